"""Drafters: each is a pytree with four verbs (`jaxspec.types.Drafter`)."""
