"""The floor of a round, against sums by hand."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.core.topology import Topology
from jaxspec.drafters.medusa import Heads, Medusa
from jaxspec.sharding import Partition, make_mesh
from jaxspec.tpu.aot import Setup
from tests import fakes
from tests.sharding.on_devices import HEAD_DIM

ROWS, LIVE, CAPACITY, KV_HEADS = 4, 100, 256, 2


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def keys(layers):
    return ROWS * layers * 2 * KV_HEADS * LIVE * HEAD_DIM * 4


@pytest.fixture(scope="module")
def models():
    partition = Partition(make_mesh(1, 1))
    placed = [
        partition.place(fakes.tiny(1, layers=layers), HEAD_DIM) for layers in (2, 1)
    ]
    return [jaxspec.LanguageModel("tiny", model, None, partition) for model in placed]


def floor(target, drafter, **shape):
    generator = jaxspec.Generator(target, drafter, capacity=CAPACITY, **shape)
    return Setup(generator, ROWS, LIVE, "v5e:1x1").floor_bytes()


@pytest.fixture(scope="module")
def plain(models):
    """The embedding is looked up in; all else is read once, and the live keys."""
    decoder = models[0].decoder
    return size(decoder) - size(decoder.embed_tokens) + keys(layers=2)


def test_a_target_makes_one_pass(models, plain):
    assert floor(models[0], None) == plain
    assert floor(models[0], "prompt-lookup", draft_tokens=4) == plain


def test_a_draft_makes_one_for_each_token(models, plain):
    draft = models[1].decoder
    level = size(draft) - size(draft.embed_tokens) + keys(layers=1)
    found = floor(*models, draft_tokens=3)
    assert found == pytest.approx(plain + 3 * level)


def test_an_exit_runs_the_first_layers_once_more_for_each(models, plain):
    decoder = models[0].decoder
    level = size(decoder.layers[0]) + keys(layers=1) + size(decoder.lm_head)
    found = floor(models[0], "early-exit:1", draft_tokens=2)
    assert found == pytest.approx(plain + 2 * level)


def test_heads_are_read_once(models, plain):
    decoder = models[0].decoder
    width = decoder.config.hidden_size
    blocks = jnp.zeros((3, 1, width, width)), jnp.zeros((3, 1, width))
    medusa = Medusa(Heads(*blocks), Topology.chain(3))
    found = floor(models[0], medusa)
    assert found == plain + size(blocks) + size(decoder.lm_head)
