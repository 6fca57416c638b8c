"""Block verification, coupling and typical acceptance: by hand, and integrated.

What holds of every rule is asked of every rule in `RULES`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.accept import RULES, Rule, rejection
from jaxspec.core.distributions import sample
from jaxspec.types import Draft, Verdict
from tests import oracles
from tests.core.enumeration import (
    ALMOST_1,
    Tables,
    joint,
    logs,
    make_draft,
    mean_accepted,
    probabilities,
    rows_of,
)

JITTED = {name: jax.jit(rule.decide) for name, rule in RULES.items()}
every_rule = pytest.mark.parametrize("name", list(RULES))
lossless_by_uniforms = pytest.mark.parametrize("name", ["rejection", "block"])
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
THRESHOLDS = {"rejection": oracles.ratios, "block": oracles.block_thresholds}
SHAPES = [(2, 1), (2, 2), (3, 2), (4, 3)]
TOLERANCE = 1e-6  # as in test_accept
NAN = float("nan")


def noise_for(name, rows, nodes, size, uniform=0.5, seed=0):
    """Noise of the shape that the rule takes: one uniform for all, or any Gumbels."""
    if RULES[name].shares_noise:
        gumbel = np.random.default_rng(seed).gumbel(size=(rows, nodes + 1, size))
        return gumbel.astype(np.float32)
    return np.full((rows, nodes), uniform, np.float32)


def decide(name, target, tokens, draft, noise, valid=None):
    """Accepted counts and next probabilities; rows are given as probabilities."""
    draft = make_draft(tokens, None if draft is None else logs(draft), valid)
    verdict = JITTED[name](logs(target), draft, np.asarray(noise, np.float32))
    slots = np.arange(draft.tokens.shape[1] + 1)
    assert np.array_equal(verdict.path, np.tile(slots, (len(tokens), 1)))
    return np.asarray(verdict.count) - 1, probabilities(verdict)


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


# Block verification by hand


def test_the_papers_example_gains_a_tenth():
    """Sun et al. 2024, section 2: 10/9 tokens one by one, 11/9 by blocks."""
    target, draft = [1 / 3, 2 / 3], np.array([2 / 3, 1 / 3])
    # All thresholds are quarters: one point in each of the cells between them.
    uniforms = (np.array(list(np.ndindex(4, 4))) + 0.5) / 4
    for name, ninths in (("rejection", 10), ("block", 11)):
        mean = 0
        for tokens in np.ndindex(2, 2):
            given = [[target] * 3] * 16, [tokens] * 16, [[draft] * 2] * 16
            mean += draft[[*tokens]].prod() * decide(name, *given, uniforms)[0].mean()
        assert abs(mean - ninths / 9) < 1e-12


def test_a_later_token_redeems_an_unlikely_one():
    # p_1 = .4, then p_2 = min(1, .4 * 2.5) = 1; or 1 stays .4, then p_3 = 1.
    target, draft = [[P, P, P, P[::-1]]] * 3, [[Q, Q, Q]] * 3
    tokens = [[2, 0, 0], [2, 1, 0], [2, 2, 2]]
    uniforms = np.full((3, 3), ALMOST_1)
    assert decide("block", target, tokens, draft, uniforms)[0].tolist() == [3, 3, 0]
    assert decide("rejection", target, tokens, draft, uniforms)[0].tolist() == [0, 0, 0]


def test_thresholds_and_what_follows_are_those_worked_out_by_hand():
    # p_1 = .4; .4 * (.5, .3, .2) - (.1, .05, .85) has the positive part (.1, .07, 0).
    inner = [0.1, 0.05, 0.85]
    threshold = 0.17 / (0.17 + 0.6)
    tokens = [[2, 2]] * 5  # p_2 = .4 * .2 / .85
    whole = 0.08 / 0.85
    uniforms = [
        [threshold - 1e-5, whole + 1e-5],
        [threshold + 1e-5, whole + 1e-5],
        [threshold + 1e-5, whole - 1e-5],
        [0.0, 0.0],
        [ALMOST_1, ALMOST_1],
    ]
    target, draft = [[P, P, P[::-1]]] * 5, [[Q, inner]] * 5
    accepted, following = decide("block", target, tokens, draft, uniforms)
    assert accepted.tolist() == [1, 0, 2, 2, 0]
    np.testing.assert_allclose(following[0], [10 / 17, 7 / 17, 0], atol=1e-6)
    np.testing.assert_allclose(following[[1, 4]], [[1, 0, 0]] * 2, atol=1e-6)
    np.testing.assert_allclose(following[[2, 3]], [P[::-1]] * 2, atol=1e-6)


def test_a_short_draft_keeps_its_last_prefix_by_its_own_probability():
    valid = [[True, False], [True, False]]
    target, draft = [[P, Q, P]] * 2, [[Q, P]] * 2
    uniforms = [[0.399, 0.0], [0.401, 0.0]]
    accepted, following = decide(
        "block", target, [[2, 0]] * 2, draft, uniforms, np.array(valid)
    )
    assert accepted.tolist() == [1, 0]
    np.testing.assert_allclose(following, [Q, [1, 0, 0]], atol=1e-6)


def test_an_impossible_token_is_in_no_block_even_where_the_uniform_is_0():
    never = [0.5, 0.5, 0.0]
    target = [[never, P, P, P], [P, never, P, P], [P, P, never, P]]
    tokens = [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    for draft in ([[Q] * 3] * 3, None):
        accepted, following = decide("block", target, tokens, draft, np.zeros((3, 3)))
        assert accepted.tolist() == [0, 1, 2]
        assert (following[:, 2] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("probs", [[0.0, 0.0, 1.0, 0.0], [0.25] * 4], ids=str)
def test_a_block_from_the_target_itself_is_kept_whole(probs, dtype):
    rows = jnp.asarray(logs([[probs] * 3] * 2), dtype)
    uniforms = jnp.array([[ALMOST_1, ALMOST_1], [0.0, ALMOST_1]])
    verdict = JITTED["block"](rows, make_draft([[2, 2]] * 2, rows[:, :2]), uniforms)
    assert verdict.count.tolist() == [3, 3]
    assert np.array_equal(verdict.next_log_probs, rows[:, 2])


def test_a_block_ends_before_a_node_drawn_from_what_is_not_numbers():
    # In the last, the drawn token itself has a number.
    nan = [NAN] * 3
    bad = [[Q, nan, Q], [nan, Q, Q], [Q, Q, [0.2, NAN, 0.3]], [Q, [NAN, 0.3, 0.5], Q]]
    tokens = [[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 2, 1]]
    target = [[P, P, P, Q]] * 4
    for uniform in (0.0, ALMOST_1):
        noise = np.full((4, 3), uniform)
        accepted, following = decide("block", target, tokens, bad, noise)
        assert accepted.tolist() == [1, 0, 2, 1]
        np.testing.assert_allclose(following, [P] * 4, atol=1e-6)


def test_a_certain_draft_is_the_one_hot_one():
    rng = np.random.default_rng(4)
    rows, nodes, size = 500, 3, 5
    target = rng.dirichlet(np.ones(size), (rows, nodes + 1))
    tokens = target[:, :-1].argmax(axis=-1)
    uniforms = rng.random((rows, nodes))
    certain = decide("block", target, tokens, None, uniforms)
    told = decide("block", target, tokens, np.eye(size)[tokens], uniforms)
    assert np.array_equal(certain[0], told[0])
    np.testing.assert_allclose(certain[1], told[1], atol=1e-6)
    assert np.bincount(certain[0], minlength=nodes + 1).min() >= 5


def test_random_blocks_equal_the_oracle():
    rng = np.random.default_rng(1)
    rows, nodes, size = 400, 4, 6
    target = rng.dirichlet(np.ones(size), (rows, nodes + 1))
    target[::3] = np.where(target[::3] > 0.1, target[::3], 0)
    target /= target.sum(axis=-1, keepdims=True)
    # Near the target, so that blocks of every length are kept.
    draft = 0.8 * target[:, :-1] + 0.2 * rng.dirichlet(np.ones(size), (rows, nodes))
    tokens = (rng.random((rows, nodes, 1)) > draft.cumsum(axis=-1)).sum(axis=-1)
    uniforms = rng.random((rows, nodes)).astype(np.float32)
    valid = rng.random((rows, nodes)) > 0.1
    for given in (draft, None):
        accepted, following = decide("block", target, tokens, given, uniforms, valid)
        for row in range(rows):
            probs = None if given is None else given[row]
            count, expected = oracles.block_verify(
                target[row], probs, tokens[row], uniforms[row], valid[row]
            )
            assert accepted[row] == count
            # 1e-7 of the rows, over the smallest positive part seen (1e-3).
            np.testing.assert_allclose(following[row], expected, atol=2e-4)
        if given is not None:
            assert np.bincount(accepted, minlength=nodes + 1).min() >= 20


# Block verification integrated: no draws, so no noise to hide in

block_joint = functools.partial(joint, thresholds=oracles.block_thresholds)


@pytest.mark.parametrize("kind", ["smooth", "zeros", "equal", "one-hot"])
@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_blocks_integrate_to_the_target(size, nodes, kind):
    for seed in range(3):
        tables = Tables(seed, size, nodes, kind)
        found = block_joint(JITTED["block"], tables)
        np.testing.assert_allclose(found, tables.continuation(()), atol=TOLERANCE)


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_every_certain_block_integrates_to_the_target(size, nodes):
    tables = Tables(1, size, nodes, "zeros")
    expected = tables.continuation(())
    for fixed in np.ndindex(*(size,) * nodes):
        found = block_joint(JITTED["block"], tables, fixed)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_blocks_with_invalid_nodes_integrate_to_the_target():
    tables = Tables(2, 2, 3, "smooth")
    expected = tables.continuation(())
    for valid in np.ndindex(2, 2, 2):
        for fixed in (None, (0, 1, 1)):
            found = block_joint(JITTED["block"], tables, fixed, np.array(valid, bool))
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def wrong_block(choose=max, thresholds=oracles.block_thresholds, scaled=True):
    """The oracle's block verification with a step done another way."""

    def one(target, draft, tokens, uniforms):
        passed = uniforms < thresholds(target, draft, tokens)
        count = choose([i + 1 for i in np.flatnonzero(passed)] + [0])
        if count == len(tokens):
            return count, target[count]
        kept = oracles.block_prefixes(target, draft, tokens)[count] if scaled else 1
        excess = np.maximum(kept * target[count] - draft[count], 0)
        # Where the wrong step came where nothing can follow.
        return count, excess / excess.sum() if excess.sum() else target[count]

    def rule(target_log_probs, draft, uniforms):
        known = np.exp(target_log_probs), np.exp(draft.log_probs)
        rows = zip(*known, draft.tokens, uniforms, strict=True)
        counts, following = zip(*(one(*row) for row in rows), strict=True)
        path = np.zeros((len(counts), len(uniforms[0]) + 1))
        return Verdict(path, np.array(counts) + 1, np.asarray(logs(following)))

    return rule


