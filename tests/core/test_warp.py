import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import noise
from jaxspec.core.distributions import fit_vocabulary, sample
from jaxspec.core.warp import Sampling, warp
from tests import oracles

INF = float("inf")
jitted = jax.jit(warp)
OPTIONS = ("top_k", "top_p", "min_p")
PRESENT = [c for n in range(4) for c in itertools.combinations(OPTIONS, n)]
# Values that keep all stand for the absent options at the other sizes.
PROGRAMS = [(64, present) for present in PRESENT]
PROGRAMS += [(size, present) for size in (5, 1000) for present in ((), OPTIONS)]
TEMPERATURES = [0.0, 1e-6, 0.3, 0.7, 1.0, 1.5, 10.0, 1e6]
VALUES = {
    "top_k": (np.int32, lambda size: [0, 1, 2, 3, size // 2, size, size + 7]),
    "top_p": (np.float32, lambda size: [1e-7, 0.1, 0.5, 0.9, 0.999, 1.0]),
    "min_p": (np.float32, lambda size: [0.0, 1e-4, 0.05, 0.3, 1.0]),
}


def compiled(logits, sampling):
    return np.asarray(jitted(logits, sampling))


def random_logits(rng, rows, slots, size):
    """Rows of every kind: smooth, tied, huge, and with impossible tokens."""
    logits = rng.normal(0, 3, (rows, slots, size))
    kind = np.arange(rows * slots).reshape(rows, slots) % 5
    logits = np.where((kind == 1)[..., None], np.round(logits), logits)
    logits = np.where((kind == 2)[..., None], logits * 3000, logits)
    gone = rng.random(logits.shape) < np.where(kind == 3, 0.3, 0.95)[..., None]
    gone[..., rng.integers(size)] = False
    logits = np.where((kind >= 3)[..., None] & gone, -INF, logits)
    return logits.astype(np.float32)


def random_sampling(rng, rows, size, present):
    """One option set a row, drawn from the values that are worth a look."""
    drawn = {}
    for name in present:
        dtype, values = VALUES[name]
        drawn[name] = rng.choice(values(size), rows).astype(dtype)
    return Sampling(rng.choice(TEMPERATURES, rows).astype(np.float32), **drawn)


def row_options(sampling, row):
    """The options of one row as the oracle takes them, just as float32 holds them."""
    given = sampling._asdict()
    return {name: v[row].item() for name, v in given.items() if v is not None}


def check(logits, sampling):
    """Holds every slot's kept tokens and probabilities against the oracle.

    Returns:
        The share of slots whose kept tokens are the oracle's own, without any slack.
    """
    found = compiled(logits, sampling)
    assert found.dtype == np.float32
    same = []
    for row, slot in np.ndindex(logits.shape[:2]):
        options = row_options(sampling, row)
        same.append(check_slot(logits[row, slot], found[row, slot], **options))
    return np.mean(same)


def check_slot(logits, log_probs, temperature, **options):
    possible = np.isfinite(logits)
    keep = np.isfinite(log_probs)
    if temperature == 0:
        exact = possible
        assert np.array_equal(keep, possible)
        temperature = 1.0
    else:
        # float32 sums are right to about 1e-6, which decides only what lies that close.
        narrow, exact, wide = (
            oracles.kept(logits, temperature, **options, slack=s)
            for s in (-4e-6, 0, 4e-6)
        )
        assert (keep >= narrow).all() and (keep <= wide).all()
    distance = oracles.distance_below(logits, temperature)
    expected = -distance[keep] - np.log(np.exp(-distance[keep]).sum())
    np.testing.assert_allclose(log_probs[keep], expected, rtol=1e-6, atol=4e-6)
    return np.array_equal(keep, exact)


def uniform_batch(logits, temperature, **options):
    """The probabilities of rows that share their options."""
    logits = np.asarray(logits, np.float32)
    size = logits.shape[:1]
    values = {
        name: np.full(size, value, VALUES[name][0]) for name, value in options.items()
    }
    sampling = Sampling(np.full(size, temperature, np.float32), **values)
    return np.exp(compiled(logits[:, None], sampling)[:, 0])


@pytest.mark.parametrize(("size", "present"), PROGRAMS, ids=str)
def test_every_combination_of_options_equals_the_oracle(size, present):
    rng = np.random.default_rng([size, len(present)])
    agreed = []
    for _ in range(3):
        logits = random_logits(rng, 24, 3, size)
        agreed.append(check(logits, random_sampling(rng, 24, size, present)))
    # The slack is for a few near ties; the sets are otherwise the oracle's.
    assert np.mean(agreed) > 0.97


def test_a_vocabulary_of_49152_equals_the_oracle():
    rng = np.random.default_rng(4)
    check(random_logits(rng, 5, 2, 49152), random_sampling(rng, 5, 49152, OPTIONS))


def test_the_token_that_reaches_top_p_is_kept():
    logits = np.log(np.array([[0.5, 0.41, 0.09], [0.09, 0.41, 0.5]], np.float32))
    probs = uniform_batch(logits, 1.0, top_p=0.9)
    right = np.array([0.5, 0.41]) / 0.91
    np.testing.assert_allclose(probs[0], [*right, 0], atol=1e-6)
    np.testing.assert_allclose(probs[1], [0, *right[::-1]], atol=1e-6)
    assert np.round(right, 3).tolist() == [0.549, 0.451]


def test_top_p_1_keeps_what_a_float32_sum_cannot_see():
    logits = np.array([[0.0, -30.0, -60.0]], np.float32)
    probs = uniform_batch(logits, 1.0, top_p=1.0)
    np.testing.assert_allclose(probs[0], np.exp(logits[0]), rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-30, 1e-7])
def test_a_tiny_top_p_keeps_the_best(top_p):
    probs = uniform_batch([[1.0, 3.0, 2.0]], 1.0, top_p=top_p)
    assert probs.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"top_k": 1}, [0, 2]),
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 3}, [0, 1, 2, 4]),
        ({"top_p": 0.1}, [0, 2]),
        ({"top_p": 0.9}, [0, 1, 2, 4]),
        ({"min_p": 1.0}, [0, 2]),
    ],
)
def test_ties_at_a_threshold_are_all_kept(options, keep):
    # e^2, e, e^2, 1, e: of 21.2 in all the first tie has 14.8, both ties 20.2.
    probs = uniform_batch([[2.0, 1.0, 2.0, 0.0, 1.0]], 1.0, **options)
    assert np.flatnonzero(probs[0]).tolist() == keep


