"""BL-17: a target without a distribution ends its own row, where plain decoding does.

The first id of a prompt names its row, so that a model can be made to fail at one row.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.accept import RULES
from jaxspec.core.report import Reporting
from jaxspec.decoding.state import ERROR, LENGTH
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, runs

INF, NAN = float("inf"), float("nan")
VOCAB, NODES, NEW, NEVER = 12, 3, 24, 10**6
BAD, PROMPT = 4, 5
# The last of the prompt's ids, so that the bad row fails in prefill, and later ones:
# every offset of a round is met.
PLACES = [PROMPT - 1, *range(PROMPT, PROMPT + 2 * NODES + 2)]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner", "starts", "ends", "hit", "value"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Faulty:
    """A table model whose logits go wrong at some positions of some rows.

    Attributes:
        starts: by a row's first id, the position from which its logits are wrong.
        ends: the position from which they are right again.
        hit: which ids' logits are replaced, by `value`.
    """

    inner: Any
    starts: Any
    ends: Any
    hit: Any
    value: Any

    @classmethod
    def sound(cls, inner):
        never = np.full(VOCAB, NEVER, np.int32)
        return cls(inner, never, never, np.zeros(VOCAB, bool), np.float32(0))

    def broken(self, fault, place, rows=(BAD,), ends=NEVER):
        hit, value = FAULTS[fault]
        starts = self.starts.copy()
        starts[list(rows)] = place
        return dataclasses.replace(
            self,
            starts=starts,
            ends=np.full(VOCAB, ends, np.int32),
            hit=np.isin(np.arange(VOCAB), hit),
            value=np.float32(value),
        )

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def init_hidden(self, rows):
        return jnp.zeros((rows, 5))

    def init_cache(self, *sizes):
        return self.inner.init_cache(*sizes)

    def init_scratch(self, *sizes):
        return self.inner.init_scratch(*sizes)

    def norm(self, hidden):
        return hidden

    def unembed(self, normed, ids=None):
        assert ids is None
        logits = self.inner.unembed(normed[..., :4])
        wrong = (normed[..., 4:] == 1) & self.hit
        return jnp.where(wrong, self.value, logits)

    def __call__(self, tokens, positions, cache, scratch, *rest, **options):
        output, scratch = self.inner(
            tokens, positions, cache, scratch, *rest, **options
        )
        stored = cache.block(0, 0)[0][0, 0, 0].astype(int)
        row = jnp.where(positions[0] == 0, tokens[0], stored)
        fails = (positions >= self.starts[row]) & (positions < self.ends[row])
        hidden = jnp.concatenate([output.hidden, fails[:, None].astype("f4")], -1)
        return output._replace(hidden=hidden), scratch


EVERY = tuple(range(VOCAB))
FAULTS = {
    "plus infinity": ((5,), INF),
    "all NaN": (EVERY, NAN),
    "one NaN": ((7,), NAN),
    "all but one NaN": (tuple(set(EVERY) - {2}), NAN),
    "all minus infinity": (EVERY, -INF),
}
NO_DISTRIBUTION = [name for name in FAULTS if name != "plus infinity"]
TABLE = fakes.TableModel.random(VOCAB, seed=3, scale=2.0, windows=(None,))
SOUND = Faulty.sound(TABLE)
ROWS = 8
rng = np.random.default_rng(1)
PROMPTS = [[row, *rng.integers(0, VOCAB, PROMPT - 1).tolist()] for row in range(ROWS)]
GREEDY = runs.Batch(PROMPTS, new=NEW, capacity=40, chunk=8)
TEMPERATURES = {
    "greedy": [0.0] * ROWS,
    "sampled": [1.0] * ROWS,
    # The bad row is greedy in one and sampled in the other.
    "mixed": [0.0, 1.0] * (ROWS // 2),
    "mixed otherwise": [1.0, 0.0] * (ROWS // 2),
}
WAYS = {name: GREEDY._replace(temperature=each) for name, each in TEMPERATURES.items()}


@pytest.fixture(scope="module")
def plain():
    """What the sound target writes by itself, by temperature."""
    return {
        name: runs.generate(SOUND, Autoregressive(), batch)
        for name, batch in WAYS.items()
    }


def draft_model(way, plain):
    """The oracle around a draft: accepts and rejects at every depth."""
    inner = DraftModel(Faulty.sound(TABLE.near(1, 1.0)), NODES)
    return fakes.Oracle(inner, plain[way].state.tokens)


def prompt_lookup(way, plain):
    return fakes.Oracle(PromptLookup(NODES, min_ngram=1), plain[way].state.tokens)


def without(way, plain):
    return Autoregressive()


DRAFTERS = {each.__name__: each for each in (draft_model, prompt_lookup, without)}
# Each is a program of its own to compile, so the full product is for CI.
FEW = {
    ("draft_model", "block"),
    ("draft_model", "coupled"),
    ("prompt_lookup", "rejection"),
}
COMPILED = [("draft_model", "block"), ("without", "rejection")]
CASES = [
    pytest.param(*case, marks=[] if case in FEW else pytest.mark.full)
    for case in itertools.product(DRAFTERS, RULES)
]


def run_of(target, name, rule, way, plain, text=None):
    drafter = DRAFTERS[name](way, plain)
    if text is not None and name != "without":
        drafter = dataclasses.replace(drafter, text=text)
    return runs.generate(target, drafter, WAYS[way]._replace(rule=rule))


def assert_ends_in_error(run, clean, place, rows=(BAD,), same=True):
    """At the token after `place`, with the ids before; the others to the bit."""
    finish = np.asarray(run.state.finish)
    for row in range(ROWS):
        if row in rows:
            kept = place + 1 - PROMPT
            assert finish[row] == ERROR
            assert len(run.ids[row]) == kept
            assert run.ids[row] == clean.ids[row][:kept] or not same
        else:
            assert finish[row] == LENGTH and run.ids[row] == clean.ids[row]
    written = np.arange(40) < np.asarray(run.state.length)[:, None]
    assert (np.asarray(run.state.tokens)[written] < VOCAB).all()


@pytest.mark.parametrize("name, rule", CASES)
def test_a_row_without_a_distribution_ends_there_and_alone(plain, name, rule):
    accepted = []
    for way in WAYS:
        clean = run_of(SOUND, name, rule, way, plain)
        if way == "greedy" or rule == "coupled":
            assert clean.ids == plain[way].ids
        for number, place in enumerate(PLACES):
            fault = NO_DISTRIBUTION[number % len(NO_DISTRIBUTION)]
            # What an arg-max over no distribution gives is drafted after it.
            text = np.array(plain[way].state.tokens)
            text[BAD, place + 1 :] = 0 if "infinity" in fault else VOCAB - 1
            target = SOUND.broken(fault, place)
            run = run_of(target, name, rule, way, plain, text)
            # `block` looks ahead: with a shorter draft it may draw otherwise.
            is_sampled = bool(TEMPERATURES[way][BAD])
            same = not (rule == "block" and is_sampled)
            assert_ends_in_error(run, clean, place, same=same)
            accepted.append(int(run.state.statistics.accepted[BAD].sum()))
    # It also ended behind accepted drafts.
    assert name == "without" or max(accepted) >= NODES


@pytest.mark.parametrize("fault", NO_DISTRIBUTION)
def test_each_fault_ends_plain_decoding_at_its_token(plain, fault):
    for way, place in itertools.product(WAYS, (PROMPT - 1, PROMPT + 3)):
        target = SOUND.broken(fault, place)
        run = runs.generate(target, Autoregressive(), WAYS[way])
        assert_ends_in_error(run, plain[way], place)


def test_several_rows_end_each_at_its_own_token(plain):
    target = SOUND.broken("all NaN", PROMPT, rows=(BAD,))
    starts = target.starts.copy()
    starts[[0, 7]] = PROMPT - 1, PROMPT + 5
    target = dataclasses.replace(target, starts=starts)
    run = run_of(target, "draft_model", "block", "greedy", plain)
    lengths = dict(enumerate(map(len, run.ids)))
    assert [lengths.pop(row) for row in (0, BAD, 7)] == [0, 1, 6]
    assert set(lengths.values()) == {NEW}
    assert np.asarray(run.state.finish).tolist() == [
        ERROR if row in (0, BAD, 7) else LENGTH for row in range(ROWS)
    ]
    clean = plain["greedy"].ids
    assert all(ids == clean[row][: len(ids)] for row, ids in enumerate(run.ids))


def test_when_every_row_fails_the_loop_ends(plain):
    target = SOUND.broken("all NaN", PROMPT + 2, rows=range(VOCAB))
    run = run_of(target, "draft_model", "block", "sampled", plain)
    assert (np.asarray(run.state.finish) == ERROR).all()
    assert [len(ids) for ids in run.ids] == [3] * ROWS


def test_a_fault_after_the_last_token_is_never_met(plain):
    last = PROMPT + NEW - 1
    for name, rule in COMPILED:
        target = SOUND.broken("all NaN", last)
        run = run_of(target, name, rule, "greedy", plain)
        assert run.ids == plain["greedy"].ids
        assert (np.asarray(run.state.finish) == LENGTH).all()


def test_nothing_that_is_no_number_is_committed(plain):
    """Of the bad row neither tokens nor cache nor statistics pass its last token."""
    place = PROMPT + 4
    target = SOUND.broken("all NaN", place)
    run = run_of(target, "draft_model", "block", "greedy", plain)
    clean = plain["greedy"]
    state = run.state
    assert int(state.cache.length[BAD]) == place
    assert int(state.length[BAD]) == place + 1
    ours = runs.committed(state.cache, state.cache.length)
    theirs = runs.committed(clean.state.cache, state.cache.length)
    for one, other in zip(ours, theirs, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
    assert int(state.statistics.emitted[BAD]) == place + 1 - PROMPT - 1
    assert (state.statistics.accepted[BAD] <= state.statistics.drafted[BAD]).all()


@pytest.mark.parametrize("way", WAYS)
def test_plus_infinity_picks_its_id(plain, way):
    target = SOUND.broken("plus infinity", PROMPT + 1, ends=13)
    clean = run_of(SOUND, "draft_model", "block", way, plain)
    for name, rule in COMPILED:
        run = run_of(target, name, rule, way, plain)
        # From position PROMPT + 1 to 12 the next token is 5, and then life goes on.
        assert run.ids[BAD][2 : 13 - PROMPT + 1] == [5] * (13 - PROMPT - 1)
        assert (np.asarray(run.state.finish) == LENGTH).all()
        if name == "draft_model":
            others = [row for row in range(ROWS) if row != BAD]
            assert [run.ids[r] for r in others] == [clean.ids[r] for r in others]


@pytest.mark.parametrize("fault", NO_DISTRIBUTION)
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(
            rule, marks=[] if ("draft_model", rule) in FEW else pytest.mark.full
        )
        for rule in RULES
    ],
)
def test_a_draft_without_a_distribution_is_refused(plain, rule, fault):
    """Ids stay exact, and nothing drafted from no distribution is accepted."""
    draft = Faulty.sound(TABLE.near(1, 1.0)).broken(fault, PROMPT + 2, range(VOCAB))
    for way, forced in itertools.product(WAYS, (False, True)):
        drafter = fakes.Oracle(
            DraftModel(draft, NODES), plain[way].state.tokens, jnp.asarray(forced)
        )
        run = runs.generate(SOUND, drafter, WAYS[way]._replace(rule=rule))
        assert (np.asarray(run.state.finish) == LENGTH).all()
        assert [len(ids) for ids in run.ids] == [NEW] * ROWS
        assert np.max(run.ids) < VOCAB and np.min(run.ids) >= 0
        if way == "greedy" or rule == "coupled":
            assert run.ids == plain[way].ids
        if rule != "coupled":
            # Two draft tokens have a distribution; `coupled` may guess others.
            accepted = np.asarray(run.state.statistics.accepted).sum(axis=1)
            assert accepted.max() <= 2


class TestWithMoreOptions:
    """One program: a bias for each row, and log-probabilities."""

    def run(self, plain, way, target=SOUND, barred=()):
        bias = np.zeros((ROWS, VOCAB), np.float32)
        bias[list(barred)] = -INF
        batch = WAYS[way]._replace(
            options={"logit_bias": bias}, reporting=Reporting(alternatives=2)
        )
        drafter = draft_model(way, plain)
        return runs.generate(target, drafter, batch)

    @pytest.mark.parametrize("way", WAYS)
    def test_options_that_rule_every_id_out_end_the_row(self, plain, way):
        clean = self.run(plain, way)
        run = self.run(plain, way, barred=[BAD])
        assert_ends_in_error(run, clean, PROMPT - 1)

    def test_log_probabilities_of_a_bad_row_are_those_of_its_tokens(self, plain):
        clean = self.run(plain, "greedy").state
        target = SOUND.broken("one NaN", PROMPT + 4)
        bad = self.run(plain, "greedy", target).state
        assert int(bad.finish[BAD]) == ERROR
        written = np.arange(40) < np.asarray(bad.length)[:, None]
        for one, other in zip(bad.log_probs, clean.log_probs, strict=True):
            one, other = np.asarray(one)[written], np.asarray(other)[written]
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)
