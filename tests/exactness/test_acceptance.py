"""How many draft tokens a first round accepts is what theory says, for every rule.

The probability of each accepted length is computed from the tables by going through all
drafts, options and penalties included; the measured share must lie within 4.9 standard
deviations, which one right share in a million does not: 0.05 for a case, 0.015 for all
cases together.
"""

import functools

import numpy as np
import pytest

from jaxspec.core import analytics
from tests import oracles
from tests.exactness import tables
from tests.exactness.chi_square import draw
from tests.exactness.tables import CASES, DRAFT, DRAFTERS, NODES, TARGET, UNCUT, VOCAB

REPEATS, DEVIATIONS = 16, 4.9


@functools.cache
def first_round(rule):
    batch = tables.batch([CASES[name] for name in UNCUT])
    return draw(DRAFTERS["draft model"], batch, REPEATS, rule=rule, rounds=1)


def both(case, texts):
    """The distributions of target and draft after the texts."""
    return (tables.next_probs(model, case, texts) for model in (TARGET, DRAFT))


def by_rejection(case, texts, weights):
    """1 - TV of each token, Leviathan et al. 2023, theorem 3.5: min(p, q) summed."""
    target, draft = both(case, texts)
    return weights[:, None] * np.minimum(target, draft)


def by_coupling(case, texts, weights):
    """Both draw x with probability 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    target, draft = both(case, texts)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(
            target[:, None] / target[:, :, None], draft[:, None] / draft[:, :, None]
        )
        agree = 1 / ratios.sum(axis=-1)
    possible = (target > 0) & (draft > 0)
    return weights[:, None] * np.where(possible, agree, 0)


def by_block(case, texts, weights):
    """Sun et al. 2024: of drafts that begin so, the share p_i is kept up to here.

    The two weights of a text are its probability as a draft, and p_i times that.
    """
    target, draft = both(case, texts)
    drawn, kept = weights[:, :1] * draft, weights[:, 1:] * target
    return np.stack([drawn, np.minimum(kept, drawn)], axis=-1)


def reach(name, step, start=1.0):
    """The probabilities that a first round accepts 1, 2, ... tokens at least."""
    case = CASES[name]

    def after_prefill(texts, weights):
        if texts.shape[1] > 0:
            return step(case, texts, weights)
        # Prefill has drawn the first token.
        first = tables.next_probs(TARGET, case, texts)
        return weights[:, None] * first.reshape(1, VOCAB, *(1,) * (weights.ndim - 1))

    walked = tables.walk(after_prefill, start, new=NODES + 1)
    return np.array([weights.sum(axis=0) for _, weights in walked][1:])


EXPECTED = {
    "rejection": lambda name: reach(name, by_rejection),
    "coupled": lambda name: reach(name, by_coupling),
    "block": lambda name: reach(name, by_block, [1.0, 1.0])[:, 1],
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_acceptance_is_what_theory_says(rule):
    drawn = first_round(rule)
    assert (drawn.drafted == 1).all()
    parts = [drawn.turn(place, len(UNCUT)).accepted for place in range(len(UNCUT))]
    measured = np.array([part.mean(axis=0) for part in parts])
    expected = np.array([EXPECTED[rule](name) for name in UNCUT])
    variance = expected * (1 - expected) / len(parts[0])
    off = np.abs(measured - expected) / np.sqrt(variance)
    for name, *shares in zip(UNCUT, measured, expected, strict=True):
        print(f"{name}: accepted {shares[0].round(3)}, in theory {shares[1].round(3)}")
    together = np.abs((measured - expected).sum(axis=0)) / np.sqrt(variance.sum(axis=0))
    print(f"farthest from theory, in deviations: {off.max():.1f}; all: {together}")
    assert (off < DEVIATIONS).all()
    assert (together < DEVIATIONS).all()


def test_a_block_accepts_no_fewer_tokens_than_rejection():
    """Case by case in expectation, and measured on the same drafts and uniforms."""
    means = []
    for place, name in enumerate(UNCUT):
        block, rejection = (EXPECTED[rule](name) for rule in ("block", "rejection"))
        assert block.sum() >= rejection.sum()
        more = [
            first_round(rule).turn(place, len(UNCUT)).accepted.sum(axis=1)
            for rule in ("block", "rejection")
        ]
        gain = more[0] - more[1]
        means.append(gain.mean())
        deviation = gain.std() / np.sqrt(len(gain))
        expected = block.sum() - rejection.sum()
        print(f"{name}: {gain.mean():.3f} more tokens, in theory {expected:.3f}")
        assert abs(gain.mean() - expected) < DEVIATIONS * deviation
    assert min(means) > 0


def test_coupling_accepts_between_its_bounds():
    """(1 - TV) / (1 + TV) <= P <= 1 - TV; and the product's formula is this one."""
    texts = np.array(list(np.ndindex(VOCAB, VOCAB)))
    for name in UNCUT:
        target, draft = both(CASES[name], texts)
        weights = np.ones(len(texts))
        agree = by_coupling(CASES[name], texts, weights).sum(axis=-1)
        overlap = np.minimum(target, draft).sum(axis=-1)
        assert (agree <= overlap + 1e-12).all()
        assert (agree >= overlap / (2 - overlap) - 1e-12).all()
        found = analytics.coupled_acceptance_probability(target, draft)
        np.testing.assert_allclose(found, agree, atol=2e-6)


def test_the_kept_share_of_a_block_is_what_its_thresholds_give():
    """Sun et al.'s theorem, against the algorithm itself on each of 1,296 drafts."""
    case, accepted = CASES["T=1.0, penalties"], np.zeros(NODES + 1)
    root = np.array([[3]])
    for tokens in np.ndindex(*(VOCAB,) * NODES):
        along = [np.hstack([root, [tokens[:i]]]).astype(int) for i in range(NODES + 1)]
        rows = [list(both(case, text)) for text in along]
        target, draft = (np.array([row[side][0] for row in rows]) for side in (0, 1))
        drawn = np.prod([draft[i][token] for i, token in enumerate(tokens)])
        passed = oracles.block_thresholds(target, draft[:-1], tokens)
        for count in range(NODES + 1):
            stops_here = passed[count - 1] if count else 1.0
            accepted[count] += drawn * stops_here * np.prod(1 - passed[count:])
    weights = np.array([[1.0, 1.0]])
    texts, reached = root, []
    for _ in range(NODES):
        weights = by_block(case, texts, weights).reshape(-1, 2)
        texts = np.array([[*text, token] for text in texts for token in range(VOCAB)])
        reached.append(weights[:, 1].sum())
    np.testing.assert_allclose(accepted[::-1].cumsum()[::-1][1:], reached, atol=1e-12)