def test_logits_that_are_neighbouring_floats_are_told_apart():
    behind = np.nextafter(np.float32(-1), np.float32(-2))
    probs = uniform_batch([[0.0, -1.0, behind], [behind, -1.0, 0.0]], 1.0, top_k=2)
    assert (probs > 0).tolist() == [[True, True, False], [False, True, True]]


def test_top_p_is_relative_to_what_top_k_kept():
    # [.4, .3, .2, .1]: the best two are .7, of which .4 is .57.
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    probs = uniform_batch(logits, 1.0, top_k=2, top_p=0.55)
    assert probs.tolist() == [[1, 0, 0, 0]]


def test_options_come_after_the_temperature():
    # At temperature 2 the ratio of .64 to .04 falls from 16 to 4: min_p .2 keeps it.
    logits = np.log(np.array([[0.64, 0.32, 0.04]], np.float32))
    assert np.count_nonzero(uniform_batch(logits, 1.0, min_p=0.2)) == 2
    assert np.count_nonzero(uniform_batch(logits, 2.0, min_p=0.2)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_a_temperature_of_zero_or_almost_takes_the_best_token(options, temperature):
    # BL-16.
    draws = 500
    logits = np.tile(np.array([1.0, 2.0, 3.0], np.float32), (draws, 1))
    probs = uniform_batch(logits, temperature, **options)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-6)
    if temperature == 0:
        # Greedy rows stop before the temperature and draw without noise.
        np.testing.assert_allclose(probs, oracles.softmax(logits), atol=1e-6)
        gumbel = 0.0
    else:
        assert (probs == [0, 0, 1]).all()
        keys = noise.seed_keys(range(draws))
        slots = jnp.zeros((draws, 1), jnp.int32)
        draw = jax.jit(noise.gumbels, static_argnums=4)
        gumbel = draw(keys, slots[:, 0], slots, noise.NEXT_TOKEN, 3)[:, 0]
    with np.errstate(divide="ignore"):
        assert (np.asarray(sample(jnp.log(probs), gumbel)) == 2).all()


