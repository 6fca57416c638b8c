"""The steps of a round that are not the drafter's."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import run_rows
from jaxspec.core import tree
from jaxspec.core.adjust import adjust
from jaxspec.core.distributions import arg_max, log_softmax, one_hot_log
from jaxspec.core.report import LogProbs, report
from jaxspec.core.warp import warp
from jaxspec.decoding.randomness import Randomness
from jaxspec.decoding.state import DecodingState, Options, Statistics
from jaxspec.scratch import Scratch
from jaxspec.types import Draft, Drafter, Output, Target, Verdict, Warp


def bind_warp(state: DecodingState, options: Options) -> Warp:
    """The one warp with each row's options and history."""

    def bound(logits, path_tokens, path_count):
        adjusted = _adjust(state, options, logits, path_tokens, path_count)
        return warp(adjusted, options.sampling)

    return bound


def bind_noise(state: DecodingState, options: Options, vocabulary: int) -> Randomness:
    """The round's random numbers, by the keys of the rule."""
    return Randomness(
        state.keys,
        state.length,
        options.sampling.greedy,
        vocabulary,
        options.rule.shares_noise,
    )


def _adjust(state, options, logits, path_tokens, path_count):
    return adjust(
        logits, options.sampling, state.history, options.ends, path_tokens, path_count
    )


def target_distribution(
    state: DecodingState,
    options: Options,
    logits: Float[Array, "B m V"],
    path_tokens: Int[Array, "B m depth"],
    path_count: Int[Array, "B m"],
) -> tuple[Float[Array, "B m V"], Bool[Array, "B m"]]:
    """The log-probabilities that the rule sees: a greedy row's are one-hot.

    Returns:
        They, and where there are none: one logit is NaN, or all are minus infinity.
    """
    sampling = options.sampling
    logits = _adjust(state, options, logits, path_tokens, path_count)

    def certain(logits):
        return one_hot_log(arg_max(logits), logits.shape[-1])

    def mixed(logits):
        greedy = sampling.greedy[:, None, None]
        return jnp.where(greedy, certain(logits), warp(logits, sampling))

    log_probs = lax.cond(sampling.greedy.all(), certain, mixed, logits)
    return log_probs, ~(logits.max(axis=-1) > -jnp.inf)


class Verified(NamedTuple):
    """The target's distributions after each slot of a draft.

    Attributes:
        log_probs: the distribution of each slot's child.
        unusable: slots after which the target has none.
        logits: None where nobody asks for log-probabilities.
        path_tokens: drafted on the way to each slot, itself included.
        path_count: how many those are: the slot's depth.
    """

    log_probs: Float[Array, "B N+1 V"]
    unusable: Bool[Array, "B N+1"]
    logits: Float[Array, "B N+1 V"] | None
    path_tokens: Int[Array, "B N+1 depth"]
    path_count: Int[Array, "B N+1"]


def verify(
    target: Target,
    drafter: Drafter,
    draft: Draft,
    state: DecodingState,
    options: Options,
    one_token_rounds: bool = True,
) -> tuple[Output, Scratch, Verified]:
    """One forward pass over the newest token and all draft nodes.

    It goes on from the layers that the drafter has already run, if it has run any.
    If the drafter may miss and no row has a valid node, only the newest token is fed,
    unless that is ruled out: a round without a draft then costs what plain decoding
    costs. The other slots of the output are zero. Of other drafters that would be a
    second verify to compile and, on a TPU, more memory traffic in every round: 752 MB
    in place of 595 of SmolLM2 with an EAGLE head on a v5e chip.
    """
    ancestors = tree.ancestry(draft.parents)
    paths, depths = tree.paths(draft.tokens, ancestors, drafter.depth)
    newest = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([newest, draft.tokens], axis=1)
    rows, slots = tokens.shape

    def feed(fed: int):
        hidden, scratch = None, target.model.init_scratch(rows, slots)
        if draft.prefix is not None:
            hidden, scratch = draft.prefix
            hidden = hidden[:, :fed]
        output, scratch = run_rows(
            target.model,
            target.cache,
            scratch,
            tokens[:, :fed],
            state.length[:, None] - 1 + depths[:, :fed],
            jnp.arange(fed),
            ancestors[:, :fed],
            drafter.taps,
            first=drafter.prefix_layers,
            hidden=hidden,
        )
        logits = target.model.unembed(target.model.norm(output.hidden))
        log_probs, unusable = target_distribution(
            state, options, logits, paths[:, :fed], depths[:, :fed]
        )
        pad = functools.partial(_pad_slots, slots=slots)
        kept = None if options.reporting is None else pad(logits)
        output = Output(pad(output.hidden), pad(output.taps))
        verified = Verified(pad(log_probs), pad(unusable), kept, paths, depths)
        return output, scratch, verified

    if not (one_token_rounds and drafter.may_miss):
        return feed(slots)
    return lax.cond(draft.valid.any(), lambda: feed(slots), lambda: feed(1))


