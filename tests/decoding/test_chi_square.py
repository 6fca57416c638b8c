"""Sampled ids have the target's distribution, at every position, through the loop.

The exact distribution of each token, and of each pair of neighbours, follows from the
tables by float64 NumPy. One batch holds many rows that differ in seed and options only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core import accept
from jaxspec.decoding import loop
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, oracles, runs

VOCAB, NODES, NEW, ROWS = 6, 3, 8, 2048
# The ending has occurred before, so that lookup drafts from the first round on.
PROMPT = [2, 4, 1, 0, 5, 3, 2, 4, 1]
PLAIN = {"temperature": 1.0}
OPTIONS = [
    PLAIN,
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.5, "top_p": 0.95},
]
NOT_SET = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TARGET = fakes.TableModel.random(VOCAB, seed=0)
DRAFT = TARGET.near(seed=1, noise=1.0)
DRAFTERS = {
    "autoregressive": Autoregressive(),
    "draft_model": DraftModel(DRAFT, NODES),
    "prompt_lookup": PromptLookup(NODES, min_ngram=1),
}
ACCEPTABLE, DAMNING = 1e-4, 1e-12


def sampled(drafter, options, repeats, made=runs.SHARED, rounds=runs.FOREVER):
    """States of `repeats` batches, each `ROWS` rows, `options` in turn by row."""
    column = lambda name, value, dtype: np.array(  # noqa: E731
        [options[row % len(options)].get(name, value) for row in range(ROWS)], dtype
    )
    for repeat in range(repeats):
        batch = runs.Batch(
            [PROMPT] * ROWS,
            new=NEW,
            temperature=column("temperature", 1.0, "f4"),
            seeds=range(repeat * ROWS, (repeat + 1) * ROWS),
            options={
                name: column(name, value, "i4" if name == "top_k" else "f4")
                for name, value in NOT_SET.items()
                if any(name in option for option in options)
            },
            capacity=32,
            chunk=16,
        )
        state, values = runs.start(TARGET, drafter, batch, made)
        yield made.decode(TARGET, drafter, state, values, jnp.int32(rounds))


def texts(drafter, options, repeats, made=runs.SHARED):
    """The new tokens `[option, sample, NEW]`, after the prompt's last token."""
    width = slice(len(PROMPT) - 1, len(PROMPT) + NEW)
    states = sampled(drafter, options, repeats, made)
    tokens = np.concatenate([np.asarray(state.tokens)[:, width] for state in states])
    return np.stack([tokens[start :: len(options)] for start in range(len(options))])


def warped(model, option):
    """Probabilities `[3, V + 1, V, V]` of each next token by context."""
    table = np.asarray(model.table).reshape(-1, model.vocab_size)
    rows = [oracles.warp(logits, **option) for logits in table]
    return np.reshape(rows, model.table.shape)


def exact_pairs(option):
    """The joint distribution of each new token and the one before it."""
    probs = warped(TARGET, option)[:, 1:]
    pair = np.zeros((VOCAB, VOCAB))
    pair[PROMPT[-2], PROMPT[-1]] = 1
    for position in range(len(PROMPT) - 1, len(PROMPT) + NEW - 1):
        pair = np.einsum("bo,bon->on", pair, probs[position % 3])
        yield pair


def p_value(observed, probs):
    """Pearson's test; cells with an expectation under 5 are merged."""
    observed, probs = observed.ravel(), probs.ravel()
    if observed[probs == 0].any():
        return 0.0
    order = np.argsort(probs)
    expected = probs[order] * observed.sum()
    cells = [[0.0, 0.0]]
    for seen, wanted in zip(observed[order], expected, strict=True):
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen
        cells[-1][1] += wanted
    # The largest cell comes last: it is never the one that lacks.
    seen, wanted = np.transpose(cells)
    return stats.chisquare(seen, wanted).pvalue if len(cells) > 1 else 1.0


def p_values(tokens, options):
    """Of each option and position: the token alone, and together with the last."""
    found = {}
    for option, text in zip(options, tokens, strict=True):
        for place, pair in enumerate(exact_pairs(option)):
            seen = np.zeros((VOCAB, VOCAB))
            np.add.at(seen, (text[:, place], text[:, place + 1]), 1)
            key = f"token {place} at {option}"
            found[key] = p_value(seen.sum(axis=0), pair.sum(axis=0))
            found[f"pair before {key}"] = p_value(seen, pair)
    return found


def assert_distribution(drafter, repeats=8):
    """A failure is looked at with ten times the samples, never with another seed."""
    found = p_values(texts(drafter, OPTIONS, repeats), OPTIONS)
    print(f"{len(found)} tests, smallest p {min(found.values()):.1e}")
    if min(found.values()) <= ACCEPTABLE:
        found = p_values(texts(drafter, OPTIONS, 10 * repeats), OPTIONS)
    assert {key: p for key, p in found.items() if p <= ACCEPTABLE} == {}


def test_no_threshold_is_a_matter_of_rounding():
    """The exact distributions hold only if float32 keeps the same tokens."""
    for option in OPTIONS:
        for logits in np.asarray(TARGET.table).reshape(-1, VOCAB):
            narrow, wide = (
                oracles.kept(logits, **option, slack=slack) for slack in (-2e-6, 2e-6)
            )
            np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_position_has_the_target_distribution(name):
    assert_distribution(DRAFTERS[name])


