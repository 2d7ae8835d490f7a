"""kernels.py against the plain PyTorch reference of quant.py, byte for byte: on a GPU the compiled kernels, elsewhere
the same source in Triton's interpreter (conftest.py). No tolerance anywhere.

Cases with values known beforehand come first, so that the two cannot be wrong together; CASE numbers are those of the
project's collection of bug reports. The last test compiles every kernel for Hopper, which needs no GPU, and looks at
what the compiler made of it."""

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import kernels
import model
import quant
from quant import Fp4, Fp8, dequantize

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHARED_LIMIT = 232448  # bytes of shared memory that a Hopper program can have
FP8_FROM_FLOAT = ("quantize_fp8_rows", "quantize_fp8_blocks", "quantize_fp8_weight")
FROM_FLOAT = (*FP8_FROM_FLOAT, "quantize_fp8_rows_and_cols", "quantize_fp4_rows", "quantize_fp8_fp4_rows")
FROM_FP8, FROM_FP4 = ("fp8_to_fp4", "fp8_rows_to_cols"), ("fp4_to_fp8_rows", "fp4_to_fp8_cols")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = {"floor": (8, False), "even": (7, False), "ceil": (6, True)}  # amax < 8 * 2^e, < 7 * 2^e, <= 6 * 2^e

# -----------------------------------------------------------------------------
# helpers


@pytest.fixture(autouse=True)
def filled_memory():
    """Fresh memory holds NaN or 255, so that a byte which a kernel forgets cannot be right by chance (CASE 11)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def flat(values):
    """Tuples of tuples, as Fp8 and Fp4 are, in one list."""
    return [v for value in values for v in flat(value)] if isinstance(values, (tuple, list)) else [values]


def run(name, *args):
    """The kernel's output tensors. Arguments are on DEVICE, or are moved there; lists stay lists."""
    there = lambda a: [there(one) for one in a] if isinstance(a, list) else a.to(DEVICE) if isinstance(a, torch.Tensor) else a
    return getattr(kernels, name)(*(there(a) for arg in args for a in ([arg] if isinstance(arg, list) else flat([arg]))))


def raw(x):
    """All bytes of x, on the CPU. Cloned, since a single element keeps any stride, and bytes want stride 1."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu()


def assert_same(got, want):
    """Tensors alike in shape, dtype and every byte; strides are free."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"output {i}"
        differ = raw(a) != raw(b)
        assert not differ.any(), f"output {i}: {differ.sum()} of {differ.numel()} bytes differ"


def check(name, *args):
    """Kernel and reference agree; gives the kernel's output on the CPU."""
    got = run(name, *args)
    assert_same(got, flat([getattr(quant, name)(*args)]))
    return [t.cpu() for t in got]


def codes(data):
    return data.view(torch.uint8).flatten().tolist()


def nibbles(data):
    return torch.stack([data & 15, data >> 4], -1).flatten().tolist()


def row(values, width=32, dtype=torch.float32):
    """[1, width] with the values first, then zeros."""
    return torch.tensor([[*values, *[0.0] * (width - len(values))]]).to(dtype)


def with_neighbours(x):
    """x, the floats next to each of its values, and the least and the largest there are."""
    below, above = (torch.nextafter(x, torch.tensor(d)) for d in (0.0, math.inf))
    return torch.cat([x, below, above, torch.tensor([2.0 ** -149, 3.4028234e38])])


def fp8(bits, exponents):
    """FP8 from codes [M, K] and exponents [M, ceil(K/128)] as lists or tensors; None stands for NaN."""
    scale = torch.tensor([[math.nan if e is None else 2.0 ** e for e in line] for line in exponents])
    return Fp8(torch.as_tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn), scale)


