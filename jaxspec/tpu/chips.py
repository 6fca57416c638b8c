"""TPU chips by their data sheets, and which of a slice's chips a mesh can take."""

import math
import re
from typing import NamedTuple

from jaxspec.errors import UserError


class Chip(NamedTuple):
    """Of one chip; peaks, which no program reaches.

    Attributes:
        hbm_bytes: of main memory.
        hbm_bandwidth: bytes a second.
        flops: bfloat16 operations a second.
        ici_bandwidth: bytes a second to the other chips of a slice, over all links.
        source: where the numbers stand.
    """

    hbm_bytes: float
    hbm_bandwidth: float
    flops: float
    ici_bandwidth: float
    source: str


_TOPOLOGY = re.compile(r"\w+:[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}")
_DOCS = "https://docs.cloud.google.com/tpu/docs/"
# A GB is taken as 1e9 bytes. Most sheets give the bandwidth of both directions of the
# links together: half of it here. That of v4 gives 300 GB/s, of 6 links of 50.
CHIPS: dict[str, Chip] = {
    "v4": Chip(32e9, 1200e9, 275e12, 300e9, _DOCS + "v4"),
    "v5e": Chip(16e9, 819e9, 197e12, 200e9, _DOCS + "v5e"),
    "v5p": Chip(95e9, 2765e9, 459e12, 600e9, _DOCS + "v5p-training"),
    "v6e": Chip(32e9, 1638e9, 918e12, 400e9, _DOCS + "v6e"),
}
# A float32 product of full precision is six of bfloat16.
FLOAT32_PASSES = 6
# Of one collective, beside what it moves: an assumption, on no data sheet.
COLLECTIVE_SECONDS = 2e-6


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:2x4`.

    Raises:
        UserError: no such chip is known, or no grid of them is named.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS or not _TOPOLOGY.fullmatch(topology):
        raise UserError(
            f"topology is {topology!r}, expected one of {', '.join(CHIPS)} with its "
            "grid of chips, such as v5e:2x4"
        )
    return CHIPS[kind]


def chips_of(topology: str) -> int:
    """How many chips a topology has."""
    return math.prod(int(side) for side in topology.partition(":")[2].split("x"))


def meshes_of(topology: str, mesh: tuple[int, int]) -> int:
    """How many meshes a slice has: one on each of its VMs, or one over all chips.

    Raises:
        UserError: it is none of both, or the compiler cannot bring its chips together.
    """
    kind, chips, size = topology.partition(":")[0], chips_of(topology), math.prod(mesh)
    refuse_part_of_slice(mesh, kind, chips)
    # A VM of v5e or v6e has all chips of a slice of up to 8, any other has 4.
    own = chips if kind in ("v5e", "v6e") and chips <= 8 else min(chips, 4)
    if size <= own:
        return chips // own
    if size != chips:
        raise UserError(
            f"mesh is {mesh[0]}x{mesh[1]}, expected at most the {own} chips of a VM or "
            f"all {chips} of {topology}"
        )
    return 1


def refuse_part_of_slice(mesh: tuple[int, int], kind: str, chips: int) -> None:
    """Refuses a mesh over some chips of a slice where the compiler does.

    libtpu 0.0.42 compiles none for a part of a v5e or v6e slice but a single chip.

    Args:
        mesh: data times model.
        kind: of the chips, as a topology or a device names it.
        chips: of the whole slice.
    """
    limited = kind in ("v5e", "v6e") or kind.endswith("lite")
    if limited and math.prod(mesh) not in (1, chips):
        raise UserError(
            f"mesh is {mesh[0]}x{mesh[1]}: a program of {kind} runs on one chip or on "
            f"the whole slice, expected 1x1 or a mesh of all {chips} chips, such as "
            f"1x{chips}"
        )
