import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.train import losses


@pytest.fixture(scope="module")
def pair():
    """Log-probabilities of a target and of a draft at 5 positions, 7 ids."""
    rng = np.random.default_rng(0)
    return [
        jax.nn.log_softmax(jnp.asarray(rng.normal(0, 2, (5, 7)), jnp.float32))
        for _ in range(2)
    ]


def test_losses_are_what_their_definitions_say(pair):
    target, draft = (np.exp(np.asarray(each, np.float64)) for each in pair)
    entropy = -(target * np.log(target)).sum(-1)
    forward = (target * np.log(target / draft)).sum(-1)
    backward = (draft * np.log(draft / target)).sum(-1)
    distance = np.abs(target - draft).sum(-1) / 2
    np.testing.assert_allclose(losses.cross_entropy(*pair), forward + entropy, 1e-5)
    np.testing.assert_allclose(losses.reverse_kl(*pair), backward, 1e-5)
    np.testing.assert_allclose(losses.overlap(*pair), 1 - distance, 1e-5)
    np.testing.assert_allclose(losses.total_variation(*pair), distance, 1e-5)


def test_losses_are_least_where_the_draft_is_the_target(pair):
    target, _ = pair

    def slope(loss):
        logits = target + 3.0
        return jax.grad(lambda x: loss(target, jax.nn.log_softmax(x)).sum())(logits)

    for loss in (losses.cross_entropy, losses.reverse_kl):
        np.testing.assert_allclose(slope(loss), 0, atol=1e-6)
    # This one has an edge there.
    np.testing.assert_allclose(losses.total_variation(target, target), 0, atol=1e-6)


def test_ids_that_the_target_rules_out_cost_the_cross_entropy_nothing():
    target = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    draft = jax.nn.log_softmax(jnp.array([0.0, 1.0, 2.0]))
    slope = jax.grad(lambda d: losses.cross_entropy(target, d))(draft)
    np.testing.assert_allclose(slope, [-0.5, -0.5, 0])


def test_what_the_rest_of_the_vocabulary_has_is_no_fault_of_the_draft():
    """A target of which the draft knows two ids of mass 0.6: no loss, no slope."""
    target = jnp.log(jnp.array([0.2, 0.4]))
    draft = jnp.log(jnp.array([1 / 3, 2 / 3]))
    logits = jnp.array(draft)
    slope = jax.grad(lambda x: losses.cross_entropy(target, jax.nn.log_softmax(x)))(
        logits
    )
    np.testing.assert_allclose(slope, 0, atol=1e-7)
    np.testing.assert_allclose(losses.overlap(target, draft), 0.6, 1e-6)


def test_smooth_l1_is_quadratic_near_and_linear_far():
    wanted, guessed = jnp.array([[0.0, 0.0]]), jnp.array([[0.5, 3.0]])
    np.testing.assert_allclose(losses.smooth_l1(wanted, guessed), [(0.125 + 2.5) / 2])


def test_a_mean_is_of_the_supervised_positions_alone():
    values = jnp.array([1.0, 2.0, jnp.nan, 9.0])
    supervised = jnp.array([True, True, False, False])
    assert losses.mean_over(values, supervised) == 1.5
    slope = jax.grad(lambda v: losses.mean_over(v, supervised))(values)
    np.testing.assert_array_equal(slope, [0.5, 0.5, 0, 0])
    assert losses.mean_over(values, jnp.zeros(4, bool)) == 0


def test_a_shift_brings_later_positions_forward_and_ends_in_nothing():
    values = jnp.arange(6).reshape(1, 6)
    np.testing.assert_array_equal(losses.shift(values, 2), [[2, 3, 4, 5, 0, 0]])
    mask = losses.shift(jnp.ones((1, 3), bool), 1)
    np.testing.assert_array_equal(mask, [[True, True, False]])


def test_tokens_per_round_by_simulation():
    """Rounds of a chain whose nodes are accepted with given chances."""
    chances = np.array([0.9, 0.5, 0.7])
    rng = np.random.default_rng(1)
    accepted = rng.random((200_000, 3)) < chances
    rounds = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    expected = losses.tokens_per_round(
        jnp.asarray(chances)[:, None, None], jnp.ones((1, 1), bool)
    )
    assert abs(rounds.mean() - expected) < 0.01
