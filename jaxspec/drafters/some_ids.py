"""A model that knows only a part of its vocabulary."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxspec.core.distributions import widen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SomeIds:
    """A model whose other ids are impossible, and cost nothing.

    All but the vocabulary head is the model's own; see `jaxspec.types.Model`.

    Attributes:
        known: the ids that it knows.
        places: where each id stands among them, their number if it does not.
    """

    model: Any
    known: Int[Array, " v"]
    places: Int[Array, " V"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the model's blocks."""
        return self.model(*args, **options)

    def unembed(
        self, normed: Float[Array, "*B E"], ids: Int[Array, " v"] | None = None
    ) -> Float[Array, "*B V"]:
        """Logits, minus infinity for ids that it does not know."""
        if ids is not None:
            return self.model.unembed(normed, ids)
        return widen(self.model.unembed(normed, self.known), self.places)
