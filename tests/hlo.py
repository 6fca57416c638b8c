"""Finds what makes a compiled program talk to the host."""

import re

# Each line of HLO is one instruction: `name = shape opcode(operands), attributes`.
FORBIDDEN = (
    re.compile(r"\b(infeed|outfeed)(-done)?\("),
    re.compile(r"\b(send|recv)(-done)?\(.*host_transfer"),
    re.compile(r"custom_call_target=\"[^\"]*([Cc]allback|SendToHost|RecvFromHost)"),
)


def host_traffic(hlo_text: str) -> list[str]:
    """The instructions that call back, feed, send to or receive from the host."""
    lines = (line.strip() for line in hlo_text.splitlines())
    return [line for line in lines if any(bad.search(line) for bad in FORBIDDEN)]
