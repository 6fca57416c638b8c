"""Heads before they have learned anything, made to fit a target."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxspec.drafters.eagle_head import Eagle3Config, Eagle3Head
from jaxspec.drafters.early_exit import ExitAdapter
from jaxspec.drafters.medusa import Heads
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.decoder import Decoder
from jaxspec.train.corpus import Corpus

FEWEST_LAYERS = 5
# Of the target's last norm, in a head that knows nothing yet: with all of it the first
# guesses are as sure as the target's own, and wrong: a third of a short training
# went into unlearning that.
FIRST_CERTAINTY = 0.2


def usual_taps(layers: int) -> tuple[int, int, int]:
    """The blocks that EAGLE-3 heads tap, in the authors' code.

    Raises:
        UserError: there are too few.
    """
    if layers < FEWEST_LAYERS:
        raise UserError(
            f"heads read the outputs of blocks of a target of {FEWEST_LAYERS} layers "
            f"or more, this one has {layers}"
        )
    return 1, layers // 2 - 1, layers - 4


def commonest_ids(
    corpus: Corpus,
    vocabulary: int,
    count: int,
    favoured: Int[np.ndarray, " f"] | None = None,
) -> Int[np.ndarray, " v"]:
    """The ids that the target writes most, in order.

    Of ids that it wrote equally often the favoured come first, then the lower.
    """
    seen = np.zeros(vocabulary)
    if favoured is not None:
        seen[favoured] = 0.5
    for part in range(len(corpus)):
        texts = corpus.texts(part)
        for tokens, start in zip(texts.each(), texts.starts, strict=True):
            seen += np.bincount(tokens[start:], minlength=vocabulary)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def new_eagle3(
    target: Decoder,
    taps: tuple[int, ...],
    known: Int[np.ndarray, " v"],
    inner: int,
    seed: int,
) -> Eagle3Head:
    """An EAGLE-3 head of one layer, whose vocabulary begins as the target's rows.

    Args:
        target: that it will draft for.
        taps: the blocks that it reads.
        known: the ids of its vocabulary.
        inner: width of its MLP.
        seed: of what is random.
    """
    config = Eagle3Config(
        one_layer(target.config, inner),
        taps,
        target.config.hidden_size,
        draft_vocabulary=known.size,
    )
    head = Eagle3Head(config, rngs=nnx.Rngs(seed))
    rows = target.embed_tokens if target.lm_head is None else target.lm_head
    assert head.lm_head is not None
    head.lm_head.weight[...] = rows.weight[...][known].astype(jnp.float32)
    head.norm.weight[...] = FIRST_CERTAINTY * target.final_norm.weight[...]
    return head


def redraft(
    trained: Eagle3Head,
    known: Int[np.ndarray, " u"],
    new: Eagle3Head,
    ids: Int[np.ndarray, " v"],
) -> Eagle3Head:
    """Makes a trained head draft other ids: those that it knows keep their rows.

    Args:
        trained: the head, which is changed.
        known: the ids that it drafts.
        new: one that has not learned, of whom it takes the rows of the other ids.
        ids: that it is to draft.
    """
    assert trained.lm_head is not None and new.lm_head is not None
    _, there, here = np.intersect1d(known, ids, return_indices=True)
    kept = trained.lm_head.weight[...][there]
    new.lm_head.weight[...] = new.lm_head.weight[...].at[here].set(kept)
    trained.lm_head = new.lm_head
    trained.config = dataclasses.replace(trained.config, draft_vocabulary=ids.size)
    return trained


def one_layer(target: ModelConfig, inner: int) -> ModelConfig:
    """A llama layer as wide as the target's, with its heads and rotary frequencies."""
    return ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=inner,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        query_scale=target.head_dim**-0.5,
        windows=(None,),
        ropes=(Rope(target.ropes[-1].theta),),
    )


def new_medusa(target: Decoder, count: int) -> Heads:
    """Medusa heads that change nothing yet: their blocks are zero, as in the paper."""
    width = target.config.hidden_size
    return Heads(
        jnp.zeros((count, 1, width, width), jnp.float32),
        jnp.zeros((count, 1, width), jnp.float32),
    )


def new_adapter(target: Decoder) -> ExitAdapter:
    """An exit adapter that changes nothing yet."""
    config = target.config
    rngs = nnx.Rngs(0)
    return ExitAdapter(config.hidden_size, config.norm_eps, jnp.float32, rngs)