def sample(M, K, dtype, seed):
    """Values over many binades, zeros of both signs and a zero block; odd seeds NaN and Inf, some subnormals."""
    g = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-16, 8, (M, 1), generator=g) + torch.randint(-8, 8, (1, K), generator=g)
    x = torch.randn(M, K, generator=g) * 2.0 ** (exponent - (120 if seed % 4 == 3 else 0))
    x[torch.rand(M, K, generator=g) < 0.1] = 0.0
    x[torch.rand(M, K, generator=g) < 0.1] = -0.0
    x[M // 2, :32] = 0.0
    if seed % 2:
        x[-1, -1], x[M // 3, K // 2] = math.nan, -math.inf
    return x.to(dtype)


def formats(x):
    """x, its FP8 rows and its MXFP4 rows, by the reference."""
    return {**dict.fromkeys(FROM_FLOAT, x), **dict.fromkeys(FROM_FP8, quant.quantize_fp8_rows(x)),
            **dict.fromkeys(FROM_FP4, quant.quantize_fp4_rows(x))}


# -----------------------------------------------------------------------------
# FP8 from float


@pytest.mark.parametrize("dtype", DTYPES)
def test_e4m3_rounding(dtype):  # CASES 4 and 8
    values = [448, 126.25, 17, 19, 25, 27, -17, *(n * 2 ** -9 for n in (1.5, 2.5, .5, .75, 7.5, 7.25))]
    want = [448, 128, 16, 20, 24, 28, -16, *(n * 2 ** -9 for n in (2, 2, 0, 1, 8, 7))]
    data, scale = check("quantize_fp8_rows", row(values, dtype=dtype))
    assert scale.item() == 1
    assert data.float()[0, :len(want)].tolist() == want


def test_every_e4m3_code_is_kept():
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(nan=0.0).view(2, 128)
    for name in ("quantize_fp8_rows", "quantize_fp8_blocks"):
        for e in (0, -100, 100):
            data, scale = check(name, x * 2.0 ** e)
            assert (scale == 2.0 ** e).all()
            assert codes(data) == [*range(127), 0, *range(128, 255), 0]


def test_fp8_scale_is_the_least_power_that_holds_amax():
    exponents = torch.cat([torch.arange(-133, -110), torch.arange(-5, 5), torch.arange(115, 127)])
    amax = with_neighbours(1.75 * 2.0 ** exponents)
    scale = check("quantize_fp8_rows", amax[:, None])[1]
    for a, s in zip(amax.tolist(), scale.flatten().tolist()):
        e = next(e for e in range(-126, 120) if e == 119 or Fraction(a) <= 448 * Fraction(2) ** e)
        assert s == 2.0 ** e, a


def test_fp8_extremes():
    data, scale = check("quantize_fp8_rows", row([3.4028234e38, -3.4028234e38, 2.0 ** 119]))
    assert (codes(data)[:3], scale.item()) == ([0x7E, 0xFE, 0x38], 2.0 ** 119)  # saturates; decoding stays finite
    for dtype in (torch.float32, torch.bfloat16):  # subnormal inputs: nothing is flushed
        data, scale = check("quantize_fp8_rows", row([2.0 ** -130, -(2.0 ** -132), 2.0 ** -133], dtype=dtype))
        assert (codes(data)[:3], scale.item()) == ([0x18, 0x88, 0x04], 2.0 ** -126)


# -----------------------------------------------------------------------------
# MXFP4 from float


@pytest.mark.parametrize("rule", RULES)
def test_e2m1_ties(rule):  # CASE 2
    values = [6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, .25000003, 2.5000002, 5.0000005, -.25, -.75, -5, -.1]
    data, scale = check("quantize_fp4_rows", row(values), rule)
    assert (scale.item(), nibbles(data)[:15]) == (127, [7, 0, 2, 2, 4, 4, 6, 6, 1, 5, 7, 8, 10, 14, 8])


def test_block_size_is_said_twice_alike():
    assert kernels.MX.value == quant.BLOCK and 128 % quant.BLOCK == quant.BLOCK % 8 == 0


def test_nibble_order():  # CASE 3
    data, scale = check("quantize_fp4_rows", row([.5, 1, 1.5, 2, 3, 4, 6, -.5]))
    assert (data[0, :4].tolist(), scale.item()) == ([0x21, 0x43, 0x65, 0x97], 127)


@pytest.mark.parametrize("rule", RULES)
def test_mx_scale_rule(rule):
    largest, inclusive = RULES[rule]
    exponents = torch.cat([torch.arange(-126, -120), torch.arange(-2, 3), torch.arange(123, 127)])
    amax = with_neighbours(torch.cat([m * 2.0 ** exponents for m in (1.0, 1.5, 1.75)]))
    scale = check("quantize_fp4_rows", torch.nn.functional.pad(amax[:, None], (31, 0)), rule)[1]
    for a, b in zip(amax.tolist(), scale.flatten().tolist()):
        a = Fraction(a)
        fits = lambda e: a < largest * Fraction(2) ** e or (inclusive and a == largest * Fraction(2) ** e)
        assert b == next(b for b in range(1, 253) if b == 252 or fits(b - 127)), a


def test_mx_extremes():
    data, scale = check("quantize_fp4_rows", row([3.4028234e38, -2.0 ** 124, 2.0 ** 126]))
    assert (scale.item(), nibbles(data)[:3]) == (252, [7, 9, 4])
    for dtype in (torch.float32, torch.bfloat16):
        data, scale = check("quantize_fp4_rows", row([2.0 ** -127, -(2.0 ** -128)], dtype=dtype))
        assert (scale.item(), nibbles(data)[:2]) == (1, [1, 8])


# -----------------------------------------------------------------------------
# zeros, non-finite values, places


def test_zero_tiles_beside_others():  # CASE 1
    x = torch.zeros(256, 256)
    x[0, 0], x[0, 1] = 1, -0.0
    rows, blocks = Fp8(*check("quantize_fp8_rows", x)), Fp8(*check("quantize_fp8_blocks", x))
    fp4 = Fp4(*check("quantize_fp4_rows", x))
    for q in (rows, blocks, fp4):
        assert torch.equal(dequantize(q), x)
    assert rows.scale.flatten().tolist() == [2.0 ** -8, *[2.0 ** -126] * 511]
    assert fp4.scale.flatten().tolist() == [125, *[0] * 2047]
    assert (codes(rows.data)[:3], nibbles(fp4.data)[:3]) == ([0x78, 0x80, 0], [6, 8, 0])
    for q in (check("fp4_to_fp8_rows", fp4), check("fp8_to_fp4", rows)):
        assert torch.equal(dequantize((Fp4 if q[0].dtype == torch.uint8 else Fp8)(*q)), x)
    for name, q in (("fp4_to_fp8_cols", fp4), ("fp8_rows_to_cols", rows)):
        assert torch.equal(dequantize(Fp8(*check(name, q))), x.t())


@pytest.mark.parametrize("m, k, bad", ((0, 0, math.nan), (1, 127, math.inf), (129, 128, -math.inf)))
def test_non_finite_spoils_its_own_tile_and_no_other(m, k, bad):
    x = torch.ones(130, 192)
    x[m, k] = bad
    i, j = torch.arange(130)[:, None], torch.arange(192)
    tile = (i // 128 == m // 128) & (j // 128 == k // 128)
    line, block = tile & (i == m), (i == m) & (j // 32 == k // 32)
    rows, fp4 = Fp8(*check("quantize_fp8_rows", x)), Fp4(*check("quantize_fp4_rows", x))
    assert torch.equal(dequantize(rows).isnan(), line)
    assert torch.equal(dequantize(fp4).isnan(), block)
    assert torch.equal(dequantize(Fp8(*check("quantize_fp8_blocks", x))).isnan(), tile)
    assert torch.equal(dequantize(Fp8(*check("fp4_to_fp8_rows", fp4))).isnan(), line)
    assert torch.equal(dequantize(Fp4(*check("fp8_to_fp4", rows))).isnan(), line)
    for name, q in (("fp4_to_fp8_cols", fp4), ("fp8_rows_to_cols", rows)):
        assert torch.equal(dequantize(Fp8(*check(name, q))).isnan(), tile.t())


def test_scales_are_where_they_belong():
    exponent = torch.arange(2 * 3 * 2).view(2, 3, 2)  # [E, N/128, K/128], every tile another
    w = (448 * 2.0 ** exponent).repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :192]
    data, scale, data_t, scale_t = check("quantize_fp8_weight", w)
    assert torch.equal(scale, 2.0 ** exponent) and torch.equal(scale_t, scale.mT) and set(codes(data)) == {0x7E}
    x = 6 * 2.0 ** torch.arange(3 * 10).view(3, 10).repeat_interleave(32, 1)  # [M, K/32]
    _, scale8, _, scale4 = check("quantize_fp8_fp4_rows", x)
    assert scale4.flatten().tolist() == [127 + i for i in range(30)]
    assert scale8.log2().int().tolist() == [[10 * m + k - 6 for k in (3, 7, 9)] for m in range(3)]


# -----------------------------------------------------------------------------
# small format to small format


def test_every_e8m0_byte():
    data = torch.arange(16, dtype=torch.uint8).mul(17).repeat(256, 1)  # each code twice
    q = Fp4(data, torch.arange(256, dtype=torch.uint8)[:, None])
    rows = Fp8(*(t.cpu() for t in run("fp4_to_fp8_rows", q)))
    assert rows.scale.flatten()[:255].log2().tolist() == [min(max(b - 133, -126), 119) for b in range(255)]
    want, got = dequantize(q)[1:255], dequantize(rows)[1:255]
    fits = want.isfinite()  # 6 * 2^127 of byte 254, which quantisers here never write, is no float32
    assert torch.equal(got[fits], want[fits]) and got.isfinite().all() and set(codes(rows.data[255])) == {0x7F}
    for name in FROM_FP4:
        check(name, q)


@pytest.mark.parametrize("name", FROM_FP4)
def test_exponent_spread(name):
    """Codes survive exactly up to a spread of 14; then the error is at most 2^-18 of the largest value."""
    data = torch.arange(16, dtype=torch.uint8).mul(17).repeat(1, 2)
    for spread in (0, 1, 7, 13, 14, 15, 16, 20):
        q = Fp4(data, torch.tensor([[140, 140 - spread]], dtype=torch.uint8))
        got = dequantize(Fp8(*check(name, q))).view(-1)
        error = (got - dequantize(q)[0]).abs().max().item()
        assert (error == 0) == (spread <= 14) and error <= 2.0 ** -18 * 6 * 2.0 ** 13


def test_fp8_to_fp4_every_code():
    top = torch.arange(128, dtype=torch.uint8)[:, None]
    data = torch.cat([top, top // 2 | 0x80, top * torch.tensor([[i / 30 for i in range(30)]])], 1).to(torch.uint8)
    for e in (0, -126, -120, 119):
        data4, byte = check("fp8_to_fp4", fp8(data, [[e]] * 128))
        k_m = [(math.frexp(v)[1] - 1, math.frexp(v)[0] * 2) for v in data[1:127, 0].view(torch.float8_e4m3fn).tolist()]
        want = [0, *(min(max(k - 2 + (m >= 1.75) + e + 127, 1), 252) for k, m in k_m), 255]
        assert byte.flatten().tolist() == want and not data4[127].any()
    assert check("fp8_to_fp4", fp8(data[:1], [[None]]))[1].item() == 255


def test_rows_to_cols_rounds_into_the_subnormals():
    """448 moved down by 14 ... 20 is 14 7 3.5 1.75 .875 .4375 .21875 steps of 2^-9; cutting gives 3 1 0 for 4 2 1."""
    data = torch.full((8, 2), 0x7E, dtype=torch.uint8)
    data[:, 1] = 0xFE
    out, scale = check("fp8_rows_to_cols", fp8(data, [[e] for e in (0, -14, -15, -16, -17, -18, -19, -20)]))
    assert codes(out) == [0x7E, 14, 7, 4, 2, 1, 0, 0, 0xFE, 0x8E, 0x87, 0x84, 0x82, 0x81, 0x80, 0x80]
    assert (scale == 1).all() and scale.shape == (2, 1)


def test_rows_to_cols_every_code():
    data = torch.arange(256, dtype=torch.uint8).repeat(130, 1)
    exponents = [[-(m % 21), 3] for m in range(130)]
    out, _ = check("fp8_rows_to_cols", fp8(data, exponents))
    assert codes(out[:, 0]) == [*range(255), 0x7F]  # a NaN code is one NaN, not a NaN tile
    exponents[129] = [None, -126]
    out, scale = check("fp8_rows_to_cols", fp8(data, exponents))
    assert scale.isnan().sum(0).tolist() == [0, 128] and set(codes(out[:128, 128:])) == {0x7F}


# -----------------------------------------------------------------------------
# random data, odd shapes, strides, sizes


SHAPES = [(1, 32), (1, 448), (2, 128), (2, 192), (3, 96), (3, 320), (13, 64), (13, 160), (67, 32), (67, 192), (67, 448),
          (128, 128), (128, 160), (133, 96), (133, 320), (300, 64), (300, 192)]


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_odd_shapes(seed):  # CASE 5
    M, K = SHAPES[seed]
    for name, arg in formats(sample(M, K, DTYPES[seed % 3], seed)).items():
        check(name, arg)


@pytest.mark.parametrize("K", (1, 5, 130, 2112))
def test_fp8_of_any_width(K):
    x = sample(5, K, torch.bfloat16, K)
    x[:, -(-K // 128) * 128 - 128:] *= 1000  # the last, short tile
    for name in FP8_FROM_FLOAT:
        check(name, x)
    check("fp8_rows_to_cols", quant.quantize_fp8_rows(x))


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    check("quantize_fp4_rows", sample(67, 192, torch.float32, 2), rule)


def test_any_strides():  # CASE 6
    x = sample(96, 160, torch.bfloat16, 0).to(DEVICE)
    slices = x.t(), x[:, ::5], x[::3, 64:], x.view(48, 2, 160)[:, 1]
    for view in (*slices, x[:1].expand(13, 160), x[:, :1].expand(96, 32)):
        for name in FROM_FLOAT:
            assert_same(run(name, view), run(name, view.contiguous()))
    experts = x.view(96, 2, 80).transpose(0, 1)
    assert_same(run("quantize_fp8_weight", experts), run("quantize_fp8_weight", experts.contiguous()))
    data, scale = run("quantize_fp8_blocks", x)
    q8 = data.t().contiguous().t(), scale.expand(96, 2)  # the block's scale for each of its rows
    q4 = [t.t().contiguous().t() for t in run("quantize_fp4_rows", x)]
    for name, q in [(name, q8) for name in FROM_FP8] + [(name, q4) for name in FROM_FP4]:
        assert_same(run(name, *q), run(name, *(t.contiguous() for t in q)))


def test_empty():
    for M, K in ((0, 128), (0, 32), (5, 0)):
        x = torch.zeros(M, K)
        q8 = (x.to(torch.float8_e4m3fn), torch.zeros(M, -(-K // 128)))
        q4 = (torch.zeros(M, K // 2, dtype=torch.uint8), torch.zeros(M, K // 32, dtype=torch.uint8))
        assert [t.shape for t in run("quantize_fp8_fp4_rows", x)] == [t.shape for t in (*q8, *q4)]
        assert [t.shape for t in run("fp8_rows_to_cols", *q8)] == [(K, M), (K, -(-M // 128))]
        assert [t.shape for t in run("fp4_to_fp8_cols", *q4)] == [(K, M), (K, -(-M // 128))]
        assert [t.shape for t in run("fp4_to_fp8_rows", *q4)] == [t.shape for t in q8]
        assert [t.shape for t in run("fp8_to_fp4", *q8)] == [t.shape for t in q4]
    assert [t.shape for t in run("quantize_fp8_weight", torch.zeros(0, 300, 64))][1::2] == [(0, 3, 1), (0, 1, 3)]


@pytest.mark.parametrize("M, K", [(256, 256), (130, 304), (133, 302), (7, 33)])
def test_cols_with_one_scale_a_tile(M, K):
    for seed in (2, 3):
        check("quantize_fp8_rows_and_cols", sample(M, K, torch.bfloat16, seed), True)


@pytest.mark.skipif(not CUDA, reason="needs a GPU's memory and speed")
@pytest.mark.parametrize("M, K", [(300001, 7168), (524289, 4096), (32 * 65536 + 1, 32), (1, 128 * 65536 + 32)])
def test_huge(M, K):  # CASE 7: more than 2^31 elements, more than 65535 tiles along either axis
    x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda").normal_()
    m, k = M // 128 * 128, (K - 1) // 128 * 128  # the last tile, alone
    q8, q4 = run("quantize_fp8_rows", x), run("quantize_fp4_rows", x)
    last8, last4 = (q8[0][m:, k:], q8[1][m:, k // 128:]), (q4[0][m:, k // 2:], q4[1][m:, k // 32:])
    for names, whole, last in ((FROM_FLOAT, [x], [x[m:, k:]]), (FROM_FP8, q8, last8), (FROM_FP4, q4, last4)):
        for name in names:
            alone = run(name, *last)
            assert_same([t[-a.shape[0]:, -a.shape[1]:] for t, a in zip(run(name, *whole), alone)], alone)


# -----------------------------------------------------------------------------
# data movement of an MoE layer


def routing(T, K, E, seed=0):
    """ids [T, K], some -1, expert 1 without tokens; quant's groups; their rows in all, and each tile's shift."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (T, K), generator=g).int()
    ids[ids == 1] = 0 if E > 1 else 1
    ids = ids.clamp(max=E - 1)
    return ids, quant.group_rows(ids, E)


def kernel_groups(ids, E, num_rows=None, num_pairs=None):
    """kernels.group_rows with as many rows as may be needed, or num_rows; regroup_rows makes the same maps from what is kept."""
    num_rows = (ids.numel() + 127 * E + 127) // 128 * 128 if num_rows is None else num_rows
    pair, row, layout, *of_tiles = run("group_rows", ids, E, num_rows, num_pairs)
    assert_same(run("regroup_rows", row, layout, num_rows), [pair, *of_tiles])
    return pair, row, layout, *of_tiles


@pytest.mark.parametrize("T, K, E", [(50, 2, 3), (300, 4, 16), (1, 1, 1), (40, 3, 256), (7, 8, 8), (130, 1, 2)])
def test_routing_maps(T, K, E):
    for ids, groups in (routing(T, K, E, 1), *[(i, quant.group_rows(i, E)) for i in (
            torch.full((T, K), E - 1, dtype=torch.int32), torch.full((T, K), -1, dtype=torch.int32))]):
        pair, row, layout, expert, shift = (t.cpu() for t in kernel_groups(ids, E))
        M, tiles = len(groups.pair_M), len(groups.pair_M) // 128
        assert_same([pair[:M], row, layout], [groups.pair_M.int(), groups.row_TK, groups.layout])
        assert (pair[M:] == -1).all() and (expert[tiles:] == -1).all()
        counts = torch.bincount(ids[ids >= 0].long(), minlength=E)
        first = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        of_tile = torch.searchsorted(groups.offsets.long(), torch.arange(tiles) * 128, right=True) - 1
        assert torch.equal(expert[:tiles], of_tile.int()) and torch.equal(expert[:tiles], groups.expert)
        assert torch.equal(shift[:tiles], (groups.offsets.long()[of_tile] - first[of_tile]).int())
        assert torch.equal(shift[:tiles], groups.shift)


def test_routing_leaves_out_what_has_no_place():
    """Experts that do not exist, and pairs beyond the room that was given, are as if they were elsewhere."""
    ids = torch.tensor([[0, 5], [2, 1], [-7, 1]], dtype=torch.int32)
    want = kernel_groups(torch.tensor([[0, -1], [-1, 1], [-1, 1]], dtype=torch.int32), 2, 256)
    assert_same(kernel_groups(ids, 2, 256), want)
    ids = torch.zeros(300, 1, dtype=torch.int32)
    pair, row, layout, _, _ = kernel_groups(ids, 1, 256, 100)
    assert row.flatten().tolist() == [*range(100), *[-1] * 200] and layout.tolist() == [[0, 256], [0, 0], [100, 0]]
    assert pair.tolist() == [*range(100), *[-1] * 156]
    ids[:100], ids[100:200] = 2, 1  # the third expert's first pair would be one too many, its rows begin behind the last
    pair, row, layout, expert, _ = kernel_groups(ids, 3, 256, 200)
    assert row.flatten().tolist() == [*[-1] * 100, *range(128, 228), *range(100)]
    assert layout[0].tolist() == [0, 128, 256, 256] and layout[2, 2] <= 256 and expert.tolist() == [0, 1]
    assert pair.tolist() == [*range(200, 300), *[-1] * 28, *range(100, 200), *[-1] * 28]


def test_routing_example():  # that of the comment in kernels.py
    ids = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    pair, row, layout, expert, shift = (t.tolist() for t in kernel_groups(ids, 2, 256))
    assert pair == [1] + [-1] * 127 + [0, 2] + [-1] * 126 and row == [[128], [0], [129]]
    assert layout == [[0, 128, 256], [0, 127, 0], [1, 130, 0]] and expert == [0, 1] and shift == [0, 127]


@pytest.mark.parametrize("width", (96, 256))
def test_fan_out(width):
    """Rows and cols, from FP8 and from MXFP4, are those of the gathered tensor; rows past the end stay untouched."""
    ids, groups = routing(90, 3, 4)
    x = sample(90, width, torch.bfloat16, 5)
    pair, _, layout, _, _ = kernel_groups(ids, 4)
    M, token = len(groups.pair_M), quant._token(groups)
    q8, q4 = quant.quantize_fp8_rows(x), quant.quantize_fp4_rows(x)
    g8, g4 = quant._gather(q8, token), quant._gather(q4, token)
    compact = lambda q: (q.data, q.scale[::128])
    args = pair, layout[0, -1:], 3
    assert_same([run("fan_out_rows", x, *args)[:M]], [quant._gather(x, token)])
    for name, source, want in (("fp4_fan_out_rows", q4, quant.fp4_to_fp8_rows(g4)), ("fp8_fan_out_rows", q8, g8)):
        assert_same([t[:M] for t in run(name, source, *args)], want)
    for name, source, want in (("fp4_fan_out_cols", q4, compact(quant.fp4_to_fp8_cols(g4))),
                               ("fp8_fan_out_cols", q8, compact(quant.fp8_rows_to_cols(g8)))):
        data, scale = run(name, source, *args)[:2]
        assert_same([data[:, :M], scale[:, :M // 128]], want)
        if M < len(pair):
            assert set(codes(data[:, M:].contiguous())) <= {0x7F, 0xFF}  # what filled_memory left there
    cols_and_rows = run("fp8_fan_out_cols", q8, *args, True)
    assert_same([t[:M] for t in cols_and_rows[2:]], g8)


@pytest.mark.parametrize("M, K", [(40, 384), (41, 256), (7, 768), (3, 32), (5, 1408), (1, 2048)])
def test_rms_norm(M, K):
    """As near as bfloat16 allows, and quantised as the reference quantises what came out."""
    x, weight = sample(M, K, torch.bfloat16, 4), torch.randn(K, generator=torch.Generator().manual_seed(1))
    y, data8, scale8, data4, scale4 = run("rms_norm", x, weight, 1e-6, True, True, True)
    want = quant._norm_values(x.double(), weight.double(), 1e-6)[0]
    assert ((y.cpu().double() - want).abs() <= want.abs() * 2.0**-8 + 1e-30).all()
    assert_same([data8, scale8, data4, scale4], flat(quant.quantize_fp8_fp4_rows(y.cpu())))
    for some in ((True, False, False), (False, True, False), (False, False, True)):
        got, want = run("rms_norm", x, weight, 1e-6, *some), (y, data8, scale8, data4, scale4)
        kept = [t for t, keep in zip(want, (some[0], some[1], some[1], some[2], some[2])) if keep]
        assert_same([t for t in got if t is not None], kept)


def test_rms_norm_backward():
    x, dy = (torch.randn(37, 416, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    weight = torch.randn(416, generator=torch.Generator().manual_seed(2))
    leaf, w = x.double().requires_grad_(), weight.double().requires_grad_()
    (leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + 1e-6) * w).backward(dy.double())
    dx, dw = (t.cpu() for t in run("rms_norm_backward", dy, x, weight, 1e-6))
    assert ((dx.double() - leaf.grad).abs() <= leaf.grad.abs() * 2.0**-8 + 1e-4).all()
    assert (dw - w.grad).norm() <= 1e-6 * w.grad.norm()


@pytest.mark.parametrize("first, wide", [(0, 320), (64, 320), (8, 272), (2, 320), (0, 258), (0, 257), (1, 320)])
def test_rms_norm_of_rows_that_lie_apart(first, wide):
    """As MLA's latents do, columns of a wider matrix: the same bits as of a copy, whatever is asked for. (Widths and beginnings
    that no 16 bytes divide are copied.)"""
    whole, weight = sample(37, wide, torch.bfloat16, 5), torch.randn(256, generator=torch.Generator().manual_seed(1))
    dy = torch.randn(37, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    apart = whole.to(DEVICE)[:, first:first + 256]
    for name, before in (("rms_norm", ()), ("rms_norm_backward", (dy,))):
        assert_same(*(list(run(name, *before, x, weight, 1e-6)[:2 if before else 1]) for x in (apart, apart.contiguous())))
    if apart.stride(0) % 8:  # a lone row counts as contiguous, whatever its stride
        assert_same(*(run("rms_norm", x[8:9], weight, 1e-6)[:1] for x in (apart, apart.contiguous())))
    whole = run("rms_norm", apart.contiguous(), weight, 1e-6, True, True, True)
    assert_same(run("rms_norm", apart, weight, 1e-6, False, True, True)[1:], whole[1:])


@pytest.mark.parametrize("batch, length, heads, widths, strided", [
    (2, 5, 4, (32, 16, 32), True), (1, 3, 6, (24, 12, 40), True), (3, 2, 33, (8, 2, 6), False),
    (1, 1, 1, (2, 4, 2), False)])
def test_attention_inputs(batch, length, heads, widths, strided):
    """Forward and backward. Sums over heads are exact here, so that they do not depend on the order."""
    nope, rope, value = widths
    T, g = batch * length, torch.Generator().manual_seed(heads)
    config = model.ModelConfig(n_heads=heads, nope_dim=nope, rope_dim=rope, v_dim=value)
    one_pass = model.Pass(batch, model.rope_table(config, length, "cpu"), quant.RECIPES["bf16"], frozenset())
    random = lambda *shape: torch.randn(*shape, generator=g).bfloat16()
    q, kv = random(T, heads * (nope + rope)), random(T, heads * (nope + value))
    k_rope = random(T, 6 + rope)[:, 6:] if strided else random(T, rope)
    want_q, k, v = model.heads(q.clone(), kv, k_rope, one_pass, config)
    got_q = q.clone().to(DEVICE)
    got = run("attention_inputs", got_q, kv, k_rope, one_pass.rope, heads, nope)
    assert_same([got_q, *got], [want_q.reshape(T, -1), k.reshape(T, -1), v.reshape(T, -1)])
    assert_same(run("attention_inputs", None, kv, k_rope, one_pass.rope, heads, nope), got)

    dq, dk, dv = (random(batch, length, heads, width) for width in (nope + rope, nope + rope, value))
    dk = (dk * 16).round() / 16  # of 12 bits or so
    want = model.heads_backward(dq.clone(), dk, dv, one_pass, config)
    flat = [t.reshape(T, -1).to(DEVICE) for t in (dq, dk, dv)]
    assert_same([flat[0], *run("attention_inputs_backward", *flat, one_pass.rope, heads, nope)][1:], want[1:])
    assert_same(flat[:1], want[:1])


@pytest.mark.parametrize("save_h", ("fp8", "fp4"))
def test_swiglu(save_h):
    """h is kept as the reference quantises it; a, dh and their scales are the reference's but for rounding of the sigmoid:
    a code at most one step off, in fewer than one of a thousand places."""
    ids, groups = routing(90, 3, 4)
    g = torch.Generator().manual_seed(0)
    pair, _, layout, _, shift = kernel_groups(ids, 4)
    M, P, width = len(groups.pair_M), groups.num_pairs, 256
    h, da = (torch.randn(M, n, generator=g).mul(2).bfloat16() for n in (2 * width, width))
    h[groups.pair_M < 0], da[groups.pair_M < 0] = 0, 0
    p = torch.rand(ids.numel(), generator=g)
    recipe = quant.Recipe("fp8", save_h=save_h)
    a, kept = quant._swiglu_forward(h, p.view(ids.shape), groups, recipe)
    got = run("swiglu", h, p, pair[:M], shift, layout[0, -1:], P, save_h)
    assert_same(got[2:], kept)
    assert_near_codes(Fp8(*got[:2]), a)
    *want, dp_M = quant._swiglu_backward(da, kept, p.view(ids.shape), groups, recipe)
    out = run("swiglu_backward", da, p, pair[:M], shift, layout[0, -1:], *kept)
    for i, q in enumerate(want):
        assert_near_codes(Fp8(*out[2 * i:2 * i + 2]), q)
    dp = out[6].sum(1, keepdim=True).cpu()[groups.pair_M >= 0]
    assert torch.allclose(dp, dp_M[groups.pair_M >= 0], rtol=1e-5, atol=1e-4)


def assert_near_codes(got, want):
    """FP8 alike but for a code one step off, or a scale at its border, in at most one of a thousand places."""
    a, b = dequantize(Fp8(*(t.cpu() for t in got))), dequantize(want)
    same = a == b
    assert (~same).float().mean() <= 1e-3 and (a - b).abs().max() <= b.abs().max() / 8


def swiglu_case(exact):
    """ids, pair, shift, end, P, h, da, p. With `exact`, gates are 32 or more, where the sigmoid is 1 in float32, and all products
    of a row fit into 24 bits: the same bits in any order of operations."""
    ids, groups = routing(90, 3, 4)
    g = torch.Generator().manual_seed(0)
    pair, _, layout, _, shift = kernel_groups(ids, 4)
    M, width = len(groups.pair_M), 256
    h, da = torch.randn(M, 2 * width, generator=g).mul(2), torch.randn(M, width, generator=g)
    if exact:
        h[:, :width] = 2.0 ** torch.randint(5, 8, (M, width), generator=g) * torch.randint(8, 15, (M, width), generator=g) / 8
        da *= 2.0 ** torch.randint(-12, 12, (M, 1), generator=g) * 2.0 ** torch.randint(-6, 6, (1, width), generator=g)
    h[:, :32], h[5:9], da[:, 40:44] = 0, 0, 0
    p = torch.randint(1, 255, (ids.numel(),), generator=g).float() / 256
    return groups, pair[:M], shift, layout[0, -1:], h.bfloat16(), da.bfloat16(), p


@pytest.mark.parametrize("spoilt", (False, True))
@pytest.mark.parametrize("save_h", ("fp8", "fp4", "bf16"))
def test_swiglu_backward_exactly(save_h, spoilt):
    """Where arithmetic is exact, every byte is the reference quantiser's of dgate, dup and a rounded to bfloat16; what stands in
    padding rows of da and h does not matter, and NaN and Inf spoil their own tiles only."""
    groups, pair, shift, end, h, da, p = swiglu_case(exact=True)
    real = groups.pair_M >= 0
    if spoilt:
        rows = real.nonzero().flatten()
        da[rows[3], 7], da[rows[130], 255], h[rows[200], 386], h[rows[60], 5], p[11] = (
            math.nan, math.inf, math.nan, -math.inf, math.nan)
    kept = quant.narrow(groups.take(h), save_h)
    h_M = groups.put(quant._wide(kept))
    d = da.float().masked_fill(~real[:, None], 0)
    (gate, up), p_M = h_M.chunk(2, -1), quant._gather(p, groups.pair_M)[:, None]
    dgate, dup, dp = quant.swiglu_gradients(d, gate, up, p_M)
    dh, a = torch.cat([dgate, dup], -1).bfloat16(), quant.swiglu(gate, up, p_M).bfloat16()
    da[~real] = math.nan
    if save_h == "bf16":
        padded = h.masked_fill(~real[:, None], math.nan)
        out = run("swiglu_backward", da, p, pair, shift, end, padded, None)
    else:
        out = run("swiglu_backward", da, p, pair, shift, end, *kept)
    assert_same(out[:6], flat([quant.quantize_fp8_rows(dh), quant.quantize_fp8_rows(dh.t()), quant.quantize_fp8_rows(a.t())]))
    assert torch.allclose(out[6].sum(1).cpu(), dp.flatten(), rtol=1e-5, atol=1e-4 * dp.nan_to_num(0, 0, 0).abs().max().item(),
                          equal_nan=True)


def test_swiglu_bf16():
    """Forward and backward of the BF16 recipe against autograd in float64, zeros in padding."""
    groups, pair, _, end, h, da, p = swiglu_case(exact=False)
    real = (groups.pair_M >= 0)[:, None]
    h64 = h.double().masked_fill(~real, 0).requires_grad_()
    p64 = quant._gather(p, groups.pair_M).double()[:, None].requires_grad_()
    a = torch.nn.functional.silu(h64[:, :256]) * h64[:, 256:] * p64
    a.backward(da.double().masked_fill(~real, 0))
    h[~real[:, 0]], da[~real[:, 0]] = math.nan, math.nan
    near = lambda got, want: ((got.cpu().double() - want).abs() <= want.abs() * 2.0 ** -8 + 1e-6).all()
    forward = run("swiglu_bf16", h, p, pair, end)
    dh, a_again, dp = run("swiglu_backward_bf16", da, h, p, pair, end)
    assert near(forward, a.detach()) and near(a_again, a.detach()) and near(dh, h64.grad)
    assert (dp.sum(1).cpu().double() - p64.grad[:, 0]).abs().max() <= 1e-5 * p64.grad.abs().max()
    for t in (forward, dh, a_again, dp):
        assert (t.cpu()[~real[:, 0]] == 0).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_sum_rows(dtype):
    ids, groups = routing(20, 4, 5)
    y = torch.randn(len(groups.pair_M), 160, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert_same(flat([run("sum_rows", y, groups.row_TK.int())]), [quant._sum_rows(y, groups)])


@pytest.mark.parametrize("N", (1, 3, 16))
def test_sum_parts(N):
    """Of whole numbers, whose sums are exact in any order: column by column, as SwiGLU's backward writes them, or row by row."""
    parts = torch.randint(-9, 9, (N, 40), generator=torch.Generator().manual_seed(N)).float().t()
    row = torch.randint(-1, 40, (150, 3), generator=torch.Generator().manual_seed(4)).int()
    want = parts.sum(1)[row.long()].masked_fill(row < 0, 0)
    for given in (parts, parts.contiguous()):
        assert_same([run("sum_parts", given, row)], [want])


@pytest.mark.parametrize("width", (128, 192, 1280))
def test_sum_fp8_rows(width):
    """What came home in FP8, one row out of a NaN; and rows that stand apart and scales in bytes, as in messages."""
    q = quant.quantize_fp8_rows(torch.randn(40, width, generator=torch.Generator().manual_seed(3)))
    q.scale[7, 0] = math.nan
    row = torch.randint(-1, 40, (30, 3), generator=torch.Generator().manual_seed(4)).int()
    apart = torch.cat([q.data.view(torch.uint8), torch.zeros(40, 16, dtype=torch.uint8)], 1).to(DEVICE)[:, :width]
    byte = (q.scale.view(torch.int32) >> 23).to(torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        want = quant.sum_rows(q, row, dtype)
        for data, scale in itertools.product((q.data, apart.view(torch.float8_e4m3fn)), (q.scale, byte)):
            got = run("sum_rows", data, row, scale, dtype)
            assert_same([got.nan_to_num(nan=1e9)], [want.nan_to_num(nan=1e9)])  # one NaN is as good as another
    assert want.isnan().any() and not want.isnan().all()


# -----------------------------------------------------------------------------
# messages between ranks


@pytest.mark.parametrize("T, K, local, ranks", (
    (0, 2, 4, 2), (1, 8, 8, 32), (300, 3, 5, 3), (570, 8, 8, 8), (1100, 2, 4, 1), (90, 6, 2, 5), (300, 1, 16, 2)))
def test_place_messages(T, K, local, ranks):
    """Places, and what is sent to each rank, as the reference has them; some choices are none, some tokens have none. Nor does
    it matter if experts do not exist, or a token names one twice."""
    generator = torch.Generator().manual_seed(T)
    ids = torch.rand(T, local * ranks, generator=generator).topk(K, 1).indices.int()
    ids[::7], ids[::3, 0] = -1, -1
    for ids in (ids, torch.randint(-2, local * ranks + 2, (T, K), generator=generator).int(), torch.full_like(ids, local - 1)):
        counts, place = model._count(ids, local, ranks)
        got = torch.full((ranks, local + 1), -5, dtype=torch.int32, device=DEVICE)
        before = run("count_messages", ids, local, got)
        assert_same([*run("place_messages", ids, local, before, got), got], [*place(), counts[0]])


def test_places_example():  # that of the comment in kernels.py
    ids, sent = torch.tensor([[0, 1], [3, 0], [2, 2]], dtype=torch.int32), torch.empty(2, 3, dtype=torch.int32, device=DEVICE)
    before = run("count_messages", ids, 2, sent)
    token, row, place = run("place_messages", ids, 2, before, sent)
    assert token.tolist() == [0, 1, 1, 2, -1, -1] and row.tolist() == [[0, -1], [1, 2], [-1, 3]]
    assert place.tolist() == [[0, 1], [3, 4], [2, 6]] and sent.tolist() == [[2, 1, 2], [2, 1, 2]]
    layout, begin = (torch.empty(size, dtype=torch.int32, device=DEVICE) for size in ((3, 3), (2, 3)))
    kernels.lay_out_messages(sent, layout, begin)  # as if two ranks sent these to one
    assert layout.tolist() == [[0, 128, 256], [0, 124, 0], [4, 130, 0]] and begin.tolist() == [[0, 128, 0], [2, 129, 2]]


def arriving(each, local, held):
    """Of ranks' ids, what they announce to the one that has the experts `held`, [R, E + 1]; and in the order of messages ids that
    count from its first expert, and places."""
    parts, ranks = [], len(each)
    for ids in each:
        counts, places = model._count(ids, local, ranks)
        place = places()[2]
        here = (ids >= held.start) & (ids < held.stop)
        parts.append((counts[0, held.start // local], torch.where(here, ids - held.start, -1)[here.any(1)], place[here.any(1)]))
    counts, ids, place = zip(*parts)
    return torch.stack(counts), torch.cat(ids), torch.cat(place)


def senders():
    """(ids of each rank's tokens, experts a rank): hand-written ones, none, one expert's, and random ones, where some ranks have
    no tokens, some experts no pairs."""
    yield [torch.tensor(ids, dtype=torch.int32).view(-1, 2) for ids in ([[0, 1], [3, 0]], [], [[2, 1], [-1, 2], [1, 1]])], 2
    yield [torch.full((3, 4), -1, dtype=torch.int32)] * 2, 3
    yield [torch.ones(70, 1, dtype=torch.int32)] * 3, 2
    generator = torch.Generator().manual_seed(1)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    for ranks in range(1, 9):
        local, K = number(1, 7), number(1, 7)  # more choices than experts of a rank, too
        open_ = torch.randperm(ranks * local, generator=generator)[:number(1, ranks * local + 1)]
        choose = lambda T: open_[torch.randint(0, len(open_), (T, K), generator=generator)].int()
        drop = lambda ids: ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -1)
        yield [drop(choose(number(0, 90) * number(0, 2))) for _ in range(ranks)], local


@pytest.mark.parametrize("name", ("bf16", "fp8", "fp4"))
def test_rows_are_received_as_if_they_were_grouped(name, monkeypatch):
    """From places and counts the maps that group_rows makes of all received ids, by kernels and by plain PyTorch; scales and
    weights as they were sent."""
    monkeypatch.setattr(quant, "kernels", kernels, raising=False)
    there = lambda t: t.to(DEVICE) if isinstance(t, torch.Tensor) else type(t)(*(there(part) for part in t))
    for each, local in senders():
        num_experts, K = len(each) * local, each[0].shape[1]
        for held in (range(first, first + local) for first in range(0, num_experts, local)):
            counts, ids, place = arriving(each, local, held)
            num_pairs, N = int((ids >= 0).sum()), len(ids)
            assert counts[:, :-1].sum() == num_pairs and counts[:, -1].sum() == N
            x, p = sample(max(N, 3), 128, torch.bfloat16, 5)[:N], torch.rand(N, K)
            q = {"fp8": quant.quantize_fp8_rows, "fp4": quant.quantize_fp4_rows}.get(name, lambda x: x)(x)
            message, got = quant.pack(q, name, place, p), []
            for gpu in (False, True):
                monkeypatch.setattr(quant, "_on_gpu", lambda x: gpu)
                move = there if gpu else lambda t: t
                new = lambda *size: move(torch.full(size, -5, dtype=torch.int32))
                arrivals = quant.Arrivals(new(3, local + 1), new(len(each), local + 1), held, num_experts)
                arrivals.lay_out(move(counts))
                got.append(quant.receive(move(message), name, 128, torch.bfloat16, K, arrivals, num_pairs))
                assert_same(flat([got[-1][0], got[-1][1]]), flat([q, p]))
            (*_, plain), (*_, groups) = got
            want = kernel_groups(ids, local, quant._room(num_pairs, local), num_pairs)
            assert_same(groups[:3] + groups[4:6], want)
            monkeypatch.setattr(quant, "_on_gpu", lambda x: False)
            assert_same(plain[:6], quant.group_rows(ids, local)[:6])
            assert plain.num_pairs == groups.num_pairs == num_pairs


@pytest.mark.parametrize("name", ("bf16", "fp8", "quantised on the way", "fp4"))
@pytest.mark.parametrize("width, K", ((128, 1), (640, 6), (200, 3), (100, 2)) + CUDA * ((7168, 8),))  # slow in the interpreter
def test_messages(name, width, K, monkeypatch):
    """Messages from kernels and from plain PyTorch are the same bytes, in the order of an index with gaps, too, and unpack to
    the same. Rows of zeros and of NaN are among them; of some widths codes need padding, and PyTorch alone packs."""
    if name == "fp4" and width % 32:
        pytest.skip("no width for MXFP4")
    monkeypatch.setattr(quant, "kernels", kernels, raising=False)
    g = torch.Generator().manual_seed(width)
    x = torch.randn(37, width, generator=g).bfloat16()
    x[3], x[5, 0] = 0, math.nan
    ids, p = torch.randint(-1, 16, (37, K), generator=g).int(), torch.rand(37, K, generator=g)
    q = {"fp8": quant.quantize_fp8_rows, "fp4": quant.quantize_fp4_rows}.get(name, lambda x: x)(x)
    name = "fp8" if name == "quantised on the way" else name
    there = lambda t: t.to(DEVICE) if isinstance(t, torch.Tensor) else type(t)(*(part.to(DEVICE) for part in t))

    def both_ways(f, *args, **options):
        want = f(*args, **options)
        with monkeypatch.context() as patch:
            patch.setattr(quant, "_on_gpu", lambda x: True)
            return f(*map(there, args), **{key: there(t) for key, t in options.items()}), want

    for index in (None, torch.tensor([4, 4, -1, 0, 36, -1, 5, 3]).int()):
        for others in ((), (p,), (ids, p)):
            message, want = both_ways(lambda q, *others, index=None: quant.pack(q, name, *others, index=index), q, *others,
                                      **({} if index is None else {"index": index}))
            sent = slice(None) if index is None else (index >= 0).nonzero().squeeze(1)
            assert message.shape == want.shape
            assert_same([message.cpu()[sent]], [want[sent]])
    message, want = both_ways(lambda q, *others, index: quant.pack(q, name, *others, index=index, per=3), q, ids.repeat(3, 1),
                              torch.rand(111, K, generator=g), index=torch.tensor([4, 110, -1, 0, 36, 50]).int())
    assert_same([message.cpu()[[0, 1, 3, 4, 5]]], [want[[0, 1, 3, 4, 5]]])
    message = quant.pack(q, name, ids, p)
    read = name, width, torch.bfloat16, (torch.int32, K), (torch.float32, K)
    got, want = both_ways(lambda message: quant.unpack(message, *read), message)
    assert_same(flat(list(got)), flat(list(want)))
    if name != "fp4":  # which is no format to come home in
        row = torch.randint(-1, 37, (20, 3), generator=g).int()
        sums = lambda message, row: [t.nan_to_num(nan=1e9) for t in quant.sum_messages(  # one NaN is as good as another
            message, name, width, torch.bfloat16, row, (torch.float32, K))]
        assert_same(*both_ways(sums, quant.pack(q, name, p), row))
    if name == "bf16":  # rows that stand apart
        pair = torch.randint(0, 37, (128,), generator=g).int()
        assert_same([run("fan_out_rows", got[0], pair)], [q[pair.long()]])
    if name == "fp4":
        for fan_out in ("fp4_fan_out_rows", "fp4_fan_out_cols"):
            assert_same(flat([run(fan_out, *got[0])]), flat([run(fan_out, q)]))


@pytest.mark.parametrize("V", (384, 5003))
def test_cross_entropy(V):
    """Against float64 of the same bfloat16 logits; gradients are rounded once. Large logits, ignored and wrong targets."""
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(6, V, generator=generator)).bfloat16()
    logits[1], logits[2, 3], logits[4, 0] = -1e4, 3e38, math.nan
    targets = torch.tensor([0, V - 1, 5, -100, 7, V])
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide[:4], targets[:4], reduction="none")
    losses.sum().backward()
    got, lse = run("token_losses", logits, targets)
    assert torch.allclose(got.cpu()[:4].double(), losses.detach(), rtol=1e-6, atol=1e-6) and got.cpu()[4:].isnan().all()
    d = run("logit_gradients", logits.clone(), targets, lse, torch.tensor(0.5)).cpu().double()
    assert ((d[:4] - wide.grad[:4] / 2).abs() <= wide.grad[:4].abs() * 2.0**-8 + 1e-9).all() and d[4].isnan().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_clear_empty_experts(dtype):
    """Those without rows, one in two blocks of a program's, and nothing else."""
    out = torch.full((4, 5, 16411), math.nan, dtype=dtype, device=DEVICE)
    kernels.clear_empty_experts(out, torch.tensor([0, 0, 128, 384, 384], dtype=torch.int32, device=DEVICE))
    assert (out[0] == 0).all() and (out[3] == 0).all() and out[1:3].isnan().all()


def adamw_case(sizes, generator):
    """Weights, gradients, moments, steps of 0, and what divides gradients; gradients are large and small."""
    new = lambda n: torch.randn(n, generator=generator)
    weights, grads = [new(n).to(DEVICE) for n in sizes], [(new(n) * 10 ** new(n)).to(DEVICE) for n in sizes]
    moments = [[torch.zeros(n, dtype=torch.bfloat16, device=DEVICE) for n in sizes] for _ in range(2)]
    return weights, grads, *moments, [torch.zeros((), device=DEVICE) for _ in sizes], torch.tensor(2.0, device=DEVICE)


def test_adamw_bf16():
    """Against torch's in float64, moments rounded after each step; sizes of less, just, and more than a program's."""
    weights, grads, first, second, steps, half = adamw_case((2048, 1, 4099, 33), torch.Generator().manual_seed(0))
    wide = [[t.cpu().double() for t in ts] for ts in (weights, first, second)]
    for n in (1, 2, 3):
        for step in steps:
            step += 1
        kernels.adamw_bf16(weights, grads, first, second, steps, half, torch.zeros((), device=DEVICE), 0.01 * n, 0.9, 0.95,
                           1e-8, 0.1)
        for i, grad in enumerate(grads):
            w, m, v = (ts[i] for ts in wide)
            g = grad.cpu().double() / 2
            m.lerp_(g, 0.1), v.mul_(0.95).add_(0.05 * g * g)
            w.mul_(1 - 0.001 * n).sub_(0.01 * n / (1 - 0.9 ** n) * m / ((v / (1 - 0.95 ** n)).sqrt() + 1e-8))
            assert (weights[i].cpu() - w).abs().max() <= 2e-6, "steps are 0.01 to 0.03 a weight"
            for got, want in ((first[i], m), (second[i], v)):
                assert ((got.cpu() - want).abs() <= want.abs() * 2.0 ** -8 * 1.001).all(), "rounded once, to nearest"
                want.copy_(got)


def test_adamw_bf16_skips():
    case = adamw_case((70, 2050), torch.Generator().manual_seed(1))
    before = [t.clone() for t in flat(case)]
    kernels.adamw_bf16(*case, torch.ones((), device=DEVICE), 0.1, 0.9, 0.95, 1e-8, 0.1)
    assert_same(flat(case), before)


@pytest.mark.skipif(not CUDA, reason="needs a GPU's memory and speed")
@pytest.mark.parametrize("M, K", [(300032, 7168), (524416, 4096)])
def test_huge_fan_out(M, K):  # CASE 7, through an index and back
    x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda").normal_()
    index, end = torch.arange(M, dtype=torch.int32, device="cuda"), torch.tensor([M], dtype=torch.int32, device="cuda")
    last = slice(M - 128, M)
    alone = torch.arange(128, dtype=torch.int32, device="cuda")
    q8, q4 = run("quantize_fp8_rows", x), run("quantize_fp4_rows", x)
    for name, q, cols in (("fp8_fan_out_rows", q8, False), ("fp4_fan_out_rows", q4, False), ("fp8_fan_out_cols", q8, True),
                          ("fp4_fan_out_cols", q4, True)):
        whole, part = run(name, *q, index, end)[:2], run(name, *(t[last] for t in q), alone, end)[:2]
        assert_same([t[:, -part[i].shape[1]:] if cols else t[last] for i, t in enumerate(whole)], part)
        del whole
    y, *rest = run("rms_norm", x, torch.ones(K), 1e-6, True, True, False)
    assert_same([y[last], rest[0][last]], run("rms_norm", x[last], torch.ones(K), 1e-6, True, True, False)[:2])
    assert_same([run("sum_rows", x, index[:, None])[last]], [x[last]])


@pytest.mark.skipif(not CUDA, reason="needs a GPU's memory and speed")
def test_huge_attention_inputs():  # CASE 7
    T, S, heads = 66000, 1000, 128
    q, kv, k_rope, dv = (torch.empty(T, n, dtype=torch.bfloat16, device="cuda").normal_()
                         for n in (heads * 192, heads * 256, 64, heads * 128))
    table, last = torch.randn(2, S, 32, device="cuda"), slice(T - S, T)
    alone = [t[last].clone() for t in (q, kv, k_rope, dv)]
    whole, part = ([q, *run("attention_inputs", q, kv, k_rope, table, heads, 128)]
                   for q, kv, k_rope, _ in ((q, kv, k_rope, dv), alone))
    assert_same([t[last] for t in whole], part)
    q, k, _ = whole
    whole = [q, *run("attention_inputs_backward", q, k, dv, table, heads, 128)]
    assert_same([t[last] for t in whole], [part[0], *run("attention_inputs_backward", *part[:2], alone[3], table, heads, 128)])


@pytest.mark.skipif(not CUDA, reason="compiles for the GPU")
def test_token_counts_do_not_recompile():  # CASE 9: nothing is tuned or compiled anew after the first counts
    def step(T):
        x = torch.randn(T, 256, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, 4, (T, 2), device="cuda", dtype=torch.int32)
        pair, row, layout, _, shift = kernel_groups(ids, 4)
        q8, q4 = run("quantize_fp8_fp4_rows", x)[:2], run("quantize_fp8_fp4_rows", x)[2:]
        run("rms_norm", x, torch.ones(256), 1e-6, True, True, True), run("fp8_to_fp4", *q8)
        run("fp4_fan_out_rows", *q4, pair, layout[0, -1:], 2), run("fp4_fan_out_cols", *q4, pair, layout[0, -1:], 2)
        run("fp8_fan_out_cols", *q8, pair, layout[0, -1:], 2, True), run("sum_rows", x.repeat(9, 1), row)
        q, v, table = x[:, :192].contiguous(), x[:, :128].contiguous(), torch.ones(2, T, 32)
        run("attention_inputs", q, x, x[:, 64:128], table, 1, 128)
        run("attention_inputs_backward", q, q.clone(), v, table, 1, 128)
        logits, load = torch.randn(T, 3, 16), torch.zeros(16, dtype=torch.int64)
        rule = False, True, 1.0, 1.0, 1e-20
        scores, choices, weights, chosen, balance = run("route", logits, None, load, 1, 2, [1, 1, 1], *rule)
        run("route_backward", scores, choices, weights, chosen, balance, *rule)
        run("split_float32", scores, [0, 0, 1, 2])

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["repr"])
    try:
        for T in (64, 65, 128, 130):
            step(T)
        compiled.clear()
        for T in range(70, 90):
            step(T)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that would be launched, while "cuda" is the CPU."""
    on_cpu = lambda make: lambda *sizes, device=None, **more: make(*sizes, **more)
    for name in ("randn", "rand", "empty", "zeros", "ones", "arange", "tensor"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    names = set()
    monkeypatch.setattr(kernels, "_launch", lambda kernel, *args, **more: names.add(getattr(kernel, "__name__", kernel)))
    return names


@pytest.mark.skipif(CUDA, reason="there `python bench.py kernels` runs")
def test_bench_calls_every_kernel(monkeypatch, launched):
    """The bench's table on a small shape, with launches and clocks left out."""
    import bench
    monkeypatch.setattr(bench, "bench_kernels", lambda: {"dequantize": "dequantize", "cols": "cols"})
    monkeypatch.setattr(bench, "median_us", lambda work: (work(), 1.0)[1])
    monkeypatch.setattr(bench, "host_us", lambda work: 1.0)
    for name in ("SHAPES", "LAYER_SHAPES"):
        monkeypatch.setattr(bench, name, {"v3": (264, 8, 8, 256, 128, 327)})
    groups = [t.zero_() for t in kernels.group_rows(torch.zeros(264, 8, dtype=torch.int32), 8, 1408)]
    monkeypatch.setattr(kernels, "group_rows", lambda *_: groups)
    rows = list(bench.kernel_rows("v3", "jittered", 4.0))
    assert all(set(row) <= set(bench.KERNEL_COLUMNS) for row in rows) and sum(bool(row["times_pair"]) for row in rows) >= 10
    entries = {"_rms_norm", "_rms_norm_backward", "_quantize_rows", "_quantize_pairs", "_quantize_blocks", "_fp8_to_fp4",
               "_fp4_to_fp8_rows", "_fp4_to_fp8_cols", "_fan_out_rows", "_fp8_rows_to_cols", "_swiglu", "_swiglu_backward",
               "_sum_rows", "_regroup_rows", "_place_tokens", "_pack_rows", "_quantize_to_messages", "dequantize", "cols"}
    assert entries <= launched


@pytest.mark.skipif(CUDA, reason="there `python bench.py kernels` runs")
def test_bench_of_gemms(monkeypatch, launched):
    import bench
    monkeypatch.setattr(bench, "take_turns", lambda works, _: [(work(), 100.0)[1] for work in works])
    monkeypatch.setattr(bench, "sustained_us", lambda work: 125.0)
    monkeypatch.setattr(bench, "GEMM_SHAPES", {"v3": (3, 640, 256, 128), "one": (1, 640, 256, 128)})
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: True)
    monkeypatch.setattr(F, "scaled_mm", lambda *_, **__: True)
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: a.new_zeros(*(len(offs),) * (b.dim() == 2), len(a), b.shape[-1]))
    for groups in ("balanced", "jittered"):
        rows = list(bench.gemm_rows("v3", groups))
        rows += bench.whole_layer(rows)
        assert len(rows) == 9 and all(set(row) <= set(bench.GEMM_COLUMNS) for row in rows) and "_gemm" in launched
        assert [bool(row["times_scaled_mm_loop"]) for row in rows] == [True] * 4 + [False] * 5
        assert all(row["sustained_tflops"] == pytest.approx(0.8 * row["tflops"], abs=0.1) for row in rows)
    monkeypatch.setattr(F, "grouped_mm", None)  # a single expert's GEMMs are beside matmul
    rows = list(bench.gemm_rows("one", "balanced"))
    assert len(rows) == 8 and all(row["times_bf16_grouped"] for row in rows)
    assert sum(bench.group_sizes(8, 32768, "jittered")) <= 32768 and 0 in bench.group_sizes(8, 32768, "jittered")


@pytest.mark.skipif(CUDA, reason="test_model.py has this for a GPU")
def test_a_training_step_all_through_the_kernels(monkeypatch):
    """Routing, fan-out, SwiGLU, sums and conversions in the interpreter, unwritten memory full of NaN: the reference's
    gradients, but for rounding. Norms, which would take most of the time, have tests of their own."""
    torch.manual_seed(0)
    net = model.Model(replace(model.PRESETS["tiny"], n_layers=2, n_dense=1, dense_width=176, expert_width=128, n_experts=2,
                              top_k=1, n_heads=1, nope_dim=64, rope_dim=64, v_dim=64))
    net.recipe, net.dtype = quant.RECIPES["mxfp4"], torch.bfloat16
    tokens = torch.randint(0, 256, (1, 129))  # 128: the shared expert reads whole tiles of tokens

    def gradients():
        net.zero_grad()
        loss = net(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}}

    want = gradients()
    monkeypatch.setattr(quant, "kernels", kernels, raising=False)
    monkeypatch.setattr(quant, "_on_gpu", lambda x: True)
    monkeypatch.setattr(quant, "_norm_fuses", lambda *_: False)
    quant.new_epoch()
    for key, value in gradients().items():
        assert (value - want[key]).norm() <= 0.03 * want[key].norm(), key


# -----------------------------------------------------------------------------
# router


@pytest.mark.parametrize("M, N", ((1, 4099), (70, 256), (33, 160), (5, 3)))
@pytest.mark.parametrize("order", ((2, 0, 1, 0), (0, 0, 1, 2), (1,)), ids=str)
def test_split_float32(M, N, order):
    """Byte for byte, and the parts add up to x; of NaN the first is none either."""
    g = torch.Generator().manual_seed(N)
    x = torch.randn(M, N, generator=g) * 2.0 ** torch.randint(-90, 90, (M, N), generator=g)
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, 1 + 2.0**-23])
    got = run("split_float32", x, list(order))
    assert_same([got], [quant._parts(x, order)])
    if len(order) == 4:
        parts = got.cpu().float().view(M, 4, N)
        assert torch.equal(sum(parts[:, order.index(i)] for i in range(3)), x)
    assert run("split_float32", torch.tensor([[math.nan, math.inf]]), [0, 1]).isnan().tolist() == [[True, False, True, True]]


def route(logits, top_k, bias=None, groups=(1, 1, 1), gate="sigmoid", scale=1.0, load=None, batch=1):
    """kernels.route on logits [T, E], with an alpha of 1 -> scores, ids, weights, chosen, balance, on the CPU."""
    bias = torch.tensor(bias) if isinstance(bias, list) else bias
    logits = torch.as_tensor(logits, dtype=torch.float32)[:, None].contiguous()
    rule = gate == "softmax", model.GATES[gate].renormalise, scale, 1.0, model.LEAST_SUM
    out = run("route", logits, bias, load, batch, top_k, list(groups), *rule)
    return [None if t is None else t.cpu() for t in out]


@pytest.mark.parametrize("logits, top_k, groups, want", [
    ([0, 0, 0, 0, 0, 0], 3, (1, 1, 1), [0, 1, 2]),  # all tie
    ([1, 2, 2, 0, 2, -1], 4, (1, 1, 1), [1, 2, 4, 0]),  # some do
    ([5], 1, (1, 1, 1), [0]),
    ([3, 2, 1, 0], 4, (1, 1, 1), [0, 1, 2, 3]),  # all are chosen
    ([0] * 8, 4, (4, 2, 2), [0, 1, 2, 3]),  # groups tie
    ([3, -9, 1, 1], 2, (2, 1, 2), [2, 3]), ([3, -9, 1, 1], 2, (2, 1, 1), [0, 1]),  # the better pair, the better one
    ([9, 9, 9, -1, -2, -3, 8, 8, 8], 4, (3, 2, 2), [0, 1, 2, 6]),  # three groups of three
    ([0, 0, 0, 1, 2, 3], 3, (2, 1, 1), [5, 4, 3]),  # the example of the comment in kernels.py, and its padding
    ([-200, -200, -200, -200], 2, (2, 1, 2), [0, 1])])  # every score is 0
def test_route_by_hand(logits, top_k, groups, want):
    scores, ids, weights, chosen, balance = route([logits], top_k, groups=groups, scale=2.5)
    assert ids.tolist() == [want] and chosen is balance is None
    exact = torch.tensor([logits]).double().sigmoid()
    assert torch.allclose(scores.double(), exact, rtol=1e-6, atol=1e-37)
    exact = exact.gather(1, ids.long())
    exact = 2.5 * exact / exact.sum().clamp(min=1e-20)
    assert torch.allclose(weights.double(), exact, rtol=1e-6, atol=1e-17)


def test_route_bias_moves_selection_only():  # CASE 16
    _, ids, weights, _, _ = route(torch.logit(torch.tensor([[0.9, 0.8, 0.1]])), 2, [-1.0, 0.0, 1.0])
    assert ids.tolist() == [[2, 1]] and torch.allclose(weights, torch.tensor([[1 / 9, 8 / 9]]), rtol=1e-6)
    assert route([[0.0, 0.0, 0.0, 0.0]], 2, [-1.0, -2.0, -1.0, -3.0])[1].tolist() == [[0, 2]]  # all negative


@pytest.mark.parametrize("groups", ((1, 1, 1), (4, 2, 2), (4, 2, 1), (2, 1, 2)), ids=str)
@pytest.mark.parametrize("gate", ("sigmoid", "softmax"))
def test_route_of_numbers_that_are_none(gate, groups):
    """NaN is chosen first and stays NaN, and so do losses; experts exist and differ, whatever comes."""
    logits, load = torch.zeros(7, 8), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    logits[0, 5], logits[1], logits[2, 3] = math.nan, math.nan, -math.nan
    logits[3], logits[4, 6], logits[5] = -math.inf, math.inf, math.inf
    scores, ids, weights, chosen, balance = route(logits, 4, groups=groups, gate=gate, load=load)
    assert ((ids >= 0) & (ids < 8)).all() and all(len(set(row)) == 4 for row in ids.tolist())
    assert weights[:3].isnan().any(1).all() and weights[6].isfinite().all() and balance.isnan().all()
    assert chosen.sum() == load.sum() == 28
    if gate == "sigmoid":
        assert ids[[0, 2, 4], 0].tolist() == [5, 3, 6] and weights[[0, 2]].isnan().all() and weights[3:].isfinite().all()
    rule = gate == "softmax", gate == "sigmoid", 1.0, 1.0, 1e-20
    d = run("route_backward", scores, ids, torch.ones(7, 4), chosen, torch.ones(1), *rule)
    assert d[:3].isnan().any(1).all()


ROUTERS = [  # gate, experts, top-k, groups, tokens, sequences
    ("sigmoid", 256, 8, (8, 4, "top2"), 70, 2), ("softmax", 160, 6, (8, 3, "max"), 45, 1),
    ("softmax", 64, 6, (1, 1, "max"), 129, 1), ("sigmoid", 12, 3, (3, 2, "top2"), 900, 3),  # of two chunks each
    ("sigmoid", 1, 1, (1, 1, "top2"), 3, 3), ("softmax", 8, 8, (1, 1, "max"), 20, 4)]


def router_case(gate, E, K, groups, T, B):
    """A Router and three summands of logits [T, 3, E]."""
    n_groups, top_groups, group_score = groups
    torch.manual_seed(E)
    router = model.Router(replace(
        model.PRESETS["tiny"], gate=gate, n_experts=E, top_k=K, n_groups=n_groups, top_groups=top_groups,
        group_score=group_score, route_scale=2.5, balance_alpha=0.3))
    if router.gate.balanced:
        router.bias.normal_(0, 0.3)
    return router, torch.randn(T, 3, E) * torch.tensor([1.0, 2.0**-8, 2.0**-16])[:, None]


@pytest.fixture
def through_kernels(monkeypatch):
    monkeypatch.setattr(quant, "kernels", kernels, raising=False)
    monkeypatch.setattr(quant, "_on_gpu", lambda x: True)


@pytest.mark.parametrize("case", ROUTERS, ids=str)
def test_route_against_the_router(case, through_kernels):
    """The reference on the kernel's own scores: the same choices, counts to the last, weights and losses but for rounding.
    Loads are added to what is there, the same bits come again, and without a load the same weights."""
    (router, parts), (gate, E, _, _, _, B) = router_case(*case), case
    router, parts = router.to(DEVICE), parts.to(DEVICE)
    apply = lambda learns: model._Route.apply(parts, router, B, learns)
    (ids, weights, balance), again, alone = apply(True), apply(True), apply(False)
    assert_same([*again, *alone[:2]], [ids, weights, balance, ids, weights])
    assert alone[2] is None and torch.equal(router.load, 2 * torch.bincount(ids.flatten(), minlength=E))
    bias = router.bias if router.gate.balanced else None
    c = router.config
    groups, rule = (c.n_groups, c.top_groups, 1), (gate == "softmax", router.gate.renormalise, 2.5, 0.3, model.LEAST_SUM)
    scores = kernels.route(parts, bias, None, 1, c.top_k, groups, *rule)[0]
    near = lambda a, b: torch.allclose(a.double(), b.double(), rtol=1e-6, atol=0)
    logits = parts[:, 0] + parts[:, 1] + parts[:, 2]
    assert near(scores, router.gate.score(logits.double()))
    if CUDA and gate == "sigmoid":
        assert_same([scores], [router.gate.score(logits)])
    assert torch.equal(router.select(scores), ids.long())
    assert near(weights, router.weigh(scores.double(), ids.long()))
    assert near(balance, router.balance_loss(scores.double(), ids.long(), B))


@pytest.mark.parametrize("case", ROUTERS, ids=str)
@pytest.mark.parametrize("of", ("weights", "balance", "both"))
def test_route_gradients(case, of, through_kernels):
    """Against float64, the choices being the kernel's; every summand has the same."""
    router, parts = router_case(*case)
    router, parts, B = router.to(DEVICE), parts.to(DEVICE).requires_grad_(), case[-1]
    ids, weights, balance = model._Route.apply(parts, router, B, True)
    dweights, dbalance = torch.randn(weights.shape, device=DEVICE), torch.randn(B, device=DEVICE)

    def gradient(weights, balance, wrt):
        terms = {"weights": (weights * dweights).sum(), "balance": (balance * dbalance).sum()}
        return torch.autograd.grad(sum(terms.values()) if of == "both" else terms[of], wrt)[0]

    got = gradient(weights, balance, parts)
    wide = parts.detach().double().sum(1).requires_grad_()
    scores = router.gate.score(wide)
    want = gradient(router.weigh(scores, ids.long()), router.balance_loss(scores, ids.long(), B), wide)
    assert torch.equal(got[:, 0], got[:, 1]) and torch.equal(got[:, 0], got[:, 2])
    size = want.norm() if want.norm() > 1e-9 else 1  # of one expert, or where all are chosen, everything cancels
    assert (got[:, 0] - want).norm() <= 1e-6 * size


# -----------------------------------------------------------------------------
# GEMMs: against float64 of the decoded operands

needs_gpu = pytest.mark.skipif(not CUDA, reason="Gluon's GEMMs need a GPU")
GROUPS = ([256, 0, 128, 384], [128, 128, 128], [0, 640, 0], [1024, 256])
MANY = [4096, 0, 2048, 128]  # more tiles than an H200 has multiprocessors, several times over


def uneven(*shape, seed):
    """Gaussian rows, each times its own power of two, so that scales differ."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=g)


def grouped(sizes, device="cuda"):
    """Offsets [E + 1] and the expert of each 128 rows."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return offsets.int().to(device), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) // 128).int().to(device)


def rounds_to(got, want, size):
    """Within 1e-3 in norm, and each element within 2e-3 of size, its sum of magnitudes; bfloat16 half a step more.

    Hopper's FP8 tensor cores align 32 products to the largest and cut them off 13 bits below it: emulated so, these inputs
    differ by up to 1.1e-3 of size in one element."""
    step = 2.0 ** -8 * want.abs() if got.dtype == torch.bfloat16 else 0
    off = got.cpu().double() - want
    return off.norm() <= (1e-3 if got.dtype == torch.float32 else 4e-3) * want.norm() and (off.abs() <= 2e-3 * size + step).all()


@needs_gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("sizes, N, K", [(s, *nk) for s in GROUPS for nk in ((256, 256), (192, 416), (1408, 128), (576, 2048))]
                         + [(MANY, 1408, 384), (MANY, 640, 128), (MANY, 2048, 256)])
def test_grouped_gemm(sizes, N, K, dtype):
    """Also with rows behind the last expert, which stay as they are; the same bits in every run."""
    a, b = quant.quantize_fp8_rows(uneven(sum(sizes), K, seed=1)), quant.quantize_fp8_blocks(uneven(len(sizes), N, K, seed=2))
    want, size = (torch.cat([f(dequantize(a)[s:t].double()) @ f(dequantize(b)[e].double()).t() for e, (s, t) in
                             enumerate(zip(grouped(sizes)[0].tolist(), grouped(sizes)[0].tolist()[1:]))])
                  for f in (lambda x: x, torch.abs))
    padded = [torch.cat([t, t[:128]]) for t in (a.data.view(torch.uint8), a.scale)]
    experts = torch.cat([grouped(sizes)[1], torch.full((1,), -1, device="cuda", dtype=torch.int32)])
    runs = []
    for _ in range(3):
        out = torch.full((sum(sizes) + 128, N), math.nan, device="cuda", dtype=dtype)
        kernels.grouped_gemm(padded[0].cuda().view(torch.float8_e4m3fn), padded[1].cuda().t().contiguous().t(),
                             *(t.cuda() for t in b), experts, out)
        runs.append(out)
    assert rounds_to(runs[0][:-128], want, size) and runs[0][-128:].isnan().all()
    assert_same(runs[1:], [runs[0], runs[0]])


@needs_gpu
@pytest.mark.parametrize("add", (False, True), ids=("new", "added"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("by_column", (0, 1))
@pytest.mark.parametrize("sizes, N, K", [(s, *nk) for s in (*GROUPS, [0, 0]) for nk in ((256, 256), (192, 416), (576, 128))]
                         + [(GROUPS[0], 2816, 1408), (GROUPS[0], 1408, 2944)])
def test_grouped_wgrad(sizes, N, K, by_column, dtype, add):
    """One operand with a scale a column, the other a 128x128 tile, either way round; an expert without tokens gives zero, or
    leaves what is there. What stands behind the last expert does not matter."""
    M, widths = sum(sizes), (N, K)
    x = [uneven(M, n, seed=i) for i, n in enumerate(widths)]
    q = [quant.quantize_fp8_rows(v.t()) if i == by_column else quant.fp8_rows_to_cols(quant.quantize_fp8_rows(v))
         for i, v in enumerate(x)]
    a, b = (dequantize(v).double() for v in q)
    bounds = grouped(sizes)[0].tolist()
    want, size = (torch.stack([f(a[:, s:t]) @ f(b[:, s:t]).t() for s, t in zip(bounds, bounds[1:])])
                  for f in (lambda v: v, torch.abs))
    rubbish = lambda data: F.pad(raw(data).view(len(data), M), (0, 128), value=0x7F).view(torch.float8_e4m3fn)
    scales = [F.pad(v.scale[:: 1 if i == by_column else 128], (0, 1), value=math.nan) for i, v in enumerate(q)]
    q = [(rubbish(v.data).cuda(), scale.cuda().t().contiguous().t()) for v, scale in zip(q, scales)]
    there = torch.randn(want.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    runs = []
    for _ in range(2):
        out = there.clone().cuda() if add else torch.full(want.shape, math.nan, device="cuda", dtype=dtype)
        kernels.grouped_wgrad(*q[0], *q[1], grouped(sizes)[0], out, add)
        runs.append(out)
    want = want + there.double() if add else want
    assert rounds_to(runs[0], want, size)
    assert_same(runs[1:], runs[:1])
    for e in (i for i, n in enumerate(sizes) if not n):
        assert torch.equal(runs[0][e].cpu(), there[e] if add else torch.zeros_like(there[e]))


@needs_gpu
@pytest.mark.parametrize("add", (False, True), ids=("new", "added"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("by_column", (0, 1))
def test_wgrad_in_parts(by_column, dtype, add):
    """Of many tokens and a narrow layer, with a number of tiles of 128 that no number of parts divides."""
    widths, M = (192, 416), 67 * 128
    q = [quant.quantize_fp8_rows(v.t()) if i == by_column else quant.fp8_rows_to_cols(quant.quantize_fp8_rows(v))
         for i, v in enumerate(uneven(M, n, seed=n) for n in widths)]
    a, b = (dequantize(v).double() for v in q)
    there = torch.randn(1, *widths, generator=torch.Generator().manual_seed(9)).to(dtype)
    q = [(v.data.cuda(), v.scale[:: 1 if i == by_column else 128].cuda().t().contiguous().t()) for i, v in enumerate(q)]
    runs = []
    for _ in range(2):
        out = there.clone().cuda() if add else torch.full(there.shape, math.nan, device="cuda", dtype=dtype)
        kernels.grouped_wgrad(*q[0], *q[1], None, out, add)
        runs.append(out)
    assert rounds_to(runs[0], (a @ b.t())[None] + (there.double() if add else 0), (a.abs() @ b.abs().t())[None])
    assert_same(runs[1:], runs[:1])


@pytest.mark.parametrize("M", (896, 2048, 67 * 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("by_column", (0, 1))
def test_wgrad_in_parts_adds_up(M, dtype, by_column, monkeypatch):
    """With the GEMM emulated, on a card of 132 multiprocessors: 1, 2 or 8 parts, new or added; no more than `out` is written."""
    parts = []

    def gemm(a, a_scale, b, b_scale, experts, out, rows, N, K, wgrad, transpose, add=False):
        assert (len(a), len(b), a.shape[1], wgrad) == (rows, N, K, True)
        wide = lambda q, scale: q.double() * scale.repeat_interleave(128, 1)
        a, b = wide(a, a_scale), wide(b, b_scale.repeat_interleave(128, 0)[:N])
        bounds = [0, K] if experts is None else experts.tolist()
        parts.append(len(bounds) - 1)
        for e, (s, t) in enumerate(zip(bounds, bounds[1:])):
            dw = a[:, s:t] @ b[:, s:t].t()
            out[e] = (dw.t() if transpose else dw) + (out[e].double() if add else 0)

    monkeypatch.setattr(kernels, "_launch_gemm", gemm)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: 132)
    widths = 192, 416
    q = [quant.quantize_fp8_rows(v.t()) if i == by_column else quant.fp8_rows_to_cols(quant.quantize_fp8_rows(v))
         for i, v in enumerate(uneven(M, n, seed=n) for n in widths)]
    a, b = (dequantize(v).double() for v in q)
    want, size = (a @ b.t())[None], (a.abs() @ b.abs().t())[None]
    q = [(v.data, v.scale[:: 1 if i == by_column else 128]) for i, v in enumerate(q)]
    around = torch.full((3, *widths), math.nan, dtype=dtype)
    for add in (False, True):
        assert kernels.grouped_wgrad(*q[0], *q[1], None, around[1:2], add).data_ptr() == around[1:2].data_ptr()
        assert rounds_to(around[1:2], want * (1 + add), size * (1 + add))
    assert around[0].isnan().all() and around[2].isnan().all() and parts == [{896: 1, 2048: 2}.get(M, 8)] * 2


def test_cuts():
    """Parts of like length, of whole tiles."""
    assert kernels._cuts(1152, 4, "cpu").tolist() == [0, 256, 512, 768, 1152]
    assert kernels._cuts(2048, 2, "cpu").tolist() == [0, 1024, 2048]


@needs_gpu
def test_gemm_sums_in_float32():
    """K = 16384, everything positive: sums kept in few bits would drift. bfloat16 is within a step of the rounded sum."""
    x = torch.rand(256, 16384, generator=torch.Generator().manual_seed(0)) + 0.5
    a, b = quant.quantize_fp8_rows(x[:128]), quant.quantize_fp8_blocks(x[None, 128:])
    want = dequantize(a).double() @ dequantize(b)[0].double().t()
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(128, 128, device="cuda", dtype=dtype)
        kernels.grouped_gemm(*(t.cuda() for t in (*a, *b)), torch.zeros(1, device="cuda", dtype=torch.int32), out)
        if dtype == torch.float32:
            assert ((out.cpu().double() - want).abs() <= 1e-3 * want).all()
        else:
            step = 2.0 ** (want.log2().floor() - 7)
            assert ((out.cpu().double() - want.bfloat16().double()).abs() <= step).all()


@needs_gpu
def test_gemm_of_a_plain_linear():
    """No table of experts, no offsets."""
    a, b = quant.quantize_fp8_rows(uneven(384, 256, seed=1)), quant.quantize_fp8_blocks(uneven(1, 192, 256, seed=2))
    alone, grouped_ = (torch.empty(384, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for out, experts in ((alone, None), (grouped_, torch.zeros(3, device="cuda", dtype=torch.int32))):
        kernels.grouped_gemm(*(t.cuda() for t in (*a, *b)), experts, out)
    assert_same([alone], [grouped_])
    x, y = uneven(384, 256, seed=3), uneven(384, 192, seed=4)
    cols = quant.quantize_fp8_rows(x.t()), quant.fp8_rows_to_cols(quant.quantize_fp8_rows(y))
    cols = [t.cuda() for t in (*cols[0], cols[1].data, cols[1].scale[::128])]
    alone, grouped_ = (torch.empty(1, 256, 192, device="cuda") for _ in range(2))
    for out, offsets in ((alone, None), (grouped_, torch.tensor([0, 384], device="cuda", dtype=torch.int32))):
        kernels.grouped_wgrad(*cols, offsets, out)
    assert_same([alone], [grouped_])


def test_gemm_refuses_what_it_cannot_do():
    f8 = lambda *shape: torch.zeros(*shape, dtype=torch.float8_e4m3fn)
    scale, table = torch.zeros(8, 1), torch.zeros(1, dtype=torch.int32)
    for a, b, out in ((f8(100, 128), f8(1, 128, 128), (100, 128)), (f8(128, 120), f8(1, 128, 120), (128, 128)),
                      (f8(128, 128), f8(1, 40, 128), (128, 40)), (f8(128, 128), f8(1, 128, 128), (128, 64))):
        with pytest.raises(ValueError, match="grouped_gemm"):
            kernels.grouped_gemm(a, scale, b, scale, table, torch.zeros(out))
    for sides in ((scale[:1], scale[:1]), (torch.zeros(128, 1), torch.zeros(128, 1))):
        with pytest.raises(ValueError, match="grouped_wgrad"):
            kernels.grouped_wgrad(f8(128, 128), sides[0], f8(128, 128), sides[1], table.repeat(2), torch.zeros(1, 128, 128))


# -----------------------------------------------------------------------------
# what the compiler makes of the kernels


def compile_for_hopper(kernel, args, num_warps, constants):
    """The launch that `kernels` would make, compiled for sm_90 as Triton would specialise it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    pointers = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv",
                torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
    plain, constant = ({p.name for p in kernel.params if test(p)} for test in
                       (lambda p: p.do_not_specialize, lambda p: p.is_constexpr))
    options = {"maxnreg": constants.pop("maxnreg")} if "maxnreg" in constants else {}
    signature, constexprs, attrs = {}, {}, {}
    for i, (name, value) in enumerate({**dict(zip(kernel.arg_names, args)), **constants}.items()):
        if isinstance(value, torch.Tensor):
            signature[name] = pointers[value.dtype]
        elif hasattr(value, "block_shape"):  # a tensor that TMA copies
            signature[name] = f"tensordesc<{pointers[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
        elif value is None or name in constant or (value == 1 and name not in plain):
            signature[name], constexprs[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (signature[name] == "i32" and value % 16 == 0 and name not in plain):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": num_warps, "enable_fp_fusion": False, **options})


def resources(compiled):
    """Registers and bytes of local memory (spills) a thread, from the binary."""
    dump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([dump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK"))


def every_launch():
    """(name, arguments, whether it computes in float32) of every entry, on tensors as training has them, and on odd ones."""
    x, odd = torch.ones(256, 7168, dtype=torch.bfloat16), torch.ones(160, 301).t()
    for tensor in (x, odd):
        for name, arg in formats(tensor).items():
            yield name, [arg], False
    pair, end = torch.zeros(256, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    p, weight = torch.ones(256), torch.ones(7168)
    q8, q4, h, da = quant.quantize_fp8_rows(x), quant.quantize_fp4_rows(x), x[:, :4096].contiguous(), x[:, :2048].contiguous()
    yield "quantize_fp8_rows_and_cols", [x, True], False
    yield "fan_out_rows", [x, pair, end, 8], False
    for name in ("fp8_fan_out_rows", "fp8_fan_out_cols"):
        yield name, [q8, pair, end, 8], False
    yield "fp8_fan_out_cols", [q8, pair, end, 8, True], False
    for name in ("fp4_fan_out_rows", "fp4_fan_out_cols"):
        yield name, [q4, pair, end, 8], False
    yield "rms_norm", [torch.cat([x, x], 1)[:, :7168], weight, 1e-6], True
    for width in (7168, 4096, 2048, 768, 384, 256):
        narrow = x[:, :width].contiguous()
        yield "rms_norm", [narrow, weight[:width], 1e-6, True, True, True], True
        yield "rms_norm_backward", [narrow, narrow, weight[:width], 1e-6], True
    q, kv, v = (torch.ones(2, n * 16, dtype=torch.bfloat16) for n in (192, 256, 128))
    table = torch.ones(2, 1, 32)
    yield "attention_inputs", [q, kv, x[:2, 512:576], table, 16, 128], True
    yield "attention_inputs", [None, kv, x[:2, 512:576], table, 16, 128], True
    yield "attention_inputs_backward", [q, q.clone(), v, table, 16, 128], True
    yield "swiglu", [h, p, pair, pair, end, 256, "fp8"], True
    yield "swiglu", [h, p, pair, pair, end, 256, "fp4"], True
    yield "swiglu_backward", [da, p, pair, pair, end, *quant.quantize_fp8_rows(h)], True
    yield "swiglu_backward", [da, p, pair, pair, end, *quant.quantize_fp4_rows(h)], True
    yield "swiglu_backward", [da, p, pair, None, end, h, None], True
    yield "swiglu_bf16", [h, p, pair, end], True
    yield "swiglu_backward_bf16", [da, h, p, pair, end], True
    weights, experts = quant.quantize_fp8_blocks(torch.ones(2, 4096, 7168)), torch.zeros(2, dtype=torch.int32)
    compact = lambda q: (q.data, q.scale[::128].contiguous())  # one scale a 128x128 tile
    dy, cols = quant.quantize_fp8_rows(h.t()), compact(quant.fp8_rows_to_cols(q8))
    yield "grouped_gemm", [q8, Fp8(*(t[:1] for t in weights)), None, torch.empty(256, 4096, dtype=torch.bfloat16)], True
    for dtype in (torch.bfloat16, torch.float32):
        yield "grouped_gemm", [q8, weights, experts, torch.empty(256, 4096, dtype=dtype)], True
        for add in (False, True):
            out = torch.empty(2, 4096, 7168, dtype=dtype)
            yield "grouped_wgrad", [dy, cols, end[:3], out, add], True
            yield "grouped_wgrad", [cols, dy, end[:3], out.mT.contiguous(), add], True
    parts, load, rule = torch.ones(32, 3, 256), torch.zeros(256, dtype=torch.int64), [False, True, 2.5, 1e-4, 1e-20]
    yield "route", [parts, p, load, 1, 8, [8, 4, 2], *rule], True  # V3's, V2's, V2-Lite's
    yield "route", [parts[:, :1, :160].contiguous(), None, None, 1, 6, [8, 3, 1], True, False, *rule[2:]], True
    yield "route", [parts[:, :, :64].contiguous(), None, load[:64], 1, 6, [1, 1, 1], True, False, *rule[2:]], True
    scores, ids, dbalance = parts[:, 0].contiguous(), pair.view(32, 8), p[:1]
    yield "route_backward", [scores, ids, p.view(32, 8), scores[:1], dbalance, *rule], True
    yield "route_backward", [scores, ids, p.view(32, 8), None, None, True, False, *rule[2:]], True
    yield "split_float32", [scores, [0, 0, 1, 2]], False
    yield "split_float32", [weight[None], [2, 0, 1, 0]], False
    yield "group_rows", [pair.view(32, 8), 256, 4096], False
    yield "regroup_rows", [pair.view(32, 8), torch.zeros(3, 257, dtype=torch.int32), 4096], False
    yield "sum_rows", [x, pair.view(32, 8)], False
    for scale in (q8.scale, q8.scale.to(torch.uint8)):
        yield "sum_rows", [q8.data, pair.view(32, 8), scale, torch.bfloat16], False
    yield "sum_parts", [p.view(16, 16).t(), pair.view(32, 8)], False
    for local, ranks in ((8, 32), (128, 2)):
        counts, layout = torch.zeros(ranks, local + 1, dtype=torch.int32), torch.zeros(3, local + 1, dtype=torch.int32)
        yield "count_messages", [pair.view(32, 8), local, counts], False
        for many in (pair.view(32, 8), torch.zeros(2**15, 6, dtype=torch.int32)):  # tokens by chunks of 16 and of 128
            yield "place_messages", [many, local, counts.repeat(2, 1, 1), counts], False
        yield "lay_out_messages", [counts, layout, counts.clone()], False
    both = [pair[:64].view(32, 2), p[:64].view(32, 2)]
    for data, scale in ((x, None), q8, q4):
        name = {torch.bfloat16: "bf16", torch.uint8: "fp4"}.get(data.dtype, "fp8")
        size = quant.message_bytes(name, 7168, torch.bfloat16, (torch.int32, 2), (torch.float32, 2))
        codes, message = data.shape[1] * data.element_size(), torch.zeros(32, size, dtype=torch.uint8)
        yield "pack_rows", [data, scale, both, pair[:32], size], False
        fp8 = scale if scale is not None and scale.dtype == torch.float32 else None
        scales = 0 if scale is None else scale.shape[1]
        yield "receive_rows", [message, codes, scales, fp8, counts, layout, 4096, 128, 256, 2], False
        if fp8 is not None:
            yield "unpack_rows", [message, codes, scales, fp8], False
    yield "quantize_to_messages", [x, both[1:], pair[:32], 7168 + 64 + 16], False
    yield "token_losses", [x, end.long().repeat(16)], True
    yield "logit_gradients", [x, end.long().repeat(16), p, p[0]], True
    yield "clear_empty_experts", [torch.empty(2, 256, 512, dtype=torch.bfloat16), experts], False
    moments = [torch.zeros(64, dtype=torch.bfloat16)]
    yield "adamw_bf16", [[p[:64]], [p[:64]], moments, moments, [p[0]], p[0], p[0], 0.1, 0.9, 0.95, 1e-8, 0.1], True


def compile_all():
    """Run in a process of its own, without the interpreter: see test_compiled_for_hopper."""
    launches = []

    def note(kernel, programs, *args, num_warps=4, **constants):
        launches.append((kernel, args, num_warps, constants))

    kernels._launch = note
    for name, args, computes in every_launch():
        launches.clear()
        run(name, *args)
        for launch in launches:
            compiled = compile_for_hopper(*launch)
            registers, stack = resources(compiled)
            print(f"{name} {launch[0].fn.__name__}: {registers} registers, {stack} B of stack, {compiled.metadata.shared} shared")
            assert stack == 0 and compiled.metadata.shared <= SHARED_LIMIT
            ptx = compiled.asm["ptx"]
            assert computes or not re.search(r"\.ftz|ex2|fma\.rn\.f32", ptx), "bits that depend on the compiler's mood"
            if launch[0].fn.__name__ == "_gemm":
                assert re.search(r"wgmma\.mma_async\S*e4m3\.e4m3", ptx) and "cp.async.bulk.tensor" in ptx
            reads = name not in ("quantize_fp8_blocks", "clear_empty_experts")  # a tile at once; nothing but bounds
            if isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bfloat16 and reads:
                assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global", ptx), "no 16-byte loads"


def in_a_process_of_its_own(function):
    """Where nothing is interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run([sys.executable, "-c", f"import test_kernels; test_kernels.{function}()"], env=environment,
                           cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True)
    print(child.stdout)
    assert child.returncode == 0, child.stdout + child.stderr


def test_compiled_for_hopper():
    """Every kernel compiles for sm_90 without spills, flush-to-zero, approximations or fused multiply-adds."""
    in_a_process_of_its_own("compile_all")


def launch_all():
    """Each kernel's launch, and others that differ in one argument, once by Triton's own way and once by ours, which must pick
    the same of what was compiled (stand-ins: nothing is) and give it the same arguments, or their addresses."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction
    launched, launches, launch = [], [], kernels._launch

    class Driver:
        get_current_target = lambda self: GPUTarget("cuda", 90, 32)
        get_current_device = get_current_stream = lambda self, *_: 0

    class Compiled:
        function = packed_metadata = None
        launch_metadata = lambda self, *_: None
        run = lambda self, *args: launched.append((self, args[9:] if args[:6] == (1, 1, 1, 0, None, None) else args))
        __getitem__ = lambda self, grid: lambda *args: launched.append((self, args))

    def check(kernel, args, num_warps=4, **options):
        want = kernel.run(*args, **options, num_warps=num_warps, enable_fp_fusion=False, grid=(1,), warmup=True)
        launch(kernel, 1, *args, num_warps=num_warps, **options)
        got, given = launched.pop()
        same = [a is b or isinstance(b, torch.Tensor) and a == b.data_ptr() for a, b in zip(given, args)]
        assert got is want and len(given) == len(args) and all(same), (kernel, args)

    def others(value, memory=torch.zeros(64, dtype=torch.uint8)):
        if isinstance(value, torch.Tensor):
            return [memory[at:at + 32].view(dtype) for at in (0, 8)
                    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
        if hasattr(value, "block_shape"):
            sizes = [8 * n for n in value.block_shape]
            return [kernels._descriptor(torch.zeros(sizes, dtype=dtype), tuple(value.block_shape))
                    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)]
        numbers = 0, 1, 8, 16, 2**31 - 1, 2**31, 2**31 + 8, 2**40, 2**63
        return [*numbers, *(-n for n in numbers[1:]), True, 0.5, None]

    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile = lambda self, key, signature, device, *_: self.device_caches[device][0].setdefault(key, Compiled())
    kernels._multiprocessors = lambda x: 132
    kernels._launch = lambda kernel, programs, *args, **options: launches.append((kernel, args, options))
    for name, args, _ in every_launch():
        run(name, *args)
    for _ in range(2):  # the second time everything is known
        for kernel, args, options in launches:
            check(kernel, args, **options)
            for i, parameter in enumerate(kernel.params):
                values = [args[i] + 1, 2 * args[i]] if type(args[i]) is int else []
                for other in values if parameter.is_constexpr else others(args[i]):
                    if i or isinstance(other, torch.Tensor):  # the first tells the device
                        check(kernel, (*args[:i], other, *args[i + 1:]), **options)
    known = [len(compiled) for _, _, compiled in kernels._COMPILED.values()]
    triton.knobs.runtime.launch_enter_hook.add(print)  # Triton's own way of launching is taken where somebody listens
    for kernel, args, options in launches:
        check(kernel, args, **options)
    assert [len(compiled) for _, _, compiled in kernels._COMPILED.values()] == known


def test_launches_what_triton_would():
    in_a_process_of_its_own("launch_all")