@pytest.mark.full
@pytest.mark.parametrize("vocab", [4, 8])
def test_a_draft_of_another_vocabulary_size_keeps_the_distribution(vocab):
    """BL-31."""
    assert_distribution(DraftModel(fakes.TableModel.random(vocab, seed=5), NODES))


@pytest.mark.full
def test_a_draft_of_one_token_keeps_the_distribution():
    assert_distribution(DraftModel(DRAFT, 1))


def acceptance(option):
    """The probability that a first round accepts 1, 2, ... tokens at least."""
    target, draft = (warped(model, option)[:, 1:] for model in (TARGET, DRAFT))
    position = len(PROMPT) - 1
    reached = np.zeros((VOCAB, VOCAB))
    reached[PROMPT[-1]] = target[position % 3, PROMPT[-2], PROMPT[-1]]
    for _ in range(NODES):
        position += 1
        # Both agree on this much of each token; 1 - TV is its sum.
        shared = np.minimum(target, draft)[position % 3]
        reached = np.einsum("bo,bon->on", reached, shared)
        yield reached.sum()


def acceptance_p_values(repeats):
    states = sampled(DRAFTERS["draft_model"], OPTIONS, repeats, rounds=1)
    accepted = np.concatenate([np.asarray(s.statistics.accepted) for s in states])
    return {
        f"depth {depth + 1} at {option}": stats.binomtest(
            int(accepted[start :: len(OPTIONS), depth].sum()),
            len(accepted) // len(OPTIONS),
            probability,
        ).pvalue
        for start, option in enumerate(OPTIONS)
        for depth, probability in enumerate(acceptance(option))
    }


def test_acceptance_is_one_minus_the_total_variation():
    """Leviathan et al. 2023, theorem 3.5, at each depth of a draft."""
    found = acceptance_p_values(8)
    if min(found.values()) <= ACCEPTABLE:
        found = acceptance_p_values(80)
    assert {key: p for key, p in found.items() if p <= ACCEPTABLE} == {}


def always_accept(log_probs, draft, uniforms):
    return accept.rejection(log_probs, draft, jnp.zeros_like(uniforms))


def raw_draft_distribution(log_probs, draft, uniforms):
    """Drawn at temperature 0.5, tested against temperature 1."""
    raw = jax.nn.log_softmax(draft.log_probs * 0.5)
    return accept.rejection(log_probs, draft._replace(log_probs=raw), uniforms)


def bonus_from_the_draft(log_probs, draft, uniforms):
    verdict = accept.rejection(log_probs, draft, uniforms)
    all_accepted = (verdict.count == NODES + 1)[:, None]
    wrong = jnp.where(all_accepted, draft.log_probs[:, -1], verdict.next_log_probs)
    return verdict._replace(next_log_probs=wrong)


def only_the_rejected_id_removed(log_probs, draft, uniforms):
    verdict = accept.rejection(log_probs, draft, uniforms)
    refused = jnp.minimum(verdict.count - 1, NODES - 1)[:, None]
    own = jnp.take_along_axis(log_probs, refused[:, :, None], axis=1)[:, 0]
    token = jnp.take_along_axis(draft.tokens, refused, axis=1)
    rest = jax.nn.log_softmax(jnp.where(jnp.arange(VOCAB) == token, -jnp.inf, own))
    all_accepted = (verdict.count == NODES + 1)[:, None]
    wrong = jnp.where(all_accepted, verdict.next_log_probs, rest)
    return verdict._replace(next_log_probs=wrong)


def softmax_of_the_excess(target_log_probs, draft_probs):
    return jax.nn.log_softmax(jnp.maximum(jnp.exp(target_log_probs) - draft_probs, 0))


def target_itself(target_log_probs, draft_probs):
    return target_log_probs


def smallest_p_value(drafter, option, made):
    return min(p_values(texts(drafter, [option], 2, made), [option]).values())


@pytest.mark.parametrize(
    ("wrong", "module", "part", "option"),
    [
        (always_accept, loop, "rejection", PLAIN),
        (softmax_of_the_excess, accept, "residual_log_probs", PLAIN),
        (target_itself, accept, "residual_log_probs", PLAIN),
        (raw_draft_distribution, loop, "rejection", {"temperature": 0.5}),
        (bonus_from_the_draft, loop, "rejection", PLAIN),
        (only_the_rejected_id_removed, loop, "rejection", PLAIN),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_sampler_is_found(wrong, module, part, option, monkeypatch):
    drafter = DRAFTERS["draft_model"]
    monkeypatch.setattr(module, part, wrong)
    made = runs.programs()
    p = smallest_p_value(drafter, option, made._replace(prefill=runs.SHARED.prefill))
    print(f"{wrong.__name__}: p = {p:.1e}")
    assert p < DAMNING


def test_a_looked_up_token_that_is_always_accepted_is_found(monkeypatch):
    """BL-14."""
    monkeypatch.setattr(loop, "rejection", always_accept)
    made = runs.programs()._replace(prefill=runs.SHARED.prefill)
    assert smallest_p_value(DRAFTERS["prompt_lookup"], PLAIN, made) < DAMNING