def leading(passed):
    """How many of 1, 2, 3, ... are there from the first on."""
    return oracles.leading([i in passed for i in range(1, max(passed) + 1)])


def prefixes(target, draft, tokens, valid=None):
    return np.array(oracles.block_prefixes(target, draft, tokens)[1:])


def test_the_controls_differ_from_the_right_rule_by_their_one_step():
    found = block_joint(wrong_block(), Tables(0, 3, 2, "smooth"))
    expected = Tables(0, 3, 2, "smooth").continuation(())
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


# Tables in which each step matters.
@pytest.mark.parametrize(("seed", "size"), [(2, 3), (4, 4)])
@pytest.mark.parametrize(
    "step",
    [
        {"choose": leading},
        {"scaled": False},
        {"thresholds": prefixes},
        {"thresholds": oracles.ratios},
    ],
    ids=["until the first failure", "residual not scaled", "by p", "by the ratio"],
)
def test_wrong_blocks_do_not_integrate_to_the_target(seed, size, step):
    tables = Tables(seed, size, 2, "smooth")
    edges = step.get("thresholds", oracles.block_thresholds)
    found = joint(wrong_block(**step), tables, thresholds=edges)
    assert abs(found.sum() - 1) < 1e-5
    assert np.abs(found - tables.continuation(())).max() > 1000 * TOLERANCE


def accepted_by(name, tables, fixed=None):
    return mean_accepted(JITTED[name], tables, fixed, thresholds=THRESHOLDS[name])


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_blocks_never_keep_fewer_tokens_in_expectation(size, nodes):
    gains = []
    for kind in ("smooth", "zeros", "equal", "one-hot"):
        for seed in range(3):
            tables = Tables(seed, size, nodes, kind)
            gains.append(
                accepted_by("block", tables) - accepted_by("rejection", tables)
            )
    assert min(gains) > -1e-9
    # Of one node a block is the node.
    assert max(gains) < 1e-9 if nodes == 1 else max(gains) > 0.01


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
