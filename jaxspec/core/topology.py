"""Trees that are known when the program is compiled: their shape is static."""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from jaxspec.errors import UserError


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape of a draft: nodes level by level, siblings side by side.

    Attributes:
        parents: the slot that each node hangs on; node i is slot i + 1.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        """Checks the numbering.

        Raises:
            UserError: there is no node, a parent is no earlier slot, or nodes are not
                in order of depth and parent.
        """
        if not self.parents:
            raise UserError("tree has no node, expected 1 or more")
        for node, parent in enumerate(self.parents):
            if not 0 <= parent <= node:
                raise UserError(
                    f"tree: node {node} hangs on slot {parent}, expected 0 to {node}"
                )
        if list(self.parents) != sorted(self.parents):
            raise UserError(
                f"tree: parents are {self.parents}, expected none below the one before"
            )

    @classmethod
    def chain(cls, nodes: int) -> "Topology":
        """Node i hangs on slot i."""
        return cls(tuple(range(nodes)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> "Topology":
        """Every node of a level has equally many children: `children[level]`.

        Raises:
            UserError: a level has none.
        """
        if not children or min(children) < 1:
            raise UserError(
                f"tree is {tuple(children)}, expected children of 1 or more a level"
            )
        parents, level = [], [0]
        for count in children:
            parents += [slot for slot in level for _ in range(count)]
            level = range(len(parents) - len(level) * count + 1, len(parents) + 1)
        return cls(tuple(parents))

    @classmethod
    def paths(cls, paths: Iterable[Sequence[int]]) -> "Topology":
        """From paths of ranks: (0, 2) is the third child of the root's first child.

        The format of Medusa's choices (Cai et al. 2024, section 2.3.3).

        Raises:
            UserError: the parent or an earlier sibling of a path is missing.
        """
        ordered = sorted({tuple(path) for path in paths}, key=lambda p: (len(p), p))
        slots = {(): 0} | {path: slot for slot, path in enumerate(ordered, start=1)}
        for path in ordered:
            if not path or min(path) < 0:
                raise UserError(f"tree: {path} is no path of ranks")
            # In order, so that the one before it stands for all.
            for other in (path[:-1], (*path[:-1], path[-1] - 1)):
                if other not in slots and other[-1:] != (-1,):
                    raise UserError(f"tree has the path {path} but not {other}")
        return cls(tuple(slots[path[:-1]] for path in ordered))

    @classmethod
    def likeliest(cls, acceptance: Sequence[Sequence[float]], nodes: int) -> "Topology":
        """The `nodes` nodes whose paths are likeliest to be accepted.

        Greedy expansion, which is optimal where a node's probability depends on its
        depth and rank only: a path is never likelier than its parent's (Cai et al.
        2024, section 2.3.3; Chen et al. 2024, Sequoia, for such position-wise trees).

        Args:
            acceptance: `[depth][rank]`, the probability that this child of an accepted
                node is the accepted one; falling in the rank.
            nodes: the budget.

        Raises:
            UserError: a probability is out of range or rises, or there are fewer paths.
        """
        if nodes < 1:
            raise UserError(f"a tree of {nodes} nodes is asked for, expected 1 or more")
        for level, ranks in enumerate(acceptance):
            falling = all(a >= b for a, b in itertools.pairwise(ranks))
            if not falling or not all(0 <= each <= 1 for each in ranks):
                raise UserError(
                    f"acceptance at depth {level + 1} is {list(ranks)}, expected "
                    "probabilities from the first child to the last, none rising"
                )
        taken: list[tuple[int, ...]] = []
        open_paths: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
        while open_paths and len(taken) <= nodes:
            cost, _, path = heapq.heappop(open_paths)
            taken.append(path)
            if len(path) < len(acceptance):
                for rank, probability in enumerate(acceptance[len(path)]):
                    child = (*path, rank)
                    entry = (cost * probability, len(child), child)
                    heapq.heappush(open_paths, entry)
        if len(taken) <= nodes:
            raise UserError(
                f"a tree of {nodes} nodes is asked for, the acceptance given has "
                f"{len(taken) - 1} paths"
            )
        return cls.paths(taken[1:])

    @property
    def nodes(self) -> int:
        """How many there are, N."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return int(self.depths.max())

    @property
    def rows(self) -> int:
        """Slots up to the last that has a child, M."""
        return max(self.parents) + 1

    @functools.cached_property
    def depths(self) -> Int[np.ndarray, " N+1"]:
        """Of each slot; the root has 0."""
        levels = [0]
        for parent in self.parents:
            levels.append(levels[parent] + 1)
        return np.array(levels)

    @functools.cached_property
    def ranks(self) -> Int[np.ndarray, " N"]:
        """How many siblings come before each node."""
        seen = [self.parents[:node].count(p) for node, p in enumerate(self.parents)]
        return np.array(seen, int)

    @functools.cached_property
    def ancestors(self) -> Int[np.ndarray, "N+1 depth"]:
        """The slots on the way to each slot, below the root; then zeros."""
        table = np.zeros((self.nodes + 1, self.depth), int)
        for slot, parent in enumerate(self.parents, start=1):
            table[slot] = table[parent]
            table[slot, self.depths[slot] - 1] = slot
        return table

    @property
    def most_children(self) -> int:
        """Of one slot."""
        return int(self.ranks.max()) + 1
