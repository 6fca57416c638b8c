"""The steps of a round that are not the drafter's."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.cache import Scratch, run_rows
from jaxspec.core import noise, tree
from jaxspec.core.distributions import arg_max, one_hot_log
from jaxspec.core.warp import Sampling, warp
from jaxspec.decoding.state import EOS, LENGTH, RUNNING, DecodingState, Statistics
from jaxspec.types import Context, Draft, Drafter, Noise, Output, Target, Verdict, Warp


def bind_warp(sampling: Sampling) -> Warp:
    """The one warp with each row's options; none of them looks at the path yet."""
    return lambda logits, path_tokens, path_count: warp(logits, sampling)


def bind_noise(
    state: DecodingState, sampling: Sampling, purpose: int, size: int
) -> Noise:
    """Gumbel noise by the rule's keys, zero on greedy rows: nobody else sees a key."""

    def draw(slots):
        drawn = noise.gumbels(state.keys, state.length, slots, purpose, size)
        return jnp.where(sampling.greedy[:, None, None], 0.0, drawn)

    def gumbel(slots, positions):
        silence = jnp.zeros((*slots.shape, size))
        # One branch for the batch: a greedy batch draws nothing.
        return lax.cond(sampling.greedy.all(), lambda _: silence, draw, slots)

    return gumbel


def target_distribution(
    logits: Float[Array, "B m V"],
    path_tokens: Int[Array, "B m depth"],
    path_count: Int[Array, "B m"],
    sampling: Sampling,
    warp: Warp,
) -> Float[Array, "B m V"]:
    """The log-probabilities that the rule sees: a greedy row's are one-hot."""

    def mixed(logits):
        greedy = sampling.greedy[:, None, None]
        best = one_hot_log(arg_max(logits), logits.shape[-1])
        return jnp.where(greedy, best, warp(logits, path_tokens, path_count))

    def all_greedy(logits):
        return one_hot_log(arg_max(logits), logits.shape[-1])

    return lax.cond(sampling.greedy.all(), all_greedy, mixed, logits)


def verify(
    target: Target,
    drafter: Drafter,
    draft: Draft,
    context: Context,
    sampling: Sampling,
) -> tuple[Output, Scratch, Float[Array, "B N+1 V"]]:
    """One forward pass over the newest token and all draft nodes.

    If no row has a valid node, only the newest token is fed: a round without a draft
    costs what plain decoding costs. The other slots of the output are then zero.
    """
    ancestors = tree.ancestry(draft.parents)
    paths, depths = tree.paths(draft.tokens, ancestors, drafter.depth)
    newest = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([newest, draft.tokens], axis=1)
    rows, slots = tokens.shape

    def feed(fed: int):
        output, scratch = run_rows(
            target.model,
            target.cache,
            target.model.init_scratch(rows, slots),
            tokens[:, :fed],
            context.length[:, None] - 1 + depths[:, :fed],
            jnp.arange(fed),
            ancestors[:, :fed],
            drafter.taps,
        )
        logits = target.model.unembed(target.model.norm(output.hidden))
        log_probs = target_distribution(
            logits, paths[:, :fed], depths[:, :fed], sampling, context.warp
        )
        pad = functools.partial(_pad_slots, slots=slots)
        return Output(pad(output.hidden), pad(output.taps)), scratch, pad(log_probs)

    if slots == 1:
        return feed(1)
    return lax.cond(draft.valid.any(), lambda: feed(slots), lambda: feed(1))


def _pad_slots(values: Float[Array, "B fed *rest"], slots: int) -> Array:
    missing = slots - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing)) + ((0, 0),) * (values.ndim - 2))


def emitted_tokens(
    draft: Draft, verdict: Verdict, next_token: Int[Array, " B"]
) -> Int[Array, "B depth+1"]:
    """The accepted draft tokens, then the next token in all places after them."""
    by_slot = jnp.concatenate([next_token[:, None], draft.tokens], axis=1)
    accepted = jnp.take_along_axis(by_slot, verdict.path, axis=1)[:, 1:]
    followed = jnp.concatenate([accepted, next_token[:, None]], axis=1)
    place = jnp.arange(followed.shape[1])
    return jnp.where(place < verdict.count[:, None] - 1, followed, next_token[:, None])


def emit(
    state: DecodingState,
    verdict: Verdict,
    emitted: Int[Array, "B width"],
    eos_ids: Int[Array, " eos"],
) -> tuple[DecodingState, Verdict]:
    """The one commit boundary: cuts at EOS, at the limit, and inactive rows to nothing.

    Tokens, lengths, caches and statistics all follow the count it returns.
    """
    place = jnp.arange(emitted.shape[1])
    is_end = (emitted[:, :, None] == eos_ids).any(axis=-1)
    before_end = jnp.where(is_end, place, emitted.shape[1]).min(axis=-1)
    room = state.limit - state.length
    count = jnp.minimum(jnp.minimum(verdict.count, before_end + 1), room)
    count = jnp.where(state.active, count, 0)
    length = state.length + count
    ended = jnp.where(length >= state.limit, LENGTH, RUNNING)
    ended = jnp.where(before_end < count, EOS, ended)
    # Places past the count are sent out of range and dropped.
    capacity = state.tokens.shape[1]
    columns = jnp.where(place < count[:, None], state.length[:, None] + place, capacity)
    put = (jnp.arange(emitted.shape[0])[:, None], columns)
    is_draft = place < verdict.count[:, None] - 1
    state = state._replace(
        tokens=state.tokens.at[put].set(emitted, mode="drop"),
        from_draft=state.from_draft.at[put].set(is_draft, mode="drop"),
        length=length,
        finish=jnp.where(state.active, ended, state.finish),
    )
    return state, verdict._replace(count=count)


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
