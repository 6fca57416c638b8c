import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import BLOCK, KVCache, causal, run_rows
from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.models.config import Rope
from jaxspec.models.decoder import Decoder
from tests.checkpoints.writers import tiny_config
from tests.fakes import full_layout
from tests.models.forwards import (
    NEWER,
    TEXT_LENGTH,
    chunked,
    decoder,
    feed,
    largest_difference,
    leaves,
    one_shot,
    pieces,
    random_ids,
    tiny,
    tiny_names,
    tiny_parameters,
    tiny_values,
)
from tests.models.reference import forward

NAMES = tiny_names(*NEWER[1:])
BASIC = ("llama", "qwen2", "qwen3", "gemma3")
WINDOWED = ("qwen2, windows", "gemma2", "gemma3", "mistral")
CHUNK = 48
IDS = random_ids(64, TEXT_LENGTH)


@functools.cache
def whole(name):
    return one_shot(tiny(name).model, IDS)


@functools.cache
def in_chunks(name, stacked=False):
    make = make_cache(tiny(name).config, stacked)
    return chunked(tiny(name).model, IDS, CHUNK, make_cache=make)


def padded(model, ids):
    """The text in one piece of the width that `whole` is compiled for already."""
    cache = model.init_cache(1, TEXT_LENGTH + 1, TEXT_LENGTH)
    return feed(model, ids, [(TEXT_LENGTH, len(ids))], cache=cache)


@functools.cache
def expected(name):
    entry = tiny(name)
    return forward(entry.config, entry.parameters, IDS)


def make_cache(config, stacked, dtype=jnp.float32, init=KVCache.init):
    def make(rows, capacity, width):
        heads, head_dim = config.num_kv_heads, config.head_dim
        sizes = rows, heads, capacity, width, head_dim
        return init(config.windows, *sizes, dtype, stacked=stacked)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_every_block_equal_the_numpy_forward(name):
    ours, theirs = whole(name), expected(name)
    assert largest_difference(ours.logits[0], theirs.logits) < 1e-4
    taps = np.moveaxis(np.asarray(ours.output.taps[0]), 1, 0)
    assert largest_difference(taps, theirs.blocks) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_text_tells_the_tiny_models_apart(name):
    # Were the logits flat, or the window and ropes without effect, agreement would
    # show nothing.
    entry, logits = tiny(name), expected(name).logits
    assert logits.std() > 0.5
    changed = {"windows": (None,) * entry.config.num_layers}
    if "yarn" in name:
        changed = {"ropes": (Rope(10_000.0),) * entry.config.num_layers}
    elif name not in WINDOWED and not name.startswith("gemma3"):
        changed = {"ropes": (Rope(77.0),) * entry.config.num_layers}
    other = dataclasses.replace(entry.config, **changed)
    assert (
        largest_difference(forward(other, entry.parameters, IDS).logits, logits) > 0.1
    )


@pytest.mark.parametrize("name", ("llama", "qwen2, windows", "qwen3", "gemma3"))
def test_chunks_and_single_tokens_give_what_one_piece_gives(name):
    model, wanted = tiny(name).model, whole(name).logits
    assert TEXT_LENGTH > 2 * BLOCK
    assert largest_difference(in_chunks(name).logits, wanted) < 1e-5
    assert largest_difference(chunked(model, IDS, 1).logits, wanted) < 1e-5


def test_a_longer_bucket_and_unequal_chunks_change_nothing():
    model, wanted = tiny("gemma3").model, whole("gemma3").logits
    chunks = [(BLOCK, BLOCK), (BLOCK, 1), *pieces(TEXT_LENGTH - BLOCK - 1, BLOCK)]
    assert largest_difference(feed(model, IDS, chunks).logits, wanted) < 1e-5


