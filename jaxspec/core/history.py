"""What a row has written, as the warp and the stop sequences read it.

The text that a slot's child continues is the committed text and then the draft tokens
on the slot's path: both are read alike, so a draft token counts at the node after it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core.sampling import Sampling, Sequences


class Counts(NamedTuple):
    """Which ids stand in a row.

    Attributes:
        in_prompt: whether the prompt has the id; None: no repetition penalty asks.
        in_output: how often the output has it.
    """

    in_prompt: Bool[Array, "B V"] | None
    in_output: Int[Array, "B V"]

    @classmethod
    def init(
        cls,
        sampling: Sampling,
        prompt: Int[Array, "B S"],
        length: Int[Array, " B"],
        vocabulary: int,
    ) -> "Counts | None":
        """Of rows without output; None where no penalty asks for counts."""
        if not sampling.counts_output:
            return None
        nothing = cls(None, jnp.zeros((prompt.shape[0], vocabulary), jnp.int32))
        if sampling.repetition_penalty is None:
            return nothing
        return nothing._replace(in_prompt=nothing.add(prompt, length).in_output > 0)

    def add(self, tokens: Int[Array, "B T"], count: Int[Array, " B"]) -> "Counts":
        """Counts the first `count` tokens of each row as output."""
        rows, vocabulary = self.in_output.shape
        is_new = jnp.arange(tokens.shape[1]) < count[:, None]
        # The others are sent out of range and dropped.
        at = (jnp.arange(rows)[:, None], jnp.where(is_new, tokens, vocabulary))
        return self._replace(in_output=self.in_output.at[at].add(1, mode="drop"))


class History(NamedTuple):
    """The committed text of each row.

    Attributes:
        tokens: prompt and output; what stands at or past `length` means nothing.
        length: committed tokens, the newest included.
        prompt_length: how many of them are the prompt's.
        counts: None where no penalty asks.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    counts: Counts | None = None

    def ending(
        self,
        path_tokens: Int[Array, "B m depth"],
        path_count: Int[Array, "B m"],
        width: int,
    ) -> Int[Array, "B m width"]:
        """The last `width` tokens of each text; -1 where it has not begun."""
        rows, slots = path_count.shape
        end = self.length[:, None] + path_count
        at = end[..., None] - width + jnp.arange(width)
        committed = jnp.take_along_axis(
            self.tokens, at.reshape(rows, -1), axis=1, mode="clip"
        ).reshape(rows, slots, width)
        if path_tokens.shape[-1]:
            drafted = at - self.length[:, None, None]
            on_path = jnp.take_along_axis(path_tokens, drafted, axis=2, mode="clip")
            committed = jnp.where(drafted < 0, committed, on_path)
        return jnp.where(at < 0, -1, committed)


def ends_with(
    endings: Int[Array, "B m width"], sequences: Sequences
) -> Bool[Array, "B m n"]:
    """Whether a text's last tokens are the sequence; one without tokens is nowhere."""
    width = sequences.tokens.shape[-1]
    same = endings[:, :, None, :] == sequences.tokens[:, None]
    before = jnp.arange(width) < width - sequences.length[..., None]
    return (same | before[:, None]).all(axis=-1) & (sequences.length > 0)[:, None]


def path_counts(
    path_tokens: Int[Array, "B m depth"], path_count: Int[Array, "B m"], vocabulary: int
) -> Int[Array, "B m V"]:
    """How often each id stands on a slot's own path.

    Comparisons, one for each depth, and no scatter: XLA fuses them into the one pass
    over the logits that the penalties are anyway.
    """
    ids = jnp.arange(vocabulary)
    total = jnp.zeros((*path_count.shape, vocabulary), jnp.int32)
    for depth in range(path_tokens.shape[-1]):
        drafted = jnp.where(depth < path_count, path_tokens[..., depth], -1)
        total += drafted[..., None] == ids
    return total
