"""What one round of a compiled program moves and computes, by the round's steps.

Counted from the text of the program: `cost_analysis` counts memory on the chip as well,
and the body of every loop once. Main memory (HBM) alone is counted here, arrays with
the padding of their tiles, and bodies as often as they run.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxspec.cache import BLOCK
from jaxspec.tpu.hlo import Computation, Instruction, Module, Stored, arrays_of

STEPS = ("draft", "verify", "accept")
# What makes no array of its own.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "opt-barrier", "iota"),
    # Buffers, and views of them, are all the custom calls of a program without kernels.
    "custom-call",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COLLECTIVES += ("collective-permute",)
# A copy to or from the chip's own memory that goes on beside other work.
_AHEAD = ("copy-start", "slice-start", "dynamic-slice-start")
# Their result is a tuple of what is given and what is made.
_BOTH = ("all-gather-start", "collective-permute-start")
_PARTS = ("dynamic-slice", "slice", "gather")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


@dataclasses.dataclass
class Cost:
    """Of some instructions, on one chip.

    Attributes:
        hbm: bytes read from and written to main memory.
        flops: of the matrix products.
        moved: bytes of results of collectives, by kind.
        calls: how many collectives there are.
        largest: entries of the largest result of a collective.
    """

    hbm: float = 0.0
    flops: float = 0.0
    moved: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: float = 0.0
    largest: int = 0

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Adds another one, so many times."""
        self.hbm += other.hbm * times
        self.flops += other.flops * times
        self.calls += other.calls * times
        self.largest = max(self.largest, other.largest)
        for kind, size in other.moved.items():
            self.moved[kind] = self.moved.get(kind, 0.0) + size * times


