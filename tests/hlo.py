"""Finds in a compiled program what copies an array."""

import re


def copies(hlo_text: str, leaf) -> int:
    """How many instructions copy an array of this shape, in any layout."""
    kind = {"bfloat16": "bf16", "float32": "f32"}[leaf.dtype.name]
    shape = re.escape(f"{kind}[{','.join(map(str, leaf.shape))}]")
    return len(re.findall(rf"= \(?{shape}.* copy(-start)?\(", hlo_text))
