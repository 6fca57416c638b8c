import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache import KVCache
from jaxspec.decoding import loop
from jaxspec.decoding.state import DecodingState
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.tpu.hlo import host_traffic
from tests import fakes, runs
from tests.hlo import copies


def compiled_text(made, target, drafter, batch):
    state, options = runs.start(target, drafter, batch)
    lowered = made.decode.lower(target, drafter, state, options, jnp.int32(1))
    return lowered.compile().as_text()


def cache_copies(target, drafter, rows) -> int:
    """How often the rounds of a generation copy an array of the target's cache."""
    prompts, options = runs.Batch([[1, 2, 3]] * rows).device()
    init = functools.partial(DecodingState.init, width=8)
    state = jax.eval_shape(init, target, drafter, prompts, options)
    # Traced anew each time: a part of the loop may have been replaced.
    rounds = jax.jit(lambda *args: loop.decode(*args), donate_argnums=2)
    lowered = rounds.lower(target, drafter, state, options, jnp.int32(1))
    arrays = {a.shape: a for a in jax.tree.leaves(state.cache.groups)}
    text = lowered.compile().as_text()
    return sum(copies(text, array) for array in arrays.values())


def test_the_loop_never_talks_to_the_host(tiny):
    text = compiled_text(runs.OPTIMIZED, tiny.target, Autoregressive(), tiny.batch)
    assert "while(" in text
    assert host_traffic(text) == []


def test_a_print_inside_the_loop_is_found(tiny, monkeypatch):
    silent = loop.decode_round

    def chatty(model, drafter, state, *others):
        jax.debug.print("length {}", state.length[0])
        return silent(model, drafter, state, *others)

    monkeypatch.setattr(loop, "decode_round", chatty)
    text = compiled_text(runs.programs(None), tiny.target, Autoregressive(), tiny.batch)
    assert len(host_traffic(text)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "%i = ((f32[2]), token[]) infeed(token[] %t)",
        "%o = token[] outfeed(f32[2] %x, token[] %t)",
        "%s = (f32[2], u32[], token[]) send(f32[2] %x), is_host_transfer=true",
        "%r = (f32[2], token[]) recv-done(%c), channel_id=1, is_host_transfer=true",
        '%c = f32[2] custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"',
        '%c = f32[2] custom-call(%x), custom_call_target="xla_python_gpu_callback"',
    ],
)
def test_every_kind_of_host_traffic_is_found(line):
    assert host_traffic(f"ENTRY %main {{\n  {line}\n}}") == [line]


@pytest.mark.parametrize(
    "line",
    [
        "%s = (f32[2], u32[], token[]) send(f32[2] %x), channel_id=2",
        '%c = f32[2] custom-call(%x), custom_call_target="__onednn$matmul"',
        "%send.1 = f32[2] add(f32[2] %recv, f32[2] %infeed)",
    ],
)
def test_traffic_between_devices_and_plain_maths_pass(line):
    assert host_traffic(line) == []


@pytest.mark.parametrize(
    ("drafted", "windows", "rows"),
    [(False, None, 1), (False, (8, None), 3), (True, (8, None), 1)],
)
def test_no_round_copies_a_cache(tiny, drafted, windows, rows):
    target = fakes.tiny(1, windows=windows)
    drafter = DraftModel(tiny.draft, 2) if drafted else Autoregressive()
    assert cache_copies(target, drafter, rows) == 0


def test_a_write_that_does_not_wait_for_the_reads_is_found(tiny, monkeypatch):
    """XLA then writes a layer before its attention has read, to a copy of it."""
    patient = KVCache.commit

    def hasty(cache, scratch, path, count):
        written = patient(cache, scratch, path, jnp.ones_like(count))
        return dataclasses.replace(written, length=cache.length + count)

    monkeypatch.setattr(KVCache, "commit", hasty)
    assert cache_copies(tiny.target, Autoregressive(), 1) > 0
