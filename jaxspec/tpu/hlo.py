"""Reads the text of a compiled program: computations of instructions on arrays."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1.0),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2.0),
    **dict.fromkeys(("f32", "s32", "u32"), 4.0),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8.0),
    **dict.fromkeys(("s4", "u4"), 0.5),
}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(condition|body|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# What talks to the host.
_FORBIDDEN = (
    re.compile(r"\b(infeed|outfeed)(-done)?\("),
    re.compile(r"\b(send|recv)(-done)?\(.*host_transfer"),
    re.compile(r"custom_call_target=\"[^\"]*([Cc]allback|SendToHost|RecvFromHost)"),
)


class Stored(NamedTuple):
    """An array as the program holds it.

    Attributes:
        sides: of each axis.
        size: in bytes, with the padding of its tiles.
        in_hbm: it is in the chip's main memory, not in a memory on the chip.
    """

    kind: str
    sides: tuple[int, ...]
    size: float
    in_hbm: bool


class Instruction(NamedTuple):
    """One line: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def arrays(self) -> list[Stored]:
        """What it makes: one array, or several of a tuple."""
        return list(arrays_of(self.shape))

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""

    def called(self, role: str) -> str | None:
        """The computation that it calls as `body`, `condition` or `calls`."""
        return next((c for r, c in _CALLED.findall(self.line) if r == role), None)

    @property
    def branches(self) -> list[str]:
        """The computations that a conditional chooses from."""
        found = _BRANCHES.search(self.line)
        return _NAME.findall(found[1]) if found else []


Computation = Mapping[str, Instruction]


class Module(NamedTuple):
    """The computations of a program by name, and the one that is run."""

    computations: Mapping[str, Computation]
    entry: str

    def root(self, name: str) -> Instruction:
        """The result of a computation."""
        return next(each for each in self.computations[name].values() if each.is_root)


def parse(text: str) -> Module:
    """Reads the text of one module."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[1], {})
            entry = header[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = found.groups()
            operands = tuple(_NAME.findall(_arguments(rest)))
            current[name] = Instruction(name, shape, opcode, operands, line, bool(root))
    return Module(computations, entry)


def arrays_of(shape: str) -> Iterator[Stored]:
    """The arrays that a shape names."""
    for kind, sides, order, notes in _ARRAY.findall(shape):
        if kind not in BYTES:
            continue
        lengths = tuple(int(side) for side in sides.split(",") if side)
        space = _SPACE.search(notes)
        padded = _padded(lengths, order, notes)
        size = math.prod(padded) * BYTES[kind]
        # A number alone lies in the memory of the scalar unit.
        outside = bool(lengths) and (space is None or space[1] == "0")
        yield Stored(kind, lengths, size, outside)


def host_traffic(text: str) -> list[str]:
    """The instructions that call back, feed, send to or receive from the host."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if any(bad.search(line) for bad in _FORBIDDEN)]


def _arguments(rest: str) -> str:
    """What stands in the parentheses of an instruction, which are open."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:place]
    return rest


def _padded(lengths: tuple[int, ...], order: str, notes: str) -> list[int]:
    """The sides of an array whose last axes are filled up to whole tiles."""
    padded, tile = list(lengths), _TILE.search(notes)
    minor = [int(axis) for axis in order.split(",") if axis]
    if tile is None or not minor:
        return padded
    sides = [int(side) for side in tile[1].split(",")]
    # The tile's last side is along the axis that varies fastest.
    for axis, side in zip(minor, reversed(sides), strict=False):
        padded[axis] = -(-padded[axis] // side) * side
    return padded
