"""The loop: prefill, then rounds of propose, verify, accept, commit."""
