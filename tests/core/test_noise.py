import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core import noise

PURPOSES = (noise.NEXT_TOKEN, noise.DRAFT_TOKEN, noise.ACCEPT)
SEEDS = [0, 1, 7, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
LENGTHS = [1, 2, 3, 4000]
SLOTS = [0, 1, 2, 3, 64]


gumbels = jax.jit(noise.gumbels, static_argnums=4)
uniforms = jax.jit(noise.uniforms)


def every_key():
    """Rows for all seeds and lengths, all slots in each."""
    seeds, lengths = zip(*itertools.product(SEEDS, LENGTHS), strict=True)
    rows = len(seeds)
    slots = np.broadcast_to(np.array(SLOTS, np.int32), (rows, len(SLOTS)))
    return noise.seed_keys(seeds), np.array(lengths, np.int32), slots


def test_every_seed_length_slot_and_purpose_has_its_own_draw():
    keys, lengths, slots = every_key()
    drawn = [gumbels(keys, lengths, slots, p, 2) for p in PURPOSES]
    pairs = np.stack(drawn).reshape(-1, 2)
    assert len(pairs) == len(SEEDS) * len(LENGTHS) * len(SLOTS) * len(PURPOSES)
    assert len(np.unique(pairs, axis=0)) == len(pairs)
    accept = [np.asarray(uniforms(keys, lengths, slots, p)) for p in PURPOSES]
    assert len(np.unique(accept)) == np.size(accept)


def test_the_halves_of_a_seed_are_its_key():
    keys = noise.seed_keys([5, 2**32 + 5, 2**64 - 1])
    assert keys.dtype == np.uint32
    assert keys.tolist() == [[0, 5], [1, 5], [2**32 - 1, 2**32 - 1]]


def test_a_draw_does_not_depend_on_the_neighbours():
    keys, lengths, slots = every_key()
    together = np.asarray(gumbels(keys, lengths, slots, noise.NEXT_TOKEN, 2))
    order = np.random.default_rng(0).permutation(len(keys))
    mixed = gumbels(keys[order], lengths[order], slots[order], noise.NEXT_TOKEN, 2)
    assert np.array_equal(mixed, together[order])
    alone = gumbels(keys[5:6], lengths[5:6], slots[5:6, 3:4], noise.NEXT_TOKEN, 2)
    assert np.array_equal(alone[0, 0], together[5, 3])


def test_a_draw_inside_a_loop_is_the_same():
    keys, lengths, slots = every_key()
    arguments = keys, lengths, slots, noise.NEXT_TOKEN, 2

    def looped():
        body = lambda i, total: total + noise.gumbels(*arguments)  # noqa: E731
        return jax.lax.fori_loop(0, 1, body, jnp.zeros((*slots.shape, 2)))

    assert np.array_equal(gumbels(*arguments), jax.jit(looped)())


@pytest.mark.parametrize("size", [1, 63, 1000])
def test_a_padded_vocabulary_changes_no_draw(size):
    keys, lengths, slots = (part[:3] for part in every_key())
    wide = gumbels(keys, lengths, slots, noise.DRAFT_TOKEN, 1024)
    narrow = gumbels(keys, lengths, slots, noise.DRAFT_TOKEN, size)
    assert narrow.shape[-1] == size
    assert np.array_equal(narrow, wide[..., :size])


# The size differs by case, so that no program compiled under the default is reused.
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (11, {"jax_threefry_partitionable": False}),
        (
            13,
            {
                "jax_enable_x64": True,
                "jax_default_prng_impl": "rbg",
                "jax_high_dynamic_range_gumbel": True,
                "jax_numpy_dtype_promotion": "strict",
            },
        ),
    ],
)
def test_the_users_defaults_change_no_draw(size, settings):
    arguments = [part[:3] for part in every_key()]
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        changed = (
            gumbels(*arguments, noise.DRAFT_TOKEN, size),
            uniforms(*arguments, noise.ACCEPT),
        )
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    default = (
        gumbels(*arguments, noise.DRAFT_TOKEN, 1024)[..., :size],
        uniforms(*arguments, noise.ACCEPT),
    )
    for mine, expected in zip(changed, default, strict=True):
        assert mine.dtype == jnp.float32
        assert np.array_equal(mine, expected)


def test_the_default_that_matters_would_change_a_plain_draw():
    # The negative control of the test above.
    plain = lambda: jax.random.gumbel(jax.random.key(3), (11,))  # noqa: E731
    with jax.threefry_partitionable(False):
        unpinned = plain()
    assert not np.array_equal(unpinned, plain())


def many(draws=200_000):
    keys, ones = noise.seed_keys([11]), jnp.ones(1, jnp.int32)
    slots = jnp.arange(draws // 20, dtype=jnp.int32)[None]
    return (
        np.ravel(gumbels(keys, ones, slots, noise.NEXT_TOKEN, 20)),
        np.ravel(uniforms(keys, ones, slots, noise.ACCEPT)),
    )


def test_the_draws_have_their_distributions():
    extreme, even = many()
    assert np.isfinite(extreme).all()
    assert even.min() >= 0 and even.max() < 1
    assert stats.kstest(extreme, "gumbel_r").pvalue > 1e-4
    assert stats.kstest(even, "uniform").pvalue > 1e-4
    shape = np.euler_gamma, np.pi / np.sqrt(6)
    assert abs(extreme.mean() - shape[0]) < 0.01
    assert abs(extreme.std() - shape[1]) < 0.01
    # A normal of the same mean and spread must be told apart.
    assert stats.kstest(extreme, "norm", shape).pvalue < 1e-12


def test_the_maximum_over_a_large_vocabulary_is_not_tied():
    # Ties go to the lowest id, so they favour low ids. Draws of 23 bits tie in 1 of
    # 100 cases here (the control); of 32 bits in 1 of 50,000.
    size, draws = 151_936, 600
    keys, ones = noise.seed_keys([3]), jnp.ones(1, jnp.int32)
    slots = jnp.arange(draws, dtype=jnp.int32)

    def tied(draw):
        def one(slot):
            values = draw(slot)
            return (values == values.max()).sum() > 1

        return int(jax.jit(lambda: jax.lax.map(one, slots))().sum())

    assert tied(lambda s: noise.gumbels(keys, ones, s[None, None], 0, size)) == 0
    coarse = lambda s: jax.random.gumbel(jax.random.key(s), (size,))  # noqa: E731
    assert tied(coarse) > 0
