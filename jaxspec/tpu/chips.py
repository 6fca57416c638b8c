"""TPU chips by their data sheets."""

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


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
# A GB is taken as 1e9 bytes. The sheets give the bandwidth of both directions of the
# links together: half of it here.
CHIPS: dict[str, Chip] = {
    "v4": Chip(32e9, 1228e9, 275e12, 150e9, _DOCS + "v4"),
    "v5e": Chip(16e9, 819e9, 197e12, 200e9, _DOCS + "v5e"),
    "v5p": Chip(95e9, 2765e9, 459e12, 600e9, _DOCS + "v5p-training"),
    "v6e": Chip(32e9, 1638e9, 918e12, 400e9, _DOCS + "v6e"),
}
# Of one collective, beside what it moves: an assumption, on no data sheet.
COLLECTIVE_SECONDS = 2e-6


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:2x4`.

    Raises:
        UserError: no such chip is known.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise UserError(
            f"topology is {topology!r}, expected one of {', '.join(CHIPS)} with its "
            "grid of chips, such as v5e:2x4"
        )
    return CHIPS[kind]
