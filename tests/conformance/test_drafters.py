"""What every drafter must do; a new one is a new line in `DRAFTERS`."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.head_files import places_of
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.decoding.round import bind_noise, bind_warp
from jaxspec.decoding.state import ERROR, LENGTH
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.some_ids import SomeIds
from jaxspec.rows import map_rows
from jaxspec.tpu.hlo import host_traffic
from jaxspec.types import Chunk, Context, Target
from tests import fakes, runs

NODES = 4
# A leaf on every level, and levels of unequal width.
TREE = Topology.paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])
# All of them, since the oracle can dictate no id that a drafter lacks.
ORDERED = np.random.default_rng(0).permutation(64)
# Each is given a draft model.
DRAFTERS = {
    "autoregressive": lambda draft: Autoregressive(),
    "draft_model": lambda draft: DraftModel(draft, NODES),
    "draft_model of listed ids": lambda draft: DraftModel(
        SomeIds(draft, jnp.asarray(ORDERED), places_of(ORDERED, 64)), NODES
    ),
    "draft_model, dynamic tree": lambda draft: DraftModel(draft, DynamicTree(3, 2, 7)),
    "draft_model, tree": lambda draft: DraftModel(draft, TREE),
    "eagle": lambda draft: Eagle(fakes.eagle(draft), Topology.chain(NODES)),
    "eagle, tree": lambda draft: Eagle(fakes.eagle(draft), TREE),
    "eagle, dynamic tree": lambda draft: Eagle(
        fakes.eagle(draft), DynamicTree(3, 2, 7)
    ),
    "eagle3": lambda draft: Eagle(fakes.eagle3(draft), Topology.chain(NODES)),
    "eagle3, tree": lambda draft: Eagle(fakes.eagle3(draft), TREE),
    "early_exit": lambda draft: EarlyExit(1, Topology.chain(NODES)),
    "early_exit, tree": lambda draft: EarlyExit(1, TREE),
    "medusa": lambda draft: Medusa(fakes.heads(draft, NODES), Topology.chain(NODES)),
    "medusa, tree": lambda draft: Medusa(fakes.heads(draft, 3), TREE),
    "prompt_lookup": lambda draft: PromptLookup(NODES, min_ngram=1),
}
MET_AT_LEAST = 20


# The same code on another topology: what they alone could break is shape arithmetic.
IN_FULL = ("draft_model", "early_exit", "medusa", "draft_model, dynamic tree")
IN_FULL += (
    "draft_model of listed ids",
    "eagle",
    "eagle, tree",
    "eagle, dynamic tree",
    "eagle3",
)
PARAMS = [
    pytest.param(name, marks=pytest.mark.full if name in IN_FULL else ())
    for name in DRAFTERS
]


@pytest.fixture(scope="module", params=PARAMS)
def case(request, tiny):
    return make_case(request.param, tiny)


def make_case(name, tiny):
    """A drafter as it is, and the same one with the oracle around it switched on.

    Both are one program, so each drafter is compiled once for nearly all tests.
    """
    inner = DRAFTERS[name](tiny.draft)
    text = tiny.plain.run.state.tokens
    by_warp = "dynamic" in name
    alone = fakes.Oracle(inner, text, jnp.array(False), jnp.int32(0), by_warp)
    forced = dataclasses.replace(alone, forced=jnp.array(True))
    return SimpleNamespace(
        **vars(tiny), name=name, inner=inner, alone=alone, forced=forced
    )


def test_greedy_ids_are_those_of_the_target_alone(case):
    run = runs.generate(case.target, case.alone, case.batch)
    runs.assert_same_ids(case.plain, run.ids)


def test_every_accepted_count_occurs_and_the_ids_stay(case):
    assert len({token for row in case.plain.run.ids for token in row}) >= 8
    met = np.zeros(case.inner.depth + 1, int)
    states = runs.rounds(case.target, case.forced, case.batch)
    before = next(states)
    for after in states:
        right = np.asarray(case.forced.right(before.length))
        old, new = before.statistics, after.statistics
        emitted = np.asarray(new.emitted - old.emitted)
        accepted = np.asarray((new.accepted - old.accepted).sum(axis=1))
        active = np.asarray(before.active)
        wanted = np.where(active, np.minimum(right, emitted), 0)
        np.testing.assert_array_equal(accepted, wanted)
        uncut = active & (emitted == right + 1)
        assert (uncut | (np.asarray(after.finish) != 0)).all()
        met += np.bincount(accepted[uncut], minlength=met.size)
        np.testing.assert_array_equal(after.cache.length + 1, after.length)
        before = after
    print(f"accepted counts met: {met}")
    assert (met >= MET_AT_LEAST).all()
    runs.assert_same_ids(case.plain, runs.Run(case.batch, before).ids)


@jax.jit
def propose(target, drafter, state, options):
    warp = bind_warp(state, options)
    context = Context(state.tokens, state.length, state.active, warp)
    gumbel = bind_noise(state, options, target.vocab_size).draft
    target = Target(target, state.cache)
    return drafter.propose(target, state.drafter, context, gumbel)[0]


def prefilled(target, drafter, state, options):
    """The same text, newest token included, taken in from nothing."""
    rows, capacity = state.tokens.shape
    fed = state.length - 1
    batch = runs.Batch([[0]] * rows, capacity=capacity)
    prompts = batch.device()[0]._replace(
        tokens=state.tokens, length=fed, limit=state.limit, keys=state.keys
    )
    chunk = Chunk(state.tokens, jnp.zeros(rows, jnp.int32), fed)
    fresh = runs.SHARED.prefill(
        target, drafter, prompts, chunk, options, jnp.array(False), capacity
    )
    return fresh._replace(
        length=state.length,
        prompt_length=state.prompt_length,
        finish=state.finish,
        counts=state.counts,
    )


def assert_same_proposals(case, state, options):
    kept = propose(case.target, case.alone, state, options)
    fresh = prefilled(case.target, case.alone, state, options)
    remade = propose(case.target, case.alone, fresh, options)
    active = np.asarray(state.active)
    for name in ("tokens", "parents", "valid"):
        old, new = getattr(kept, name), getattr(remade, name)
        np.testing.assert_array_equal(old[active], new[active], err_msg=name)
    if kept.log_probs is not None:
        np.testing.assert_allclose(
            kept.log_probs[active], remade.log_probs[active], atol=1e-5, rtol=0
        )


def test_proposals_after_any_round_are_those_of_a_fresh_prefill(case):
    _, mixed = case.batch._replace(temperature=[0.0, 1.0] * 8).device()
    for state in runs.rounds(case.target, case.forced, case.batch):
        if bool(state.active.any()):
            assert_same_proposals(case, state, mixed)


def test_a_round_a_dispatch_is_bit_equal_to_one_dispatch(case):
    batch = case.batch._replace(temperature=[0.0, 1.0] * 8, new=24)
    whole = runs.generate(case.target, case.alone, batch).state
    *_, stepped = runs.rounds(case.target, case.alone, batch)
    for one, other in zip(
        jax.tree.leaves(whole), jax.tree.leaves(stepped), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_row_is_bit_equal_wherever_it_stands(case):
    batch = case.batch._replace(temperature=[0.0, 1.0, 0.7, 1.3] * 4, new=24)
    order = np.random.default_rng(0).permutation(16)
    there = runs.generate(case.target, case.alone, batch).state
    moved = runs.generate(case.target, case.alone, batch.rows(order)).state
    written = np.arange(batch.capacity) < np.asarray(there.length)[:, None]
    tokens = np.where(written, there.tokens, 0)[order]
    np.testing.assert_array_equal(np.where(written[order], moved.tokens, 0), tokens)
    for one, other in zip(
        jax.tree.leaves(there.statistics),
        jax.tree.leaves(moved.statistics),
        strict=True,
    ):
        np.testing.assert_array_equal(one[order], other)
    for one, other in zip(
        runs.committed(there.cache, there.cache.length),
        runs.committed(moved.cache, moved.cache.length),
        strict=True,
    ):
        np.testing.assert_array_equal(one[:, :, order], other)


def test_a_row_is_bit_equal_whatever_its_neighbours_are(case):
    batch = case.batch._replace(temperature=[0.0, 1.0] * 8, new=24)
    others = [[7, *prompt[1:]] for prompt in batch.prompts]
    others[:4] = batch.prompts[:4]
    seeds = [0, 1, 2, 3, *range(50, 62)]
    near = runs.generate(case.target, case.alone, batch)
    far = batch._replace(
        prompts=others, seeds=seeds, temperature=[0.0, 1.0] * 2 + [1.0] * 12
    )
    assert runs.generate(case.target, case.alone, far).ids[:4] == near.ids[:4]


def test_greedy_rows_are_exact_beside_sampled_ones(case):
    batch = case.batch._replace(temperature=[0.0, 1.0] * 8)
    ids = runs.generate(case.target, case.alone, batch).ids
    runs.assert_same_ids(case.plain, ids[::2], range(0, 16, 2))
    assert ids[1::2] != case.plain.run.ids[1::2]


def test_a_seed_fixes_the_ids_and_another_changes_them(case):
    batch = case.batch._replace(temperature=1.0)
    ids = runs.generate(case.target, case.alone, batch).ids
    assert runs.generate(case.target, case.alone, batch).ids == ids
    other = runs.generate(case.target, case.alone, batch._replace(seeds=range(90, 106)))
    assert all(one != two for one, two in zip(ids, other.ids, strict=True))


def test_any_limit_is_met_exactly(case):
    limits = [*range(case.inner.depth + 4), 64, 0, 1, 33]
    new = np.resize(limits, 16)
    run = runs.generate(case.target, case.alone, case.batch._replace(new=new))
    wanted = [ids[:n] for ids, n in zip(case.plain.run.ids, new, strict=True)]
    assert run.ids == wanted
    assert (np.asarray(run.state.finish) == LENGTH).all()


def test_rates_are_rates(case):
    for drafter in (case.alone, case.forced):
        run = runs.generate(case.target, drafter, case.batch)
        drafted, accepted = (
            np.asarray(each)
            for each in (run.state.statistics.drafted, run.state.statistics.accepted)
        )
        assert (accepted >= 0).all() and (accepted <= drafted).all()
        emitted = np.asarray(run.state.statistics.emitted)
        # The token that prefill draws is outside.
        assert emitted.tolist() == [len(ids) - 1 for ids in run.ids]
        rounds = np.asarray(run.state.statistics.rounds)
        assert (emitted <= accepted.sum(axis=1) + rounds).all()
        assert (emitted >= accepted.sum(axis=1)).all()


def test_other_lengths_and_values_compile_nothing(case):
    runs.generate(case.target, case.alone, case.batch)
    before = [each._cache_size() for each in runs.SHARED]
    changed = runs.Batch(
        [list(range(3, 3 + n)) for n in range(5, 21)],
        new=range(16),
        temperature=np.linspace(0, 2, 16),
        seeds=range(100, 116),
        eos=(3, 5),
    )
    runs.generate(case.target, case.forced, changed)
    assert [each._cache_size() for each in runs.SHARED] == before


def test_a_row_placed_after_an_error_row_equals_a_fresh_one(case):
    """What a bad row leaves behind is no number, and reaches neither place nor time."""
    bad, decode = 5, runs.SHARED.decode
    fresh, options = runs.start(case.target, case.forced, case.batch)
    begun = decode(case.target, case.forced, fresh, options, jnp.int32(3))

    def spoil(axis, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.at[(slice(None),) * axis + (bad,)].set(jnp.nan)

    def place(axis, leaf, new):
        row = (slice(None),) * axis + (bad,)
        return leaf.at[row].set(new[row])

    spoilt = map_rows(spoil, begun)
    spoilt = spoilt._replace(finish=spoilt.finish.at[bad].set(ERROR))
    ended = decode(case.target, case.forced, spoilt, options, jnp.int32(runs.FOREVER))
    others = [row for row in range(16) if row != bad]
    ids = runs.Run(case.batch, ended).ids
    runs.assert_same_ids(case.plain, [ids[row] for row in others], others)
    placed = map_rows(place, ended, fresh)
    again = decode(case.target, case.forced, placed, options, jnp.int32(runs.FOREVER))
    runs.assert_same_ids(case.plain, runs.Run(case.batch, again).ids)


def test_the_program_never_talks_to_the_host(case):
    state, options = runs.start(case.target, case.alone, case.batch)
    program = runs.SHARED.decode.lower(
        case.target, case.alone, state, options, jnp.int32(1)
    )
    assert host_traffic(program.compile().as_text()) == []


def test_bfloat16_stays_bfloat16_and_probabilities_are_float32(case):
    target, draft = (
        fakes.tiny(1, dtype=jnp.bfloat16),
        fakes.tiny(2, 1, dtype="bfloat16"),
    )
    drafter, made = DRAFTERS[case.name](draft), runs.OPTIMIZED
    batch = runs.Batch([[1, 2, 3]] * 2, capacity=16, chunk=4, new=4)
    prompts, options = batch.device()
    chunk = Chunk(jnp.zeros((2, 4), int), jnp.zeros(2, int), jnp.full(2, 3, jnp.int32))
    state = jax.eval_shape(
        lambda *args: made.prefill(*args, 4),
        *(target, drafter, prompts, chunk, options, jnp.array(True)),
    )
    after = jax.eval_shape(made.decode, target, drafter, state, options, jnp.int32(1))
    assert jax.tree.map(jnp.dtype, after) == jax.tree.map(jnp.dtype, state)
    floats = {
        str(leaf.dtype)
        for leaf in jax.tree.leaves((after.cache, after.drafter, after.hidden))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floats == {"bfloat16"}
    draft = jax.eval_shape(propose, target, drafter, state, options)
    assert draft.log_probs is None or draft.log_probs.dtype == jnp.float32
