"""Coupling and typical acceptance: by hand, and integrated.

What holds of every rule is asked of every rule in `RULES`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.accept import RULES, Rule, rejection
from jaxspec.core.distributions import sample
from jaxspec.types import Draft
from tests import oracles
from tests.core.deciding import (
    JITTED,
    NAN,
    SHAPES,
    TOLERANCE,
    P,
    Q,
    decide,
    every_rule,
    noise_for,
)
from tests.core.enumeration import (
    ALMOST_1,
    Tables,
    joint,
    logs,
    make_draft,
    rows_of,
)

# The registry, and what holds of every rule


def test_the_registry_says_what_a_rule_takes_and_keeps():
    assert list(RULES) == ["rejection", "block", "coupled", "typical"]
    assert RULES["rejection"].decide is rejection
    assert [rule.name for rule in RULES.values()] == list(RULES)
    assert [name for name in RULES if RULES[name].shares_noise] == ["coupled"]
    assert [name for name in RULES if not RULES[name].lossless] == ["typical"]


def test_a_rule_is_static_so_that_a_program_is_compiled_for_it_once():
    traced = []

    @jax.jit
    def name_of(rule: Rule, x):
        traced.append(rule.name)
        return x

    for name in ("block", "rejection", "block"):
        name_of(RULES[name], 1.0)
    assert traced == ["block", "rejection"]


@every_rule
def test_no_draft_at_all_gives_the_target_row(name):
    target = logs([[P], [Q]])
    empty = Draft(*(jnp.zeros((2, 0), t) for t in (jnp.int32, jnp.int32, bool)))
    verdict = JITTED[name](target, empty, noise_for(name, 2, 0, 3))
    assert verdict.count.tolist() == [1, 1]
    assert verdict.path.tolist() == [[0], [0]]
    assert np.array_equal(verdict.next_log_probs, target[:, 0])


@every_rule
@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_1])
def test_a_greedy_target_accepts_by_id_and_emits_no_other(name, uniform):
    best = [1, 2, 0]
    target = np.eye(3)[[best] * 4]
    tokens = [[1, 2], [1, 0], [0, 2], [2, 2]]
    noise = noise_for(name, 4, 2, 3, uniform)
    certain = [0, 0, 1.0]
    # The last is certain of the target's token and has drawn another: S is 0 at p = 1.
    for draft in (None, [[Q, P]] * 4, [[certain, P]] * 4, [[Q, certain]] * 4):
        accepted, following = decide(name, target, tokens, draft, noise)
        assert accepted.tolist() == [2, 1, 0, 0]
        expected = np.eye(3)[np.take(best, accepted)]
        np.testing.assert_allclose(following, expected, atol=1e-6)


@every_rule
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_invalid_node_ends_the_draft_and_what_lies_past_it_does_not_matter(
    name, deterministic
):
    rng = np.random.default_rng(3)
    rows, nodes, size = 64, 3, 4
    # Peaked, so that any rule accepts whole drafts.
    target = rng.dirichlet(np.full(size, 0.1), (rows, nodes + 1))
    target = 0.95 * target + 0.05 / size
    draft = 0.8 * target[:, :-1] + 0.2 * rng.dirichlet(np.ones(size), (rows, nodes))
    tokens = target[:, :-1].argmax(axis=-1)
    valid = np.arange(nodes) < np.arange(rows)[:, None] % (nodes + 1)
    length = valid.sum(axis=-1)
    noise = noise_for(name, rows, nodes, size, 0.3)
    given = None if deterministic else draft
    accepted, following = decide(name, target, tokens, given, noise, valid)
    assert (accepted <= length).all()
    ended = accepted == length
    assert np.bincount(length[ended], minlength=nodes + 1).min() >= 3
    own = np.exp(logs(target))[np.arange(rows), length]
    assert np.array_equal(following[ended], own[ended])

    # NaN from the last valid slot on, in the target and in the draft.
    past = np.arange(nodes + 1) >= length[:, None]
    poisoned = np.where(past[:, :, None], NAN, target)
    if not deterministic:
        given = np.where(past[:, :-1, None], NAN, draft)
    again, after = decide(name, poisoned, tokens, given, noise, valid)
    assert np.array_equal(again, accepted)
    assert np.array_equal(after[~ended], following[~ended])
    assert np.isnan(after[ended]).all()


# Coupling


def shared_draws(seeds, tables):
    """Noise, what plain sampling writes with it, and what a drafter foresees of it."""
    shape = (seeds, tables.nodes + 1, tables.size)
    noise = np.random.default_rng(5).gumbel(size=shape).astype(np.float32)
    target, draft = ([logs(t) for t in rows] for rows in (tables.target, tables.draft))
    plain = [oracles.gumbel_chain(target, each) for each in noise]
    foreseen = [oracles.gumbel_chain(draft, each[:-1]) for each in noise]
    return noise, np.array(plain), np.array(foreseen)


def emitted(tables, tokens, told, noise, given=None, valid=None):
    """The ids of a round under `coupled` and how many there are; no others are set."""
    target = logs(rows_of(tables.target, tokens))
    draft = make_draft(tokens.astype(np.int32), told, valid)
    verdict = JITTED["coupled"](target, draft, noise if given is None else given)
    count = np.asarray(verdict.count)
    last = noise[np.arange(len(noise)), count - 1]
    ids = np.concatenate([tokens, tokens[:, :1]], axis=1)
    ids[np.arange(len(ids)), count - 1] = sample(verdict.next_log_probs, last)
    return np.where(np.arange(ids.shape[1]) < count[:, None], ids, -1), count


@pytest.mark.parametrize("kind", ["smooth", "zeros"])
def test_coupled_ids_are_those_of_plain_sampling_whatever_the_drafter(kind):
    tables = Tables(6, 4, 3, kind)
    # Near enough to the target that every count occurs.
    near = zip(tables.target, tables.draft, strict=False)
    tables.draft = [0.7 * target + 0.3 * draft for target, draft in near]
    noise, plain, foreseen = shared_draws(3000, tables)
    rng = np.random.default_rng(7)
    right = plain[:, :-1]
    flipped = np.where(rng.random(right.shape) < 0.3, (right + 1) % 4, right)
    valid = rng.random(right.shape) > 0.2
    told = logs(rows_of(tables.draft, foreseen))
    for tokens, told_rows, nodes in [
        (foreseen, told, None),
        (rng.integers(0, 4, right.shape), None, None),
        (flipped, None, valid),
        (right, None, None),
        ((right + 1) % 4, None, None),
    ]:
        ids, count = emitted(tables, tokens, told_rows, noise, valid=nodes)
        places = np.arange(4) < count[:, None]
        assert np.array_equal(ids, np.where(places, plain, -1))
        assert tokens is not foreseen or np.bincount(count)[1:].min() >= 20
        assert tokens is not right or (count == 4).all()
    assert (count == 1).all()
    # The control: noise of the wrong depth gives other ids.
    ids, count = emitted(tables, foreseen, told, noise, given=noise[:, ::-1])
    assert (ids != np.where(np.arange(4) < count[:, None], plain, -1)).any()


def test_shared_noise_agrees_as_often_as_theory_says():
    """Daliri et al. 2025; within 4 standard deviations, which chance leaves 6e-5."""
    rounds = 200_000
    rng = np.random.default_rng(8)
    for spread in (0.3, 2.0):
        target, draft = rng.dirichlet(np.full(6, spread), 2)
        gumbel, other = rng.gumbel(size=(2, rounds, 2, 6)).astype(np.float32)
        exact = oracles.gumbel_match(target, draft)
        distance = np.abs(target - draft).sum() / 2
        assert (1 - distance) / (1 + distance) <= exact <= 1 - distance
        rows = np.broadcast_to(logs(target), (rounds, 2, 6))
        bound = 4 * np.sqrt(exact * (1 - exact) / rounds)
        for seen, agrees in ((gumbel, True), (other, False)):
            tokens = (logs(draft) + seen[:, 0]).argmax(axis=-1)
            drafted = make_draft(tokens[:, None].astype(np.int32))
            verdict = JITTED["coupled"](rows, drafted, gumbel)
            rate = float(np.mean(np.asarray(verdict.count) - 1))
            # The control draws with noise of its own, and agrees less.
            assert (abs(rate - exact) < bound) == agrees
            assert agrees or rate < exact


def test_a_draw_is_compared_with_the_draw_of_its_own_parent():
    # Zero noise: each slot's arg-max. The second token is right only of the first row.
    target = [[P, P[::-1], P], [P, P, P]]
    zero = np.zeros((2, 3, 3))
    accepted, following = decide("coupled", target, [[0, 2], [0, 2]], None, zero)
    assert accepted.tolist() == [2, 1]
    np.testing.assert_allclose(following, [P, P], atol=1e-6)
    # The noise of depth 1 alone makes token 2 the second row's draw too.
    zero[1, 1, 2] = 5
    assert decide("coupled", target, [[0, 2], [0, 2]], None, zero)[0].tolist() == [2, 2]


# Typical acceptance


@pytest.mark.parametrize(
    ("row", "accepted"),
    [
        ([0.5, 0.3, 0.2, 0, 0, 0], [1, 1, 1, 0, 0, 0]),  # epsilon binds: .09
        ([0.86, 0.1, 0.04, 0, 0, 0], [1, 1, 0, 0, 0, 0]),
        # Entropy 1.727, so the threshold is .3 exp(-1.727) = .0533: delta binds.
        ([0.19] * 5 + [0.05], [1, 1, 1, 1, 1, 0]),
        ([0.188] * 5 + [0.06], [1] * 6),
        ([1 / 6] * 6, [1] * 6),
        ([0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_token_is_typical_above_epsilon_or_delta_by_the_entropy(row, accepted):
    tokens = np.arange(6)[:, None]
    after = np.eye(6)[0]
    found, following = decide(
        "typical", [[row, after]] * 6, tokens, None, np.full((6, 1), ALMOST_1)
    )
    assert found.tolist() == accepted
    assert found.tolist() == [oracles.is_typical(row, token) for token in range(6)]
    # Refused or not, the next token is the target's own.
    expected = np.where(found[:, None], after, row)
    np.testing.assert_allclose(following, expected, atol=1e-6)


def test_typical_reads_neither_the_noise_nor_the_draft():
    rng = np.random.default_rng(9)
    target = rng.dirichlet(np.full(8, 0.2), (200, 4))
    tokens = target[:, :-1].argsort(axis=-1)[:, :, -2]
    some = decide("typical", target, tokens, None, np.zeros((200, 3)))
    draft = rng.dirichlet(np.ones(8), (200, 3))
    other = decide("typical", target, tokens, draft, rng.random((200, 3)))
    assert np.array_equal(some[0], other[0])
    assert np.array_equal(some[1], other[1])
    assert np.bincount(some[0], minlength=4).min() >= 5
    passes = [
        [oracles.is_typical(*pair) for pair in zip(rows, ids, strict=False)]
        for rows, ids in zip(target, tokens, strict=True)
    ]
    assert some[0].tolist() == [oracles.leading(row) for row in passes]


def whole(target, draft, tokens, valid=None):
    """No uniform matters, so no cell has an edge."""
    return np.ones(len(tokens))


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_typical_is_lossy_except_for_greedy_rows(size, nodes):
    tables = Tables(0, size, nodes, "smooth")
    found = joint(JITTED["typical"], tables, thresholds=whole)
    assert abs(found.sum() - 1) < 1e-5
    assert np.abs(found - tables.continuation(())).max() > 1000 * TOLERANCE
    greedy = Tables(0, size, nodes, "one-hot")
    found = joint(JITTED["typical"], greedy, thresholds=whole)
    np.testing.assert_allclose(found, greedy.continuation(()), atol=TOLERANCE)
