"""What lies where on a mesh, by names and shapes alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspec.cache import KVCache
from jaxspec.checkpoints.load import expected_shapes
from jaxspec.core.history import Counts
from jaxspec.core.report import Reporting
from jaxspec.decoding.state import DecodingState
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import UserError
from jaxspec.scratch import Scratch
from jaxspec.sharding import COPIED, Partition, Rules, make_mesh
from tests import fakes, runs

HEAD_DIM = 8


def partition(data=2, model=4, **fields):
    return Partition(AbstractMesh((data, model), ("data", "model")), **fields)


def spec(name, shape, over=None, **options):
    return (over or partition()).parameter(name, shape, HEAD_DIM, **options).spec


# Shapes only.
TARGET = nnx.eval_shape(lambda: fakes.tiny(1))
DRAFT = nnx.eval_shape(lambda: fakes.tiny(2, layers=1))


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("embed_tokens.weight", (64, 32), P("model", None)),
        ("lm_head.weight", (64, 32), P("model", None)),
        ("layers.1.self_attn.q_proj.weight", (32, 32), P("model", None)),
        ("layers.1.self_attn.q_proj.bias", (32,), P("model")),
        ("layers.0.self_attn.k_proj.weight", (32, 32), P("model", None)),
        ("layers.0.self_attn.v_proj.bias", (32,), P("model")),
        ("layers.0.self_attn.o_proj.weight", (32, 32), P(None, "model")),
        ("layers.0.mlp.gate_proj.weight", (64, 32), P("model", None)),
        ("layers.0.mlp.up_proj.bias", (64,), P("model")),
        ("layers.0.mlp.down_proj.weight", (32, 64), P(None, "model")),
        # A bias of what was summed over all chips is added once.
        ("layers.0.self_attn.o_proj.bias", (32,), P()),
        ("layers.0.mlp.down_proj.bias", (32,), P()),
        ("layers.0.self_attn.q_norm.weight", (8,), P()),
        ("layers.0.input_layernorm.weight", (32,), P()),
        ("final_norm.weight", (32,), P()),
        ("heads.weights", (4, 1, 32, 32), P()),
        # The end alone tells: another parameter's name is no such end.
        ("layers.0.extra_embed_tokens.weight", (64, 32), P()),
    ],
)
def test_a_parameter_lies_where_the_end_of_its_name_says(name, shape, wanted):
    assert spec(name, shape) == wanted
    assert spec(f"model.{name}", shape) == wanted


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_tokens.weight", (66, 32)),
        ("self_attn.o_proj.weight", (32, 6 * HEAD_DIM)),
        # Whole heads or none: 16 and 48 rows divide, 2 and 6 heads do not.
        ("self_attn.k_proj.weight", (2 * HEAD_DIM, 32)),
        ("self_attn.k_proj.bias", (HEAD_DIM,)),
        ("self_attn.q_proj.weight", (6 * HEAD_DIM, 32)),
        ("mlp.down_proj.weight", (32, 63)),
    ],
)
def test_what_does_not_divide_is_not_split(name, shape):
    assert set(spec(name, shape)) == {None}


def test_an_axis_of_a_rule_that_is_none_is_not_split():
    rules = Rules(vocabulary=None, rows=None)
    over = partition(rules=rules)
    assert spec("lm_head.weight", (64, 32), over) == P(None, None)
    assert spec("up_proj.weight", (64, 32), over) == P("model", None)
    assert (over.row_parts, partition().row_parts) == (1, 2)
    assert over.split("rows", 8) is None


def test_drafters_have_rules_of_their_own():
    over = partition(draft_rules=COPIED)
    for name, shape in expected_shapes(TARGET.config).items():
        assert set(spec(name, shape, over, draft=True)) <= {None}
        assert spec(name, shape, over) == spec(name, shape)
    backwards = partition(draft_rules=Rules(inner="data"))
    assert spec("up_proj.weight", (64, 32), backwards, draft=True) == P("data", None)


def test_placing_shapes_gives_each_parameter_its_sharding():
    placed = partition().place(TARGET, HEAD_DIM)
    block = placed.layers[1]
    assert placed.lm_head.weight.get_value().sharding.spec == P("model", None)
    assert block.self_attn.q_proj.weight.get_value().sharding.spec == P("model", None)
    # 2 kv heads over 4 chips.
    assert block.self_attn.k_proj.weight.get_value().sharding.spec == P(None, None)
    assert block.mlp.down_proj.weight.get_value().sharding.spec == P(None, "model")
    assert block.input_layernorm.weight.get_value().sharding.spec == P()


@pytest.fixture(scope="module")
def state():
    """The shapes of a state with all that a state may have."""
    batch = runs.Batch(
        [[1, 2]] * 8,
        options={
            "repetition_penalty": np.ones(8, np.float32),
            "logit_bias": np.zeros((8, 64), np.float32),
        },
        reporting=Reporting(4),
    )
    prompts, options = batch.device()
    init = functools.partial(DecodingState.init, width=16)
    drafter = DraftModel(DRAFT, 3)
    made = jax.eval_shape(init, TARGET, drafter, prompts, options)
    return made, options


def specs(tree):
    return jax.tree.map(lambda where: where.spec, tree)


def test_each_array_of_a_state_is_split_by_its_rows(state):
    made, _ = state
    found = specs(partition(4, 2).state(made))
    for leaf in jax.tree.leaves(
        (found.statistics, found.log_probs, found.keys), is_leaf=lambda a: type(a) is P
    ):
        assert leaf[0] == "data" and set(leaf[1:]) <= {None}
    assert found.tokens == P("data", None)
    cached = P(None, None, "data", "model", None, None)
    for cache in (found.cache, found.drafter.cache):
        assert isinstance(cache, KVCache)
        leaves = jax.tree.leaves(cache.groups, is_leaf=lambda a: type(a) is P)
        assert leaves and set(leaves) == {cached}
        assert cache.length == P("data")
    assert isinstance(found.counts, Counts)
    assert set(found.counts) == {P("data", "model")}


def test_the_bias_of_the_logits_is_split_as_they_are(state):
    _, options = state
    found = specs(partition(4, 2).state(options))
    assert found.sampling.logit_bias == P("data", "model")
    assert found.sampling.temperature == found.sampling.repetition_penalty == P("data")
    assert found.eos_ids == P("data", None)


def test_kv_heads_that_do_not_divide_are_on_every_chip(state):
    made, _ = state
    found = specs(partition(2, 4).state(made)).cache
    [leaf, *_] = jax.tree.leaves(found.groups, is_leaf=lambda a: type(a) is P)
    assert leaf == P(None, None, "data", None, None, None)


def test_entries_of_a_round_are_split_by_kv_heads():
    scratch = jax.eval_shape(lambda: Scratch.init(1, 8, 2, 4, HEAD_DIM, "f4"))
    found = specs(partition(4, 2).state(scratch))
    assert found.keys[0] == found.values[0] == P("data", "model", None, None)
    # Slots are no heads.
    assert found.positions == P("data", None)


def test_a_scalar_and_rows_that_do_not_divide_are_everywhere():
    over = partition(4, 2)
    assert specs(over.state(jnp.int32(3))) == P()
    assert specs(over.state(jnp.zeros((6, 5)))) == P(None, None)


@pytest.mark.parametrize("sizes", [(1, 9), (3, 3), (0, 4), (2, -1), (9, 1)])
def test_a_mesh_larger_than_there_are_devices_is_refused(sizes):
    eight = [dataclasses.make_dataclass("Device", ["id"])(id) for id in range(8)]
    wanted = f"mesh is {sizes[0]}x{sizes[1]}, but there are 8 devices; choose"
    with pytest.raises(UserError, match=wanted) as caught:
        make_mesh(*sizes, devices=eight)
    assert "\n" not in str(caught.value)