def _pad_slots(values: Float[Array, "B fed *rest"], slots: int) -> Array:
    missing = slots - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing)) + ((0, 0),) * (values.ndim - 2))


def drop_unusable(draft: Draft, unusable: Bool[Array, "B N+1"]) -> Draft:
    """Ends the draft where the target has no distribution to test the next node by."""
    after = jnp.take_along_axis(unusable, draft.parents, axis=1)
    return draft._replace(valid=draft.valid & ~after)


def at_last(slots: Array, verdict: Verdict) -> Array:
    """The entry of each row at the last slot that its verdict commits."""
    last = jnp.take_along_axis(verdict.path, verdict.count[:, None] - 1, axis=1)
    return jnp.take_along_axis(slots, last, axis=1)[:, 0]


def emitted_tokens(
    draft: Draft, verdict: Verdict, next_token: Int[Array, " B"]
) -> Int[Array, "B depth+1"]:
    """The accepted draft tokens, then the next token in all places after them."""
    by_slot = jnp.concatenate([next_token[:, None], draft.tokens], axis=1)
    accepted = jnp.take_along_axis(by_slot, verdict.path, axis=1)[:, 1:]
    followed = jnp.concatenate([accepted, next_token[:, None]], axis=1)
    place = jnp.arange(followed.shape[1])
    return jnp.where(place < verdict.count[:, None] - 1, followed, next_token[:, None])


def report_round(
    state: DecodingState,
    options: Options,
    verified: Verified,
    slots: Int[Array, "B depth+1"],
    tokens: Int[Array, "B depth+1"],
) -> LogProbs | None:
    """The log-probabilities of tokens drawn from `slots`, if anybody asks."""
    if options.reporting is None or verified.logits is None:
        return None
    adjusted = _adjust(
        state, options, verified.logits, verified.path_tokens, verified.path_count
    )
    greedy = options.sampling.greedy[:, None, None]
    # To the rule a greedy row is one-hot: it is reported as before the arg-max.
    warped = jnp.where(greedy, log_softmax(adjusted), verified.log_probs)
    return report(options.reporting, verified.logits, warped, slots, tokens)


def count_round(
    statistics: Statistics,
    draft: Draft,
    uncut: Int[Array, " B"],
    cut: Int[Array, " B"],
) -> Statistics:
    """Adds a round; `uncut` is the verdict's count before the commit boundary.

    A round cut to e tokens, all of them draft tokens, counts e accepted and only the
    nodes down to depth e as drafted; any other counts all its valid nodes.
    """
    depth = jnp.arange(1, statistics.drafted.shape[1] + 1)
    deepest = jnp.where(cut < uncut, cut, depth.size)[:, None]
    accepted = jnp.minimum(uncut - 1, cut)[:, None]
    node_depths = tree.depths(tree.ancestry(draft.parents))[:, 1:]
    at_depth = (node_depths[:, :, None] == depth) & draft.valid[:, :, None]
    active = (cut > 0)[:, None]
    return Statistics(
        rounds=statistics.rounds + active[:, 0],
        emitted=statistics.emitted + cut,
        drafted=statistics.drafted
        + jnp.where(active & (depth <= deepest), at_depth.sum(axis=1), 0),
        accepted=statistics.accepted + jnp.where(active & (depth <= accepted), 1, 0),
    )
