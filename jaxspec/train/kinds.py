"""The kinds of drafters that can be trained: how each begins, learns and is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.checkpoints.cut_draft import (
    CutDraft,
    cut_config,
    cut_parameters,
    load_cut,
    write_cut,
)
from jaxspec.checkpoints.eagle import load_eagle
from jaxspec.checkpoints.exit_adapter import load_adapter, write_adapter
from jaxspec.checkpoints.medusa import load_heads
from jaxspec.checkpoints.write_eagle import write_eagle3
from jaxspec.checkpoints.write_medusa import write_medusa
from jaxspec.drafters.medusa import Heads
from jaxspec.errors import UserError
from jaxspec.models.decoder import Decoder
from jaxspec.train.distill import DraftObjective
from jaxspec.train.eagle import EagleObjective
from jaxspec.train.early_exit import ExitObjective
from jaxspec.train.medusa import MedusaObjective
from jaxspec.train.new_heads import new_adapter, new_eagle3, new_medusa, redraft
from jaxspec.train.recipe import HeadRecipe

Known = Int[np.ndarray, " v"]


class Pupil(NamedTuple):
    """A drafter that learns: its parameters, by what, and how it is written."""

    parameters: Any
    objective: Any
    write: Callable[[Path, Any], None]


class Kind(NamedTuple):
    """A kind of drafter.

    Attributes:
        make: a new one, that drafts the given ids.
        read: the parameters of the one that a recipe starts from, and its ids.
        redraft: those parameters, changed to draft the ids of a new one; given both,
            each with its ids. Most kinds have no parameters of their ids.
    """

    make: Callable[[Decoder, HeadRecipe, Known], Pupil]
    read: Callable[[Path, Decoder, HeadRecipe], tuple[Any, Known | None]]
    redraft: Callable[[Any, Known, Any, Known], Any] = lambda trained, *_: trained


def _new_eagle(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    inner = recipe.inner or target.config.intermediate_size
    head = new_eagle3(target, recipe.taps(target), known, inner, recipe.seed)
    objective = EagleObjective(jnp.asarray(known), recipe.depth, loss=recipe.loss)
    return Pupil(
        head, objective, lambda folder, head: write_eagle3(folder, head, known)
    )


def _read_eagle(path: Path, target: Decoder, recipe: HeadRecipe):
    head, places = load_eagle(path, target.config)
    _refuse_other(path, "taps", head.taps, recipe.taps(target))
    return head, None if places is None else _ids_at(places)


def _new_medusa(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    heads = new_medusa(target, recipe.depth)
    objective = MedusaObjective(jnp.asarray(known), loss=recipe.loss)
    return Pupil(heads, objective, lambda folder, h: write_medusa(folder, h, known))


def _read_medusa(path: Path, target: Decoder, recipe: HeadRecipe):
    heads = load_heads(path, target.config)
    ids = None if heads.known is None else np.asarray(heads.known)
    return Heads(heads.weights, heads.biases, heads.vocabulary), ids


def _new_exit(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    layers = recipe.layers
    if layers is None:
        raise UserError("an early exit needs its `layers`, those before it")
    tap = recipe.taps(target).index(layers - 1)
    objective = ExitObjective(jnp.asarray(known), tap, recipe.depth, recipe.loss)

    def write(folder: Path, adapter: Any) -> None:
        write_adapter(folder, adapter, layers, known)

    return Pupil(new_adapter(target), objective, write)


def _read_exit(path: Path, target: Decoder, recipe: HeadRecipe):
    adapter, layers, known, _ = load_adapter(path, target.config)
    _refuse_other(path, "layers", layers, recipe.layers)
    return adapter, None if known is None else np.asarray(known)


def _new_draft(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    layers = recipe.cut
    cut_config(target.config, layers)
    own = cut_parameters(target, layers)
    objective = DraftObjective(jnp.asarray(known), layers, recipe.depth, recipe.loss)

    def write(folder: Path, own: Any) -> None:
        write_cut(folder, CutDraft(layers, own, known))

    return Pupil(own, objective, write)


def _read_draft(path: Path, target: Decoder, recipe: HeadRecipe):
    draft = load_cut(path, target.config)
    _refuse_other(path, "layers", draft.layers, recipe.cut)
    return dict(draft.own), draft.known


def _refuse_other(path: Path, what: str, there: Any, asked: Any) -> None:
    if there != asked:
        raise UserError(f"{path}: its {what} are {there}, but {asked} is asked for")


def _ids_at(places: Int[Array, " V"]) -> Known:
    """The ids by their places, the number of them standing for none."""
    by_id = np.asarray(places)
    ids = np.flatnonzero(by_id < by_id.max())
    return ids[np.argsort(by_id[ids])]


KINDS = {
    "eagle": Kind(_new_eagle, _read_eagle, redraft),
    "medusa": Kind(_new_medusa, _read_medusa),
    "early-exit": Kind(_new_exit, _read_exit),
    "draft": Kind(_new_draft, _read_draft),
}
