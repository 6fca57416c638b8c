"""Speculative decoding, as the papers' box has it.

A round proposes, verifies, accepts and commits; all rounds of a generation are one
`lax.while_loop` in one XLA program, with no host round trip. Plain decoding is the same
loop with a drafter that proposes nothing.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.cache import causal, run_rows
from jaxspec.core import noise
from jaxspec.core.accept import rejection
from jaxspec.core.distributions import sample
from jaxspec.decoding.round import (
    bind_noise,
    bind_warp,
    count_round,
    emit,
    emitted_tokens,
    target_distribution,
    verify,
)
from jaxspec.decoding.state import DecodingState, Options, Prompts
from jaxspec.types import Chunk, Context, Drafter, Model, Target, Verdict


def decode(
    model: Model,
    drafter: Drafter,
    state: DecodingState,
    options: Options,
    rounds: Int[Array, ""],
) -> DecodingState:
    """Runs rounds until every row has ended, `rounds` of them at most."""

    def unfinished(carry):
        state, done = carry
        return state.active.any() & (done < rounds)

    def body(carry):
        state, done = carry
        return decode_round(model, drafter, state, options), done + 1

    return lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def decode_round(
    model: Model, drafter: Drafter, state: DecodingState, options: Options
) -> DecodingState:
    """One round: Leviathan et al. 2023, algorithm 1, for all rows at once."""
    target = Target(model, state.cache)
    sampling, vocabulary = options.sampling, model.vocab_size
    context = Context(state.tokens, state.length, state.active, bind_warp(sampling))
    draft_noise = bind_noise(state, sampling, noise.DRAFT_TOKEN, vocabulary)

    draft, drafting = drafter.propose(target, state.drafter, context, draft_noise)
    output, scratch, log_probs = verify(target, drafter, draft, context, sampling)
    nodes = jnp.broadcast_to(
        jnp.arange(1, draft.tokens.shape[1] + 1), draft.tokens.shape
    )
    uniforms = noise.uniforms(state.keys, state.length, nodes, noise.ACCEPT)
    verdict = rejection(log_probs, draft, uniforms)
    next_token = _draw(state, verdict.next_log_probs, sampling)
    emitted = emitted_tokens(draft, verdict, next_token)
    uncut = verdict.count
    state, verdict = emit(state, verdict, emitted, options.eos_ids)
    cache = state.cache.commit(scratch, verdict.path, verdict.count)
    drafting = drafter.commit(Target(model, cache), drafting, draft, verdict, output)
    return state._replace(
        cache=cache,
        drafter=drafting,
        statistics=count_round(state.statistics, draft, uncut, verdict.count),
    )


def prefill(
    model: Model,
    drafter: Drafter,
    prompts: Prompts | DecodingState,
    chunk: Chunk,
    options: Options,
    final: Bool[Array, ""],
    width: int,
) -> DecodingState:
    """Feeds a piece of every prompt; after the `final` one draws the first token.

    The first call is given the prompts and makes the state; `width` is the largest
    chunk of the generation.
    """
    state = prompts
    if isinstance(state, Prompts):
        state = DecodingState.init(model, drafter, state, width)
    rows, tokens = chunk.tokens.shape
    slots = jnp.arange(tokens)
    output, scratch = run_rows(
        model,
        state.cache,
        model.init_scratch(rows, tokens),
        chunk.tokens,
        chunk.start[:, None] + slots,
        slots,
        causal(rows, tokens),
        drafter.taps,
    )
    path = jnp.broadcast_to(slots, (rows, tokens))
    cache = state.cache.commit(scratch, path, chunk.count)
    last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, last, axis=1)[:, 0]
    target = Target(model, cache)
    state = state._replace(
        cache=cache,
        drafter=drafter.prefill(target, state.drafter, chunk, output),
        hidden=jnp.where((chunk.count > 0)[:, None], hidden, state.hidden),
    )
    # Only the last chunk pays for a row of the vocabulary head.
    return lax.cond(final, _first_token, lambda *args: args[1], model, state, options)


def _first_token(model, state, options) -> DecodingState:
    logits = model.unembed(model.norm(state.hidden))[:, None]
    rows = logits.shape[0]
    path_tokens = jnp.zeros((rows, 1, 0), jnp.int32)
    path_count = jnp.zeros((rows, 1), jnp.int32)
    warp = bind_warp(options.sampling)
    log_probs = target_distribution(
        logits, path_tokens, path_count, options.sampling, warp
    )[:, 0]
    token = _draw(state, log_probs, options.sampling)[:, None]
    one = Verdict(path_count, jnp.ones(rows, jnp.int32), log_probs)
    return emit(state, one, token, options.eos_ids)[0]


def _draw(state, log_probs, sampling) -> Int[Array, " B"]:
    root = jnp.zeros((log_probs.shape[0], 1), jnp.int32)
    gumbel = bind_noise(state, sampling, noise.NEXT_TOKEN, log_probs.shape[-1])
    return sample(log_probs, gumbel(root, state.length[:, None])[:, 0])
