"""Which drafter an argument names, and what it can draft."""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from jaxspec.arguments import MOST_NODES, Tree, find_tree
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.some_ids import SomeIds
from jaxspec.errors import UserError
from jaxspec.loading import LanguageModel, require_same_tokenizer
from jaxspec.row_options import is_whole
from jaxspec.sharding import Partition
from jaxspec.shipped import AUTO, best
from jaxspec.types import Drafter

DEFAULT_DRAFT_TOKENS = 4
CHAIN, TREE, DYNAMIC = "a chain", "a tree", "a dynamic tree"
Shape = Topology | DynamicTree


class Kind(NamedTuple):
    """A kind of drafter that has a name.

    Attributes:
        make: from the target, what the name has after its colon, and the shape that was
            asked for, if any.
        shapes: that it drafts.
        argument: what comes after the colon; "": there is none.
    """

    make: Callable[[LanguageModel, str, Any], Drafter]
    shapes: tuple[str, ...]
    argument: str = ""


def make_drafter(
    target: LanguageModel,
    drafter: LanguageModel | Drafter | str | None,
    count: int | None = None,
    tree: Tree | None = None,
) -> Drafter:
    """The drafter that an argument names, of k = `count` or of a tree.

    Raises:
        UserError: there is none, its tokenizer is another one, or it does not draft
            what is asked for.
    """
    shape = _asked_shape(count, tree)
    if drafter == AUTO:
        found = best(target.reference)
        drafter, shape = found.name, shape or _shape_of(found.shape)
    if isinstance(drafter, str):
        check_name(drafter, tree)
        name, _, argument = drafter.partition(":")
        return NAMED[name].make(target, argument, shape)
    if isinstance(drafter, LanguageModel):
        require_same_tokenizer(target, drafter)
        return DraftModel(drafter.decoder, shape or _default_chain())
    if shape is not None:
        asked = "draft_tokens" if tree is None else "tree"
        raise UserError(
            f"{asked} has no effect with the drafter {drafter!r}; leave it out"
        )
    if drafter is None:
        return Autoregressive()
    if not hasattr(drafter, "propose"):
        raise UserError(f"drafter is {drafter!r}, expected a model, a name or None")
    return drafter


def place_drafter(partition: Partition, drafter: Drafter) -> Drafter:
    """Puts a drafter's own parameters where the partition's rules for them say."""
    config = getattr(own_module(drafter), "config", None)
    decoder = getattr(config, "decoder", config)
    # Without attention of its own nothing is split by heads.
    head_dim = getattr(decoder, "head_dim", 1)
    placed = partition.place(drafter, head_dim, draft=True)
    own = own_module(placed)
    if isinstance(own, nnx.Module):
        own.whole = partition.draft_rules.kv_heads is None  # pyright: ignore
    return placed


def own_module(drafter: Any) -> Any:
    """The model or head that a drafter has of its own, or None."""
    own = getattr(drafter, "model", None) or getattr(drafter, "head", None)
    return own.model if isinstance(own, SomeIds) else own


def check_name(name: str, tree: Tree | None = None) -> None:
    """Refuses a name that no drafter has, or that drafts no such tree.

    Raises:
        UserError: says which names there are, or which draft it.
    """
    kind, _, argument = name.partition(":")
    found = NAMED.get(kind)
    if found is None or not (argument if found.argument else name == kind):
        names = [k + (f":{v.argument}" if v.argument else "") for k, v in NAMED.items()]
        raise UserError(
            f"drafter is {name!r}, expected {AUTO}, {', '.join(names)}, none or a model"
        )
    asked = CHAIN if tree is None else TREE
    asked = DYNAMIC if isinstance(tree, DynamicTree) else asked
    if asked not in found.shapes:
        able = ", ".join(k for k, v in NAMED.items() if asked in v.shapes)
        raise UserError(
            f"{asked} needs a draft model or {able} to draft it, the drafter is "
            f"{name!r}"
        )


def _asked_shape(count: int | None, tree: Tree | None) -> Shape | None:
    if tree is not None and count is not None:
        raise UserError("draft_tokens and tree are both given; leave one out")
    if count is not None and not is_whole(count, 1, MOST_NODES):
        raise UserError(
            f"draft_tokens is {count!r}, expected a whole number from 1 to {MOST_NODES}"
        )
    if tree is not None:
        return find_tree(tree)
    return None if count is None else Topology.chain(count)


def _shape_of(sizes: tuple[int, ...]) -> Topology:
    """A chain of k if there is one size, else a tree of these levels."""
    return Topology.chain(*sizes) if len(sizes) == 1 else Topology.branching(sizes)


def _default_chain() -> Topology:
    return Topology.chain(DEFAULT_DRAFT_TOKENS)


def _prompt_lookup(target, argument: str, shape: Shape | None) -> PromptLookup:
    return PromptLookup((shape or _default_chain()).nodes)


def _early_exit(target: LanguageModel, exit: str, shape: Topology | None) -> EarlyExit:
    """After so many layers, or where a trained adapter was made for."""
    if not os.path.isdir(exit):
        return EarlyExit(_exit_layers(target, exit), shape or _default_chain())
    from jaxspec.checkpoints.exit_adapter import load_adapter

    decoder = target.decoder
    adapter, layers, known, places = load_adapter(exit, decoder.config, decoder.dtype)
    return EarlyExit(layers, shape or _default_chain(), adapter, known, places)


def _exit_layers(target: LanguageModel, layers: str) -> int:
    """Refuses an exit that leaves nothing to draft with, or nothing to save."""
    most = target.decoder.config.num_layers - 1
    if not re.fullmatch(r"\d{1,4}", layers) or not 1 <= int(layers) <= most:
        raise UserError(
            f"drafter is 'early-exit:{layers}', expected early-exit:1 to "
            f"early-exit:{most} ({target.reference} has {most + 1} layers), or the "
            "folder of an adapter"
        )
    return int(layers)


def _medusa(target: LanguageModel, path: str, shape: Topology | None) -> Medusa:
    """A chain of all heads by default; refuses a draft deeper than they are many."""
    from jaxspec.checkpoints.medusa import load_heads

    decoder = target.decoder
    heads = load_heads(path, decoder.config, decoder.dtype)
    count = heads.weights.shape[0]
    topology = shape or Topology.chain(count)
    if topology.depth > count:
        raise UserError(
            f"{path} has {count} heads, but a draft of depth {topology.depth} is asked "
            f"for; draft_tokens or the levels of tree may be {count} at most"
        )
    return Medusa(heads, topology)


def _eagle(target: LanguageModel, path: str, shape: Shape | None) -> Eagle:
    from jaxspec.checkpoints.eagle import load_eagle

    decoder = target.decoder
    head, places = load_eagle(path, decoder.config, decoder.dtype)
    return Eagle(head, shape or _default_chain(), places)


def _draft(target: LanguageModel, path: str, shape: Shape | None) -> DraftModel:
    """A model that was cut from the target, with the target's embedding and head."""
    from jaxspec.checkpoints.cut_draft import load_cut_model

    model = load_cut_model(path, target.decoder)
    return DraftModel(model, shape or _default_chain())


NAMED = {
    "prompt-lookup": Kind(_prompt_lookup, (CHAIN,)),
    "early-exit": Kind(_early_exit, (CHAIN, TREE), "N or early-exit:PATH"),
    "medusa": Kind(_medusa, (CHAIN, TREE), "PATH"),
    "eagle": Kind(_eagle, (CHAIN, TREE, DYNAMIC), "PATH"),
    "draft": Kind(_draft, (CHAIN, TREE, DYNAMIC), "PATH"),
}