@pytest.mark.parametrize(
    "widths, stacked",
    (
        pytest.param((1, 2, 3, 4, 5, 6), False, marks=pytest.mark.full),
        pytest.param((1, 2, 3, 4, 5, 6), True, marks=pytest.mark.full),
    ),
)
def test_a_ring_gives_what_a_full_cache_gives(widths, stacked):
    """Over four turns of the ring, in chunks and then as a verify feeds."""
    entry, ids = tiny("gemma3"), random_ids(64, 12 * CHUNK + sum(widths))
    chunks = [*pieces(12 * CHUNK, CHUNK), *((width, width) for width in widths)]
    rings, full = (
        feed(
            *(entry.model, ids, chunks),
            make_cache=make_cache(entry.config, stacked, init=init),
        )
        for init in (KVCache.init, full_layout)
    )
    slots = [
        [group[0].shape[4] for group in each.cache.groups] for each in (rings, full)
    ]
    assert min(slots[0]) * 4 < ids.size < min(slots[1])
    # The order of a sum is another one: float32 rounds in units of the largest term.
    tolerance = 1e-6 * np.abs(full.logits).max()
    print(f"{largest_difference(rings.logits, full.logits):.1e} of {tolerance:.1e}")
    assert largest_difference(rings.logits, full.logits) < tolerance


def test_ragged_rows_equal_each_row_alone():
    model = tiny("gemma3").model
    texts = [IDS[:length] for length in (3, 9, 127, 128, 200)]
    width = 100
    cache = model.init_cache(len(texts), TEXT_LENGTH, width)
    logits = [np.zeros((0, 64))] * len(texts)
    for start in (0, width):
        counts = np.array([np.clip(len(t) - start, 0, width) for t in texts])
        tokens = np.zeros((len(texts), width), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : counts[row]] = text[start : start + counts[row]]
        fed = feed(model, tokens, [(width, width)], cache=cache)
        cache = dataclasses.replace(fed.cache, length=cache.length + counts)
        for row, count in enumerate(counts):
            logits[row] = np.concatenate([logits[row], fed.logits[row, :count]])
    for row, text in enumerate(texts):
        wanted = whole("gemma3").logits[0, : len(text)]
        assert largest_difference(logits[row], wanted) < 1e-5


def test_resuming_from_hidden_equals_the_whole():
    model, layers, length, middle = tiny("gemma3").model, 3, 50, 1
    tokens, positions = jnp.asarray(IDS[:length]), jnp.arange(length)
    cache, scratch = model.init_cache(1, length, length), model.init_scratch(1, length)
    seen = jnp.tri(length, dtype=bool)

    def run(hidden, scratch, first, last):
        def row(cache, scratch, hidden):
            return model(
                *(tokens, positions, cache, scratch, positions, seen),
                live_blocks=jnp.int32(0),
                first=first,
                last=last,
                hidden=hidden,
                taps=tuple(range(first, last)),
            )

        axes = (cache.row_axes, 0, None if hidden is None else 0)
        return jax.jit(jax.vmap(row, axes))(cache, scratch, hidden)

    complete, full = run(None, scratch, 0, layers)
    early, part = run(None, scratch, 0, middle)
    for new, old in zip(part.keys[middle:], scratch.keys[middle:], strict=True):
        np.testing.assert_array_equal(new, old)
    late, resumed = run(early.hidden, part, middle, layers)
    assert largest_difference(early.hidden, complete.taps[:, :, middle - 1]) < 1e-5
    assert largest_difference(late.hidden, complete.hidden) < 1e-5
    assert largest_difference(late.taps, complete.taps[:, :, middle:]) < 1e-5
    for one, other in zip(resumed.keys, full.keys, strict=True):
        assert largest_difference(one, other) < 1e-5


