import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import noise
from jaxspec.core.accept import rejection
from jaxspec.core.distributions import (
    fit_vocabulary,
    log_softmax,
    sample,
)
from jaxspec.core.warp import Sampling, warp
from jaxspec.types import Draft
from tests import oracles
from tests.core.deciding import random_rounds
from tests.core.enumeration import (
    ALMOST_1,
    Tables,
    joint,
    logs,
    make_draft,
    probabilities,
)

rule = jax.jit(rejection)
jitted_warp = jax.jit(warp)
NAN = float("nan")
DRAWS = 50_000
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])


def decide(target, tokens, draft, uniforms, valid=None):
    """The accepted counts and next probabilities; all arguments are probabilities."""
    draft = make_draft(tokens, None if draft is None else logs(draft), valid)
    verdict = rule(logs(target), draft, np.asarray(uniforms, np.float32))
    rows, slots = verdict.path.shape
    assert np.array_equal(verdict.path, np.tile(np.arange(slots), (rows, 1)))
    return np.asarray(verdict.count) - 1, probabilities(verdict)


@functools.cache
def shared_noise():
    """Draft and next-token Gumbels for 16 ids, and uniforms, for seeds 0, 1, 2, ..."""
    draw = jax.jit(noise.gumbels, static_argnums=4)
    keys, lengths = noise.seed_keys(range(DRAWS)), jnp.full(DRAWS, 5)
    root = jnp.zeros((DRAWS, 1), jnp.int32)
    uniform = jax.jit(noise.uniforms)(keys, lengths, root + 1, noise.ACCEPT)
    purposes = noise.DRAFT_TOKEN, noise.NEXT_TOKEN
    drafting, last = (draw(keys, lengths, root, p, 16)[:, 0] for p in purposes)
    return drafting, last, uniform


@jax.jit
def emitted(target, drawn_from, told, token, noises):
    """First tokens of independent rounds; the draft is drawn from one row, and the
    rule is `told` another (or none: the draft is `token`)."""
    drafting, last, uniform = noises
    size = target.shape[-1]
    rows = jnp.broadcast_to(target, (DRAWS, 2, size))
    tokens = jnp.full(DRAWS, token)
    if told is not None:
        tokens = sample(drawn_from, drafting[:, :size])
        told = jnp.broadcast_to(told, (DRAWS, 1, size))
    verdict = rejection(rows, make_draft(tokens[:, None], told), uniform)
    following = sample(verdict.next_log_probs, last[:, :size])
    return jnp.where(verdict.count == 2, tokens, following), verdict.count - 1


def marg(target, drawn_from, told=None, token=0):
    """`marg(n)`: the frequencies of the first token, and the acceptance rate."""
    first, accepted = emitted(target, drawn_from, told, token, shared_noise())
    counts = np.bincount(first, minlength=np.shape(target)[-1])
    assert counts.size == np.shape(target)[-1]
    return counts / DRAWS, float(np.mean(accepted))


def close(found, right):
    return bool(np.abs(found - np.asarray(right)).max() < 0.01)


# Hand-made cases


