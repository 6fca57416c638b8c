"""What a generator and a call are given, checked before any compute."""

import itertools
import operator
import re
from collections.abc import Sequence

from jaxspec.core.accept import RULES, Rule
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel, require_same_tokenizer
from jaxspec.row_options import is_whole
from jaxspec.types import Drafter

MOST_ALTERNATIVES = 100
MOST_NODES = 256
DEFAULT_DRAFT_TOKENS = 4
Tree = Topology | DynamicTree | Sequence[int]
EARLY_EXIT, MEDUSA = "early-exit:", "medusa:"


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


def make_drafter(
    target: LanguageModel,
    drafter: LanguageModel | Drafter | str | None,
    count: int | None = None,
    tree: Tree | None = None,
) -> Drafter:
    """The drafter that an argument names, of k = `count` or of a tree.

    Raises:
        UserError: there is none, its tokenizer is another one, or it drafts no trees.
    """
    if tree is not None and count is not None:
        raise UserError("draft_tokens and tree are both given; leave one out")
    if count is not None and not is_whole(count, 1, MOST_NODES):
        raise UserError(
            f"draft_tokens is {count!r}, expected a whole number from 1 to {MOST_NODES}"
        )
    given = count if tree is None else tree
    count = DEFAULT_DRAFT_TOKENS if count is None else count
    shape = Topology.chain(count) if tree is None else find_tree(tree)
    if isinstance(drafter, str):
        check_drafter_name(drafter)
    if isinstance(drafter, LanguageModel):
        require_same_tokenizer(target, drafter)
        return DraftModel(drafter.decoder, shape)
    if isinstance(shape, DynamicTree):
        raise UserError(
            f"a dynamic tree needs a draft model to grow it, the drafter is {drafter!r}"
        )
    if isinstance(drafter, str) and drafter.startswith(EARLY_EXIT):
        return EarlyExit(find_exit(target, drafter.removeprefix(EARLY_EXIT)), shape)
    if isinstance(drafter, str) and drafter.startswith(MEDUSA):
        path = drafter.removeprefix(MEDUSA)
        return make_medusa(target, path, None if given is None else shape)
    if tree is not None:
        raise UserError(
            "tree needs a draft model, early exit or Medusa heads to draft it, the "
            f"drafter is {drafter!r}"
        )
    if drafter == "prompt-lookup":
        return PromptLookup(count)
    if given is not None:
        raise UserError(
            f"draft_tokens has no effect with the drafter {drafter!r}; leave it out"
        )
    if drafter is None:
        return Autoregressive()
    if isinstance(drafter, str) or not hasattr(drafter, "propose"):
        raise UserError(f"drafter is {drafter!r}, expected a model, a name or None")
    return drafter


def check_drafter_name(name: str) -> None:
    """Refuses a name that no drafter has, whatever the target is.

    Raises:
        UserError: there is none.
    """
    if name != "prompt-lookup" and not name.startswith((EARLY_EXIT, MEDUSA)):
        raise UserError(
            f"drafter is {name!r}, expected prompt-lookup, {EARLY_EXIT}N, "
            f"{MEDUSA}PATH, none or a model"
        )


def make_medusa(target: LanguageModel, path: str, topology: Topology | None) -> Medusa:
    """The drafter of a file of Medusa heads; a chain of them all by default.

    Raises:
        UserError: the file is none for this target, or has too few heads.
    """
    from jaxspec.checkpoints.medusa import load_heads

    decoder = target.decoder
    heads = load_heads(path, decoder.config, decoder.dtype)
    count = heads.weights.shape[0]
    topology = Topology.chain(count) if topology is None else topology
    if topology.depth > count:
        raise UserError(
            f"{path} has {count} heads, but a draft of depth {topology.depth} is asked "
            f"for; draft_tokens or the levels of tree may be {count} at most"
        )
    return Medusa(heads, topology)


def find_exit(target: LanguageModel, layers: str) -> int:
    """After how many layers `early-exit:N` leaves the target.

    Raises:
        UserError: it is no number, or leaves nothing to draft with or to save.
    """
    most = target.decoder.config.num_layers - 1
    if not re.fullmatch(r"\d{1,4}", layers) or not 1 <= int(layers) <= most:
        raise UserError(
            f"drafter is {EARLY_EXIT + layers!r}, expected early-exit:1 to "
            f"early-exit:{most} ({target.reference} has {most + 1} layers)"
        )
    return int(layers)


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