def test_bl49_taps_are_the_outputs_of_the_blocks_named_from_zero():
    values = tiny_config("llama", num_hidden_layers=8, mlp_bias=True)
    config = parse_config(values, "config.json")
    parameters = tiny_parameters(config)
    for layer in range(8):
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            parameters[f"layers.{layer}.{part}"][:] = 0
        parameters[f"layers.{layer}.mlp.down_proj.bias"][:] = layer + 1
    model = decoder(config, parameters)
    ids, taps = IDS[:5], (0, 3, 7)
    cache, scratch, slots = (
        model.init_cache(1, 5, 5),
        model.init_scratch(1, 5),
        np.arange(5),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(taps):
        rows = ids[None], slots[None], slots, causal(1, 5)
        return run_rows(model, cache, scratch, *rows, taps)[0]

    output = run(taps)
    embedded = parameters["embed_tokens.weight"][ids]
    for index, tap in enumerate(taps):
        wanted = embedded + sum(range(1, tap + 2))
        np.testing.assert_allclose(output.taps[0, :, index], wanted, atol=1e-5)
    np.testing.assert_array_equal(output.hidden, output.taps[:, :, 2])
    assert jax.eval_shape(lambda: run(())).taps.shape == (1, 5, 0, 32)


def test_a_tied_head_adds_no_leaf():
    free, tied = leaves(tiny("llama").model), leaves(tiny("llama, tied").model)
    assert set(free) - set(tied) == {"lm_head.weight"}
    assert len(jax.tree.leaves(tiny("llama, tied").model)) == len(tied)


@pytest.mark.parametrize("name", ("qwen2", "gemma3"))
def test_bfloat16_is_kept_and_norms_and_logits_are_float32(name):
    entry = tiny(name)
    model = decoder(entry.config, entry.parameters, jnp.bfloat16)
    for leaf_name, leaf in leaves(model).items():
        wanted = jnp.float32 if leaf_name.endswith("norm.weight") else jnp.bfloat16
        assert leaf.dtype == wanted, leaf_name
    # The tests' length keeps scores within what eight bits of mantissa can tell.
    ids = IDS[:64]
    with jax.numpy_dtype_promotion("strict"):
        fed = chunked(model, ids, CHUNK)
    assert fed.logits.dtype == np.float32
    assert fed.output.hidden.dtype == fed.output.taps.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(fed.cache.groups)} == {
        jnp.dtype(jnp.bfloat16)
    }
    scratch = model.init_scratch(1, 4)
    assert scratch.keys[0].dtype == scratch.values[0].dtype == jnp.bfloat16
    assert model.init_hidden(2).dtype == jnp.bfloat16
    wanted = expected(name).logits[:64]
    error = np.sqrt(np.mean((fed.logits[0] - wanted) ** 2))
    assert 0 < error < 0.1 * wanted.std()


@pytest.mark.parametrize("stacked", (False, True))
def test_what_stands_past_the_length_changes_no_bit(stacked):
    entry = tiny("gemma3")
    cache = make_cache(entry.config, stacked)(1, TEXT_LENGTH + 1, CHUNK)
    cache = chunked(entry.model, IDS[:100], CHUNK, cache=cache).cache
    ring, full = (group[0].shape[4] for group in cache.groups)
    assert full > 2 * BLOCK > 2 * cache.length and ring > cache.length

    def filled(live, later):
        """Fills what is past the length, and the blocks past the last live one."""

        def fill(array):
            slots = jnp.arange(array.shape[4])[:, None]
            array = jnp.where(slots >= 100, live, array)
            return jnp.where(slots >= BLOCK, later, array)

        groups = jax.tree.map(fill, cache.groups)
        return dataclasses.replace(cache, groups=groups)

    # A masked NaN survives any sum, so blocks of them cannot have been read.
    clean, dirty = (
        feed(entry.model, IDS[100:105], [(CHUNK, 5)], cache=filled(*values))
        for values in ((0.0, 0.0), (1e30, jnp.nan))
    )
    np.testing.assert_array_equal(clean.logits, dirty.logits)
    assert largest_difference(clean.logits, whole("gemma3").logits[:, 100:105]) < 1e-5


@pytest.mark.parametrize("stacked", (False, True))
def test_what_a_ring_holds_behind_the_window_changes_no_bit(stacked):
    entry, cache = tiny("gemma3"), in_chunks("gemma3", stacked).cache
    window, last = entry.config.windows[0], TEXT_LENGTH - 1

    def filled(garbage):
        def fill(array):
            slots = np.arange(array.shape[4])[:, None]
            back = (last - slots) % slots.size
            return jnp.where(back + 1 < window, array, garbage)

        ring, full = cache.groups
        assert ring[0].shape[4] == BLOCK < last
        return dataclasses.replace(cache, groups=(tuple(map(fill, ring)), full))

    ids = random_ids(64, 5, seed=2)
    plain, clean, dirty = (
        feed(entry.model, ids, [(CHUNK, 5)], cache=each).logits
        for each in (cache, filled(0.0), filled(1e30))
    )
    np.testing.assert_array_equal(clean, plain)
    np.testing.assert_array_equal(dirty, plain)


