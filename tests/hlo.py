"""Finds in a compiled program what talks to the host, and what copies an array."""

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


def copies(hlo_text: str, leaf) -> int:
    """How many instructions copy an array of this shape, in any layout."""
    kind = {"bfloat16": "bf16", "float32": "f32"}[leaf.dtype.name]
    shape = re.escape(f"{kind}[{','.join(map(str, leaf.shape))}]")
    return len(re.findall(rf"= \(?{shape}.* copy(-start)?\(", hlo_text))
