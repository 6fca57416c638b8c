"""Speculative decoding, as the papers' box has it.

A round proposes, verifies, accepts and commits; all rounds of a generation are one
`lax.while_loop` in one XLA program, with no host round trip. Plain decoding is the same
loop with a drafter that proposes nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.cache import causal, run_rows
from jaxspec.core.distributions import sample
from jaxspec.decoding.boundary import emit
from jaxspec.decoding.round import (
    Verified,
    at_last,
    bind_noise,
    bind_warp,
    count_round,
    drop_unusable,
    emitted_tokens,
    report_round,
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
    one_token_rounds: bool = True,
) -> DecodingState:
    """Runs rounds until every row has ended, `rounds` of them at most.

    With `one_token_rounds`, static, a round in which a drafter that may miss has no
    draft for any row costs what plain decoding costs; which rounds are such, a row's
    neighbours decide.
    """

    def unfinished(carry):
        state, done = carry
        return state.active.any() & (done < rounds)

    def body(carry):
        state, done = carry
        state = decode_round(model, drafter, state, options, one_token_rounds)
        return state, done + 1

    return lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def decode_round(
    model: Model,
    drafter: Drafter,
    state: DecodingState,
    options: Options,
    one_token_rounds: bool = True,
) -> DecodingState:
    """One round: Leviathan et al. 2023, algorithm 1, for all rows at once."""
    target = Target(model, state.cache)
    noise = bind_noise(state, options, model.vocab_size)
    warp = bind_warp(state, options)
    context = Context(state.tokens, state.length, state.active, warp)

    with jax.named_scope("draft"):
        draft, drafting = drafter.propose(target, state.drafter, context, noise.draft)
    with jax.named_scope("verify"):
        output, scratch, verified = verify(
            target, drafter, draft, state, options, one_token_rounds
        )
    draft = drop_unusable(draft, verified.unusable)
    accepting = noise.accept(drafter.nodes, drafter.depth)
    verdict = options.rule.decide(verified.log_probs, draft, accepting, drafter.depth)
    last = noise.next_token(verdict.count - 1, accepting)
    next_token = sample(verdict.next_log_probs, last)
    emitted = emitted_tokens(draft, verdict, next_token)
    reported = report_round(state, options, verified, verdict.path, emitted)
    failed = at_last(verified.unusable, verdict)
    uncut = verdict.count
    state, verdict = emit(state, verdict, emitted, failed, reported, options)
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
        state = DecodingState.init(model, drafter, state, options, width)
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
    """Draws the token after the prompt; nothing is drafted before it."""
    logits = model.unembed(model.norm(state.hidden))[:, None]
    root = jnp.zeros((logits.shape[0], 1), jnp.int32)
    no_path = root[:, :, None][..., :0]
    log_probs, unusable = target_distribution(state, options, logits, no_path, root)
    noise = bind_noise(state, options, logits.shape[-1])
    drawing = noise.next_token(root[:, 0], noise.accept(0, 0))
    token = sample(log_probs[:, 0], drawing)[:, None]
    verdict = Verdict(root, root[:, 0] + 1, log_probs[:, 0])
    verified = Verified(log_probs, unusable, logits, no_path, root)
    reported = report_round(state, options, verified, root, token)
    return emit(state, verdict, token, unusable[:, 0], reported, options)[0]
