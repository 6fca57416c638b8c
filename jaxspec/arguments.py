"""What a generator and a call are given, checked before any compute."""

import itertools
import operator
import re
from collections.abc import Sequence

from jaxspec.core.accept import RULES, Rule
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.errors import UserError, refuse
from jaxspec.row_options import is_whole
from jaxspec.types import Drafter

MOST_ALTERNATIVES = 100
MOST_NODES = 256
_DYNAMIC = re.compile(r"dynamic:depth=(\d{1,4}),topk=(\d{1,4}),nodes=(\d{1,4})")
Tree = Topology | DynamicTree | Sequence[int]


def check_call(*, batch_size: int | None, log_probs: int | None) -> None:
    """Refuses what is wrong with the options of a whole call.

    Raises:
        UserError: names the values.
    """
    faults = []
    if batch_size is not None and not is_whole(batch_size, 1):
        faults.append(f"batch_size is {batch_size!r}, expected a whole number over 0")
    if log_probs is not None and not is_whole(log_probs, 0, MOST_ALTERNATIVES):
        faults.append(
            f"log_probs is {log_probs!r}, expected a whole number from 0 to "
            f"{MOST_ALTERNATIVES}, or None"
        )
    refuse(faults)


def find_rule(name: str) -> Rule:
    """The acceptance rule of this name.

    Raises:
        UserError: there is none.
    """
    if name not in RULES:
        raise UserError(f"rule is {name!r}, expected one of {', '.join(RULES)}")
    return RULES[name]


def parse_tree(text: str) -> tuple[int, ...] | DynamicTree:
    """The children of each level, `4,2,1`, or `dynamic:depth=5,topk=4,nodes=16`.

    Raises:
        UserError: it is none of both, or no dynamic tree has these numbers.
    """
    if match := _DYNAMIC.fullmatch(text):
        return DynamicTree(*map(int, match.groups()))
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"{text!r} is no list of whole numbers such as 4,2,1, nor of the form "
            "dynamic:depth=5,topk=4,nodes=16"
        ) from None


def find_tree(tree: Tree) -> Topology | DynamicTree:
    """The tree of an argument: itself, or one with these children of each level.

    Raises:
        UserError: it is neither, or has too many nodes.
    """
    if not isinstance(tree, Topology | DynamicTree):
        if not isinstance(tree, Sequence):
            raise UserError(f"tree is {tree!r}, expected children by level or a tree")
        if not all(is_whole(count, 1) for count in tree):
            raise UserError(f"tree is {tree!r}, expected whole numbers over 0")
        nodes = sum(itertools.accumulate(tree, operator.mul))
        if nodes <= MOST_NODES:
            return Topology.branching(tree)
    else:
        nodes = tree.nodes
    if not 0 < nodes <= MOST_NODES:
        raise UserError(f"tree has {nodes} nodes, expected 1 to {MOST_NODES}")
    return tree  # pyright: ignore[reportReturnType]


def check_pairing(rule: Rule, drafter: Drafter | Topology | DynamicTree) -> None:
    """Refuses a rule that cannot judge what the drafter drafts, or a tree.

    Raises:
        UserError: names both.
    """
    if drafter.nodes > drafter.depth and not rule.trees:
        able = ", ".join(name for name, other in RULES.items() if other.trees)
        raise UserError(
            f"rule {rule.name} takes chains, but a tree of {drafter.nodes} nodes is "
            f"drafted; use {able}"
        )