def test_a_token_is_accepted_by_the_ratio_and_refused_into_the_residual():
    # BL-09: token 2 has ratio .4, tokens 0 and 1 at least 1.
    tokens = [[2], [2], [2], [1], [0], [0]]
    uniforms = [[0.399], [0.401], [0.0], [ALMOST_1], [ALMOST_1], [0.0]]
    accepted, following = decide([[P, P[::-1]]] * 6, tokens, [[Q]] * 6, uniforms)
    assert accepted.tolist() == [1, 0, 1, 1, 1, 1]
    np.testing.assert_allclose(following[1], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(following[[0, 2, 3, 4, 5]], [P[::-1]] * 5, atol=1e-6)


def test_nothing_is_accepted_after_the_first_refusal():
    tokens, uniforms = [[0, 2, 0, 0]] * 2, [[0.5, 0.9, 0.0, 0.0], [0.5, 0.1, 0.5, 0.5]]
    target = [[P, P, P, P, P[::-1]]] * 2
    accepted, following = decide(target, tokens, [[Q] * 4] * 2, uniforms)
    assert accepted.tolist() == [1, 4]
    np.testing.assert_allclose(following, [[1, 0, 0], P[::-1]], atol=1e-6)


def test_no_draft_at_all_gives_the_target_row():
    target = logs([[P], [Q]])
    empty = Draft(*(jnp.zeros((2, 0), t) for t in (jnp.int32, jnp.int32, bool)))
    verdict = rule(target, empty, np.zeros((2, 0), np.float32))
    assert verdict.count.tolist() == [1, 1]
    assert verdict.path.tolist() == [[0], [0]]
    assert np.array_equal(verdict.next_log_probs, target[:, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("probs", [[0.0, 0.0, 1.0, 0.0], [0.25] * 4], ids=str)
def test_equal_distributions_always_accept_and_have_no_residual(probs, dtype):
    # BL-10, through the warp as in a round.
    sampling = Sampling(jnp.array([1.0, 1e-6, 1.0]))
    rows = jitted_warp(jnp.asarray(logs([[probs] * 3] * 3), dtype), sampling)
    assert rows.dtype == jnp.float32
    uniforms = jnp.array([[ALMOST_1, ALMOST_1], [0.0, 1.0], [1.0, 0.5]])
    verdict = rule(rows, make_draft([[2, 2]] * 3, rows[:, :2]), uniforms)
    assert verdict.count.tolist() == [3, 2, 1]
    np.testing.assert_allclose(probabilities(verdict), [probs] * 3, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_half_precision_give_no_nan_where_they_are_equal(dtype):
    rows = jnp.asarray(logs([[[0, 0, 1, 0]] * 2, [[0.25] * 4] * 2]), dtype)
    verdict = rule(rows, make_draft([[2], [2]], rows[:, :1]), jnp.ones((2, 1)))
    assert verdict.count.tolist() == [1, 1]
    assert np.array_equal(verdict.next_log_probs, rows[:, 0])


def test_an_equal_probability_is_accepted_by_every_uniform_below_1():
    probs = np.random.default_rng(0).dirichlet(np.ones(8) * 0.3, 2000)
    tokens = probs.argmax(axis=-1)[:, None]
    rows = np.stack([probs, probs], axis=1)
    accepted, _ = decide(rows, tokens, probs[:, None], np.full((2000, 1), ALMOST_1))
    assert accepted.all()


def test_a_token_the_target_rules_out_is_refused_even_where_the_uniform_is_0():
    target = [[[0.5, 0.5, 0.0], P], [[0.5, 0.5, 0.0], P]]
    accepted, following = decide(target, [[2], [1]], [[Q], [Q]], [[0.0], [0.0]])
    assert accepted.tolist() == [0, 1]
    np.testing.assert_allclose(following[0], [0.6, 0.4, 0], atol=1e-6)
    accepted, following = decide(target, [[2], [1]], None, [[0.0], [0.0]])
    assert accepted.tolist() == [0, 1]
    np.testing.assert_allclose(following[0], [0.5, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_invalid_node_is_never_accepted_and_ends_the_draft(deterministic):
    valid = np.ones((5, 3), bool)
    for row, nodes in enumerate([[0], [1], [2], [0, 1, 2], []]):
        valid[row, nodes] = False
    target = logs([[P, Q, P[::-1], [0.1, 0.8, 0.1]]] * 5)
    draft = None if deterministic else logs([[P, Q, P[::-1]]] * 5)
    tokens = make_draft([[0, 2, 2]] * 5, draft, valid)
    verdict = rule(target, tokens, np.zeros((5, 3), np.float32))
    assert verdict.count.tolist() == [1, 2, 3, 1, 4]
    # The target's own row, to the bit: nothing was refused.
    expected = target[np.arange(5), np.asarray(verdict.count) - 1]
    assert np.array_equal(verdict.next_log_probs, expected)


def test_a_draft_row_that_is_not_numbers_is_refused_into_the_whole_target():
    # BL-17: not even the drafted id is left out.
    bad = np.array([[Q, [NAN] * 3, Q], [[NAN] * 3, Q, Q], [Q, Q, [0.2, NAN, 0.3]]])
    target = [[P, P, P, Q]] * 3
    accepted, following = decide(target, [[0, 0, 1]] * 3, bad, np.zeros((3, 3)))
    assert accepted.tolist() == [1, 0, 2]
    np.testing.assert_allclose(following, [P, P, P], atol=1e-6)


def test_a_greedy_target_accepts_its_best_token_and_emits_no_other():
    target = logs(np.eye(3)[[[1, 2, 0]] * 4])
    tokens = [[1, 2], [1, 0], [0, 2], [2, 2]]
    for draft in (None, logs([[Q, P]] * 4), logs([[[0, 0, 1.0], P]] * 4)):
        for uniform in (0.0, 0.5, ALMOST_1):
            given = np.full((4, 2), uniform, np.float32)
            verdict = rule(target, make_draft(tokens, draft), given)
            assert verdict.count.tolist() == [3, 2, 1, 1]
            best = np.eye(3)[[0, 2, 1, 1]]
            np.testing.assert_allclose(probabilities(verdict), best, atol=1e-6)


def test_random_rounds_equal_the_oracle():
    target, draft, tokens, uniforms, valid = random_rounds()
    for given in (draft, None):
        accepted, following = decide(target, tokens, given, uniforms, valid)
        for row in range(len(tokens)):
            probs = None if given is None else given[row]
            count, expected = oracles.verify(
                target[row], probs, tokens[row], uniforms[row], valid[row]
            )
            assert accepted[row] == count
            np.testing.assert_allclose(following[row], expected, atol=2e-5)
        if given is not None:
            assert np.bincount(accepted, minlength=tokens.shape[1] + 1).min() >= 20


# Frequencies


def test_the_frequencies_are_the_targets():
    # BL-09.
    found, rate = marg(logs(P), logs(Q), logs(Q))
    assert close(found, P)
    assert abs(rate - 0.7) < 0.01


def test_the_draft_is_tested_by_the_distribution_it_was_drawn_from():
    # BL-12: drawn at temperature .5.
    half = Sampling(jnp.array([0.5]))
    drawn_from = np.asarray(jitted_warp(logs([[Q]]), half))[0, 0]
    np.testing.assert_allclose(np.exp(drawn_from), [0.105, 0.237, 0.658], atol=1e-3)
    found, _ = marg(logs(P), drawn_from, drawn_from)
    assert close(found, P)
    # The control: told the raw distribution, the rule is off by what was seen shipped.
    wrong, _ = marg(logs(P), drawn_from, logs(Q))
    assert not close(wrong, P)
    assert close(wrong, [0.50, 0.24, 0.26])


@pytest.mark.parametrize(
    ("temperature", "option", "value", "kept"),
    [
        (1.0, "top_k", 2, [0, 1]),
        (0.5, "top_k", 2, [0, 1]),
        # .5 + .3 meets .8 to the last bit, so either set is right: None.
        (1.0, "top_p", 0.8, None),
        (0.5, "top_p", 0.8, [0, 1]),
        (1.0, "min_p", 0.1, [0, 1, 2]),
        (1.0, "min_p", 0.5, [0, 1]),
        (0.5, "min_p", 0.1, [0, 1, 2]),
        (0.5, "min_p", 0.5, [0]),
    ],
)
def test_tokens_that_the_warped_target_excludes_never_come(
    temperature, option, value, kept
):
    # BL-12, with the one warp on both sides: the draft's own set is another.
    sampling = Sampling(jnp.array([temperature]), **{option: jnp.array([value])})
    rows = np.asarray(jitted_warp(logs([[P, Q]]), sampling))[0]
    found, _ = marg(rows[0], rows[1], rows[1])
    possible = np.flatnonzero(np.isfinite(rows[0]))
    assert kept is None or possible.tolist() == kept
    assert np.flatnonzero(found).tolist() == possible.tolist()
    assert close(found, np.exp(rows[0]))


def test_a_looked_up_token_is_certain_to_the_draft_and_to_nobody_else():
    # BL-14.
    target = logs([0.6, 0.3, 0.1])
    found, rate = marg(target, None, token=1)
    assert close(found, np.exp(target))
    assert abs(rate - 0.3) < 0.01
    _, following = decide([[np.exp(target)] * 2], [[1]], None, [[0.301]])
    np.testing.assert_allclose(following, [[6 / 7, 0, 1 / 7]], atol=1e-6)
    # The control: the refused token is not left out of what follows.
    first, accepted = emitted(target, None, None, 1, shared_noise())
    drawn = sample(target, shared_noise()[1][:, :3])
    wrong = np.bincount(np.where(accepted, first, drawn), minlength=3) / DRAWS
    assert close(wrong, [0.42, 0.51, 0.07])
    assert not close(wrong, np.exp(target))


@pytest.mark.parametrize("draft_size", [12, 20])
def test_a_draft_of_another_padded_vocabulary_keeps_the_target(draft_size):
    # BL-31.
    rng = np.random.default_rng(2)
    target = log_softmax(jnp.asarray(rng.normal(0, 1, 16), jnp.float32))
    logits = jnp.asarray(rng.normal(0, 1, draft_size), jnp.float32)
    draft = log_softmax(fit_vocabulary(logits, 16))
    assert np.isinf(draft).sum() == max(16 - draft_size, 0)
    found, _ = marg(target, draft, draft)
    assert close(found, np.exp(target))
    assert (found[12:] > 0).all()


# Exact enumeration: no draws, so no noise to hide in


def from_softmax(target, draft, uniforms):
    """Wrong: pushes the positive part through a softmax."""
    return refused_to(target, draft, uniforms, lambda p, q: jnp.maximum(p - q, 0))


def from_target(target, draft, uniforms):
    """Wrong: draws again from the target itself."""
    return refused_to(target, draft, uniforms, lambda p, q: jnp.log(p))


def refused_to(target, draft, uniforms, logits):
    verdict = rejection(target, draft, uniforms)
    nodes = draft.tokens.shape[1]
    place = jnp.minimum(verdict.count - 1, nodes - 1)[:, None, None]
    p, q = (
        jnp.exp(jnp.take_along_axis(rows, place, axis=1)[:, 0])
        for rows in (target, draft.log_probs)
    )
    wrong = log_softmax(logits(p, q))
    kept = (verdict.count > nodes)[:, None]
    return verdict._replace(
        next_log_probs=jnp.where(kept, verdict.next_log_probs, wrong)
    )


SHAPES = [(2, 1), (3, 2), (4, 3)]
# Eight float32 roundings of 6e-8 at most on the way to an entry, all below 1.
TOLERANCE = 1e-6


@pytest.mark.parametrize("kind", ["smooth", "zeros", "equal", "one-hot"])
@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_the_rule_integrates_to_the_target(size, nodes, kind):
    for seed in range(3):
        tables = Tables(seed, size, nodes, kind)
        expected = tables.continuation(())
        assert abs(expected.sum() - 1) < 1e-6
        np.testing.assert_allclose(joint(rule, tables), expected, atol=TOLERANCE)


@pytest.mark.parametrize("wrong", [from_softmax, from_target])
@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_wrong_rules_do_not_integrate_to_the_target(size, nodes, wrong):
    tables = Tables(0, size, nodes, "smooth")
    found = joint(jax.jit(wrong), tables)
    # Still a distribution, so only the comparison can tell.
    assert abs(found.sum() - 1) < 1e-5
    assert np.abs(found - tables.continuation(())).max() > 1000 * TOLERANCE


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_every_certain_draft_integrates_to_the_target(size, nodes):
    tables = Tables(1, size, nodes, "zeros")
    expected = tables.continuation(())
    for fixed in np.ndindex(*(size,) * nodes):
        found = joint(rule, tables, fixed)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_drafts_with_invalid_nodes_integrate_to_the_target():
    tables = Tables(2, 3, 2, "smooth")
    expected = tables.continuation(())
    for valid in np.ndindex(2, 2):
        for fixed in (None, (0, 1), (2, 2)):
            found = joint(rule, tables, fixed, np.array(valid, bool))
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
