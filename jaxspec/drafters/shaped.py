"""What a drafter's tree says of the drafter."""

from typing import Any


class Shaped:
    """`nodes` and `depth` of a drafter that has a `topology`, static or dynamic.

    It always has something to draft.
    """

    topology: Any
    may_miss = False

    @property
    def nodes(self) -> int:
        """Draft nodes a round."""
        return self.topology.nodes

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return self.topology.depth