@pytest.mark.parametrize("name", ("gemma3", "qwen2, windows"))
def test_stacked_and_per_layer_caches_give_equal_results(name):
    separate, stacked = in_chunks(name), in_chunks(name, stacked=True)
    assert len(jax.tree.leaves(stacked.cache)) == 1 + len(
        set(tiny(name).config.windows)
    )
    assert largest_difference(separate.logits, stacked.logits) < 1e-5


def test_a_tree_sees_its_ancestors_only():
    # Slots: 0 the root, 1 and 2 its children, 3 under 1, 4 under 2.
    model, prefix = tiny("gemma3").model, IDS[:60]
    tokens, depth = np.array([[7, 8, 9, 10, 11]]), np.array([0, 1, 1, 2, 2])
    sees = np.array(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 0, 1, 0, 1],
        ],
        bool,
    )
    cache = padded(model, prefix).cache
    scratch, slots = model.init_scratch(1, 5), jnp.arange(5)
    output, scratch = jax.jit(run_rows)(
        model, cache, scratch, tokens, 60 + depth[None], slots, sees[None]
    )
    for path in ([0, 1, 3], [0, 2, 4]):
        text = np.concatenate([prefix, tokens[0, path]])
        wanted = padded(model, text)
        got = output.hidden[:, jnp.asarray(path)]
        assert largest_difference(got, wanted.output.hidden[:, -3:]) < 1e-5
        kept = cache.commit(scratch, jnp.array([[*path, 0, 0]]), jnp.array([3]))
        after = feed(model, IDS[:4], [(TEXT_LENGTH, 4)], cache=kept).logits
        longer = padded(model, np.concatenate([text, IDS[:4]])).logits[:, -4:]
        assert largest_difference(after, longer) < 1e-5


@pytest.mark.parametrize("field", ("attention_soft_cap", "logit_soft_cap"))
def test_each_soft_cap_matters(field):
    entry = tiny("gemma2")
    assert getattr(entry.config, field) is not None
    other = dataclasses.replace(entry.config, **{field: None})
    changed = forward(other, entry.parameters, IDS).logits
    assert largest_difference(changed, expected("gemma2").logits) > 0.1


def operations(config):
    """The names of all operations of a forward pass with logits, and how often."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))

    def run(model, tokens):
        cache, scratch = model.init_cache(1, 8, 4), model.init_scratch(1, 4)
        slots = jnp.arange(4)
        rows = tokens, slots[None], slots, causal(1, 4)
        output, _ = run_rows(model, cache, scratch, *rows)
        return model.unembed(model.norm(output.hidden))

    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    text = str(jax.make_jaxpr(run)(model, tokens))
    return collections.Counter(re.findall(r" = (\w+)", text))


def test_what_a_config_does_not_have_is_not_in_the_program():
    gemma2 = parse_config(tiny_config("gemma2"), "gemma2")
    free = dataclasses.replace(gemma2, attention_soft_cap=None, logit_soft_cap=None)
    layers = gemma2.num_layers
    # Scratch and blocks of the cache in each layer, the logits; free: the activations.
    assert operations(free)["tanh"] == layers
    assert operations(gemma2)["tanh"] == layers + 2 * layers + 1
    yarn = parse_config(tiny_values("qwen2, yarn rope"), "yarn")
    scaling = dataclasses.replace(yarn.ropes[0].scaling, attention_factor=1.0)
    unscaled = dataclasses.replace(yarn, ropes=(Rope(1e4, scaling),) * 2)
    plain = dataclasses.replace(yarn, ropes=(Rope(1e4),) * 2)
    assert operations(unscaled) == operations(plain)
    # Cosine and sine, of queries and keys, in each of two layers.
    assert operations(yarn)["mul"] == operations(plain)["mul"] + 2 * 2 * 2


def test_causal_is_lower_triangular():
    np.testing.assert_array_equal(causal(2, 3)[1], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
