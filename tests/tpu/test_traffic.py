"""What is counted of a program's text, on texts with known answers."""

import pytest

from jaxspec.tpu.hlo import arrays_of, host_traffic, parse
from jaxspec.tpu.traffic import Traffic

# A loop of rounds: in each a draft loop of 3 steps that reads 8 x 128 floats, a verify
# that reads a block of a cache for as long as it is live, a sum over the chips, and a
# copy made ahead of its use.
PROGRAM = """\
HloModule jit_decode

%cond3 (p: (s32[], f32[8,128])) -> pred[] {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %three = s32[] constant(3)
  %at = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%at, %three), direction=LT
}

%body3 (q: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %q = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %w = f32[8,128]{1,0:T(8,128)} get-tuple-element(%q), index=1
  %used = f32[8,128]{1,0:T(8,128)S(1)} negate(%w), metadata={op_name="jit(decode)/while/body/draft/neg"}
  ROOT %next = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i, %w)
}

%condlive (r: (s32[], s32[], f32[64,128])) -> pred[] {
  %r = (s32[], s32[], f32[64,128]{1,0:T(8,128)}) parameter(0)
  %a = s32[] get-tuple-element(%r), index=0
  %b = s32[] get-tuple-element(%r), index=1
  ROOT %less2 = pred[] compare(%a, %b), direction=LT
}

%block (fp0: f32[64,128], fp1: s32[]) -> f32[8,128] {
  %fp0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %fp1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[8,128]{1,0:T(8,128)S(1)} dynamic-slice(%fp0, %fp1, %zero), dynamic_slice_sizes={8,128}
}

%bodylive (s: (s32[], s32[], f32[64,128])) -> (s32[], s32[], f32[64,128]) {
  %s = (s32[], s32[], f32[64,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %cache = f32[64,128]{1,0:T(8,128)} get-tuple-element(%s), index=2
  %taken = f32[8,128]{1,0:T(8,128)S(1)} fusion(%cache, %j), kind=kLoop, calls=%block, metadata={op_name="jit(decode)/while/body/verify/slice"}
  ROOT %again = (s32[], s32[], f32[64,128]{1,0:T(8,128)}) tuple(%j, %n, %cache)
}

%product (mp0: bf16[16,256], mp1: bf16[256,128]) -> f32[16,128] {
  %mp0 = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %mp1 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %dot = f32[16,128]{1,0:T(8,128)S(1)} convolution(%mp0, %mp1), dim_labels=bf_io->bf
}

%round (t: (s32[], f32[8,128], f32[64,128], bf16[16,256], bf16[256,128])) -> (s32[], f32[8,128], f32[64,128], bf16[16,256], bf16[256,128]) {
  %t = (s32[], f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %weights = f32[8,128]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %keys = f32[64,128]{1,0:T(8,128)} get-tuple-element(%t), index=2
  %x = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%t), index=3
  %m = bf16[256,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=4
  %start3 = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%k, %weights)
  %drafts = (s32[], f32[8,128]{1,0:T(8,128)}) while(%start3), condition=%cond3, body=%body3
  %startlive = (s32[], s32[], f32[64,128]{1,0:T(8,128)}) tuple(%k, %k, %keys)
  %reads = (s32[], s32[], f32[64,128]{1,0:T(8,128)}) while(%startlive), condition=%condlive, body=%bodylive
  %y = f32[16,128]{1,0:T(8,128)S(1)} fusion(%x, %m), kind=kOutput, calls=%product, metadata={op_name="jit(decode)/while/body/verify/dot"}
  %sum = f32[16,128]{1,0:T(8,128)S(1)} all-reduce(%y), metadata={op_name="jit(decode)/while/body/verify/dot"}
  %ahead = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %there = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%ahead)
  %late = f32[8,128]{1,0:T(8,128)S(1)} negate(%there), metadata={op_name="jit(decode)/while/body/verify/neg"}
  ROOT %all = (s32[], f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) tuple(%k, %weights, %keys, %x, %m)
}

%forever (u: (s32[], f32[8,128], f32[64,128], bf16[16,256], bf16[256,128])) -> pred[] {
  %u = (s32[], f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (e: (s32[], f32[8,128], f32[64,128], bf16[16,256], bf16[256,128])) -> (s32[], f32[8,128], f32[64,128], bf16[16,256], bf16[256,128]) {
  %e = (s32[], f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %rounds = (s32[], f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) while(%e), condition=%forever, body=%round
}
"""  # noqa: E501
TILE = 8 * 128 * 4