class Traffic:
    """Counts a program; loops whose bound is an array run `live_blocks` times."""

    def __init__(self, module: Module, live_blocks: float):
        self.module, self.live_blocks = module, live_blocks
        self.steps = {step: Cost() for step in STEPS}

    def of_round(self) -> dict[str, Cost]:
        """The body of the program's own loop, by step.

        Of a conditional the dearest branch counts: a round with a draft, of rows that
        are sampled.
        """
        entry = self.module.computations[self.module.entry]
        loops = [each for each in entry.values() if each.opcode == "while"]
        body = max((loop.called("body") or "" for loop in loops), key=self._size)
        for step, cost in self._by_step(body, "accept"):
            self.steps[step].add(cost)
        return self.steps

    def _size(self, name: str) -> int:
        return len(self.module.computations.get(name, ()))

    def _by_step(self, name: str, step: str) -> Iterator[tuple[str, Cost]]:
        """The costs of a computation's instructions, each with its step."""
        computation = self.module.computations[name]
        for each in computation.values():
            own = self._step_of(each, computation) or step
            if each.opcode == "while":
                times = self._trips(each)
                for inner, cost in self._by_step(each.called("body") or "", own):
                    total = Cost()
                    total.add(cost, times)
                    yield inner, total
            elif each.opcode == "conditional":
                yield from max(
                    (list(self._by_step(branch, own)) for branch in each.branches),
                    key=_dearness,
                )
            elif each.opcode == "call":
                yield from self._by_step(each.called("to_apply") or "", own)
            elif each.opcode not in _FREE and not each.opcode.endswith("-done"):
                yield own, self._cost(each, computation)

    def _step_of(self, each: Instruction, computation: Computation) -> str | None:
        """Its step; of a copy that the compiler makes ahead, its user's."""
        if each.opcode not in _AHEAD:
            return step_of(each.op_name)
        names = {each.name}
        for user in computation.values():
            if names.intersection(user.operands):
                if step := step_of(user.op_name):
                    return step
                names.add(user.name)
        return None

    def _trips(self, loop: Instruction) -> float:
        """A constant bound of the loop's condition, or the live blocks that it has."""
        condition = loop.called("condition") or ""
        root = self.module.root(condition)
        for operand in root.operands:
            bound = self.module.computations[condition].get(operand)
            if bound is not None and bound.opcode == "constant":
                return float(re.findall(r"constant\((\d+)\)", bound.line)[0])
        return min(self.live_blocks, self._blocks(loop.called("body") or ""))

    def _blocks(self, name: str) -> float:
        """How many blocks the cache has of which a computation reads one, if it does.

        A ring's layer has those of its window, however many are live.
        """
        inside, found = self.module.computations[name], math.inf
        for each in inside.values():
            if each.opcode == "fusion":
                found = min(found, self._blocks(each.called("calls") or ""))
            if each.opcode == "dynamic-slice":
                source, part = inside[each.operands[0]].arrays[0], each.arrays[0]
                for whole, taken in zip(source.sides, part.sides, strict=True):
                    if taken == BLOCK < whole:
                        found = min(found, whole // BLOCK)
        return found

    def _cost(self, each: Instruction, computation: Computation) -> Cost:
        operands = [computation[name] for name in each.operands if name in computation]
        cost = Cost(flops=self._flops(each, computation))
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            # What each chip gives to a reduce-scatter is more than what it gets.
            given = [array for operand in operands for array in operand.arrays]
            made = given if kind == "reduce-scatter" else _made(each)
            cost.moved[kind] = sum(array.size for array in made)
            cost.calls, cost.largest = 1, max(math.prod(array.sides) for array in made)
        if each.opcode in _AHEAD:
            # A tuple of the copy and what it is of, or the other way round.
            source, copy = each.arrays[:2]
            if each.opcode == "copy-start":
                source, copy = copy, source
            cost.hbm = copy.size * (source.in_hbm + copy.in_hbm)
            return cost
        cost.hbm = self._read(each, operands) + self._written(each, operands)
        return cost

    def _read(self, each: Instruction, operands: list[Instruction]) -> float:
        """Bytes of the operands in main memory; where only parts are used, of those."""
        if each.opcode in _PARTS:
            return sum(array.size for array in each.arrays if _in_hbm(operands))
        if each.opcode == "dynamic-update-slice":
            return sum(array.size for array in operands[1].arrays if array.in_hbm)
        called = each.called("calls") if each.opcode == "fusion" else None
        total = 0.0
        for place, operand in enumerate(operands):
            for array in operand.arrays:
                if array.in_hbm and called is None:
                    total += array.size
                elif array.in_hbm:
                    total += self._used(called or "", place, array)
        return total

    def _used(self, called: str, place: int, array: Stored) -> float:
        """How much of an operand a fused computation reads."""
        inside = self.module.computations[called]
        name = next(
            each.name
            for each in inside.values()
            if each.opcode == "parameter" and f"parameter({place})" in each.line
        )
        users = list(_users(inside, name))
        if not users:
            return 0.0
        used = 0.0
        for user, taken in users:
            if user.opcode in _PARTS and user.operands[0] == taken:
                used += sum(part.size for part in user.arrays)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == taken:
                continue  # written where it lies
            else:
                return array.size
        return min(used, array.size)

    def _written(self, each: Instruction, operands: list[Instruction]) -> float:
        """Bytes of the results in main memory; of an update in place, what is new."""
        if each.opcode == "dynamic-update-slice":
            return sum(a.size for a in operands[1].arrays if _in_hbm([each]))
        called = each.called("calls") if each.opcode == "fusion" else None
        if called is None:
            return sum(array.size for array in _made(each) if array.in_hbm)
        root, inside = self.module.root(called), self.module.computations[called]
        made = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
        total = 0.0
        for array, source in zip(each.arrays, made, strict=False):
            source = _behind(inside, source)
            update = source.opcode == "dynamic-update-slice"
            new = inside[source.operands[1]].arrays[0] if update else array
            total += new.size if array.in_hbm else 0.0
        return total

    def _flops(self, each: Instruction, computation: Computation) -> float:
        """Twice the products that are added, of a matrix product or all inside."""
        if each.opcode != "fusion":
            return _product(each, computation)
        inside = self.module.computations[each.called("calls") or ""]
        return sum(self._flops(one, inside) for one in inside.values())


def step_of(op_name: str) -> str | None:
    """The step of a round that an instruction comes from, by its named scope."""
    parts = op_name.split("/")
    return next((step for step in STEPS if step in parts), None)


def _dearness(costs: list[tuple[str, Cost]]) -> tuple[float, float]:
    """By what a branch is dearer than another: on a TPU nearly always its bytes."""
    return sum(cost.hbm for _, cost in costs), sum(cost.flops for _, cost in costs)


def _made(each: Instruction) -> list[Stored]:
    """The arrays that an instruction makes."""
    if each.opcode not in _BOTH:
        return each.arrays
    return list(arrays_of(_second(each.shape)))


def _second(shape: str) -> str:
    """The second part of the shape of a tuple, itself perhaps a tuple."""
    depth = 0
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 1:
            rest = shape[place + 1 :]
            return rest if rest.lstrip().startswith("(") else rest.split(" ")[1]
    return shape


def _in_hbm(instructions: list[Instruction]) -> bool:
    """Whether the first result of the first of them lies in main memory."""
    return bool(instructions) and any(a.in_hbm for a in instructions[0].arrays[:1])


def _users(inside: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Who reads a value, seen through bitcasts, and by which name."""
    for each in inside.values():
        if name in each.operands:
            if each.opcode == "bitcast":
                yield from _users(inside, each.name)
            else:
                yield each, name


def _behind(inside: Computation, source: Instruction) -> Instruction:
    """What a bitcast shows."""
    while source.opcode == "bitcast":
        source = inside[source.operands[0]]
    return source


def _product(each: Instruction, inside: Computation) -> float:
    """Of a convolution, which is what a TPU program makes of a matrix product."""
    labels = _LABELS.search(each.line)
    if each.opcode != "convolution" or labels is None:
        return 0.0
    kernel = inside[each.operands[1]].arrays[0].sides
    (result,) = each.arrays
    return 2.0 * math.prod(result.sides) * kernel[labels[1].index("i")]
