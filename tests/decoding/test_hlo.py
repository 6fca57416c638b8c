import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding import loop
from jaxspec.drafters.autoregressive import Autoregressive
from tests import runs
from tests.hlo import host_traffic


def compiled_text(made, target, drafter, batch):
    state, options = runs.start(target, drafter, batch)
    lowered = made.decode.lower(target, drafter, state, options, jnp.int32(1))
    return lowered.compile().as_text()


def test_the_loop_never_talks_to_the_host(tiny):
    text = compiled_text(runs.SHARED, tiny.target, Autoregressive(), tiny.batch)
    assert "while(" in text
    assert host_traffic(text) == []


def test_a_print_inside_the_loop_is_found(tiny, monkeypatch):
    silent = loop.decode_round

    def chatty(model, drafter, state, options):
        jax.debug.print("length {}", state.length[0])
        return silent(model, drafter, state, options)

    monkeypatch.setattr(loop, "decode_round", chatty)
    text = compiled_text(runs.programs(), tiny.target, Autoregressive(), tiny.batch)
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
