"""What plain decoding says of given tokens: it is made to write them, one by one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import noise
from jaxspec.core.distributions import at, sample
from jaxspec.decoding.boundary import emit
from jaxspec.decoding.round import verify
from jaxspec.decoding.state import DecodingState, Options
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.types import Model, Target, Verdict


class Followed(NamedTuple):
    """The target's view of each token that it was made to write.

    Attributes:
        prob: the token's probability, by all options of its row.
        above: the probability of all likelier ids; equals are ordered by id.
        shared: None unless the rule shares noise.
    """

    prob: Float[Array, "B T"]
    above: Float[Array, "B T"]
    shared: "Shared | None"


class Shared(NamedTuple):
    """What a target that draws with the drafter's noise does.

    Attributes:
        agree: the probability that it draws the token, given that the drafter has.
        plain: what it draws: the token of plain decoding with the row's seed.
        gap: by how much that draw beats the next best, in nats, noise included.
    """

    agree: Float[Array, "B T"]
    plain: Int[Array, "B T"]
    gap: Float[Array, "B T"]


def follow(
    model: Model,
    state: DecodingState,
    options: Options,
    tokens: Int[Array, "B T"],
    draft_log_probs: Float[Array, "B T V"] | None,
) -> Followed:
    """Decodes plainly from `state`, but writes `tokens` instead of what it draws.

    `draft_log_probs` are the distributions that a drafter drew the tokens from; None:
    it was certain of them.
    """
    steps = tokens.shape[1]
    if draft_log_probs is not None:
        draft_log_probs = draft_log_probs[:, :steps].swapaxes(0, 1)

    def step(state: DecodingState, given: Any):
        token, drawn_from = given
        state, log_probs = _write(model, state, options, token)
        followed = Followed(*_rank(log_probs, token), None)
        if options.rule.shares_noise:
            shared = _share(state, log_probs, token, drawn_from)
            followed = followed._replace(shared=shared)
        return state, followed

    _, followed = lax.scan(step, state, (tokens.T, draft_log_probs))
    return jax.tree.map(jnp.transpose, followed)


def _write(model, state, options, token) -> tuple[DecodingState, Float[Array, "B V"]]:
    """One round of plain decoding, the token being given."""
    rows = token.shape[0]
    plain, target = Autoregressive(), Target(model, state.cache)
    draft = plain.empty(rows)
    _, scratch, verified = verify(target, plain, draft, state, options)
    path = jnp.zeros((rows, 1), jnp.int32)
    verdict = Verdict(path, path[:, 0] + 1, verified.log_probs[:, 0])
    failed = jnp.zeros(rows, bool)
    after, verdict = emit(state, verdict, token[:, None], failed, None, options)
    cache = state.cache.commit(scratch, path, verdict.count)
    return after._replace(cache=cache), verified.log_probs[:, 0]


def _rank(log_probs, token) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The token's probability, and that of the ids before it."""
    probs, ids = jnp.exp(log_probs), jnp.arange(log_probs.shape[-1])
    own = at(probs, token)
    is_before = probs > own[:, None]
    is_before |= (probs == own[:, None]) & (ids < token[:, None])
    return own, jnp.where(is_before, probs, 0.0).sum(axis=-1)


def _share(state, log_probs, token, drawn_from) -> Shared:
    """`state` is the one after the token, which stands at its last position."""
    ids, position = jnp.arange(log_probs.shape[-1]), state.length[:, None] - 1
    gumbel = noise.shared_gumbels(state.keys, position, ids.size)[:, 0]
    noisy, plain = log_probs + gumbel, sample(log_probs, gumbel)
    rest = jnp.where(ids == plain[:, None], -jnp.inf, noisy).max(axis=-1)
    agree = jnp.exp(at(log_probs, token))
    if drawn_from is not None:
        agree = _agreement(log_probs, drawn_from, token)
    return Shared(agree, plain, at(noisy, plain) - rest)


def _agreement(target_log_probs, draft_log_probs, token) -> Float[Array, " B"]:
    """P(the target draws x | the draft drew x) with one Gumbel noise for both.

    The chance that both draw x is 1 / sum_y max(p(y) / p(x), q(y) / q(x)) (as in
    `jaxspec.core.analytics.coupled_acceptance_probability`), and q(x) that the draft
    does.
    """
    own, drawn = at(target_log_probs, token), at(draft_log_probs, token)
    worst = jnp.maximum(
        target_log_probs - own[:, None], draft_log_probs - drawn[:, None]
    )
    both = 1 / jnp.exp(worst).sum(axis=-1)
    return jnp.where(own > -jnp.inf, both / jnp.exp(drawn), 0.0)
