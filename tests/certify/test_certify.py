"""A certificate passes what is right, and fails what is wrong, through the programs."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.cache import KVCache
from jaxspec.certify import certify
from jaxspec.certify.certificate import OPTION_SETS, SECOND_LOOK, TOGETHER
from jaxspec.certify.identity import compare_greedy
from jaxspec.certify.report import ACCEPTABLE, OptionTest, Position, failures_of
from jaxspec.core import accept, adjust
from jaxspec.loading import LanguageModel
from tests import fakes

SAMPLES = 500
PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [1, 2, 3]]
FURTHER_RULES = ("block", "coupled")
REPEATING = [[5, 6, 7, 8, 9] * 3 + [5, 6]]


@pytest.fixture(scope="module")
def target():
    return LanguageModel("tiny", fakes.tiny(1))


@pytest.fixture(scope="module")
def near(target):
    """A draft that is the target, a little disturbed: it is often right."""
    decoder = fakes.near(target.decoder, 0.1)
    return LanguageModel("tiny-draft", decoder)


def examine(generator, **options):
    return certify(
        generator, PROMPTS, REPEATING, samples=SAMPLES, batch_size=64, **options
    )


@pytest.mark.parametrize(
    "rule",
    ["rejection", *(pytest.param(r, marks=pytest.mark.full) for r in FURTHER_RULES)],
)
def test_a_draft_model_is_certified(target, near, rule):
    generator = jaxspec.Generator(target, near, draft_tokens=2, rule=rule)
    shares = []
    found = examine(generator, on_progress=shares.append)
    assert found.passed, found.failures
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert found.identity.differences == 0
    assert found.identity.verified > 50
    assert 0 < found.identity.delta < 1e-4
    assert [test.options for test in found.tests] == [*OPTION_SETS, TOGETHER]
    for test in found.tests:
        assert test.samples >= SAMPLES
        for position, depth in zip(test.positions, test.depths, strict=True):
            assert position.verified >= SAMPLES
            assert 0 < position.accepted < position.verified
            assert 0.05 < depth.expected < 0.999
        assert (test.not_plain == 0) if rule == "coupled" else test.not_plain is None


def with_rule(generator, decide):
    generator.rule = dataclasses.replace(generator.rule, decide=decide)
    return generator


def accept_all(log_probs, draft, uniforms, depth=None):
    return accept.rejection(log_probs, draft, jnp.zeros_like(uniforms))


@pytest.mark.full
def test_a_wrong_rule_fails_every_kind_of_test(target, near):
    wrong = with_rule(jaxspec.Generator(target, near, draft_tokens=2), accept_all)
    found = examine(wrong)
    assert not found.passed
    words = " ".join(found.failures)
    for part in ("position 1 has not", "together have not", "of the first rounds"):
        assert part in words
    for test in found.tests:
        assert test.smallest_p_value < ACCEPTABLE
        # It was looked at again before it was failed.
        assert test.samples >= SECOND_LOOK * SAMPLES


def test_a_rule_that_changes_greedy_ids_fails(target, near):
    def never(log_probs, draft, uniforms, depth=None):
        verdict = accept.rejection(log_probs, draft, uniforms)
        return verdict._replace(next_log_probs=jnp.roll(verdict.next_log_probs, 1, -1))

    wrong = with_rule(jaxspec.Generator(target, near, draft_tokens=2), never)
    identity = compare_greedy(wrong, PROMPTS, 64, lambda: None)
    failures = failures_of(identity, [_sound()])
    assert any("greedy: 2 of 2 prompts" in failure for failure in failures)


def from_the_target(log_probs, draft, uniforms, depth=None):
    """Draws from the target itself after a refusal."""
    verdict = accept.rejection(log_probs, draft, uniforms)
    place = (verdict.count - 1)[:, None, None]
    own = jnp.take_along_axis(log_probs, place, axis=1)[:, 0]
    return verdict._replace(next_log_probs=own)


def one_uniform(log_probs, draft, uniforms, depth=None):
    return accept.rejection(
        log_probs, draft, jnp.broadcast_to(uniforms[:, :1], uniforms.shape)
    )


@pytest.mark.full
@pytest.mark.parametrize("wrong", [from_the_target, one_uniform])
def test_a_small_fault_is_found_in_all_options_together(target, near, wrong):
    generator = with_rule(jaxspec.Generator(target, near, draft_tokens=3), wrong)
    failures = examine(generator).failures
    assert any(failure.startswith(TOGETHER) for failure in failures)


@pytest.mark.full
def test_penalties_without_the_path_are_found(target, near, monkeypatch):
    def nothing(path_tokens, path_count, vocabulary):
        return jnp.zeros((*path_count.shape, vocabulary), jnp.int32)

    monkeypatch.setattr(adjust, "path_counts", nothing)
    failures = examine(jaxspec.Generator(target, near, draft_tokens=3)).failures
    assert any(failure.startswith("penalties") for failure in failures)


def test_a_cache_that_commits_the_wrong_keys_excuses_nothing(target, near, monkeypatch):
    """The change that the fault makes is no delta to excuse it with."""
    commit = KVCache.commit

    def first_slot(self, scratch, path, count):
        wrong = path if path.shape[1] > 8 else jnp.zeros_like(path)
        return commit(self, scratch, wrong, count)

    monkeypatch.setattr(KVCache, "commit", first_slot)
    identity = compare_greedy(
        jaxspec.Generator(target, near, draft_tokens=3), PROMPTS, 64, lambda: None
    )
    assert identity.tokens < 128
    words = " ".join(failures_of(identity, [_sound()]))
    assert "no rounding of float32" in words or "not at a near tie" in words


def _sound():
    """A test that nothing is wrong with."""
    return OptionTest("", 1000, [Position(1, 1000, 500, 0.5)], 0.5, [], 0, None)


@pytest.mark.full
def test_a_coupled_rule_that_draws_its_own_tokens_fails(target, near):
    """Its distribution may be right: its ids are not plain decoding's."""

    def shifted(log_probs, draft, gumbel, depth=None):
        return accept.coupled(log_probs, draft, jnp.roll(gumbel, 1, axis=-1))

    generator = jaxspec.Generator(target, near, draft_tokens=2, rule="coupled")
    failures = examine(with_rule(generator, shifted)).failures
    assert any("with the same seed" in failure for failure in failures)


