"""Early exit: nothing is computed twice, and what it drafts is told as it was drawn."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxspec
from jaxspec.core.topology import Topology
from jaxspec.decoding.loop import decode
from jaxspec.drafters.early_exit import EarlyExit, ExitAdapter
from jaxspec.models.decoder import Block
from tests import fakes, runs
from tests.conformance.test_drafters import propose

LAYERS, EXIT = 3, 2
CHAIN, TREE = Topology.chain(3), Topology.branching((2, 2, 1))


@pytest.fixture(scope="module")
def target():
    return fakes.tiny(1, layers=LAYERS)


def silenced(model, first):
    """The same model whose layers from `first` on add nothing."""
    graph, params = nnx.split(model)
    quiet = nnx.merge(graph, jax.tree.map(jnp.array, params))
    for block in quiet.layers[first:]:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight = nnx.Param(jnp.zeros_like(linear.weight[...]))
    return quiet


def test_no_layer_computes_a_node_twice(target, monkeypatch):
    """Blocks as they are traced: the drafter's first layers, then only the others."""
    seen, call = [], Block.__call__

    def counting(self, hidden, *args):
        layer = next(i for i, each in enumerate(blocks) if each is self)
        seen.append((layer, hidden.shape[-2]))
        return call(self, hidden, *args)

    batch = runs.Batch([[1, 2, 3]] * 2, capacity=32, chunk=8, new=8)
    state, options = runs.start(target, EarlyExit(EXIT, TREE), batch)
    blocks = []

    def decode_counted(model, *args):
        blocks.extend(model.layers)
        return decode(model, *args)

    monkeypatch.setattr(Block, "__call__", counting)
    drafter = EarlyExit(EXIT, TREE)
    jax.eval_shape(decode_counted, target, drafter, state, options, jnp.int32(1))
    drafted = [(layer, width) for layer, width in seen if layer < EXIT]
    verified = [(layer, width) for layer, width in seen if layer >= EXIT]
    # Root, the levels of a scan's one body, the deepest level: 1 + 4 + 4 lanes.
    assert sorted(set(drafted)) == [(0, 1), (0, 4), (1, 1), (1, 4)]
    assert set(verified) == {(2, TREE.nodes + 1)}