def test_greedy_rows_of_a_mixed_batch_are_those_of_a_greedy_batch():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, (6, 2, 50)).astype(np.float32)
    options = {"top_k": np.full(6, 3, np.int32), "top_p": np.full(6, 0.5, np.float32)}
    mixed = compiled(logits, Sampling(np.tile(np.float32([0, 0.8]), 3), **options))
    greedy = compiled(logits, Sampling(np.zeros(6, np.float32), **options))
    # Equal bits: a neighbour must not move a greedy row.
    assert np.array_equal(mixed[::2], greedy[::2])
    assert not np.array_equal(mixed[1::2], greedy[1::2])


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 8, 2, 50)
    sampling = random_sampling(rng, 8, 50, OPTIONS)
    order = rng.permutation(8)
    shuffled = compiled(logits[order], jax.tree.map(lambda v: v[order], sampling))
    assert np.array_equal(shuffled, compiled(logits, sampling)[order])


def test_an_infinite_logit_is_certain_and_a_row_without_numbers_is_not_a_distribution():
    # BL-17, with an ordinary row beside them.
    bad = np.array([[0, 1, INF], [np.nan] * 3, [0, np.nan, 1], [-INF] * 3, [0, 1, 2]])
    for temperature in (0.0, 0.7):
        probs = uniform_batch(bad.astype(np.float32), temperature, top_k=2, top_p=0.9)
        assert probs[0].tolist() == [0, 0, 1]
        assert np.isnan(probs[1:4]).all()
        assert np.isfinite(probs[4]).all()


def test_padded_ids_stay_impossible_and_change_nothing():
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (8, 2, 60)).astype(np.float32)
    sampling = random_sampling(rng, 8, 60, OPTIONS)
    padded = compiled(fit_vocabulary(jnp.asarray(logits), 64), sampling)
    assert (padded[..., 60:] == -INF).all()
    np.testing.assert_allclose(
        padded[..., :60], compiled(logits, sampling), rtol=1e-6, atol=1e-6
    )


def test_half_precision_logits_are_widened_before_any_arithmetic():
    rng = np.random.default_rng(8)
    half = jnp.asarray(rng.normal(0, 30, (4, 2, 50)), jnp.bfloat16)
    for temperature in ([0, 0, 0, 0], [0.7, 0, 0.7, 1.3]):
        sampling = Sampling(
            np.float32(temperature), np.full(4, 20, np.int32), np.full(4, 0.99, "f")
        )
        found = compiled(half, sampling)
        assert found.dtype == np.float32
        assert np.array_equal(found, compiled(np.float32(half), sampling))


def test_new_values_of_the_options_do_not_recompile():
    rng = np.random.default_rng(9)
    step = jax.jit(lambda logits, sampling: warp(logits, sampling))
    for _ in range(3):
        sampling = random_sampling(rng, 4, 21, OPTIONS)
        step(random_logits(rng, 4, 2, 21), sampling).block_until_ready()
    step(random_logits(rng, 4, 2, 21), sampling._replace(temperature=np.zeros(4, "f")))
    assert step._cache_size() == 1
    step(random_logits(rng, 4, 2, 21), sampling._replace(min_p=None))
    assert step._cache_size() == 2  # presence, and nothing else, is another program


def sorts(function, *arguments):
    """Whether the compiled program sorts anything."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert " fusion(" in text or " call(" in text
    return any(word in text for word in (" sort(", " topk(", "TopK"))


def test_the_compiled_warp_holds_no_sort():
    rng = np.random.default_rng(10)
    logits = random_logits(rng, 2, 3, 1000)
    sampling = random_sampling(rng, 2, 1000, OPTIONS)
    assert not sorts(warp, logits, sampling)

    def sorted_warp(logits, sampling):
        return warp(logits, sampling) + jnp.sort(logits, axis=-1)

    assert sorts(sorted_warp, logits, sampling)
    assert sorts(lambda logits: jax.lax.top_k(jnp.exp(logits), 5), logits)


def test_the_best_token_of_every_row_survives_every_option():
    rng = np.random.default_rng(11)
    logits = random_logits(rng, 24, 3, 64)
    found = compiled(logits, random_sampling(rng, 24, 64, OPTIONS))
    best = logits.argmax(axis=-1)[..., None]
    kept = np.take_along_axis(found, best, axis=-1)
    assert np.array_equal(kept[..., 0], found.max(axis=-1))