@pytest.fixture(scope="module")
def steps():
    return Traffic(parse(PROGRAM), live_blocks=5).of_round()


def test_a_loop_counts_as_often_as_it_runs(steps):
    assert steps["draft"].hbm == 3 * TILE


def test_a_loop_to_the_live_length_runs_for_the_live_blocks(steps):
    blocks, copied, weights = 5 * TILE, TILE, 256 * 128 * 2
    assert steps["verify"].hbm == blocks + copied + weights


@pytest.mark.parametrize(("blocks", "read"), [(2, 2), (5, 3)])
def test_a_ring_has_only_so_many_blocks(blocks, read):
    """A cache of 384 slots has three, however many tokens are live."""
    text = PROGRAM.replace("f32[64,128]", "f32[384,128]")
    text = text.replace(
        "%part = f32[8,128]{1,0:T(8,128)S(1)}", "%part = f32[128,128]{1,0:S(1)}"
    )
    found = Traffic(parse(text), blocks).of_round()["verify"].hbm
    assert found == read * 128 * 128 * 4 + TILE + 256 * 128 * 2


SUM = "%sum = f32[16,128]{1,0:T(8,128)S(1)} all-reduce(%y)"


@pytest.mark.parametrize(
    ("line", "moved", "hbm"),
    [
        # All that it sums up, not the largest alone.
        (
            "%sum = (f32[16,128]{1,0:S(1)}, f32[8,128]{1,0:S(1)}) all-reduce(%y, %y)",
            {"all-reduce": 24 * 128 * 4},
            0,
        ),
        # A chip sends all but its own part of what it is given.
        (
            "%sum = f32[2,128]{1,0:S(1)} reduce-scatter(%y)",
            {"reduce-scatter": 16 * 128 * 4},
            0,
        ),
        # The result alone is made, here in main memory; the end of it makes nothing.
        (
            "%begun = (f32[16,128]{1,0:S(1)}, f32[64,128]{1,0}) all-gather-start(%y)\n"
            "  %sum = f32[64,128]{1,0} all-gather-done(%begun)",
            {"all-gather": 64 * 128 * 4},
            64 * 128 * 4,
        ),
        (
            "%begun = ((f32[16,128]{1,0:S(1)}), (f32[16,128]{1,0:S(1)}))"
            " collective-permute-start(%y)\n"
            "  %sum = f32[16,128]{1,0:S(1)} collective-permute-done(%begun)",
            {"collective-permute": 16 * 128 * 4},
            0,
        ),
    ],
)
def test_what_collectives_move(steps, line, moved, hbm):
    assert SUM in PROGRAM
    other = Traffic(parse(PROGRAM.replace(SUM, line)), 5).of_round()
    found = {k: v for step in other.values() for k, v in step.moved.items()}
    assert found == moved
    more = sum(step.hbm for step in other.values()) - sum(s.hbm for s in steps.values())
    assert more == hbm


def test_what_stays_on_the_chip_is_no_traffic():
    text = PROGRAM.replace("%w = f32[8,128]{1,0:T(8,128)}", "%w = f32[8,128]{1,0:S(1)}")
    assert Traffic(parse(text), 5).of_round()["draft"].hbm == 0


def test_products_and_collectives_are_counted(steps):
    verify = steps["verify"]
    assert verify.flops == 2 * 16 * 128 * 256
    assert verify.moved == {"all-reduce": 16 * 128 * 4}
    assert (verify.calls, verify.largest) == (1, 16 * 128)
    assert steps["accept"].hbm == 0


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[10,100]{1,0}", 4000),
        ("f32[10,100]{1,0:T(8,128)}", 16 * 128 * 4),
        ("f32[10,100]{0,1:T(8,128)}", 128 * 104 * 4),
        ("bf16[49152,576]{1,0:T(8,128)(2,1)}", 49152 * 640 * 2),
        ("pred[]", 1),
    ],
)
def test_tiles_pad_the_axes_that_vary_fastest(shape, size):
    (array,) = arrays_of(shape)
    assert array.size == size
    assert array.in_hbm == ("[]" not in shape)


def test_host_traffic_is_seen():
    assert host_traffic(PROGRAM) == []
    bad = (
        PROGRAM + '  %o = token[] custom-call(), custom_call_target="xla_ffi_callback"'
    )
    assert len(host_traffic(bad)) == 1