@pytest.mark.full
def test_what_drafts_too_little_is_untested(target):
    generator = jaxspec.Generator(target, "prompt-lookup", draft_tokens=3)
    found = certify(generator, PROMPTS, [[1, 2, 3, 4]], samples=SAMPLES, batch_size=64)
    assert not found.passed
    assert all("untested" in failure for failure in found.failures[1:])
    assert found.to_json()["passed"] is False


def test_nothing_to_certify_is_refused(target, near):
    with pytest.raises(jaxspec.UserError, match="without a drafter"):
        examine(jaxspec.Generator(target))
    tree = jaxspec.Generator(target, near, tree=(2, 1))
    with pytest.raises(jaxspec.UserError, match="certify tests chains"):
        examine(tree)
    lossy = jaxspec.Generator(target, near, rule="typical")
    with pytest.raises(jaxspec.UserError, match="typical does not keep"):
        examine(lossy)
    generator = jaxspec.Generator(target, near)
    with pytest.raises(jaxspec.UserError) as error:
        certify(generator, PROMPTS, REPEATING, samples=100, batch_size=0)
    for part in ("samples is 100, expected a whole number from 500", "batch_size is 0"):
        assert part in str(error.value)
    with pytest.raises(jaxspec.UserError, match="has 1 tokens, expected 2 to 510"):
        certify(generator, PROMPTS, [[4]])
    with pytest.raises(jaxspec.UserError, match="no prompts"):
        certify(generator, [], REPEATING)
    for name, value in (("seed", -1), ("seed", 2**64 - 5), ("max_new_tokens", 0)):
        with pytest.raises(jaxspec.UserError, match=f"{name} is"):
            certify(generator, PROMPTS, REPEATING, **{name: value})
    half = jaxspec.Generator(
        LanguageModel("half", fakes.tiny(1, dtype=jnp.bfloat16)), "prompt-lookup"
    )
    with pytest.raises(jaxspec.UserError, match="bfloat16, expected float32"):
        examine(half)