@pytest.mark.parametrize(
    "topology",
    [pytest.param(CHAIN, marks=pytest.mark.full), TREE],
    ids=["chain", "tree"],
)
def test_an_exit_that_sees_the_whole_model_is_always_accepted(target, topology):
    quiet = silenced(target, EXIT)
    batch = runs.Batch([[5, 6, 7], [1], [9] * 20], new=[31, 30, 29], capacity=64)
    drafter = EarlyExit(EXIT, topology)
    for temperature in (0.0, 1.0):
        run = runs.generate(quiet, drafter, batch._replace(temperature=temperature))
        statistics = run.state.statistics
        emitted, rounds = np.asarray(statistics.emitted), np.asarray(statistics.rounds)
        assert rounds.tolist() == (-(-emitted // (topology.depth + 1))).tolist()
        accepted = np.asarray(statistics.accepted).sum(axis=1)
        assert (accepted >= emitted - rounds).all()


def test_an_adapter_takes_part_and_changes_no_greedy_id(target):
    batch = runs.Batch([[5, 6, 7], [1], [9] * 20], new=24, capacity=64)
    made = ExitAdapter(32, 1e-5, jnp.float32, nnx.Rngs(0))
    bare = EarlyExit(EXIT, CHAIN)
    fresh = dataclasses.replace(bare, adapter=made)
    weights = np.random.default_rng(0).normal(size=(32, 32)).astype("f4")
    moved = dataclasses.replace(bare, adapter=nnx.clone(made))
    moved.adapter.linear.weight = nnx.Param(jnp.asarray(weights))
    done = {
        name: runs.generate(target, drafter, batch)
        for name, drafter in {"bare": bare, "fresh": fresh, "moved": moved}.items()
    }
    assert done["bare"].ids == done["fresh"].ids == done["moved"].ids
    drafted = {
        name: np.asarray(run.state.statistics.accepted).sum(axis=0).tolist()
        for name, run in done.items()
    }
    assert drafted["bare"] == drafted["fresh"] != drafted["moved"]


@pytest.mark.full
def test_bl53_a_draft_is_the_first_layers_own_with_the_right_positions():
    """Layer 0, final norm and head alone, fed the whole text and what was drafted."""
    target = fakes.tiny(1)
    config = dataclasses.replace(
        target.config, num_layers=1, windows=(None,), ropes=target.config.ropes[:1]
    )
    graph, parameters = nnx.split(target)
    alone = nnx.merge(graph, parameters)
    alone.config, alone.layers = config, nnx.List(alone.layers[:1])
    batch = runs.Batch([[5, 6, 7], [1], [9] * 20], new=24, capacity=64, temperature=1.0)
    drafter, (_, options) = EarlyExit(1, CHAIN), batch.device()
    for done, state in enumerate(runs.rounds(target, drafter, batch)):
        if done not in (0, 3):
            continue
        draft = propose(target, drafter, state, options)
        for row, length in enumerate(np.asarray(state.length)):
            text = np.concatenate([state.tokens[row, :length], draft.tokens[row]])
            wanted = np.asarray(runs.replay(alone, jnp.asarray(text[None]), 1))[0]
            wanted = jax.nn.log_softmax(wanted[length - 1 : -1])
            np.testing.assert_allclose(draft.log_probs[row], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["0", "3", "12", "-1", "two", "1.5"])
def test_an_exit_that_cannot_be_is_refused(target, name):
    model = jaxspec.LanguageModel("tiny", target)
    with pytest.raises(jaxspec.UserError) as error:
        jaxspec.Generator(model, f"early-exit:{name}")
    assert f"'early-exit:{name}', expected early-exit:1 to early-exit:2" in str(
        error.value
    )


@pytest.mark.full
def test_a_generator_drafts_by_early_exit(target):
    model = jaxspec.LanguageModel("tiny", target)
    plain = jaxspec.Generator(model).generate([[5, 6, 7], [1]], max_new_tokens=24)
    generator = jaxspec.Generator(model, "early-exit:2", tree=(2, 1))
    found = generator.generate([[5, 6, 7], [1]], max_new_tokens=24)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert all(result.stats.drafted > 0 for result in found)


def adapter_files(folder, layers=2, **tensors):
    """An adapter for a target of width 32 and 64 ids; None leaves a tensor out."""
    stored = {
        "norm.weight": np.ones(32, "f4"),
        "linear.weight": np.zeros((32, 32), "f4"),
        **tensors,
    }
    stored = {name: value for name, value in stored.items() if value is not None}
    save_file(stored, folder / "model.safetensors")
    config = {"drafter": "early-exit", "layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


BAD = {
    "an exit at the end": (
        {"layers": 3},
        "an exit after 3 layers, but the target has 3",
    ),
    "an exit at 0": ({"layers": 0}, "`layers` is 0, expected an integer from 1"),
    "another width": (
        {"norm.weight": np.ones(16, "f4")},
        "`norm.weight` has shape [16], expected [32]",
    ),
    "no map": ({"linear.weight": None}, "`linear.weight` is missing"),
    "something else": (
        {"fc.weight": np.ones(3, "f4")},
        "is none of `jaxspec train",
    ),
    "ids out of range": ({"token_map": np.array([1, 64])}, "has ids from 1 to 64"),
    "an id twice": ({"token_map": np.array([1, 1])}, "expected different ones"),
    "ids that are none": ({"token_map": np.ones(2, "f4")}, "is no list of ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_adapter_that_does_not_fit_is_refused(target, tmp_path, name):
    files, part = BAD[name]
    path = adapter_files(tmp_path, **files)
    with pytest.raises(jaxspec.UserError) as error:
        jaxspec.Generator(jaxspec.LanguageModel("tiny", target), f"early-exit:{path}")
    assert part in str(error.value)


def test_an_adapter_is_read_with_its_exit_and_ids(target, tmp_path):
    path = adapter_files(tmp_path, token_map=np.array([9, 3]))
    model = jaxspec.LanguageModel("tiny", target)
    drafter = jaxspec.Generator(model, f"early-exit:{path}").drafter
    assert drafter.layers == drafter.prefix_layers == 2
    np.testing.assert_array_equal(drafter.known, [9, 3])
    assert [int(drafter.places[i]) for i in (9, 3, 4)] == [0, 1, 2]
