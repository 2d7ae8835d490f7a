"""Triton kernels for FP8 and MXFP4 training on Hopper: conversions, the data movement of an MoE layer, and FP8 GEMMs.
Tensors in, a flat tuple of tensors out (GEMMs write where they are told); one launch each (group_rows and a narrow layer's
grouped_wgrad three; odd widths, rows and cols of another float than bfloat16, count_messages and route where it balances two), no
host synchronisation.

quant.py chooses between these and its plain PyTorch reference, checks shapes, and says what each tensor is used for.
Conversions agree with the reference on every byte. Kernels that compute first (norm, SwiGLU) give exactly the codes of
the reference quantiser applied to what they computed.

The formats. All scales are powers of two, so a change of scale moves exponents and rounds at most once.

  E4M3     one byte, s eeee mmm: 2^-6 ... 448 with three mantissa bits, multiples of 2^-9 below; 0x7F and 0xFF are NaN
  E2M1     four bits, s ee m: 0 .5 1 1.5 2 3 4 6; two to a byte, the first element in the low nibble
  FP8      E4M3 codes and float32 scales 2^e, -126 <= e <= 119: one for each 1x128 tile ("rows"), or 128x128 ("blocks").
           "cols" is the transposed tensor, tiles along the old rows: what a GEMM reads when it contracts over tokens.
           Scales of rows lie with stride 1 along M, as GEMMs load them
  MXFP4    E2M1 codes and one scale byte b = 2^(b-127) for each 1x32 block of a row; 255 is NaN, 0 a block of zeros

Bytes that each kernel has to move, an element, with bfloat16 in; over the memory's bandwidth they are the time to aim at.

                              read                 write                             sum
  quantize_fp8_rows           2                    1 + 4/128                         3.03
  quantize_fp8_rows_and_cols  2                    2 + 8/128                         4.06 (two kernels: 6.06)
  quantize_fp8_weight         4 (float32)          2                                 6.00
  quantize_fp4_rows           2                    1/2 + 1/32                        2.53
  quantize_fp8_fp4_rows       2                    1 + 4/128 + 1/2 + 1/32            3.56 (two kernels: 5.56)
  fp8_to_fp4                  1 + 4/128            1/2 + 1/32                        1.56
  fp4 -> fp8, rows or cols    1/2 + 1/32           1 + 4/128                         1.56 (by way of bfloat16: 5.56)
  fp8 rows -> cols            1 + 4/128            1                                 2.03 (and rows: 3.06)
  rms_norm                    2                    2 + 1.03 + 0.53                   5.56
  attention_inputs, a head    640                  768                               1408 (N = V = 128, R = 64; backward alike)
  swiglu, an element of a     4 (of h)             1.03 + 2.06 (h in MXFP4: 1.06)    7.09 (6.09)
  swiglu_backward             2 + 2.06             2.06 + 2.06 + 1.03                9.22 (h in MXFP4: 8.22)
  split_float32               4                    8                                 12
  route, an expert's logit    4 (three parts: 12)  4                                 8 (16)
  route_backward              4                    4                                 8
  sum_rows                    2 for each expert    2
  token_losses                2                                                      2
  logit_gradients             2                    2                                 4
  adamw_bf16                  4 + 4 + 4            4 + 4                             20 (float32 moments: 28)

What costs beside bytes. An H100's memory delivers the bytes of an element in about the time in which its schedulers issue
20 instructions for it, so instructions count: elements are handled in pairs, fours and eights of a 32-bit word.

  FP8      the hardware converts two float32 at once; of bfloat16, two a word are compared (with NaN) and scaled at once
  -> E2M1  rounding to E2M1 is rounding min(4x, 2x + 2, x + 4), x half the value: the slopes 4, 2, 1 are where its steps are
           1/2, 1, 2. Rounding keeps order, so each line is rounded by itself, to nearest even, as it is added to a large
           number, and the code is what stands in the low bits of the least. Two bfloat16 or float16 a word.
           x = 1.25: 5, 4.5, 5.25 become 5, 4 (a tie), 5; the least, 4, is the code of 2.0
  E2M1 ->  for one shift of the exponent eight magnitudes are eight bytes: one byte permutation decodes four codes
  cols     a thread holds the same columns of rows 4i ... 4i + 3, so that words of four rows go through shared memory; of
           MXFP4, 32 columns of 16 rows, which are 16 neighbouring bytes of each column: no shared memory

The interpreter has neither inline PTX nor correct casts to small formats; where a helper uses them, its twin in plain
integer and float32 operations stands beside it. Conversions multiply by powers of two alone, subnormals too (no .ftz in
their PTX: a test looks), and no multiply-add is fused but where it is written.

Offsets from a tile's origin are 64-bit (300 001 x 7168 elements pass 2^31), inside a tile 32-bit; tiles are counted along
grid x (y and z end at 65 535). Widths are compile-time constants: a model has few, and masks and strides fold away.
Every byte of an output is written, but for rows behind the last expert's. Data is contiguous, but cols and transposed
weights begin a row at a whole word.

Legend: M rows (tokens, or token-expert pairs after fan-out), K columns, weights [E experts, N, K], I expert width, T tokens;
inside a tile R rows, C columns. `x_row`, `x_col` are strides in elements.
"""

import functools
import itertools
import math

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
INF = tl.constexpr(0x7F800000)  # as float32 magnitude bits: from here on Inf and NaN
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
NO_NUMBER = tl.constexpr(128)  # the exponent of Inf and NaN
E4M3_NAN = tl.constexpr(0x7F)
MX_NAN = tl.constexpr(255)
LEAST_SCALE = tl.constexpr(2.0**-126)
MX = tl.constexpr(32)  # MXFP4: elements a scale, as quant.BLOCK says
PER_TILE, OCTETS = tl.constexpr(128 // MX.value), tl.constexpr(MX.value // 8)  # blocks in 128 columns; words of codes in a block
PART = 16  # bytes: where each part of a message begins
BOTH_WAYS = 16  # a width that it does not divide is written as rows and as columns by two launches: triton 3.6 spoils the
# bytes of one where a thread's are not neighbours
# Added to a magnitude m * 2^k, these carry into its exponent just where the scale must be a power of two larger. With
# CARRY_FP8, 1.75 = 0x3FE00000 becomes 0x3FFFFFFF, exponent 127 still; the next float32, 0x3FE00001, becomes 0x40000000, 128.
CARRY_FP8 = tl.constexpr(0x1FFFFF)  # mantissa above 1.75: 448 is 1.75 * 2^8
CARRY_MX = {"floor": 0, "even": 0x200000, "ceil": 0x3FFFFF}  # never; from 1.75 on; above 1.5: 6 is 1.5 * 2^2
CARRY_EVEN = tl.constexpr(CARRY_MX["even"])


# -----------------------------------------------------------------------------
# index maps

@triton.jit
def _tile(K, C: tl.constexpr):
    """The program's row tile and column tile. Columns run fastest, so neighbours read neighbouring memory."""
    tiles_k = tl.cdiv(K, C)
    return tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k


@triton.jit
def _tile_down(M):
    """The same with rows fastest, 128 of them, for what is written transposed: neighbours write neighbouring memory."""
    tiles_m = tl.cdiv(M, 128)
    return tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m


@triton.jit
def _origin(tile, n: tl.constexpr):
    return tile.to(tl.int64) * n


@triton.jit
def _quad(j: tl.constexpr):
    """Rows 4i + j of a 128-row tile: j = 1 gives 1, 5, 9, ..., 125."""
    return 4 * tl.arange(0, 32) + j


@triton.jit
def _joined(a, b, c, d):
    """[32, n] of rows 4i, 4i + 1, 4i + 2, 4i + 3 -> [128, n]."""
    x = tl.join(tl.join(a, c), tl.join(b, d))  # [32, n, 2, 2], of which [.., p, q] is row 2p + q
    return tl.reshape(tl.permute(x, (0, 2, 3, 1)), (128, a.shape[1]))


@triton.jit
def _source(index, row0, r, M, PER: tl.constexpr):
    """Rows to gather, 64-bit: index // PER (an index of token-expert pairs names a token), themselves without an index,
    and -1 for padding and past the end."""
    inside = _below(row0, r, M)
    if index is None:
        return tl.where(inside, row0 + r, -1)
    else:
        pair = tl.load(index + row0 + r, mask=inside, other=-1)
        return tl.where(pair < 0, -1, pair // PER).to(tl.int64)


@triton.jit
def _past_end(end, row):
    """Whether a tile that begins with this row lies behind the last expert's."""
    if end is None:
        return False
    else:
        return row >= tl.load(end)


@triton.jit
def _below(origin, x, limit):
    """Which of origin + x are below limit, compared in 32 bits. Limit may be a constexpr, which takes no tensor away."""
    return x < tl.minimum(-(origin - limit), 1 << 20).to(tl.int32)


@triton.jit
def _in_width(col0, c, width):
    """Columns inside the tensor: all, as the compiler then knows, where the width is a multiple of the tile's."""
    n: tl.constexpr = c.shape[0]
    if isinstance(width, tl.constexpr) and width % n == 0:
        return tl.full((n,), True, tl.int1)
    else:
        return _below(col0, c, width)


@triton.jit
def _pointers(ptr, row0, r, col0, c, row_stride, col_stride):
    base = ptr + row0 * row_stride + col0 * col_stride
    return base + (r.to(tl.int64) * row_stride)[:, None] + (c.to(tl.int64) * col_stride)[None, :]


@triton.jit
def _load(ptr, row0, r, col0, c, row_stride, col_stride, num_rows, width):
    """Elements at rows row0 + r and columns col0 + c; 0 outside the tensor."""
    inside = _below(row0, r, num_rows)[:, None] & _in_width(col0, c, width)[None, :]
    return tl.load(_pointers(ptr, row0, r, col0, c, row_stride, col_stride), mask=inside, other=0)


@triton.jit
def _store(ptr, value, row0, r, col0, c, row_stride, col_stride, num_rows, width):
    inside = _below(row0, r, num_rows)[:, None] & _in_width(col0, c, width)[None, :]
    tl.store(_pointers(ptr, row0, r, col0, c, row_stride, col_stride), tl.broadcast_to(value, inside.shape), mask=inside)


@triton.jit
def _gather(ptr, rows, col0, c, row_stride, col_stride, width, other):
    """_load from rows anywhere, 64-bit; `other` where they are negative."""
    inside = (rows >= 0)[:, None] & _in_width(col0, c, width)[None, :]
    at = ptr + col0 * col_stride + (rows * row_stride)[:, None] + (c.to(tl.int64) * col_stride)[None, :]
    return tl.load(at, mask=inside, other=other)


@triton.jit
def _scatter(ptr, value, rows, col0, c, row_stride, col_stride, width):
    inside = (rows >= 0)[:, None] & _in_width(col0, c, width)[None, :]
    at = ptr + col0 * col_stride + (rows * row_stride)[:, None] + (c.to(tl.int64) * col_stride)[None, :]
    tl.store(at, value, mask=inside)


@triton.jit
def _blocks(x, n: tl.constexpr):
    """[R, B * n] -> [R, B, n]."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // n, n))


@triton.jit
def _spread(x, n: tl.constexpr):
    """[R, B] -> [R, B * n], each column n times over: from one a block to one an element."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], n)), (x.shape[0], x.shape[1] * n))


@triton.jit
def _quarters(x):
    """[R, 4 n] -> four [R, n]: columns 4i, 4i + 1, 4i + 2, 4i + 3."""
    even, odd = tl.split(_blocks(x, 2))
    a, c = tl.split(_blocks(even, 2))
    b, d = tl.split(_blocks(odd, 2))
    return a, b, c, d


# -----------------------------------------------------------------------------
# numbers: float32 by its bits, bfloat16 in pairs

@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _power(e):
    """2^e as float32, built from bits; e is held to -126 ... 127, so that it is a normal number."""
    return _from_bits((tl.minimum(tl.maximum(e, -126), 127) + 127) << 23)


@triton.jit
def _exponent(scale):
    """e of a float32 power of two; NO_NUMBER for NaN."""
    return ((_bits(scale) >> 23) & 255) - 127


@triton.jit
def _float(x):
    """float32, bfloat16 or float16 -> float32. The interpreter gets subnormal bfloat16 wrong, so there bits are shifted."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return _from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def _bfloat16(x):
    """float32 -> bfloat16, to nearest even."""
    if INTERPRET:
        return (_rounded(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _unpair(words):
    """Words of two bfloat16 -> two float32 tensors, first and second of each pair."""
    return _from_bits(words << 16), _from_bits(words & -65536)


@triton.jit
def _unpair_halves(words):
    """The same of words of two float16."""
    if INTERPRET:
        first, second = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
        return first.to(tl.float16, bitcast=True).to(tl.float32), second.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }",
            "=f,=f,r", [words], (tl.float32, tl.float32), True, 1)


@triton.jit
def _pair(first, second):
    """Two float32 tensors -> words of two bfloat16, rounded to nearest even."""
    if INTERPRET:
        return ((_rounded(first) >> 16) & 0xFFFF) | (_rounded(second) & -65536)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, True, 1)


@triton.jit
def _twice(bits):
    """A bfloat16, as float32's bits, in both halves of a word."""
    if INTERPRET:
        return bits | ((bits >> 16) & 0xFFFF)
    else:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x3232;", "=r,r", [bits], tl.int32, True, 1)


@triton.jit
def _times(words, factor):
    """Pairs of bfloat16 times pairs of powers of two: exact, but for what becomes subnormal, far below any code."""
    if INTERPRET:
        first, second = _unpair(words)
        factor_1, factor_2 = _unpair(factor)
        return _pair(first * factor_1, second * factor_2)
    else:
        return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, factor], tl.int32, True, 1)


@triton.jit
def _rounded(x):
    """Bits of x, of which the upper half is its bfloat16."""
    bits = _bits(x)
    return tl.where((bits & 0x7FFFFFFF) > INF, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, axis: tl.constexpr):
    """Magnitude bits of the largest of float32 x over an axis; NaN and Inf win, as the largest bits there are."""
    if INTERPRET:
        return tl.max(_bits(x) & 0x7FFFFFFF, axis)
    else:
        return _bits(tl.reduce(tl.abs(x), axis, _larger)) & 0x7FFFFFFF


@triton.jit
def _amax_of_pairs(a, b, c, d):
    """Magnitude bits, as float32's, of the largest of the eight bfloat16 in four words; NaN wins."""
    if INTERPRET:
        x, y = tl.join(tl.join(a, b), tl.join(c, d)) & 0x7FFF7FFF, 0x7FFF0000
        return tl.max(tl.max(tl.maximum(x & y, (x << 16) & y), 3), 2)
    else:  # .xorsign.abs compares magnitudes; an abs of its own would be an instruction
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            max.NaN.xorsign.abs.bf16x2 p, $1, $2; max.NaN.xorsign.abs.bf16x2 q, $3, $4; max.NaN.xorsign.abs.bf16x2 p, p, q;
            shl.b32 q, p, 16; and.b32 p, p, 0x7FFF0000; and.b32 q, q, 0x7FFF0000; max.u32 $0, p, q; }""",
            "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)


@triton.jit
def _amax_of_halves(a, b, c, d):
    """Magnitude bits, as float16's, of the largest of the eight float16 in four words; NaN wins."""
    if INTERPRET:
        x = tl.join(tl.join(a, b), tl.join(c, d))
        return tl.max(tl.max(tl.maximum(x & 0x7FFF, (x >> 16) & 0x7FFF), 3), 2)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            abs.f16x2 p, $1; abs.f16x2 q, $2; abs.f16x2 r, $3; abs.f16x2 s, $4;
            max.NaN.f16x2 p, p, q; max.NaN.f16x2 r, r, s; max.NaN.f16x2 p, p, r;
            and.b32 q, p, 0xFFFF; shr.u32 p, p, 16; max.u32 $0, p, q; }""",
            "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)


# -----------------------------------------------------------------------------
# E4M3

@triton.jit
def _encode_e4m3(value):
    """float32 -> E4M3 bytes: nearest even, saturating; NaN becomes 0x7F.

    In integers: of 17, bits 10000011 0001000..., half a step less one, 0x7FFFF, and the last kept bit, 0, do not carry; the
    upper bits 10000011 000 = 1048 less 120 << 3 = 960 are code 88, 16. For 19, 10000011 0011000..., the last kept bit is 1,
    0x80000 is added in all and carries: code 90, 20. Below 2^-6 a code counts steps of 2^-9, the last bit from 2^14 on."""
    if INTERPRET:
        bits = _bits(value)
        magnitude = bits & 0x7FFFFFFF
        held = tl.minimum(_from_bits(tl.minimum(magnitude, INF)), 448.0)
        normal = ((_bits(held) + 0x7FFFF + ((_bits(held) >> 20) & 1)) >> 20) - 960
        code = tl.where(held < 2.0**-6, _bits(held + 2.0**14) - 0x46800000, normal) | ((bits >> 24) & 0x80)
        return tl.where(magnitude > INF, E4M3_NAN, code).to(tl.uint8)
    else:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _decode_e4m3(codes):
    """E4M3 bytes -> float32, exact; NaN codes give NaN."""
    if INTERPRET:
        code = codes.to(tl.int32)
        magnitude = code & 0x7F
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 2.0**-9, _from_bits((magnitude << 20) + (120 << 23)))
        value = tl.where(magnitude == E4M3_NAN, float("nan"), value)
        return _from_bits(_bits(value) | ((code & 0x80) << 24))
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _words_of_columns(a, b, c, d):
    """E4M3 bytes of four rows [R, C] -> words [R, C], each of one column's four bytes, the first row lowest."""
    if INTERPRET:
        return a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    else:  # four columns at a time: a 4x4 transpose of bytes
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            prmt.b32 p, $4, $5, 0x5140; prmt.b32 q, $4, $5, 0x7362; prmt.b32 r, $6, $7, 0x5140; prmt.b32 s, $6, $7, 0x7362;
            prmt.b32 $0, p, r, 0x5410; prmt.b32 $1, p, r, 0x7632; prmt.b32 $2, q, s, 0x5410; prmt.b32 $3, q, s, 0x7632; }""",
            "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], tl.int32, True, 4)


@triton.jit
def _encode_columns(a, b, c, d):
    """float32 of four rows -> words of a column's four E4M3 codes."""
    if INTERPRET:
        return _words_of_columns(_encode_e4m3(a), _encode_e4m3(b), _encode_e4m3(c), _encode_e4m3(d))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h;
            cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }""",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1)


# -----------------------------------------------------------------------------
# E2M1: see the top of the file for the three lines

def _to_e2m1(kind, one, magic):
    """PTX that turns four words of two `kind` numbers, $1 ... $4, into a word $0 of eight E2M1 codes; $5 is the factor.

    `one` is 1 in the exponent, `magic` 1.5 * 2^(mantissa bits), both twice over: from there on numbers count in ones, are in
    the same order as integers, and end in the code's bits."""
    ptx = "{ .reg .b32 t0, t1, t2, t3, a, r, s, half2, half4, m0, m2, m4, m7;"
    ptx += f"add.u32 half2, $5, {one}; add.u32 half4, half2, {one};"
    ptx += "".join(f"mov.b32 m{n}, {magic + 0x10001 * n};" for n in (0, 2, 4, 7))
    for i in range(4):
        ptx += f"abs.{kind} a, ${i + 1};"
        for to, factor, offset in ((f"t{i}", "half4", "m0"), ("r", "half2", "m2"), ("s", "$5", "m4")):
            ptx += f"fma.rn.{kind} {to}, a, {factor}, {offset};"
        ptx += f"min.u16x2 t{i}, t{i}, r; min.u16x2 t{i}, t{i}, s; min.u16x2 t{i}, t{i}, m7;"
    above = (magic & 255) * 0x01010101  # what stands above the codes in their bytes
    for i, j in (0, 1), (2, 3):  # bytes of codes; the signs to their bit 3; to each byte 16 times the one below it
        ptx += f"prmt.b32 t{i}, t{i}, t{j}, 0x4602; prmt.b32 s, ${i + 1}, ${j + 1}, 0x5713; shr.u32 s, s, 4;"
        ptx += f"lop3.b32 t{i}, t{i}, s, 0x08080808, 0xF8; mad.lo.u32 t{i}, t{i}, 0x1001, {-above * 0x1001 % 2**32};"
    return ptx + "prmt.b32 $0, t0, t2, 0x7531; }"


PAIRS_TO_E2M1 = tl.constexpr(_to_e2m1("bf16x2", 0x00800080, 0x43404340))
HALVES_TO_E2M1 = tl.constexpr(_to_e2m1("f16x2", 0x04000400, 0x66006600))


@triton.jit
def _encode_e2m1(x, half):
    """float32 x, of which x * 2 * half is what is encoded -> E2M1 codes, 0 ... 15."""
    a = tl.abs(x) * half
    least = tl.minimum(tl.minimum(a * 4.0 + 12582912.0, a * 2.0 + 12582914.0), a + 12582916.0)  # 1.5 * 2^23
    return (_bits(tl.minimum(least, 12582919.0)) & 7) | ((_bits(x) >> 28) & 8)


@triton.jit
def _pack_two(codes, BITS: tl.constexpr):
    low, high = tl.split(_blocks(codes, 2))
    return low | (high << BITS)


@triton.jit
def _pack(codes):
    """Four-bit codes [R, C] -> words [R, C/8], the first lowest."""
    return _pack_two(_pack_two(_pack_two(codes, 4), 8), 16)


@triton.jit
def _pairs_to_e2m1(a, b, c, d, half):
    """Eight bfloat16 in four words, times 2 * half (a bfloat16 twice over) -> a word of eight E2M1 codes."""
    if INTERPRET:
        low, high = _unpair(tl.join(tl.join(a, c), tl.join(b, d)))
        factor = _from_bits(half & -65536)[:, :, None, None]
        codes = tl.join(_encode_e2m1(low, factor), _encode_e2m1(high, factor))  # [R, B, 2, 2, 2], in order
        return _pack(tl.reshape(codes, (a.shape[0], a.shape[1] * 8)))
    else:
        return tl.inline_asm_elementwise(PAIRS_TO_E2M1, "=r,r,r,r,r,r", [a, b, c, d, half], tl.int32, True, 1)


@triton.jit
def _codes_to_halves(words):
    """Four E4M3 codes a word -> two words of two float16 each, exact."""
    if INTERPRET:
        low, high = tl.zeros_like(words), tl.zeros_like(words)
        for i in tl.static_range(2):
            first = _decode_e4m3((words >> (8 * i)).to(tl.uint8)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            second = _decode_e4m3((words >> (8 * i + 16)).to(tl.uint8)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            low, high = low | ((first & 0xFFFF) << (16 * i)), high | ((second & 0xFFFF) << (16 * i))
        return low, high
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r", [words], (tl.int32, tl.int32), True, 1)


@triton.jit
def _halves_to_e2m1(a, b, c, d, half):
    """Eight float16 in four words, times 2 * half (a float16 twice over) -> a word of eight E2M1 codes."""
    if INTERPRET:
        low, high = _unpair_halves(tl.join(tl.join(a, c), tl.join(b, d)))
        factor = (half & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, :, None, None]
        codes = tl.join(_encode_e2m1(low, factor), _encode_e2m1(high, factor))
        return _pack(tl.reshape(codes, (a.shape[0], a.shape[1] * 8)))
    else:
        return tl.inline_asm_elementwise(HALVES_TO_E2M1, "=r,r,r,r,r,r", [a, b, c, d, half], tl.int32, True, 1)


@triton.jit
def _byte_permute(low, high, selector):
    """Four bytes, named by the low four nibbles (0 ... 7) of selector, of the eight in low and high."""
    if INTERPRET:
        out = tl.zeros_like(selector)
        for i in tl.static_range(4):
            n = (selector >> (4 * i)) & 7
            out |= ((tl.where(n < 4, low, high) >> ((n & 3) * 8)) & 255) << (8 * i)
        return out
    else:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1)


@triton.jit
def _look_up(table, shift, bad):
    """E4M3 codes of 2^shift times the eight E2M1 magnitudes in two words, NaN where bad; and the sign's, 0x80, in byte 1."""
    entry = tl.load(table + tl.where(bad, 22, tl.minimum(tl.maximum(shift + 13, 0), 21)))
    return entry.to(tl.int32), (entry >> 32).to(tl.int32), tl.where(bad, 0, 0x8000)


@triton.jit
def _decode_e2m1(words, low, high, sign):
    """Words of eight E2M1 codes -> two words of four E4M3 codes, by what _look_up found, in words' shape."""
    magnitudes, signs = words & 0x77777777, (words >> 3) & 0x11111111
    first = _byte_permute(low, high, magnitudes) | _byte_permute(sign, sign, signs)
    second = _byte_permute(low, high, magnitudes >> 16) | _byte_permute(sign, sign, signs >> 16)
    return first, second


# -----------------------------------------------------------------------------
# scale rules

@triton.jit
def _fp8_scales(amax):
    """Magnitude -> the scale 2^e with the least e such that amax <= 448 * 2^e, -126 ... 119, and its inverse; NaN for NaN.

    All in the exponent's place: the raised exponent is e + 135, and from that come e + 127 and 127 - e."""
    raised = tl.minimum(tl.maximum((amax + CARRY_FP8) & INF, 9 << 23), 254 << 23)
    bad = amax >= INF
    scale = _from_bits(tl.where(bad, 0x7FC00000, raised - (8 << 23)))
    return scale, _from_bits(tl.where(bad, 0x7FC00000, (262 - 512 << 23) - raised))  # 262 << 23 in 32 bits with a sign


@triton.jit
def _fp8_scale(e, bad):
    return tl.where(bad, float("nan"), _power(e))


@triton.jit
def _mx_scales(amax, CARRY: tl.constexpr):
    """Magnitude -> E8M0 byte by the rule of CARRY, and the bits of half its scale's inverse. 0 is for a block of zeros alone."""
    raised = tl.minimum(tl.maximum((amax + CARRY) & INF, 3 << 23), 254 << 23)  # byte + 2, in the exponent's place
    byte = tl.where(amax >= INF, MX_NAN, tl.minimum((raised >> 23) - 2, amax))  # 0 for 0: other magnitudes' bits are more
    return byte, (255 << 23) - raised


@triton.jit
def _fp8_of_mx(top):
    """FP8 exponent for MXFP4 blocks of which the largest has byte top: 6 less, so that its 6 becomes 384; and whether NaN."""
    return tl.minimum(tl.maximum(top - 133, -126), 119), top == MX_NAN


# -----------------------------------------------------------------------------
# tiles to formats, and where they go

@triton.jit
def _to_fp8(x):
    """float32 [R, C] -> E4M3 bytes, scales [R, C/128]."""
    scale, inverse = _fp8_scales(_amax(_blocks(x, 128), 2))
    return _encode_e4m3(x * _spread(inverse, 128)), scale


@triton.jit
def _amax_of_blocks(a, b, c, d):
    """Magnitude bits of the largest of each 32 bfloat16."""
    return tl.max(_blocks(_amax_of_pairs(a, b, c, d), OCTETS), 2)


@triton.jit
def _pairs_to_fp8(words):
    """Pairs of bfloat16 [R, C/2] -> E4M3 bytes [R, C], scales [R, C/128]."""
    amax = tl.max(_blocks(_amax_of_blocks(*_quarters(words)), PER_TILE), 2)
    scale, inverse = _fp8_scales(amax)
    first, second = _unpair(_times(words, _spread(_twice(_bits(inverse)), 64)))
    return _encode_e4m3(tl.interleave(first, second)), scale


@triton.jit
def _pairs_to_fp4(words):
    """Pairs of bfloat16 [R, C/2] -> words of eight E2M1 codes [R, C/8], E8M0 bytes [R, C/32]."""
    a, b, c, d = _quarters(words)
    amax = _amax_of_blocks(a, b, c, d)
    byte, half = _mx_scales(amax, CARRY_EVEN)
    codes = _pairs_to_e2m1(a, b, c, d, _spread(_twice(half), OCTETS))
    return tl.where(_spread(amax, OCTETS) >= INF, 0, codes), byte.to(tl.uint8)


@triton.jit
def _floats_to_fp4(x, CARRY: tl.constexpr):
    """The same from float32 [R, C], by any rule."""
    byte, half = _mx_scales(_amax(_blocks(x, MX), 2), CARRY)
    codes = _pack(_encode_e2m1(x, _spread(_from_bits(half), MX)))
    return tl.where(_spread(byte, OCTETS) == MX_NAN, 0, codes), byte.to(tl.uint8)


@triton.jit
def _store_fp8_rows(data, scale, s_row, s_col, codes, scales, row0, r, tile_k, C: tl.constexpr, M, K: tl.constexpr):
    n: tl.constexpr = C // 128
    _store(data, codes, row0, r, _origin(tile_k, C), tl.arange(0, C), K, 1, M, K)
    _store(scale, scales, row0, r, _origin(tile_k, n), tl.arange(0, n), s_row, s_col, M, tl.cdiv(K, 128))


@triton.jit
def _store_once(ptr, value, n: tl.constexpr, row0, r, col0, row_stride, col_stride, num_rows, width):
    """_store of one value a block, which n threads hold, by the first of them: it need not go through shared memory."""
    i = tl.arange(0, value.shape[1] * n)
    inside = _below(row0, r, num_rows)[:, None] & (_in_width(col0 * n, i, width * n) & (i % n == 0))[None, :]
    tl.store(_pointers(ptr, row0, r, col0, i // n, row_stride, col_stride), _spread(value, n), mask=inside)


@triton.jit
def _store_fp4_rows(data, scale, codes, scales, row0, r, tile_k, C: tl.constexpr, M, K: tl.constexpr):
    """data [M, K/2] as words [M, K/8]."""
    _store(data, codes, row0, r, _origin(tile_k, C // 8), tl.arange(0, C // 8), K // 8, 1, M, K // 8)
    _store(scale, scales, row0, r, _origin(tile_k, C // MX), tl.arange(0, C // MX), K // MX, 1, M, K // MX)


@triton.jit
def _store_cols(data, words, tile_m, tile_k, C: tl.constexpr, pitch, K):
    """Words [32, C] of four rows each -> the transposed tensor [K, pitch] in words."""
    _store(data, tl.trans(words), _origin(tile_k, C), tl.arange(0, C), _origin(tile_m, 32), tl.arange(0, 32), pitch, 1, K, pitch)


# -----------------------------------------------------------------------------
# bfloat16, float16, float32 -> FP8 and MXFP4

@triton.jit(do_not_specialize=["M"])  # the number of tokens changes from step to step: one compilation for all of them
def _quantize_rows(x, x_row, x_col, data8, scale8, s_row, s_col, data4, scale4, M, K: tl.constexpr, CARRY: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr):
    """Float rows -> FP8 rows, MXFP4 rows or both from one read; a format not wanted has None for its tensors."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    value = _float(_load(x, row0, r, _origin(tile_k, C), tl.arange(0, C), x_row, x_col, M, K))
    if data8 is not None:
        codes, scales = _to_fp8(value)
        _store_fp8_rows(data8, scale8, s_row, s_col, codes, scales, row0, r, tile_k, C, M, K)
    if data4 is not None:
        codes, scales = _floats_to_fp4(value, CARRY)
        _store_fp4_rows(data4, scale4, codes, scales, row0, r, tile_k, C, M, K)


@triton.jit(do_not_specialize=["M"])
def _quantize_pairs(x, data8, scale8, s_row, s_col, data4, scale4, M, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """_quantize_rows of contiguous bfloat16, by the rule "even"."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    words = _load(x, row0, r, _origin(tile_k, C // 2), tl.arange(0, C // 2), K // 2, 1, M, K // 2)
    _store_pairs_as(words, data8, scale8, s_row, s_col, data4, scale4, row0, r, tile_k, C, M, K)


@triton.jit
def _store_pairs_as(words, data8, scale8, s_row, s_col, data4, scale4, row0, r, tile_k, C: tl.constexpr, M, K: tl.constexpr):
    if data8 is not None:
        codes, scales = _pairs_to_fp8(words)
        _store(data8, codes, row0, r, _origin(tile_k, C), tl.arange(0, C), K, 1, M, K)
        _store_once(scale8, scales, 16, row0, r, _origin(tile_k, C // 128), s_row, s_col, M, tl.cdiv(K, 128))
    if data4 is not None:
        codes, scales = _pairs_to_fp4(words)
        _store(data4, codes, row0, r, _origin(tile_k, C // 8), tl.arange(0, C // 8), K // 8, 1, M, K // 8)
        _store_once(scale4, scales, OCTETS, row0, r, _origin(tile_k, C // MX), K // MX, 1, M, K // MX)


@triton.jit
def _quantize_blocks(w, w_expert, w_row, w_col, data, scale, data_t, scale_t, N, K: tl.constexpr, pitch):
    """Float [E, N, K] -> FP8 blocks and, unless data_t is None, the same codes and scales transposed, [E, K, pitch] words."""
    tile, tile_k = _tile(K, 128)
    tiles_n, tiles_k = tl.cdiv(N, 128), tl.cdiv(K, 128)
    expert, tile_n = (tile // tiles_n).to(tl.int64), tile % tiles_n
    row0, col0, c = _origin(tile_n, 128), _origin(tile_k, 128), tl.arange(0, 128)
    w += expert * w_expert
    v0 = _float(_load(w, row0, _quad(0), col0, c, w_row, w_col, N, K))
    v1 = _float(_load(w, row0, _quad(1), col0, c, w_row, w_col, N, K))
    v2 = _float(_load(w, row0, _quad(2), col0, c, w_row, w_col, N, K))
    v3 = _float(_load(w, row0, _quad(3), col0, c, w_row, w_col, N, K))
    amax = tl.maximum(tl.maximum(_amax(v0, 1), _amax(v1, 1)), tl.maximum(_amax(v2, 1), _amax(v3, 1)))
    block_scale, inverse = _fp8_scales(tl.max(amax, 0))
    c0, c1, c2, c3 = (_encode_e4m3(v0 * inverse), _encode_e4m3(v1 * inverse), _encode_e4m3(v2 * inverse),
                      _encode_e4m3(v3 * inverse))
    data += expert * N * K
    _store(data, c0, row0, _quad(0), col0, c, K, 1, N, K)
    _store(data, c1, row0, _quad(1), col0, c, K, 1, N, K)
    _store(data, c2, row0, _quad(2), col0, c, K, 1, N, K)
    _store(data, c3, row0, _quad(3), col0, c, K, 1, N, K)
    tl.store(scale + (expert * tiles_n + tile_n) * tiles_k + tile_k, block_scale)
    if data_t is not None:
        _store_cols(data_t + expert * K * pitch, _words_of_columns(c0, c1, c2, c3), tile_n, tile_k, 128, pitch, K)
        tl.store(scale_t + (expert * tiles_k + tile_k) * tiles_n + tile_n, block_scale)


# -----------------------------------------------------------------------------
# RMSNorm, quantised as it is computed

@triton.jit(do_not_specialize=["M"])
def _rms_norm(x, pitch: tl.constexpr, weight, y, data8, scale8, s_row, s_col, data4, scale4, eps, M, K: tl.constexpr,
              C: tl.constexpr, R: tl.constexpr):
    """R rows a program, a chunk of C columns at a time; x, y and weight (int64) in pairs, rows of x `pitch` pairs apart. What is
    quantised is the bfloat16 y."""
    row, r, c = _origin(tl.program_id(0), R), tl.arange(0, R), tl.arange(0, C // 2)
    end = M if R > 1 else row + 1
    total = tl.zeros((R, C // 2), tl.float32)
    chunks = ()
    for tile in tl.static_range((K + C - 1) // C):
        chunks += (_load(x, row, r, tile * (C // 2), c, pitch, 1, end, K // 2),)
        first, second = _unpair(chunks[tile])
        total = tl.fma(first, first, tl.fma(second, second, total))
    factor = tl.rsqrt(tl.sum(total, 1) / K + eps)[:, None]
    for tile in tl.static_range((K + C - 1) // C):
        first, second = _unpair(chunks[tile])
        w = _load(weight, 0, r, tile * (C // 2), c, 0, 1, R, K // 2)  # in x's shape, so that Triton gives it x's layout
        words = _pair(first * factor * _from_bits(w.to(tl.int32)), second * factor * _from_bits((w >> 32).to(tl.int32)))
        if y is not None:
            _store(y, words, row, r, tile * (C // 2), c, K // 2, 1, end, K // 2)
        tile_k = tl.full((), tile, tl.int32)  # a tensor, as the index maps want, but a constant
        _store_pairs_as(words, data8, scale8, s_row, s_col, data4, scale4, row, r, tile_k, C, end, K)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_backward(dy, x, pitch: tl.constexpr, weight, dx, dw, eps, M, K: tl.constexpr, HALF: tl.constexpr):
    """dy, x, dx in pairs, a row at a time; rows of x `pitch` pairs apart. Each program sums dw [programs, K] over its rows: no
    atomics, one order."""
    c = tl.arange(0, HALF)
    inside = c < K // 2
    w_first = _float(tl.load(weight + 2 * c, mask=inside, other=0))
    w_second = _float(tl.load(weight + 2 * c + 1, mask=inside, other=0))
    dw_first, dw_second = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        row_64 = row + tl.zeros((HALF,), tl.int64)
        at = row_64 * (K // 2) + c
        x1, x2 = _unpair(tl.load(x + row_64 * pitch + c, mask=inside, other=0))
        d1, d2 = _unpair(tl.load(dy + at, mask=inside, other=0))
        factor = tl.rsqrt(tl.sum(tl.fma(x1, x1, x2 * x2), 0) / K + eps)
        mean = tl.sum(tl.fma(d1 * w_first, x1, d2 * w_second * x2), 0) / K * factor * factor
        dw_first = tl.fma(d1 * factor, x1, dw_first)
        dw_second = tl.fma(d2 * factor, x2, dw_second)
        tl.store(dx + at, _pair(factor * (d1 * w_first - x1 * mean), factor * (d2 * w_second - x2 * mean)), mask=inside)
    at = tl.program_id(0).to(tl.int64) * K + 2 * c
    tl.store(dw + at, dw_first, mask=inside)
    tl.store(dw + at + 1, dw_second, mask=inside)


# -----------------------------------------------------------------------------
# attention's inputs. All in pairs, and so are the widths: q, k [T, A, N + R], kv [T, A, N + V], v [T, A, V], k_rope [T, R]. A row
# is one head of a token. A pair turns by its token's angle: table [2, S, R] float32, cosines and sines.

@triton.jit
def _of_heads(ptr, rows, first, n, pitch):
    """Where columns first ... first + n - 1 of rows lie, 64-bit; and which there are: no row is -1."""
    c = tl.arange(0, triton.next_power_of_2(n))
    return ptr + (rows * pitch + first)[:, None] + c[None, :], (rows >= 0)[:, None] & (c < n)[None, :]


@triton.jit
def _copy_heads(source, source_first, source_pitch, ptr, first, pitch, rows, n):
    at, inside = _of_heads(source, rows, source_first, n, source_pitch)
    words = tl.load(at, mask=inside, other=0)
    at, inside = _of_heads(ptr, rows, first, n, pitch)
    tl.store(at, words, mask=inside)


@triton.jit
def _angles(table, token, S, R: tl.constexpr):
    """Cosines and sines of a token's pairs, [1, R] padded to a power of two."""
    c = tl.arange(0, triton.next_power_of_2(R))
    at = table + (token % S) * R + c
    cos, sin = tl.load(at, mask=c < R, other=0), tl.load(at + S.to(tl.int64) * R, mask=c < R, other=0)
    return cos[None, :], sin[None, :]


@triton.jit
def _turn(even, odd, cos, sin):
    return _pair(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def _turn_heads(ptr, rows, first, n, pitch, cos, sin):
    """Where they lie."""
    at, inside = _of_heads(ptr, rows, first, n, pitch)
    even, odd = _unpair(tl.load(at, mask=inside, other=0))
    tl.store(at, _turn(even, odd, cos, sin), mask=inside)


@triton.jit(do_not_specialize=["S"])
def _attention_inputs(kv, k_rope, k_row, q, table, k, v, S, A: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
                      H: tl.constexpr):
    """H heads of a token a program."""
    chunks: tl.constexpr = (A + H - 1) // H
    token, h = _origin(tl.program_id(0) // chunks, 1), tl.program_id(0) % chunks * H + tl.arange(0, H)
    rows = tl.where(h < A, token * A + h, -1)
    cos, sin = _angles(table, token, S, R)
    if q is not None:
        _turn_heads(q, rows, N, R, N + R, cos, sin)
    at, inside = _of_heads(k_rope, token + tl.zeros((1,), tl.int64), 0, R, k_row)
    even, odd = _unpair(tl.load(at, mask=inside, other=0))
    at, inside = _of_heads(k, rows, N, R, N + R)
    tl.store(at, tl.broadcast_to(_turn(even, odd, cos, sin), at.shape), mask=inside)
    _copy_heads(kv, 0, N + V, k, 0, N + R, rows, N)
    _copy_heads(kv, N, N + V, v, 0, V, rows, V)


@triton.jit(do_not_specialize=["S"])
def _attention_inputs_backward(dq, dk, dv, table, dkv, dk_rope, S, A: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
                               V: tl.constexpr, H: tl.constexpr):
    """A token a program, H heads at a time: the gradient of the shared key is summed in one order."""
    token = _origin(tl.program_id(0), 1)
    cos, sin = _angles(table, token, S, R)
    even, odd = tl.zeros((H, cos.shape[1]), tl.float32), tl.zeros((H, cos.shape[1]), tl.float32)
    for first in range(0, A, H):
        h = first + tl.arange(0, H)
        rows = tl.where(h < A, token * A + h, -1)
        _turn_heads(dq, rows, N, R, N + R, cos, -sin)
        at, inside = _of_heads(dk, rows, N, R, N + R)
        more_even, more_odd = _unpair(tl.load(at, mask=inside, other=0))
        even, odd = even + more_even, odd + more_odd
        _copy_heads(dk, 0, N + R, dkv, 0, N + V, rows, N)
        _copy_heads(dv, 0, V, dkv, N, N + V, rows, V)
    at, inside = _of_heads(dk_rope, token + tl.zeros((1,), tl.int64), 0, R, R)
    tl.store(at, _turn(tl.sum(even, 0)[None, :], tl.sum(odd, 0)[None, :], cos, -sin), mask=inside)


# -----------------------------------------------------------------------------
# one small format -> another, through an index where rows fan out to experts. New exponents come from old ones; an element
# is rounded once. `index` None: rows stay where they are; `end`: [1], the first row behind the last expert's.

@triton.jit(do_not_specialize=["M"])
def _fp8_to_fp4(data, scale, s_row, s_col, data4, scale4, M, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """FP8 rows, data as words [M, K/4] -> MXFP4 rows: a block's largest code gives its exponent."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    words = _load(data, row0, r, _origin(tile_k, C // 4), tl.arange(0, C // 4), K // 4, 1, M, K // 4)
    low, high = tl.split(_blocks(words, 2))
    a, b = _codes_to_halves(low)
    c, d = _codes_to_halves(high)
    scales = _load(scale, row0, r, _origin(tile_k, C // 128), tl.arange(0, C // 128), s_row, s_col, M, tl.cdiv(K, 128))
    e = _spread(_exponent(scales), PER_TILE)
    amax = tl.max(_blocks(_amax_of_halves(a, b, c, d), OCTETS), 2)  # a float16's bits
    byte = tl.minimum(tl.maximum(((amax + 0x100) >> 10) - 15 + 127 - 2 + e, 1), 252)  # the rule "even": from 1.75 on one more
    byte = tl.where((amax >= 0x7C00) | (e == NO_NUMBER), MX_NAN, tl.minimum(byte, amax))  # 0 for 0: other bits are more
    half = tl.minimum(tl.maximum(e - byte + 126 + 15, 0), 28) << 10  # 2^(e - (byte - 127) - 1), a float16; 4 times that is one
    codes = _halves_to_e2m1(a, b, c, d, _spread(half | (half << 16), OCTETS))
    codes = tl.where(_spread(byte, OCTETS) == MX_NAN, 0, codes)
    _store_fp4_rows(data4, scale4, codes, byte.to(tl.uint8), row0, r, tile_k, C, M, K)


@triton.jit(do_not_specialize=["M"])
def _fp4_to_fp8_rows(table, data, quads, byte, b_row, index, end, data8, scale8, s_row, s_col, M, K: tl.constexpr,
                     PER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """MXFP4 rows, data as words [.., K/8], `quads` times 16 bytes apart -> FP8 rows as words. The largest block's exponent less 6
    puts its 6 at 384, and keeps every code of blocks down to 2^-14 of it exact."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    if _past_end(end, row0):
        return
    rows = _source(index, row0, r, M, PER)
    words = _gather(data, rows, _origin(tile_k, C // 8), tl.arange(0, C // 8), quads * 4, 1, K // 8, 0)
    b = _gather(byte, rows, _origin(tile_k, C // MX), tl.arange(0, C // MX), b_row, 1, K // MX, 0).to(tl.int32)
    e, bad = _fp8_of_mx(tl.max(_blocks(b, PER_TILE), 2))  # a block of zeros has the least byte, so it never decides
    low, high, sign = _look_up(table, b - 127 - _spread(e, PER_TILE), _spread(bad, PER_TILE))
    first, second = _decode_e2m1(words, _spread(low, OCTETS), _spread(high, OCTETS), _spread(sign, OCTETS))
    n: tl.constexpr = C // 128
    _store(data8, tl.interleave(first, second), row0, r, _origin(tile_k, C // 4), tl.arange(0, C // 4), K // 4, 1, M, K // 4)
    _store(scale8, _fp8_scale(e, bad), row0, r, _origin(tile_k, n), tl.arange(0, n), s_row, s_col, M, tl.cdiv(K, 128))


@triton.jit
def _fp4_row(r: tl.constexpr, data, quads, byte, b_row, index, row0, tile_k, M, width, WHOLE: tl.constexpr, PER: tl.constexpr):
    """Of rows r, 16 + r, ..., 112 + r four words for each of 32 threads, [32] each, and the bytes of the words' blocks."""
    g, q = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4
    rows, at = _source(index, row0, 16 * g + r, M, PER), _origin(tile_k, 16) + 4 * q
    inside = rows >= 0 if WHOLE else (rows >= 0) & (at < width)
    words = tl.load(data + (rows * (quads * 4) + at)[:, None] + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
    b = ()
    for n in tl.static_range(0, 4, OCTETS):
        k = (at + n) // OCTETS
        b += (tl.load(byte + rows * b_row + k, mask=inside, other=0).to(tl.int32),)
    w0, w1, w2, w3 = _quarters(words)
    return (tl.reshape(w0, (32,)), tl.reshape(w1, (32,)), tl.reshape(w2, (32,)), tl.reshape(w3, (32,))), b


@triton.jit
def _transpose_words(a, b, c, d):
    """Words of four bytes of four rows -> four words, each of one column's four bytes."""
    even, odd = tl.full(a.shape, 0x5140, tl.int32), tl.full(a.shape, 0x7362, tl.int32)
    low, high = tl.full(a.shape, 0x5410, tl.int32), tl.full(a.shape, 0x7632, tl.int32)
    ab, ab_ = _byte_permute(a, b, even), _byte_permute(a, b, odd)
    cd, cd_ = _byte_permute(c, d, even), _byte_permute(c, d, odd)
    return _byte_permute(ab, cd, low), _byte_permute(ab, cd, high), _byte_permute(ab_, cd_, low), _byte_permute(ab_, cd_, high)


@triton.jit
def _fp4_to_fp8_cols(table, data, quads, byte, b_row, index, end, data8, scale8, s_row, s_col, M, width, pitch,
                     WHOLE: tl.constexpr, PER: tl.constexpr):
    """MXFP4 rows, each of `width` words, `quads` times 16 bytes apart -> FP8 cols [K, pitch] in words, one scale [K/128, M/128] a
    128x128 tile: as exact as rows. WHOLE: 128 divides K. (As a constant, K would have this kernel, ten seconds of compiling,
    compiled for each.)

    One warp a tile: a thread holds 32 columns of 16 neighbouring rows, which are 16 neighbouring bytes of each column."""
    tile_m, tile_k = _tile_down(M)
    row0 = _origin(tile_m, 128)
    N: tl.constexpr = (4 + OCTETS - 1) // OCTETS  # block bytes of four words
    if _past_end(end, row0):
        return
    words, blocks, tables = (), (), ()
    for r in tl.static_range(16):
        w, b = _fp4_row(r, data, quads, byte, b_row, index, row0, tile_k, M, width, WHOLE, PER)
        words, blocks = words + w, blocks + b
    top = blocks[0]
    for i in tl.static_range(1, 16 * N):
        top = tl.maximum(top, blocks[i])
    e, bad = _fp8_of_mx(tl.max(top))  # a block of zeros has the least byte, so it never decides
    for i in tl.static_range(16 * N):
        tables += (_look_up(table, blocks[i] - 127 - e, bad),)
    for w in tl.static_range(4):
        c = ()
        for r in tl.static_range(0, 16, 4):
            f0, s0 = _decode_e2m1(words[4 * r + w], *tables[N * r + w // OCTETS])
            f1, s1 = _decode_e2m1(words[4 * r + 4 + w], *tables[N * r + N + w // OCTETS])
            f2, s2 = _decode_e2m1(words[4 * r + 8 + w], *tables[N * r + 2 * N + w // OCTETS])
            f3, s3 = _decode_e2m1(words[4 * r + 12 + w], *tables[N * r + 3 * N + w // OCTETS])
            c += _transpose_words(f0, f1, f2, f3) + _transpose_words(s0, s1, s2, s3)
        for j in tl.static_range(8):
            _store_16_rows(data8, c[j], c[8 + j], c[16 + j], c[24 + j], tile_m, tile_k, 8 * w + j, pitch, width * 8, WHOLE)
    tl.store(scale8 + tile_k.to(tl.int64) * s_row + tile_m.to(tl.int64) * s_col, _fp8_scale(e, bad))


@triton.jit
def _store_16_rows(data, a, b, c, d, tile_m, tile_k, j: tl.constexpr, pitch, K, WHOLE: tl.constexpr):
    """Words [32] of rows 16g, 16g + 4, 16g + 8, 16g + 12 and the three behind each, of columns 32q + j -> [K, pitch]."""
    words, t = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (32, 4)), tl.arange(0, 32)
    k = (_origin(tile_k, 128) + 32 * (t % 4) + j)[:, None]
    m = (tile_m * 32 + 4 * (t // 4))[:, None] + tl.arange(0, 4)[None, :]
    tl.store(data + k * pitch + m, words, mask=m < pitch if WHOLE else (k < K) & (m < pitch))


@triton.jit(do_not_specialize=["M"])
def _fan_out_rows(data, d_row, d_col, scale, i_row, i_col, index, end, out, out_scale, s_row, s_col, M, K: tl.constexpr,
                  PER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Rows of K bytes, with their FP8 scales if any -> the same rows where the index wants them."""
    tile_m, tile_k = _tile(K, C)
    row0, r, n = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, C // 128)
    if _past_end(end, row0):
        return
    rows = _source(index, row0, r, M, PER)
    _store(out, _gather(data, rows, _origin(tile_k, C), tl.arange(0, C), d_row, d_col, K, 0), row0, r, _origin(tile_k, C),
           tl.arange(0, C), K, 1, M, K)
    if scale is not None:
        scales = _gather(scale, rows, _origin(tile_k, C // 128), n, i_row, i_col, tl.cdiv(K, 128), LEAST_SCALE)
        _store(out_scale, scales, row0, r, _origin(tile_k, C // 128), n, s_row, s_col, M, tl.cdiv(K, 128))


@triton.jit
def _fp8_quad(j: tl.constexpr, data, d_row, d_col, scale, i_row, i_col, index, row0, tile_k, M, K: tl.constexpr,
              PER: tl.constexpr):
    """Codes and scales of rows 4i + j; zeros and the least scale where there is no row."""
    rows = _source(index, row0, _quad(j), M, PER)
    codes = _gather(data, rows, _origin(tile_k, 128), tl.arange(0, 128), d_row, d_col, K, 0)
    return codes, _gather(scale, rows, _origin(tile_k, 1), tl.arange(0, 1), i_row, i_col, tl.cdiv(K, 128), LEAST_SCALE)


@triton.jit
def _lowered(codes, scale, top):
    """E4M3 codes in units of scale -> in units of 2^top, at least as large; NaN where that is none."""
    factor = tl.where(top == NO_NUMBER, float("nan"), _power(_exponent(scale) - top))
    return _encode_e4m3(_decode_e4m3(codes) * factor)


@triton.jit
def _fp8_rows_to_cols(data, d_row, d_col, scale, i_row, i_col, index, end, rows8, rows_scale, r_row, r_col,
                      data8, scale8, s_row, s_col, M, K: tl.constexpr, pitch, PER: tl.constexpr):
    """FP8 rows -> FP8 cols [K, pitch] in words, scale [K/128, M/128]: 128 rows are brought to their largest exponent, small
    codes rounded into the subnormals. And, unless rows8 is None, the fanned out rows from the same read."""
    tile_m, tile_k = _tile_down(M)
    row0, col0, c = _origin(tile_m, 128), _origin(tile_k, 128), tl.arange(0, 128)
    if _past_end(end, row0):
        return
    c0, s0 = _fp8_quad(0, data, d_row, d_col, scale, i_row, i_col, index, row0, tile_k, M, K, PER)
    c1, s1 = _fp8_quad(1, data, d_row, d_col, scale, i_row, i_col, index, row0, tile_k, M, K, PER)
    c2, s2 = _fp8_quad(2, data, d_row, d_col, scale, i_row, i_col, index, row0, tile_k, M, K, PER)
    c3, s3 = _fp8_quad(3, data, d_row, d_col, scale, i_row, i_col, index, row0, tile_k, M, K, PER)
    if rows8 is not None:
        _store(rows8, c0, row0, _quad(0), col0, c, K, 1, M, K)
        _store(rows8, c1, row0, _quad(1), col0, c, K, 1, M, K)
        _store(rows8, c2, row0, _quad(2), col0, c, K, 1, M, K)
        _store(rows8, c3, row0, _quad(3), col0, c, K, 1, M, K)
        _store(rows_scale, _joined(s0, s1, s2, s3), row0, c, _origin(tile_k, 1), tl.arange(0, 1), r_row, r_col, M,
               tl.cdiv(K, 128))
    e01, e23 = tl.maximum(_exponent(s0), _exponent(s1)), tl.maximum(_exponent(s2), _exponent(s3))
    top = tl.max(tl.maximum(e01, e23))  # a scalar: kept as [1, 1] it makes triton 3.7 spill
    words = _words_of_columns(_lowered(c0, s0, top), _lowered(c1, s1, top), _lowered(c2, s2, top), _lowered(c3, s3, top))
    _store_cols(data8, words, tile_m, tile_k, 128, pitch, K)
    tl.store(scale8 + tile_k.to(tl.int64) * s_row + tile_m.to(tl.int64) * s_col, _fp8_scale(top, top == NO_NUMBER))


# -----------------------------------------------------------------------------
# SwiGLU between the expert GEMMs. Rows are padded to 128 an expert, h is kept without padding: row m of the GEMMs is row
# m - shift[m // 128] of what is kept. pair [M]: token * top_k + slot of a row, -1 for padding; p: the pairs' gate weights.

@triton.jit
def _sigmoid(x):
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp(-x))
    else:  # 2^(-x log2 e); two approximations good to 2^-22
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
            "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _keep_half(words, rows, tile_k, HALF: tl.constexpr, h8, h8_scale, h_row, h_col, h4, h4_scale, I: tl.constexpr,
               C: tl.constexpr):
    """C columns of h, gate (HALF 0) or up (1), to the rows that are kept."""
    if h8 is not None:
        codes, scales = _pairs_to_fp8(words)
        _scatter(h8, codes, rows, _origin(tile_k, C) + HALF * I, tl.arange(0, C), 2 * I, 1, 2 * I)
        _scatter(h8_scale, scales, rows, _origin(tile_k, C // 128) + HALF * (I // 128), tl.arange(0, C // 128), h_row, h_col,
                 2 * I // 128)
    if h4 is not None:
        codes, scales = _pairs_to_fp4(words)
        _scatter(h4, codes, rows, _origin(tile_k, C // 8) + HALF * (I // 8), tl.arange(0, C // 8), I // 4, 1, I // 4)
        _scatter(h4_scale, scales, rows, _origin(tile_k, C // MX) + HALF * (I // MX), tl.arange(0, C // MX), 2 * I // MX, 1,
                 2 * I // MX)


@triton.jit(do_not_specialize=["M"])
def _swiglu(h, p, pair, shift, end, a8, a_scale, a_row, a_col, h8, h8_scale, h_row, h_col, h4, h4_scale, M, I: tl.constexpr,
            R: tl.constexpr, C: tl.constexpr):
    """h [M, 2I] in pairs (gate, then up) -> a = silu(gate) * up * p as FP8 rows, and h as it is kept."""
    tile_m, tile_k = _tile(I, C)
    row0, r, c = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, C // 2)
    if _past_end(end, row0):
        return
    of_row = tl.load(pair + row0 + r)
    rows = tl.where(of_row < 0, -1, row0 + r)
    gate = _gather(h, rows, _origin(tile_k, C // 2), c, I, 1, I, 0)
    up = _gather(h, rows, _origin(tile_k, C // 2) + I // 2, c, I, 1, I, 0)
    weight = tl.load(p + of_row, mask=of_row >= 0, other=0)[:, None]
    gate_1, gate_2 = _unpair(gate)
    up_1, up_2 = _unpair(up)
    a = tl.interleave(gate_1 * _sigmoid(gate_1) * up_1 * weight, gate_2 * _sigmoid(gate_2) * up_2 * weight)
    codes, scales = _to_fp8(a)
    _store_fp8_rows(a8, a_scale, a_row, a_col, codes, scales, row0, r, tile_k, C, M, I)
    kept = tl.where(of_row < 0, -1, rows - tl.load(shift + row0 // 128))
    _keep_half(gate, kept, tile_k, 0, h8, h8_scale, h_row, h_col, h4, h4_scale, I, C)
    _keep_half(up, kept, tile_k, 1, h8, h8_scale, h_row, h_col, h4, h4_scale, I, C)


# -----------------------------------------------------------------------------
# FP8 rows and columns of a 128x128 tile from one read, in Gluon: pairs of rows wait in shared memory, as bfloat16, until the
# columns' maxima are known. In the interpreter a plain tensor stands for that memory.
#
# A step takes 32 pairs of rows, 4j + 2 step and the row behind it: a word holds the same column of both. Staged words [32, 128]
# of two steps at four j are then sixteen rows, sixteen bytes to store a column.

_gluon_jit = triton.jit if INTERPRET.value else gluon.jit
# [j, column], in words; XOR of groups of columns and of j lets both stores of rows and loads of columns meet every bank
STAGE = tl.constexpr(gl.SharedLinearLayout(
    [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [0, 4], [0, 8], [1, 0], [2, 0], [4, 16], [8, 32], [16, 64]]))
ROWS = tl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))  # [32, 128]: eight threads a row, sixteen columns each
PAIRS = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [32, 64]: the same in words of two columns
TWO_ROWS = tl.constexpr(gl.DistributedLinearLayout(  # [32, 2]: what each of a pair of rows has one of
    [[0, 1]], [[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [32, 2]))
COLS = tl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [1, 8], [0, 1]))  # [32, 128]: four j, four columns
OUT = tl.constexpr(gl.BlockedLayout([4, 4], [4, 8], [8, 1], [1, 0]))  # [128, 32]: the same transposed, words of four rows


@_gluon_jit
def _line(n: tl.constexpr, layout: tl.constexpr):
    if INTERPRET:
        return tl.arange(0, n)
    else:
        return gl.arange(0, n, layout=layout)


@_gluon_jit
def _as(x, layout: tl.constexpr):
    """x in a layout that says the same: no data moves."""
    if INTERPRET:
        return x
    else:
        return gl.convert_layout(x, layout, assert_trivial=True)


@_gluon_jit
def _put(words):
    """Words in shared memory."""
    if INTERPRET:
        return words
    else:
        return gl.allocate_shared_memory(tl.int32, [32, 128], STAGE, words)


@_gluon_jit
def _get(stage, layout: tl.constexpr):
    if INTERPRET:
        return stage
    else:
        return stage.load(layout)


# ---- pairs of bfloat16 magnitudes

@triton.jit
def _larger_of_pairs(a, b):
    """The larger magnitudes of two words, with no meaning in the signs; NaN wins. An abs of its own would be an instruction."""
    if INTERPRET:
        return tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000) | tl.maximum(a & 0x7FFF, b & 0x7FFF)
    else:
        return tl.inline_asm_elementwise("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _amax_pairs(words, axis: tl.constexpr):
    """_larger_of_pairs over an axis."""
    if INTERPRET:
        return tl.max(words & 0x7FFF0000, axis) | tl.max(words & 0x7FFF, axis)
    else:
        return tl.reduce(words, axis, _larger_of_pairs)


@triton.jit
def _amax_within(a, b):
    """A word of the larger of a's two and the larger of b's two."""
    if INTERPRET:
        return tl.maximum(a & 0x7FFF, (a >> 16) & 0x7FFF) | (tl.maximum(b & 0x7FFF, (b >> 16) & 0x7FFF) << 16)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q; prmt.b32 p, $1, $2, 0x5410; prmt.b32 q, $1, $2, 0x7632;
            max.NaN.xorsign.abs.bf16x2 $0, p, q; }""", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _fp8_scales_of_pairs(words):
    """_fp8_scales of the two magnitudes in a word: scale of the first, of the second, and a word of both inverses."""
    if INTERPRET:
        scale_1, inverse_1 = _fp8_scales((words << 16) & 0x7FFF0000)
        scale_2, inverse_2 = _fp8_scales(words & 0x7FFF0000)
        return scale_1, scale_2, _pair(inverse_1, inverse_2)
    else:  # the same in the upper halves of float32; 0 * Inf and 0 * NaN are NaN, which the minimum makes 0x7FC0
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, r, s, zero, least, most, nan; mov.b32 zero, 0;
            mov.b32 least, 0x04800480; mov.b32 most, 0x7F007F00; mov.b32 nan, 0x7FC07FC0;
            and.b32 a, $3, 0x7FFF7FFF; add.u32 r, a, 0x001F001F; and.b32 r, r, 0x7F807F80;
            max.u16x2 r, r, least; min.u16x2 r, r, most; sub.u32 s, r, 0x04000400; sub.u32 r, 0x83008300, r;
            fma.rn.bf16x2 s, a, zero, s; fma.rn.bf16x2 r, a, zero, r; min.u16x2 s, s, nan; min.u16x2 $2, r, nan;
            shl.b32 $0, s, 16; and.b32 $1, s, 0xFFFF0000; }""",
            "=f,=f,=r,r", [words], (tl.float32, tl.float32, tl.int32), True, 1)


@triton.jit
def _each_twice(words):
    """Of a word's two halves, a word with the first twice and one with the second twice."""
    return _twice(words << 16), _twice(words & -65536)


@triton.jit
def _scaled(words, factor):
    """The two float32 of bfloat16 pairs times the powers of two in a word."""
    return _unpair(_times(words, factor))


# ---- where it goes. num_rows, num_words (of four rows), num_cols: how many the tile has, None for all

@_gluon_jit
def _store_of_rows(ptr, first, second, step: tl.constexpr, num_rows):
    """One of each of a pair's rows, the two side by side in memory."""
    if INTERPRET:
        j = 4 * tl.arange(0, 32) + 2 * step
        tl.store(ptr + j, first, mask=None if num_rows is None else j < num_rows)
        tl.store(ptr + j + 1, second, mask=None if num_rows is None else j + 1 < num_rows)
    else:
        j, k = gl.arange(0, 32, layout=gl.SliceLayout(1, TWO_ROWS)), gl.arange(0, 2, layout=gl.SliceLayout(0, TWO_ROWS))
        r = 4 * j[:, None] + k[None, :]
        tl.store(ptr + r + 2 * step, _as(tl.join(first, second), TWO_ROWS),
                 mask=None if num_rows is None else r < num_rows - 2 * step)


@_gluon_jit
def _store_row_pairs(words, data, scale, step: tl.constexpr, K: tl.constexpr, num_rows, num_cols):
    """Words of a step's pairs of rows -> FP8 rows, K bytes apart."""
    scale_1, scale_2, inverse = _fp8_scales_of_pairs(_amax_pairs(words, 1))
    _store_of_rows(scale, scale_1, scale_2, step, num_rows)
    first, second = _scaled(words, inverse[:, None])
    r, c = _line(32, gl.SliceLayout(1, ROWS)) * 4, _line(128, gl.SliceLayout(0, ROWS))
    data += r[:, None] * K + c[None, :]
    even, odd = None, None
    if num_rows is not None:
        even = (r < num_rows - 2 * step)[:, None] & (c < num_cols)[None, :]
        odd = (r + 1 < num_rows - 2 * step)[:, None] & (c < num_cols)[None, :]
    tl.store(data + 2 * step * K, _encode_e4m3(first), mask=even)
    tl.store(data + (2 * step + 1) * K, _encode_e4m3(second), mask=odd)


@_gluon_jit
def _store_staged(staged, data, scale, s_row, pitch, num_words, num_cols, BLOCK: tl.constexpr):
    """The words of two steps -> FP8 cols, pitch words apart, a scale for each column or (BLOCK) for all."""
    w0, w1 = _get(staged[0], COLS), _get(staged[1], COLS)
    top = _amax_pairs(tl.reshape(_larger_of_pairs(w0, w1), (8, 4, 128)), 1)  # within a thread
    left, right = tl.split(tl.reshape(top, (8, 64, 2)))
    top = _amax_pairs(_amax_within(left, right), 0)
    if BLOCK:
        top = top * 0 + _amax_pairs(top, 0)
        top = _amax_within(top, top)
    scale_1, scale_2, inverse = _fp8_scales_of_pairs(top)
    inverse_1, inverse_2 = _each_twice(inverse)
    scales = _as(tl.reshape(tl.join(scale_1, scale_2), (128,)), gl.SliceLayout(0, COLS))
    inverse = _as(tl.reshape(tl.join(inverse_1, inverse_2), (128,)), gl.SliceLayout(0, COLS))[None, :]
    a, b = _scaled(w0, inverse)
    c, d = _scaled(w1, inverse)
    x = _as(tl.trans(_encode_columns(a, b, c, d)), OUT)
    c, m = _line(128, gl.SliceLayout(1, OUT)), _line(32, gl.SliceLayout(0, OUT))
    tl.store(data + c.to(tl.int64)[:, None] * pitch + m[None, :], x,
             mask=None if num_cols is None else (c < num_cols)[:, None] & (m < num_words)[None, :])
    c = _line(128, gl.SliceLayout(0, COLS))
    tl.store(scale + c * s_row, scales, mask=c == 0 if BLOCK else None if num_cols is None else c < num_cols)


@_gluon_jit
def _banded(t, tiles_m, tiles_k: tl.constexpr):
    """The t-th tile: bands of eight rows of tiles, rows fastest: neighbours share pages of memory in rows and in columns."""
    x, first = t % (8 * tiles_k), t // (8 * tiles_k) * 8
    if first + 8 <= tiles_m:
        m, k = first + x % 8, x // 8
    else:
        m, k = first + x // tiles_k, x % tiles_k
    return m, k


# ---- rows and columns of bfloat16

@_gluon_jit
def _load_words(x, row: tl.constexpr, num_rows, num_cols, K: tl.constexpr):
    """Words [32, 64] of rows 4j + row; zeros outside."""
    r, c = _line(32, gl.SliceLayout(1, PAIRS)) * 4 + row, _line(64, gl.SliceLayout(0, PAIRS))
    return tl.load(x + (r[:, None] * (K // 2) + c[None, :]), mask=(r < num_rows)[:, None] & (c < num_cols // 2)[None, :], other=0)


@_gluon_jit
def _row_pairs(even, odd):
    """Words of two columns [32, 64], of two rows -> words of the two rows [32, 128]."""
    if INTERPRET:
        first, second = (even & 0xFFFF) | (odd << 16), ((even >> 16) & 0xFFFF) | (odd & -65536)
    else:
        first, second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;", "=r,=r,r,r", [even, odd], (tl.int32, tl.int32), True, 1)
    return _as(tl.reshape(tl.join(first, second), (32, 128)), ROWS)


@_gluon_jit(do_not_specialize=["s_col", "M", "quads"])
def _quantize_rows_and_cols(x, data8, scale8, s_col, data_t, scale_t, t_row, t_col, M, K: tl.constexpr, quads,
                            BLOCK: tl.constexpr):
    """Contiguous rows of bfloat16, K even, as words -> FP8 rows and FP8 cols [K, 4 quads] in words, each with its own scales."""
    tiles_k: tl.constexpr = (K + 127) // 128
    tile_m, tile_k = _banded(tl.program_id(0), tl.cdiv(M, 128), tiles_k)
    row0, col0, pitch = _origin(tile_m, 128), tile_k * 128, 4 * quads  # of columns: sixteen bytes can be stored at once
    num_rows, num_cols = M - tile_m * 128, K - col0
    x += row0 * (K // 2) + tile_k * 64
    r0, r1 = _load_words(x, 0, num_rows, num_cols, K), _load_words(x, 1, num_rows, num_cols, K)
    r2, r3 = _load_words(x, 2, num_rows, num_cols, K), _load_words(x, 3, num_rows, num_cols, K)
    first, second = _row_pairs(r0, r1), _row_pairs(r2, r3)
    staged = _put(first), _put(second)
    _store_row_pairs(first, data8 + row0 * K + col0, scale8 + row0 + tile_k * s_col, 0, K, num_rows, num_cols)
    _store_row_pairs(second, data8 + row0 * K + col0, scale8 + row0 + tile_k * s_col, 1, K, num_rows, num_cols)
    scale_t += (tile_k if BLOCK else col0) * t_row + tile_m * t_col
    _store_staged(staged, data_t + col0 * pitch.to(tl.int64) + tile_m * 32, scale_t, t_row, pitch, pitch - tile_m * 32, num_cols,
                  BLOCK)


# -----------------------------------------------------------------------------
# SwiGLU backward

FLAT = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = tl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ONCE = tl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))  # [128] in every warp
HALF = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [32, 64]: the first or last eight of a thread's sixteen
# a row's scales, one or four: [32 * B] as loaded, [32, B, 64/B] on their way to columns in HALF
EIGHT, EACH_WARP = [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[4, 0, 0], [8, 0, 0], [16, 0, 0]]
SCALES_1 = tl.constexpr(gl.DistributedLinearLayout([], [[0], [0], [0], [1], [2]], [[4], [8], [16]], [], [32]))
SCALES_4 = tl.constexpr(gl.DistributedLinearLayout([], [[0], [1], [2], [4], [8]], [[16], [32], [64]], [], [128]))
BLOCKS_1 = tl.constexpr(gl.DistributedLinearLayout(
    EIGHT, [[0, 0, 8], [0, 0, 16], [0, 0, 32], [1, 0, 0], [2, 0, 0]], EACH_WARP, [], [32, 1, 64]))
BLOCKS_4 = tl.constexpr(gl.DistributedLinearLayout(
    EIGHT, [[0, 0, 8], [0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0]], EACH_WARP, [], [32, 4, 16]))


# ---- what is read: copies to shared memory run ahead; in the interpreter a load, where they are waited for

@_gluon_jit
def _room(n: tl.constexpr):
    if not INTERPRET:
        return gl.allocate_shared_memory(tl.int32, [64, n], PLAIN)


@_gluon_jit
def _rooms(n: tl.constexpr):
    """For a step of da, gate and up."""
    return _room(64), _room(n), _room(n)


@_gluon_jit
def _fetch(room, ptr, pitch: tl.constexpr, num_real, step: tl.constexpr, n: tl.constexpr):
    """Begins to copy a step's rows, even ones first; zeros for padding. Sixteen bytes a thread."""
    if not INTERPRET:
        LAYOUT: tl.constexpr = gl.BlockedLayout([1, 4], [128 // n, n // 4], [8, 1], [1, 0])
        i, c = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, n, layout=gl.SliceLayout(0, LAYOUT))
        r = i % 32 * 4 + i // 32
        there = (r < num_real - 2 * step)[:, None] & (c >= 0)[None, :]
        async_copy.async_copy_global_to_shared(room, ptr + (r[:, None] * pitch + c[None, :]) + 2 * step * pitch, mask=there)


@_gluon_jit
def _fetch_step(rooms, sources, step: tl.constexpr, n: tl.constexpr, I: tl.constexpr):
    da, h, num_real = sources
    pitch: tl.constexpr = I * n // 64
    _fetch(rooms[0], da, I // 2, num_real, step, 64)
    _fetch(rooms[1], h, pitch, num_real, step, n)
    _fetch(rooms[2], h + pitch // 2, pitch, num_real, step, n)
    if not INTERPRET:
        async_copy.commit_group()


@_gluon_jit
def _wait(left: tl.constexpr):
    """Until all but the last `left` steps that were fetched are there."""
    if not INTERPRET:
        async_copy.wait_group(left)


@_gluon_jit
def _fetched(room, ptr, pitch: tl.constexpr, num_real, row: tl.constexpr, half: tl.constexpr, n: tl.constexpr):
    """Words [32, n/2] of rows 4j + row, of the first or the last eight of each sixteen columns."""
    q: tl.constexpr = n // 16  # words of eight columns
    if INTERPRET:
        r, c = 4 * tl.arange(0, 32) + row, tl.arange(0, 8 * q)
        c = c // q * (2 * q) + half * q + c % q
        return tl.load(ptr + r[:, None] * pitch + c[None, :], mask=(r < num_real)[:, None], other=0)
    else:
        LAYOUT: tl.constexpr = gl.BlockedLayout([1, 1, 1, q], [4, 8, 1, 1], [8, 1, 1, 1], [3, 2, 1, 0])
        HELD: tl.constexpr = gl.BlockedLayout([1, q], [4, 8], [8, 1], [1, 0])
        words = room.reshape((64, 8, 2, q)).slice(32 * (row % 2), 32).slice(half, 1, dim=2).load(LAYOUT)
        return _as(tl.reshape(words, (32, 8 * q)), HELD)


@_gluon_jit
def _set_aside(x):
    """x [n] in shared memory."""
    if INTERPRET:
        return x
    else:
        return gl.allocate_shared_memory(x.dtype, x.shape, FLAT, x)


@_gluon_jit
def _quarter(x, i: tl.constexpr, layout: tl.constexpr):
    """The i-th of four parts of x, which was set aside."""
    n: tl.constexpr = x.shape[0] // 4
    if INTERPRET:
        return tl.sum(tl.where(tl.arange(0, 4)[:, None] == i, tl.reshape(x, (4, n)), 0), 0).to(x.dtype)
    else:
        return x.slice(n * i, n).load(layout)


@_gluon_jit
def _ask(pair, shift, tile_m):
    """How far above a tile's rows stand among those that are kept, and its last row's pair, negative if it has padding."""
    up = 0
    if shift is not None:
        up = tl.load(shift + tile_m)
    return up, tl.load(pair + _origin(tile_m, 128) + 127)


@_gluon_jit
def _num_real(pair, tile_m, last):
    """How many rows of a tile are no padding, which comes last."""
    num = 128
    if last < 0:
        of_row = tl.load(pair + _origin(tile_m, 128) + _line(128, ONCE))
        num = tl.sum(tl.where(of_row >= 0, 1, 0), 0)
    return num


@_gluon_jit
def _sources(da, h, moved, tile_m, tile_k, num_real, n: tl.constexpr, I: tl.constexpr):
    """Where a tile begins in da and in what is kept of h, and how many rows it has."""
    row0 = _origin(tile_m, 128)
    return da + row0 * (I // 2) + tile_k * 64, h + (row0 - moved) * (I * n // 64) + tile_k * n, num_real


@_gluon_jit
def _blocks_in_order(B: tl.constexpr):
    """For scales of a tile, [128 * B], row and block in the order of use: rows 4j, then rows 4j + 1, ..."""
    k = _line(128 * B, LINE)
    i = k // B
    return i % 32 * 4 + i // 32, k % B


@_gluon_jit
def _pairs_of_rows(pair, tile_m, B: tl.constexpr):
    """Pairs of a tile's rows in the order of use, one a row and one a scale."""
    pair += _origin(tile_m, 128)
    return tl.load(pair + _blocks_in_order(1)[0]), tl.load(pair + _blocks_in_order(B)[0])


@_gluon_jit
def _of_rows(p, scale, s_row, s_col, moved, tile_m, tile_k, pairs, B: tl.constexpr, I: tl.constexpr):
    """Gate weights and scales of gate and up; 0 for padding."""
    of_row, of_block = pairs
    if scale is None:
        gate = tl.where(of_block >= 0, 1.0, 0.0)
        up = gate
    else:
        r, block = _blocks_in_order(B)
        at = scale + (_origin(tile_m, 128) - moved + r) * s_row + (tile_k * B + block) * s_col
        gate = tl.load(at, mask=of_block >= 0, other=0)
        up = tl.load(at + I // 128 * B * s_col, mask=of_block >= 0, other=0)
        if B == 4:
            gate, up = _of_byte(gate), _of_byte(up)
    return tl.load(p + of_row, mask=of_row >= 0, other=0), gate, up


@triton.jit
def _of_byte(byte):
    """E8M0 -> float32; byte 0, a block of zeros, is 0."""
    return _from_bits(tl.where(byte == MX_NAN, 0x7FC00000, byte.to(tl.int32) << 23))


@_gluon_jit
def _decode_e2m1_words(words):
    """Words of eight E2M1 codes [32, 8] -> float32 [32, 64]."""
    if INTERPRET:
        code = (words[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])) & 15
        magnitude = code & 7
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, _from_bits((magnitude << 22) + (126 << 23)))
        return tl.reshape(_from_bits(_bits(value) | ((code & 8) << 28)), (32, 64))
    else:  # by way of float16, of which the lower byte is 0
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{ .reg .b32 m, s, p, q, lo, hi; .reg .b16 x, y;
            mov.b32 lo, 0x3E3C3800; mov.b32 hi, 0x46444240;
            and.b32 m, $8, 0x77777777; shr.u32 s, $8, 3; and.b32 s, s, 0x11111111;
            prmt.b32 p, lo, hi, m; prmt.b32 q, 0x8000, 0, s; or.b32 p, p, q;
            prmt.b32 q, p, 0, 0x1404; mov.b32 {x, y}, q; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y;
            prmt.b32 q, p, 0, 0x3424; mov.b32 {x, y}, q; cvt.f32.f16 $2, x; cvt.f32.f16 $3, y;
            shr.u32 m, m, 16; shr.u32 s, s, 16;
            prmt.b32 p, lo, hi, m; prmt.b32 q, 0x8000, 0, s; or.b32 p, p, q;
            prmt.b32 q, p, 0, 0x1404; mov.b32 {x, y}, q; cvt.f32.f16 $4, x; cvt.f32.f16 $5, y;
            prmt.b32 q, p, 0, 0x3424; mov.b32 {x, y}, q; cvt.f32.f16 $6, x; cvt.f32.f16 $7, y; }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], (tl.float32,) * 8, True, 1)
        x = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))  # [32, 8, 4's, 2's, 1's]
        return _as(tl.reshape(x, (32, 64)), HALF)


@_gluon_jit
def _decode_pair_words(words):
    """Words of two bfloat16 [32, 32] -> float32 [32, 64]."""
    first, second = _unpair(words)
    return _as(tl.reshape(tl.join(first, second), (32, 64)), HALF)


@_gluon_jit
def _decode_e4m3_words(words):
    """Words of four E4M3 codes [32, 16] -> float32 [32, 64]."""
    low, high = _codes_to_halves(words)
    a, b = _unpair_halves(low)
    c, d = _unpair_halves(high)
    return _as(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (32, 64)), HALF)


@_gluon_jit
def _decode_kept(words):
    if words.shape[1] == 8:
        return _decode_e2m1_words(words)
    elif words.shape[1] == 16:
        return _decode_e4m3_words(words)
    else:
        return _decode_pair_words(words)


# ---- arithmetic

@triton.jit
def _swiglu_gradients(d, gate, up_p):
    """From float32 da, gate and up * p: dgate, dup / p, a."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return (d * up_p) * tl.fma(silu, 1.0 - sigmoid, sigmoid), d * silu, silu * up_p


@triton.jit
def _eighths(x):
    """[R, 8 n] -> eight [R, n]: columns 8i, 8i + 1, ..."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(c)
    x1, x5 = tl.split(b)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _dot_of_eights(x, y):
    """Sums of x * y over each eight columns."""
    a, b, c, d, e, f, g, h = _eighths(x)
    a2, b2, c2, d2, e2, f2, g2, h2 = _eighths(y)
    total = tl.fma(d, d2, tl.fma(c, c2, tl.fma(b, b2, a * a2)))
    return tl.fma(h, h2, tl.fma(g, g2, tl.fma(f, f2, tl.fma(e, e2, total))))


@_gluon_jit
def _over_columns(x, B: tl.constexpr):
    """[32, B] -> [32, 64]."""
    return _as(tl.reshape(tl.broadcast_to(x[:, :, None], (32, B, 64 // B)), (32, 64)), HALF)


@_gluon_jit
def _scales_of_rows(scales, row: tl.constexpr, B: tl.constexpr):
    """[32, B] for rows 4j + row."""
    part = _quarter(scales, row, SCALES_1 if B == 1 else SCALES_4)
    return _as(tl.reshape(part, (32, B)), gl.SliceLayout(2, BLOCKS_1 if B == 1 else BLOCKS_4))


@_gluon_jit
def _gradients(row: tl.constexpr, half: tl.constexpr, rooms, sources, factors, n: tl.constexpr, B: tl.constexpr, I: tl.constexpr):
    """Rows 4j + row, half of the columns: dgate, dup, a [32, 64]; dp's parts [32, B], yet to be scaled."""
    da, h, num_real = sources
    weight, gate_scale, up_scale = factors
    pitch: tl.constexpr = I * n // 64
    d = _decode_pair_words(_fetched(rooms[0], da, I // 2, num_real, row, half, 64))
    gate = _decode_kept(_fetched(rooms[1], h, pitch, num_real, row, half, n))
    up = _decode_kept(_fetched(rooms[2], h + pitch // 2, pitch, num_real, row, half, n))
    gate_scale, up_scale = _scales_of_rows(gate_scale, row, B), _scales_of_rows(up_scale, row, B)
    weight = _quarter(weight, row, gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS_1 if B == 1 else BLOCKS_4)))[:, None]
    dgate, d_silu, a = _swiglu_gradients(d, gate * _over_columns(gate_scale, B), up * _over_columns(up_scale * weight, B))
    dp = tl.sum(tl.reshape(_dot_of_eights(d_silu, up), (32, B, 8 // B)), 2)
    return dgate, d_silu * _over_columns(tl.broadcast_to(weight, (32, B)), B), a, dp


@_gluon_jit
def _dp(halves, factors, row: tl.constexpr, B: tl.constexpr):
    """dp's parts of both halves -> [32]."""
    parts = _as(halves[0] + halves[1], gl.SliceLayout(2, BLOCKS_1 if B == 1 else BLOCKS_4))
    return _as(tl.sum(parts * _scales_of_rows(factors[2], row, B), 1), gl.SliceLayout(1, ROWS))


@_gluon_jit
def _whole(first, last):
    """[32, 64] of first eights and of last eights -> [32, 128]."""
    x = tl.join(tl.reshape(first, (32, 8, 8)), tl.reshape(last, (32, 8, 8)))
    return _as(tl.reshape(tl.permute(x, (0, 1, 3, 2)), (32, 128)), ROWS)


@_gluon_jit
def _gradients_of_step(step: tl.constexpr, rooms, sources, factors, n: tl.constexpr, B: tl.constexpr, I: tl.constexpr):
    """Words of dgate, dup and a [32, 128], dp's parts of even and of odd rows, a half of the columns each: registers are few."""
    dgate, dup, a, even, odd = (), (), (), (), ()
    for half in tl.static_range(2):
        dgate_1, dup_1, a_1, dp_1 = _gradients(2 * step, half, rooms, sources, factors, n, B, I)
        dgate_2, dup_2, a_2, dp_2 = _gradients(2 * step + 1, half, rooms, sources, factors, n, B, I)
        dgate, dup, a = dgate + (_pair(dgate_1, dgate_2),), dup + (_pair(dup_1, dup_2),), a + (_pair(a_1, a_2),)
        even, odd = even + (dp_1,), odd + (dp_2,)
    return _whole(*dgate), _whole(*dup), _whole(*a), even, odd


@_gluon_jit(do_not_specialize=["M"])
def _swiglu_backward(da, p, pair, shift, end, h, h_scale, h_row, h_col, dh8, dh_scale, d_col, dh_t, dh_t_scale, dt_row,
                     dt_col, a_t, a_t_scale, at_row, at_col, dp, M, I: tl.constexpr, n: tl.constexpr, B: tl.constexpr):
    """da [M, I] in pairs, h in words, p -> dh as FP8 rows [M, 2I] and cols [2I, M], a as FP8 cols [I, M]; dp [M, I/128], a part
    a tile, laid out as dh_scale. A tile's row has n words of gate and n of up, and B scales of each."""
    tiles_k: tl.constexpr = I // 128
    tile_m, tile_k = _banded(tl.program_id(0), M // 128, tiles_k)
    row0, col0, pitch = _origin(tile_m, 128), tile_k * 128, M // 128 * 32  # of columns, in words
    moved, last = _ask(pair, shift, tile_m)  # before `end` is there
    if not _past_end(end, row0):
        sources = _sources(da, h, moved, tile_m, tile_k, _num_real(pair, tile_m, last), n, I)
        rooms = _rooms(n), _rooms(n)
        _fetch_step(rooms[0], sources, 0, n, I)
        _fetch_step(rooms[1], sources, 1, n, I)
        factors = _of_rows(p, h_scale, h_row, h_col, moved, tile_m, tile_k, _pairs_of_rows(pair, tile_m, B), B, I)
        factors = _set_aside(factors[0]), _set_aside(factors[1]), _set_aside(factors[2])
        rows8, of_tile = dh8 + row0 * (2 * I) + col0, row0 + tile_k.to(tl.int64) * d_col
        gates, ups, values = (), (), ()
        for step in tl.static_range(2):
            _wait(1 - step)
            dgate, dup, a, even, odd = _gradients_of_step(step, rooms[step], sources, factors, n, B, I)
            gates, ups, values = gates + (_put(dgate),), ups + (_put(dup),), values + (_put(a),)
            _store_of_rows(dp + of_tile, _dp(even, factors, 2 * step, B), _dp(odd, factors, 2 * step + 1, B), step, None)
            _store_row_pairs(dgate, rows8, dh_scale + of_tile, step, 2 * I, None, None)
            _store_row_pairs(dup, rows8 + I, dh_scale + of_tile + tiles_k * d_col, step, 2 * I, None, None)
        at, up_at = col0 * pitch.to(tl.int64) + tile_m * 32, I * pitch.to(tl.int64)
        scale_at, a_scale_at = col0 * dt_row + tile_m * dt_col, col0 * at_row + tile_m * at_col
        _store_staged(gates, dh_t + at, dh_t_scale + scale_at, dt_row, pitch, None, None, False)
        _store_staged(ups, dh_t + at + up_at, dh_t_scale + scale_at + I * dt_row, dt_row, pitch, None, None, False)
        _store_staged(values, a_t + at, a_t_scale + a_scale_at, at_row, pitch, None, None, False)


# ---- the same row by row for the BF16 recipe, which needs no columns

@triton.jit
def _real_rows(pair, row0, r):
    """A tile's pairs, and its rows or -1 where they are padding."""
    of_row = tl.load(pair + row0 + r)
    return of_row, tl.where(of_row < 0, -1, row0 + r)


@triton.jit(do_not_specialize=["M"])
def _swiglu_bf16(h, p, pair, end, out, M, I: tl.constexpr, R: tl.constexpr):
    """h [M, 2I], out [M, I] in pairs; zeros in padding."""
    tile_m, tile_k = _tile(I, 128)
    row0, r, c = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, 64)
    if _past_end(end, row0):
        return
    of_row, rows = _real_rows(pair, row0, r)
    gate_1, gate_2 = _unpair(_gather(h, rows, _origin(tile_k, 64), c, I, 1, I, 0))
    up_1, up_2 = _unpair(_gather(h, rows, _origin(tile_k, 64) + I // 2, c, I, 1, I, 0))
    weight = tl.load(p + of_row, mask=of_row >= 0, other=0)[:, None]
    words = _pair(gate_1 * _sigmoid(gate_1) * up_1 * weight, gate_2 * _sigmoid(gate_2) * up_2 * weight)
    _store(out, words, row0, r, _origin(tile_k, 64), c, I // 2, 1, M, I // 2)


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward_bf16(da, h, p, pair, end, dh, a, dp, M, I: tl.constexpr, R: tl.constexpr):
    """da, a [M, I], h, dh [M, 2I] in pairs; zeros in padding."""
    tile_m, tile_k = _tile(I, 128)
    row0, r, c, col0 = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, 64), _origin(tile_k, 64)
    if _past_end(end, row0):
        return
    of_row, rows = _real_rows(pair, row0, r)
    d_1, d_2 = _unpair(_gather(da, rows, col0, c, I // 2, 1, I // 2, 0))
    gate_1, gate_2 = _unpair(_gather(h, rows, col0, c, I, 1, I, 0))
    up_1, up_2 = _unpair(_gather(h, rows, col0 + I // 2, c, I, 1, I, 0))
    weight = tl.load(p + of_row, mask=of_row >= 0, other=0)[:, None]
    dgate_1, d_silu_1, a_1 = _swiglu_gradients(d_1, gate_1, up_1 * weight)
    dgate_2, d_silu_2, a_2 = _swiglu_gradients(d_2, gate_2, up_2 * weight)
    _store(dh, _pair(dgate_1, dgate_2), row0, r, col0, c, I, 1, M, I)
    _store(dh, _pair(d_silu_1 * weight, d_silu_2 * weight), row0, r, col0 + I // 2, c, I, 1, M, I)
    _store(a, _pair(a_1, a_2), row0, r, col0, c, I // 2, 1, M, I // 2)
    tl.store(dp + tile_k.to(tl.int64) * M + row0 + r, tl.sum(tl.fma(d_silu_1, up_1, d_silu_2 * up_2), 1))


# -----------------------------------------------------------------------------
# router: logits -> scores, experts, gate weights; back; and float32 as BF16 parts, for its GEMMs.
# Experts are chosen by integers that order as their biased scores do, so that NaN has a place, too, and a choice can leave a
# mark: the k-th chosen becomes CHOSEN + k. Tiles are [G groups, R tokens, W experts of a group], G and W powers of two: of six
# experts in two groups, expert 4 is [1, .., 1]. A thread has 32 experts of a token, from every group.

CHOSEN = tl.constexpr(-(2**31))
NO_EXPERT = tl.constexpr(-(2**31) + 2**16)  # above every mark
CLOSED = tl.constexpr(-(2**31) + 2**23 - 1)  # -inf's place, which experts of closed groups have; all numbers' are above


@triton.jit(do_not_specialize=["M"])
def _split_float32(x, out, M, N: tl.constexpr, ORDER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Rows of float32 -> for each entry of ORDER as many bfloat16: part 0 is x rounded, part 1 what that leaves, rounded, part 2
    what both leave."""
    tile_m, tile_n = _tile(N, C)
    row0, r, col0, c = _origin(tile_m, R), tl.arange(0, R), _origin(tile_n, C), tl.arange(0, C)
    value = _load(x, row0, r, col0, c, N, 1, M, N)
    first = _bfloat16(value)
    rest = value - _float(first)
    second = _bfloat16(rest)
    parts = first, second, _bfloat16(rest - _float(second))
    for j in tl.static_range(len(ORDER)):
        _store(out + j * N, parts[ORDER[j]], row0, r, col0, c, N * len(ORDER), 1, M, N)


@triton.jit
def _exp(x):
    """As torch's, to the bit on a GPU, where tl.exp is off by about |x| units in the last place."""
    if INTERPRET:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@_gluon_jit
def _axis(n: tl.constexpr, i: tl.constexpr, layout: tl.constexpr):
    """0 ... n - 1 along axis i of three."""
    if i == 0:
        return _line(n, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif i == 1:
        return _line(n, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        return _line(n, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@triton.jit
def _max_of_token(x):
    """[G, R, W] -> [1, R, 1]"""
    return tl.max(tl.max(x, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _sum_of_token(x):
    return tl.sum(tl.sum(x, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _scores(logit, is_expert, SOFTMAX: tl.constexpr):
    """Scores of logits, 0 where there is no expert."""
    if SOFTMAX:
        logit = tl.where(is_expert, logit, -float("inf"))
        p = _exp(logit - _max_of_token(logit))
        return tl.div_rn(p, _sum_of_token(p))
    else:
        return tl.where(is_expert, tl.div_rn(1.0, 1 + _exp(-logit)), 0)


@triton.jit
def _order(x):
    """float32 -> int32 that compare alike, -0 aside; any NaN is the largest, as it is to torch.topk."""
    bits = _bits(x)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _in_order(place):
    """_order's inverse."""
    return _from_bits(tl.where(place < 0, place ^ 0x7FFFFFFF, place))


@triton.jit
def _choose(place, column, mark):
    """Marks a token's largest, of several the one in the first column."""
    largest = tl.where(place == _max_of_token(place), column, 2**30)
    return tl.where(column == -_max_of_token(-largest), mark, place)


@triton.jit
def _close_groups(place, g, w, GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr):
    """Holds all but the OPEN best of GROUPS groups to CLOSED. A group is as good as the sum of its BEST, 1 or 2, best scores."""
    best = tl.max(place, 2, keep_dims=True)
    if BEST == 2:
        first = tl.min(tl.where(place == best, w, 2**30), 2, keep_dims=True)
        second = tl.max(tl.where(w == first, CHOSEN, place), 2, keep_dims=True)
        best = _order(_in_order(best) + _in_order(second))
    best = tl.where(g < GROUPS, best, NO_EXPERT)
    for _ in tl.static_range(OPEN):
        best = _choose(best, g, CHOSEN)
    return tl.where(best == CHOSEN, place, tl.minimum(place, CLOSED))


@_gluon_jit(do_not_specialize=["S"])
def _route(logits, bias, scores, ids, weights, sums, S, scale, least, PARTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
           GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr,
           G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, VECTOR: tl.constexpr, THREADS: tl.constexpr):
    """A chunk of R tokens of a sequence of S; sums [chunks, 2, E] gets, of the chunk, how often each expert was chosen, and the
    sum of its normalised scores."""
    layout: tl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [1, 32 // THREADS, THREADS], [1, 8, 1], [2, 1, 0])
    g, r, w = _axis(G, 0, layout), _axis(R, 1, layout), _axis(W, 2, layout)
    e, is_expert = g * (E // GROUPS) + w, (g < GROUPS) & (w < E // GROUPS)
    chunks = tl.cdiv(S, R)
    of_sequence = tl.program_id(0) % chunks * R + r
    token, there = (tl.program_id(0) // chunks).to(tl.int64) * S + of_sequence, (of_sequence < S) & is_expert
    at = logits + token * (PARTS * E) + e
    logit = tl.load(at, mask=there, other=0)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(at + part * E, mask=there, other=0)
    score = _scores(logit, is_expert, SOFTMAX)
    tl.store(scores + token * E + e, score, mask=there)
    biased = score
    if bias is not None:
        biased += tl.load(bias + e, mask=is_expert, other=0)
    place = tl.where(is_expert, _order(biased), NO_EXPERT)
    if GROUPS > 1:
        place = _close_groups(place, g, w, GROUPS, OPEN, BEST)
    for k in tl.static_range(K):
        place = _choose(place, g * W + w, CHOSEN + k)
    chosen = place < NO_EXPERT
    weight = tl.div_rn(score, _larger(_sum_of_token(tl.where(chosen, score, 0)), least)) if RENORMALISE else score
    slot = token * K + (place - CHOSEN)
    tl.store(ids + slot, tl.broadcast_to(e, slot.shape), mask=chosen & there)
    tl.store(weights + slot, weight * scale, mask=chosen & there)
    if sums is not None:
        of_chunk = sums + tl.program_id(0).to(tl.int64) * (2 * E) + e
        normal = score * (1 / _larger(_sum_of_token(score), least))
        tl.store(of_chunk, tl.sum((chosen & there).to(tl.float32), 1, keep_dims=True), mask=is_expert)
        tl.store(of_chunk + E, tl.sum(tl.where(there, normal, 0), 1, keep_dims=True), mask=is_expert)


@triton.jit(do_not_specialize=["chunks"])
def _balance(sums, chosen, balance, load, chunks, share, alpha, E: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr):
    """A sequence's loss, and how often it chose each expert, from the sums of its chunks, in their order."""
    sequence, step, e = tl.program_id(0).to(tl.int64), tl.arange(0, STEP), tl.arange(0, BINS)
    count, normal = tl.zeros((BINS,), tl.float32), tl.zeros((BINS,), tl.float32)
    for chunk in range(0, chunks, STEP):
        at = sums + ((sequence * chunks + chunk + step) * (2 * E))[:, None] + e[None, :]
        inside = (chunk + step < chunks)[:, None] & (e < E)[None, :]
        count += tl.sum(tl.load(at, mask=inside, other=0), 0)
        normal += tl.sum(tl.load(at + E, mask=inside, other=0), 0)
    tl.store(chosen + sequence * E + e, count, mask=e < E)
    tl.store(balance + sequence, tl.sum(count * share * normal, 0) * alpha)
    tl.atomic_add(load + e, count.to(tl.int64), mask=e < E, sem="relaxed")  # integers: any order gives the same sum


@triton.jit
def _of_quotient(d, total, dot, least):
    """Gradient of s in s / max(total, least), total the sum of s and dot that of s times its quotient's gradient d."""
    inverse = 1 / _larger(total, least)
    return (d - tl.where(total >= least, dot * inverse, 0)[:, None]) * inverse[:, None]


@triton.jit(do_not_specialize=["T", "S"])
def _route_backward(scores, ids, dweights, chosen, dbalance, dlogits, T, S, scale, share, alpha, least, E: tl.constexpr,
                    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, R: tl.constexpr, BINS: tl.constexpr):
    token, e = _origin(tl.program_id(0), R) + tl.arange(0, R), tl.arange(0, BINS)
    there, at = (token < T)[:, None] & (e < E)[None, :], (token * E)[:, None] + e[None, :]
    score = tl.load(scores + at, mask=there, other=0)
    d = tl.zeros((R, BINS), tl.float32)
    if dweights is not None:
        of_choice = tl.zeros((R, BINS), tl.int1)
        for k in tl.static_range(K):
            here = e[None, :] == tl.load(ids + token * K + k, mask=token < T, other=-1)[:, None]
            d = tl.where(here, (tl.load(dweights + token * K + k, mask=token < T, other=0) * scale)[:, None], d)
            of_choice = of_choice | here
        if RENORMALISE:
            total, dot = tl.sum(tl.where(of_choice, score, 0), 1), tl.sum(tl.where(of_choice, score * d, 0), 1)
            d = tl.where(of_choice, _of_quotient(d, total, dot, least), 0)
    if dbalance is not None:
        sequence = token // S
        f = tl.load(chosen + (sequence * E)[:, None] + e[None, :], mask=there, other=0) * share
        factor = tl.load(dbalance + sequence, mask=token < T, other=0) * alpha
        d += _of_quotient(f, tl.sum(score, 1), tl.sum(f * score, 1), least) * factor[:, None]
    if SOFTMAX:
        d = score * (d - tl.sum(d * score, 1)[:, None])
    else:
        d = d * (1 - score) * score
    tl.store(dlogits + at, d, mask=there)


# -----------------------------------------------------------------------------
# routing: where each token-expert pair stands once pairs are sorted by expert and every expert is padded to 128 rows.
# ids [[1], [0], [1]], two experts: pair = [1, -1 x 127, 0, 2, -1 x 126], row = [[128], [0], [129]]
#
# layout [3, E + 1]: rows offsets[e] : offsets[e + 1] are expert e's, a row less shift[e] is its number without padding, and
# end[e] is the row behind its last pair's. Of the last two the last is 0, for tiles behind all experts': here
# offsets = [0, 128, 256], shift = [0, 127, 0], end = [1, 130, 0]

@triton.jit
def _count_pairs(ids, counts, n, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of a chunk's pairs each expert gets: counts [chunks, E]. Bin E takes those that live elsewhere or nowhere."""
    at = _origin(tl.program_id(0), CHUNK) + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < n, other=-1)
    count, e = tl.histogram(tl.where((expert < 0) | (expert >= E), E, expert), BINS), tl.arange(0, BINS)
    tl.store(counts + _origin(tl.program_id(0), E) + e, count, mask=e < E)


@triton.jit
def _store_layout(layout, total, num_rows, num_pairs, E: tl.constexpr):
    """Of experts with so many pairs each, 0 for bins behind the last; nothing lies behind num_rows, or num_pairs without
    padding."""
    e, padded = tl.arange(0, total.shape[0]), (total + 127) // 128 * 128
    begin, inside = tl.cumsum(padded, 0) - padded, e < E
    shift, offsets, shifts, ends = begin - (tl.cumsum(total, 0) - total), layout, layout + E + 1, layout + 2 * (E + 1)
    tl.store(offsets + e, tl.minimum(begin, num_rows), mask=inside)
    tl.store(offsets + E, tl.minimum(tl.sum(padded, 0), num_rows))
    tl.store(shifts + e, shift, mask=inside)
    tl.store(shifts + E, 0)
    tl.store(ends + e, tl.minimum(begin + total, tl.minimum(shift + num_pairs, num_rows)), mask=inside)
    tl.store(ends + E, 0)


@triton.jit(do_not_specialize=["chunks", "num_rows", "num_pairs"])
def _lay_out(counts, layout, chunks, num_rows, num_pairs, E: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr):
    """One program: counts become the numbers of pairs in earlier chunks, and their sums the layout."""
    e, step = tl.arange(0, BINS), tl.arange(0, STEP)
    total = tl.zeros((BINS,), tl.int32)
    for chunk in range(0, chunks, STEP):
        at = counts + (chunk + step)[:, None] * E + e[None, :]
        inside = (chunk + step < chunks)[:, None] & (e < E)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    _store_layout(layout, total, num_rows, num_pairs, E)


@triton.jit
def _describe_tiles(layout, tile_expert, tile_shift, pair, num_rows, E: tl.constexpr, BINS: tl.constexpr):
    """Of a program's share of the tiles the expert, -1 behind the last one's, and its shift; -1 in pair's padding."""
    e, r = tl.arange(0, BINS), tl.arange(0, 128)
    last = tl.load(layout + 1 + e, mask=e < E, other=2**31 - 1)
    for tile in range(tl.program_id(0), num_rows // 128, tl.num_programs(0)):
        row, expert = tile * 128 + r, tl.sum((last <= tile * 128).to(tl.int32), 0)
        shift, end = tl.load(layout + E + 1 + expert), tl.load(layout + 2 * (E + 1) + expert)
        tl.store(tile_expert + tile, tl.where(expert < E, expert, -1))
        tl.store(tile_shift + tile, shift)
        tl.store(pair + row, -1, mask=row >= end)


@triton.jit
def _place_pairs(ids, before, layout, tile_expert, tile_shift, pair, row, n, num_rows, E: tl.constexpr, BINS: tl.constexpr,
                 CHUNK: tl.constexpr):
    """A pair's row: its expert's first, and the pairs of that expert in earlier chunks, and earlier in this one. None, -1, for
    pairs whose expert does not exist, and for those that there is no room for, among rows or in what is kept of h. And a share
    of the tiles."""
    i = tl.arange(0, CHUNK)
    at = _origin(tl.program_id(0), CHUNK) + i
    expert = tl.load(ids + at, mask=at < n, other=-1)
    rank = tl.sum(((expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    here = (expert >= 0) & (expert < E)
    earlier = tl.load(before + _origin(tl.program_id(0), E) + expert, mask=here, other=0)
    place = tl.load(layout + expert, mask=here, other=0) + earlier + rank
    fits = here & (place < tl.load(layout + 2 * (E + 1) + expert, mask=here, other=0))
    tl.store(row + at, tl.where(fits, place, -1), mask=at < n)
    tl.store(pair + place, at.to(tl.int32), mask=fits)
    _describe_tiles(layout, tile_expert, tile_shift, pair, num_rows, E, BINS)


@triton.jit(do_not_specialize=["n", "num_rows"])
def _regroup_rows(row, layout, pair, tile_expert, tile_shift, n, num_rows, E: tl.constexpr, BINS: tl.constexpr,
                  CHUNK: tl.constexpr):
    """What _place_pairs wrote beside row, from that."""
    at = _origin(tl.program_id(0), CHUNK) + tl.arange(0, CHUNK)
    place = tl.load(row + at, mask=at < n, other=-1)
    tl.store(pair + place, at.to(tl.int32), mask=place >= 0)
    _describe_tiles(layout, tile_expert, tile_shift, pair, num_rows, E, BINS)


@triton.jit
def _scale_of_byte(byte):
    """An FP8 scale from its biased exponent, 255 for NaN."""
    return tl.where(byte == 255, float("nan"), _from_bits(byte.to(tl.int32) << 23))


@triton.jit
def _sum_rows(y, y_row, scale, s_row, s_col, row_of, out, H: tl.constexpr, PER: tl.constexpr, C: tl.constexpr):
    """Expert rows y [M, H], y_row apart, with their FP8 scales if any (or the bytes that stand for them in messages), back to
    tokens: out [T, H] is the sum of the rows in row_of [T, PER], -1 for none, in float32 and in the order of slots."""
    token, tile = _tile(H, C)
    n: tl.constexpr = C // 128
    at, col, block = token.to(tl.int64) * PER, tl.arange(0, 128)[None, :], tl.arange(0, n)[:, None]
    c = _origin(tile, C) + 128 * block + col
    total = tl.zeros((n, 128), tl.float32)
    for slot in tl.static_range(PER):
        row = tl.load(row_of + at + slot)
        if row >= 0:
            value = tl.load(y + row.to(tl.int64) * y_row + c, mask=c < H, other=0)
            if scale is None:
                total += _float(value)
            else:
                part = _origin(tile, n) + block
                of_blocks = scale + row.to(tl.int64) * s_row + part * s_col
                factor = tl.load(of_blocks, mask=part * 128 < H, other=0)
                total += _decode_e4m3(value) * (_scale_of_byte(factor) if scale.dtype.element_ty == tl.uint8 else factor)
    if out.dtype.element_ty == tl.bfloat16:
        total = _bfloat16(total)
    tl.store(out + token.to(tl.int64) * H + c, total, mask=c < H)


@triton.jit
def _sum_parts(parts, s_row, s_col, row_of, out, n, N: tl.constexpr, R: tl.constexpr):
    """The sum of N numbers, column by column, of each row in row_of [n]; 0 where it is -1."""
    at = _origin(tl.program_id(0), R) + tl.arange(0, R)
    row = tl.load(row_of + at, mask=at < n, other=-1).to(tl.int64)
    total = tl.zeros((R,), tl.float32)
    for part in range(N):
        total += tl.load(parts + row * s_row + part * s_col, mask=row >= 0, other=0)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def _clear_empty_experts(out, offsets, size, BLOCK: tl.constexpr):
    """Zeros where expert e, of `size` elements, owns no rows: offsets[e] == offsets[e + 1]."""
    e, tile = _tile(size, BLOCK)
    if tl.load(offsets + e) == tl.load(offsets + e + 1):
        for start in tl.static_range(0, BLOCK, 1024):
            n = _origin(tile, BLOCK) + start + tl.arange(0, 1024)
            tl.store(out + e.to(tl.int64) * size + n, tl.zeros((1024,), out.dtype.element_ty), mask=n < size)


# -----------------------------------------------------------------------------
# messages between ranks. A message is one token's on its way to one rank: codes, scales as bytes, then up to two rows of K words
# (places, gate weights), each part padded to PART bytes. Tokens are placed by rank, then in their order: ids [[0, 1], [3, 0],
# [2, 2]], two ranks of two experts -> token = [0, 1, 1, 2], row = [[0, -1], [1, 2], [-1, 3]]
#
# A pair's place is nth * E + expert, -1 for none: the nth of its sender's pairs of that expert, in their order. In the example
# place = [[0, 1], [3, 4], [2, 6]]. Ranks tell one another how many pairs of each expert they send, then how many tokens: counts
# [R, E/R + 1] = [[2, 1, 2], [2, 1, 2]]. Where they go, experts' rows are laid out from that; `begin`, of the same shape, says
# where each sender's begin there, and its messages: a pair's row is nth behind its sender's first of that expert.

@triton.jit
def _choices(ids, at, inside, E):
    """Experts of pairs, -1 for none, and for those that do not exist."""
    expert = tl.load(ids + at, mask=inside, other=-1)
    return tl.where((expert < 0) | (expert >= E), -1, expert)


@triton.jit
def _ranks_of_tokens(ids, t, T, local, K: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr):
    """[t, RANKS]: 1 where a rank holds one of token t's experts."""
    k = tl.arange(0, triton.next_power_of_2(K))
    expert = _choices(ids, t.to(tl.int64)[:, None] * K + k[None, :], (t < T)[:, None] & (k < K)[None, :], R * local)
    rank = tl.where(expert < 0, -1, expert // local)
    return (tl.sum((rank[:, :, None] == tl.arange(0, RANKS)[None, None, :]).to(tl.int32), 1) > 0).to(tl.int32)


@triton.jit(do_not_specialize=["T"])
def _count_tokens(ids, counts, T, local, K: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, BINS: tl.constexpr,
                  CHUNK: tl.constexpr):
    """counts [chunks, R, local + 1]: a chunk's pairs of each expert, and its tokens for each rank."""
    chunk, r, e, i = tl.program_id(0), tl.arange(0, RANKS), tl.arange(0, BINS), tl.arange(0, triton.next_power_of_2(CHUNK * K))
    here = _ranks_of_tokens(ids, chunk * CHUNK + tl.arange(0, CHUNK), T, local, K, R, RANKS)
    at = _origin(chunk, CHUNK * K) + i
    expert = _choices(ids, at, (i < CHUNK * K) & (at < T * K), R * local)
    pairs = tl.histogram(tl.where(expert < 0, R * local, expert), BINS)
    counts += _origin(chunk, R * (local + 1))
    tl.store(counts + r * (local + 1) + local, tl.sum(here, 0), mask=r < R)
    tl.store(counts + e + e // local, pairs, mask=e < R * local)


@triton.jit(do_not_specialize=["chunks"])
def _add_up_counts(counts, sent, chunks, columns):
    """32 of the columns of counts [chunks, columns]: they become sums over earlier chunks, sent [columns] those over all."""
    at, step = tl.program_id(0) * 32 + tl.arange(0, 32), tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    for c in range(0, chunks, 32):
        inside = (c + step < chunks)[:, None] & (at < columns)[None, :]
        here = counts + (c + step)[:, None] * columns + at[None, :]
        count = tl.load(here, mask=inside, other=0)
        tl.store(here, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    tl.store(sent + at, total, mask=at < columns)


@triton.jit(do_not_specialize=["T"])
def _place_tokens(ids, before, sent, token, row, place, T, local, K: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr,
                  SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """From sums of counts over earlier chunks, `before`, and over all, sent: row [T, R] place of each token's message to each
    rank, -1 for none; token [T * SLOTS] of each place, -1 behind the last; place [T, K] of pairs."""
    chunk, i, r = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, RANKS)
    before += _origin(chunk, R * (local + 1))
    total = tl.load(sent + r * (local + 1) + local, mask=r < R, other=0)
    first = tl.cumsum(total, 0) - total + tl.load(before + r * (local + 1) + local, mask=r < R, other=0)
    t = chunk * CHUNK + i
    here = _ranks_of_tokens(ids, t, T, local, K, R, RANKS)
    to = first[None, :] + tl.cumsum(here, 0) - here
    inside = (t < T)[:, None] & (r < R)[None, :]
    tl.store(row + t.to(tl.int64)[:, None] * R + r[None, :], tl.where(here > 0, to, -1), mask=inside)
    tl.store(token + to, tl.broadcast_to(t[:, None], (CHUNK, RANKS)), mask=here > 0)
    for slot in tl.static_range(SLOTS):
        at = (chunk * SLOTS + slot) * CHUNK + i
        tl.store(token + at, -1, mask=(at >= tl.sum(total, 0)) & (at < T * SLOTS))
    for start in range(0, CHUNK * K, 128):
        _place_choices(ids, before, place, start, T, local, K, R, CHUNK)


@triton.jit
def _place_choices(ids, before, place, start, T, local, K: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr):
    """Places of 128 of the chunk's pairs: what earlier chunks hold of each one's expert, and the chunk's pairs before it."""
    E, i = R * local, start + tl.arange(0, 128)
    first, limit = _origin(tl.program_id(0), CHUNK * K), T * K
    inside = (i < CHUNK * K) & (first + i < limit)
    expert = _choices(ids, first + i, inside, E)
    nth = tl.load(before + expert + expert // local, mask=expert >= 0, other=0)
    for other in range(0, start + 128, 32):
        j = other + tl.arange(0, 32)
        beside = _choices(ids, first + j, (j < CHUNK * K) & (first + j < limit), E)
        nth += tl.sum(((expert[:, None] == beside[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(place + first + i, tl.where(expert < 0, -1, nth * E + expert), mask=inside)


@triton.jit
def _lay_out_messages(counts, layout, begin, R: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr):
    """One program: from counts [R, E + 1] of what comes to a rank, its experts' layout, and begin."""
    e, step = tl.arange(0, BINS), tl.arange(0, STEP)
    total = tl.zeros((BINS,), tl.int32)
    for r in range(0, R, STEP):
        inside = (r + step < R)[:, None] & (e < E)[None, :]
        total += tl.sum(tl.load(counts + (r + step)[:, None] * (E + 1) + e[None, :], mask=inside, other=0), 0)
    padded = (total + 127) // 128 * 128
    _store_layout(layout, total, tl.sum(padded, 0), tl.sum(total, 0), E)
    earlier = tl.where(e < E, tl.cumsum(padded, 0) - padded, 0)
    for r in range(0, R, STEP):
        at, inside = (r + step)[:, None] * (E + 1) + e[None, :], (r + step < R)[:, None] & (e <= E)[None, :]
        count = tl.load(counts + at, mask=inside, other=0)
        tl.store(begin + at, earlier[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        earlier += tl.sum(count, 0)


@triton.jit
def _words_at(messages, begin: tl.constexpr):
    """Words of messages, bytes, from byte `begin` on, where a part begins."""
    return tl.multiple_of((messages + begin).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _pack_words(messages, begin: tl.constexpr, first, second, rows, to, tile_k, K: tl.constexpr, L: tl.constexpr):
    """The last two parts of messages of L words, rows of K words, if any; in a message they begin at byte `begin`."""
    size: tl.constexpr = (K + 3) // 4 * 4
    out = _words_at(messages, begin)
    k, col0 = tl.arange(0, triton.next_power_of_2(size)), _origin(tile_k, 1)
    if first is not None:
        _scatter(out, _gather(first, rows, col0, k, K, 1, K, 0), to, col0, k, L, 1, size)
    if second is not None:
        _scatter(out + size, _gather(second, rows, col0, k, K, 1, K, 0), to, col0, k, L, 1, size)


@triton.jit(do_not_specialize=["M"])
def _pack_rows(data, scale, s_row, s_col, first, second, index, out, M, W: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
               PER: tl.constexpr, L: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Rows of W words by index, with S scales if any (MXFP4's bytes, or of FP8's the exponent) -> messages `out`, bytes, of L
    words. PER rows of `first` and `second` share one of data. Index -1: nothing is written."""
    tile_m, tile_k = _tile(W, C)
    row0, r, c = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, C)
    rows = _source(index, row0, r, M, PER)
    to = tl.where(rows < 0, -1, row0 + r)
    codes = _gather(data, rows, _origin(tile_k, C), c, W, 1, W, 0)
    _scatter(_words_at(out, 0), codes, to, _origin(tile_k, C), c, L, 1, W)
    if tile_k == 0:
        if scale is not None:
            size: tl.constexpr = (S + 15) // 16 * 16
            s, col0 = tl.arange(0, triton.next_power_of_2(size)), _origin(tile_k, 1)
            scales = _gather(scale, rows, col0, s, s_row, s_col, S, 0)
            if scale.dtype.element_ty == tl.float32:
                scales = ((_bits(scales) >> 23) & 255).to(tl.uint8)
            _scatter(out + W * 4, scales, to, col0, s, L * 4, 1, size)
        _pack_words(out, W * 4 + (S + 15) // 16 * 16, first, second, _source(index, row0, r, M, 1), to, tile_k, K, L)


@triton.jit(do_not_specialize=["M"])
def _quantize_to_messages(x, x_row, x_col, first, second, index, out, M, H: tl.constexpr, K: tl.constexpr, PER: tl.constexpr,
                          L: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """_pack_rows of float rows [T, H], which become FP8 on the way."""
    tile_m, tile_k = _tile(H, C)
    n: tl.constexpr = C // 128
    blocks: tl.constexpr = (H + 127) // 128
    row0, r, c = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, C)
    rows, parts = _source(index, row0, r, M, PER), out + H
    to = tl.where(rows < 0, -1, row0 + r)
    codes, scales = _to_fp8(_float(_gather(x, rows, _origin(tile_k, C), c, x_row, x_col, H, 0)))
    _scatter(out, codes, to, _origin(tile_k, C), c, L * 4, 1, H)
    _scatter(parts, (_bits(scales) >> 23).to(tl.uint8), to, _origin(tile_k, n), tl.arange(0, n), L * 4, 1, blocks)
    if tile_k == 0:
        if blocks % 16 != 0:
            zeros = tl.zeros((R, 16), tl.uint8)
            _scatter(parts + blocks, zeros, to, _origin(tile_k, 1), tl.arange(0, 16), L * 4, 1, 16 - blocks % 16)
        _pack_words(out, H + (blocks + 15) // 16 * 16, first, second, _source(index, row0, r, M, 1), to, tile_k, K, L)


@triton.jit
def _unpack_scales(messages, scale, s_row, s_col, row0, r, M, CODES: tl.constexpr, S: tl.constexpr, L: tl.constexpr):
    """FP8's scales of some messages."""
    s, col0 = tl.arange(0, triton.next_power_of_2(S)), _origin(tl.program_id(0), 0)
    byte = _load(messages + CODES, row0, r, col0, s, L * 4, 1, M, S)
    _store(scale, _scale_of_byte(byte), row0, r, col0, s, s_row, s_col, M, S)


@triton.jit(do_not_specialize=["M"])
def _unpack_rows(messages, scale, s_row, s_col, M, CODES: tl.constexpr, S: tl.constexpr, L: tl.constexpr, R: tl.constexpr):
    """Of messages as _pack_rows makes them, of which CODES bytes are codes and their padding, FP8's scale."""
    _unpack_scales(messages, scale, s_row, s_col, _origin(tl.program_id(0), R), tl.arange(0, R), M, CODES, S, L)


@triton.jit(do_not_specialize=["M", "num_rows", "held"])
def _receive_rows(messages, begin, layout, scale, s_row, s_col, weights, row, pair, tile_expert, tile_shift, M, num_rows, held,
                  num_experts, CODES: tl.constexpr, S: tl.constexpr, K: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
                  E: tl.constexpr, SENDERS: tl.constexpr, RANKS: tl.constexpr, BINS: tl.constexpr):
    """Of messages that came from SENDERS ranks, FP8's scale, unless it is None, weights [M, K], and what _place_pairs would write
    for ids that count from `held`, the first of E experts here. And a share of the tiles."""
    row0, r, col0 = _origin(tl.program_id(0), R), tl.arange(0, R), _origin(tl.program_id(0), 0)
    if scale is not None:
        _unpack_scales(messages, scale, s_row, s_col, row0, r, M, CODES, S, L)
    size: tl.constexpr = (K + 3) // 4 * 4
    k, words = tl.arange(0, triton.next_power_of_2(K)), _words_at(messages, CODES + (S + 15) // 16 * 16)
    sender = tl.arange(0, RANKS)
    first = tl.load(begin + sender * (E + 1) + E, mask=sender < SENDERS, other=2**31 - 1)
    sender = tl.sum((first[None, :] <= (row0 + r)[:, None]).to(tl.int32), 1) - 1  # the last one, of those whose first is the same
    place = tl.where(_below(row0, r, M)[:, None] & (k < K)[None, :], _load(words, row0, r, col0, k, L, 1, M, K), -1)
    expert = place % num_experts - held
    here = (place >= 0) & (expert >= 0) & (expert < E)
    to = tl.load(begin + sender[:, None] * (E + 1) + expert, mask=here, other=0) + place // num_experts
    _store(row, tl.where(here, to, -1), row0, r, col0, k, K, 1, M, K)
    tl.store(pair + to, ((row0 + r)[:, None] * K + k[None, :]).to(tl.int32), mask=here)
    _store(weights, _load(words + size, row0, r, col0, k, L, 1, M, K), row0, r, col0, k, K, 1, M, K)
    _describe_tiles(layout, tile_expert, tile_shift, pair, num_rows, E, BINS)


# -----------------------------------------------------------------------------
# FP8 GEMMs, in Gluon: grouped over experts, forward and Dgrad, and Wgrad; dense with one expert.
#
# C = A B^T, both operands E4M3 and contiguous along the contraction; every 128 of it, sums are scaled and promoted to float32.
# One program a multiprocessor goes from tile to tile: a producer warp loads by TMA, two warpgroups multiply.
#
#   tile        128x256 of C, rows of one expert. Warpgroup g has rows 64 g ... 64 g + 63, in two waves of 128 columns
#   stage       what 128 of the contraction takes: one 128x128 block of A, two of B (48 KB for 1024 cycles of the tensor cores),
#               the scale of A times that of B for each row and half, and where the tile lies in C. Three stages
#   registers   128 of sums and 64 of one partial sum a thread. Two partial sums do not fit, so a wave is multiplied when the last
#               one's sum has been read; meanwhile the other warpgroup multiplies
#   turns       the tensor cores share themselves between two warpgroups that multiply at once: both would end together, and
#               promote together while nothing is multiplied. So they take turns at beginning a wave: 8 % at K = 7168

PUT_LEFT, PUT_RIGHT = gl.constexpr(1), gl.constexpr(2)  # of a tile, the halves that are written to C


# ---- where tiles lie

@gluon.jit
def _num_gemm_tiles(where):
    """where: rows of C (M, or an expert's in wgrad), its columns N, contraction K, experts (in wgrad; else 1), GROUP."""
    return gl.cdiv(where[0], 128) * gl.cdiv(where[1], 256) * where[3]


@gluon.jit
def _tile_order(i, tiles_m, tiles_n, GROUP):
    """Tile i -> row tile, column tile: GROUP row tiles by all column tiles, rows fastest, so that what runs together shares much.

    GROUP 2, 3 row tiles, 2 column tiles: (0, 0) (1, 0) (0, 1) (1, 1) (2, 0) (2, 1)."""
    group = i // (GROUP * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP, GROUP)
    i = i % (GROUP * tiles_n)
    return group * GROUP + i % rows, i // rows


@gluon.jit
def _gemm_tile(i, experts, where, WGRAD: gl.constexpr):
    """Tile i: expert (negative: none), row, column, where its contraction begins and in how many steps of 128 it goes."""
    rows, N, K, _, GROUP = where
    tiles_m, tiles_n = gl.cdiv(rows, 128), gl.cdiv(N, 256)
    if experts is None:  # a plain linear
        m, n = _tile_order(i, tiles_m, tiles_n, GROUP)
        expert, start, steps = 0, 0, gl.cdiv(K, 128)
    elif WGRAD:  # experts [E + 1]: the first token of each
        expert = i // (tiles_m * tiles_n)
        m, n = _tile_order(i % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        start = gl.load(experts + expert)
        steps = (gl.load(experts + expert + 1) - start) // 128
    else:  # experts [M/128]: the expert of each row tile
        m, n = _tile_order(i, tiles_m, tiles_n, GROUP)
        expert, start, steps = gl.load(experts + m), 0, gl.cdiv(K, 128)
    return expert, m * 128, n * 256, start, steps


# ---- the producer

@gluon.jit
def _load_tiles(a_desc, b_desc, shared, a_scale, a_step, b_scale, b_step, experts, where, WGRAD: gl.constexpr,
                ADD: gl.constexpr, STAGES: gl.constexpr):
    """Load what tiles need, stage by stage, as far ahead as stages are empty."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    bufs, _, scales, infos, empty, ready, _ = shared
    bufs = bufs._reinterpret(bufs.dtype, [STAGES * 3, 128, 128], bufs.layout)
    rows, N, K, _, _ = where
    r, q = gl.arange(0, 256, layout=LANES), gl.arange(0, 4, layout=ALL)
    done = 0
    for i in range(gl.program_id(0), _num_gemm_tiles(where), gl.num_programs(0)):
        expert, row, col, start, steps = _gemm_tile(i, experts, where, WGRAD)
        if expert >= 0:
            flags = gl.where(col + 128 < N, PUT_LEFT + PUT_RIGHT, PUT_LEFT)
            if ADD:
                flags = gl.where(steps > 0, flags, 0)
            some = steps > 0
            at_a, below = a_scale + start // 128 * a_step + row + r % 128, (row + r % 128 < rows) & some
            if WGRAD:
                b_row, c_expert = col, expert
                left, to_right = b_scale + start // 128 * b_step + col // 128, 1
            else:
                b_row, c_expert = expert * N + col, 0
                left, to_right = b_scale + (expert * gl.cdiv(N, 128) + col // 128) * steps, steps
            right = left + gl.where(col + 128 < N, to_right, 0)
            if steps == 0:  # an expert without tokens: one step outside the operands, where TMA reads zeros, and no scales
                start = K
            steps = gl.maximum(steps, 1)
            info = gl.where(q < 2, gl.where(q < 1, row, col), gl.where(q < 3, steps, c_expert * 4 + flags))
            sa = gl.load(at_a, mask=below, other=0.0)
            sl, sr = gl.load(left, mask=some, other=0.0), gl.load(right, mask=some, other=0.0)
            for k in range(steps):
                stage, phase, at = done % STAGES, done // STAGES & 1, start + k * 128
                full = ready.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full, 3 * 128 * 128)
                tma.async_copy_global_to_shared(a_desc, [row, at], full, bufs.index(stage * 3))
                tma.async_copy_global_to_shared(b_desc, [b_row, at], full, bufs.index(stage * 3 + 1))
                tma.async_copy_global_to_shared(b_desc, [b_row + 128, at], full, bufs.index(stage * 3 + 2))
                scales.index(stage).store(sa * gl.where(r < 128, sl, sr))
                infos.index(stage).store(info)
                mbarrier.arrive(full, count=1)
                after = gl.minimum(k + 1, steps - 1)
                sa = gl.load(at_a + after * a_step, mask=below, other=0.0)
                sl = gl.load(left + after * b_step, mask=some, other=0.0)
                sr = gl.load(right + after * b_step, mask=some, other=0.0)
                done += 1
    mbarrier.wait(empty.index(done % STAGES), done // STAGES & 1 ^ 1)
    infos.index(done % STAGES).store(q * 0)
    mbarrier.arrive(ready.index(done % STAGES), count=2)


# ---- warpgroups that multiply

@gluon.jit
def _await_turn(G: gl.constexpr):
    """Wait until the other warpgroup has given the turn: barrier 8 + G, both warpgroups' 256 threads."""
    gl.inline_asm_elementwise(f"bar.sync {8 + G}, 256; mov.u32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)


@gluon.jit
def _give_turn(G: gl.constexpr):
    gl.inline_asm_elementwise(f"bar.arrive {9 - G}, 256; mov.u32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)


@gluon.jit
def _begin_wave(G: gl.constexpr, a, b, d, never):
    """d = a @ b^T, not waited for. d goes in and out as wgmma's accumulator although it begins at zero: `never` is false, but
    no compiler knows, so that none takes other registers for it or begins before the last wave's d has been read."""
    _await_turn(G)
    d = warpgroup_mma(a, b.permute((1, 0)), d, use_acc=never, is_async=True)
    _give_turn(G)
    return d


@gluon.jit
def _once_read(d, acc):
    """d and acc, once acc is computed. No instruction, but the compiler puts off no addition past it, copying d."""
    return gl.inline_asm_elementwise("", "=f,=f,0,1", [d, acc], dtype=(gl.float32, gl.float32), is_pure=False, pack=1)


@builtin
def _add_to_global(desc, coord, src, _semantic=None):
    """TMA adds shared to global memory, each element once, so in no order that could matter. Gluon 3.8: tma.async_atomic_add."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _write_wave(acc, G: gl.constexpr, c_desc, c_bufs, olds, n, e, row, col, TRANSPOSE: gl.constexpr, ADD: gl.constexpr,
                BUFS: gl.constexpr):
    """A wave's 64x128 to C, through shared memory, warpgroup G's n-th; the copy is not waited for. Added to float32 by the
    copy; to bfloat16 here, so that only the sum is rounded."""
    tma.store_wait(BUFS - 1)  # the copy before the last one, or the last one, was of this buffer: it has been read
    buf, old = c_bufs.index(G * BUFS + n % BUFS), olds.index(G)
    if TRANSPOSE:
        view = buf.reshape([128, 64]).permute((1, 0))
        row, col = col, row
    else:
        view = buf.reshape([64, 128])
    if ADD and c_desc.dtype == gl.bfloat16:
        mbarrier.expect(old, 64 * 128 * 2)
        tma.async_copy_global_to_shared(c_desc, [e, row, col], old, buf)
        mbarrier.wait(old, n & 1)
        acc += view.load(acc.type.layout).to(gl.float32)
    view.store(acc.to(c_desc.dtype))
    fence_async_shared()
    if ADD and c_desc.dtype == gl.float32:
        _add_to_global(c_desc, [e, row, col], buf)
    else:
        tma.async_copy_shared_to_global(c_desc, [e, row, col], buf)


@gluon.jit
def _next_tile(infos, ready, done, STAGES: gl.constexpr):
    """What the producer says of the tile that begins with the next stage: row, column, steps (0: no tile), expert and flags."""
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    q = gl.arange(0, 4, layout=ALL)
    mbarrier.wait(ready.index(done % STAGES), done // STAGES & 1)
    info = infos.index(done % STAGES).load(ALL)  # a scalar comes from shared memory only by way of a sum
    return (gl.sum(gl.where(q == 0, info, 0), 0), gl.sum(gl.where(q == 1, info, 0), 0), gl.sum(gl.where(q == 2, info, 0), 0),
            gl.sum(gl.where(q == 3, info, 0), 0))


@gluon.jit
def _multiply(G: gl.constexpr, c_desc, shared, TRANSPOSE: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr,
              BUFS: gl.constexpr, EARLY: gl.constexpr):
    """Warpgroup G's 64x256 of each tile that the producer loads."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, L)
    bufs, c_bufs, scales, infos, empty, ready, olds = shared
    blocks = bufs._reinterpret(bufs.dtype, [STAGES * 3, 128, 128], bufs.layout)
    scales = scales._reinterpret(scales.dtype, [STAGES * 4, 64], scales.layout)
    d = gl.zeros((64, 128), gl.float32, L)
    if G == 1:
        _give_turn(G)
    done, written = 0, 0
    row, col, steps, flags = _next_tile(infos, ready, done, STAGES)
    while steps > 0:
        row, e, never = row + 64 * G, flags >> 2, steps < 0
        left, right = gl.zeros((64, 128), gl.float32, L), gl.zeros((64, 128), gl.float32, L)
        for k in range(steps):
            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(ready.index(stage), phase)
            a, s_left, s_right = bufs.index(stage * 6 + G), scales.index(stage * 4 + G), scales.index(stage * 4 + 2 + G)
            s_left, s_right = s_left.load(ROWS), s_right.load(ROWS)
            d = _begin_wave(G, a, blocks.index(stage * 3 + 1), d, never)
            d = warpgroup_mma_wait(0, deps=(d,))
            left = gl.fma(d, s_left[:, None], left)
            d, left = _once_read(d, left)
            d = _begin_wave(G, a, blocks.index(stage * 3 + 2), d, never)
            if EARLY:
                if (k == steps - 1) & (flags & PUT_LEFT != 0):
                    _write_wave(left, G, c_desc, c_bufs, olds, written, e, row, col, TRANSPOSE, ADD, BUFS)
                    written += 1
            d = warpgroup_mma_wait(0, deps=(d,))
            right = gl.fma(d, s_right[:, None], right)
            mbarrier.arrive(empty.index(stage), count=1)
            done += 1
        if not EARLY:
            if flags & PUT_LEFT != 0:
                _write_wave(left, G, c_desc, c_bufs, olds, written, e, row, col, TRANSPOSE, ADD, BUFS)
                written += 1
        if flags & PUT_RIGHT != 0:
            _write_wave(right, G, c_desc, c_bufs, olds, written, e, row, col + 128, TRANSPOSE, ADD, BUFS)
            written += 1
        row, col, steps, flags = _next_tile(infos, ready, done, STAGES)
    tma.store_wait(0)


@gluon.jit
def _gemm(a_scale, a_step, b_scale, b_step, experts, a_desc, b_desc, c_desc, rows, N, K, num_experts, GROUP,
          WGRAD: gl.constexpr, TRANSPOSE: gl.constexpr, ADD: gl.constexpr):
    """a [rows, K], b [.., K], c [E, ..]; experts, rows, N, K, num_experts: see _gemm_tile. TRANSPOSE: tiles of C^T; ADD: to C."""
    STAGES: gl.constexpr = 3
    BUFS: gl.constexpr = 2 if c_desc.dtype == gl.bfloat16 else 1  # for C, a warpgroup
    EARLY: gl.constexpr = not ADD or c_desc.dtype == gl.float32  # left half to C while the last wave multiplies, if registers do
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 6, 64, 128], a_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFS] + c_desc.block_shape, c_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 256], FLAT)
    infos = gl.allocate_shared_memory(gl.int32, [STAGES, 4], FLAT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # two warpgroups have read the stage
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # TMA has written it, and the producer its scales
    olds = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(olds.index(i), count=1)
    shared = (bufs, c_bufs, scales, infos, empty, ready, olds)
    where = (rows, N, K, num_experts, GROUP)
    gl.warp_specialize([
        (_multiply, (0, c_desc, shared, TRANSPOSE, ADD, STAGES, BUFS, EARLY)),
        (_multiply, (1, c_desc, shared, TRANSPOSE, ADD, STAGES, BUFS, EARLY)),
        (_load_tiles, (a_desc, b_desc, shared, a_scale, a_step, b_scale, b_step, experts, where, WGRAD, ADD, STAGES)),
    ], [4, 1], [232, 40])


# -----------------------------------------------------------------------------
# cross entropy of bfloat16 logits, in float32 and without float32 logits in memory

@triton.jit
def _token_losses(logits, targets, loss, lse, V: tl.constexpr, C: tl.constexpr):
    """Log-sum-exp of a row in one pass: each lane keeps its largest logit so far, and the sum of exponentials below that."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    top, total = tl.full((C,), LOWEST, tl.float32), tl.zeros((C,), tl.float32)
    for start in range(0, V, C):
        x = _float(tl.load(logits + row * V + start + c, mask=start + c < V, other=-float("inf")))
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    most = tl.max(top, 0)
    above = tl.log(tl.sum(total * tl.exp(top - most), 0))
    target = tl.load(targets + row)
    chosen = _float(tl.load(logits + row * V + target, mask=(target >= 0) & (target < V), other=float("nan")))
    tl.store(lse + row, most + above)
    tl.store(loss + row, tl.where(target == -100, 0.0, (most - chosen) + above))


@triton.jit
def _logit_gradients(logits, targets, lse, factor, V: tl.constexpr, C: tl.constexpr):
    """In place: (softmax - one-hot of the target) * factor; zeros in a row that is ignored."""
    row, tile = _tile(V, C)
    c, target = tile * C + tl.arange(0, C), tl.load(targets + row)
    at = logits + row.to(tl.int64) * V + c
    p = tl.exp(_float(tl.load(at, mask=c < V, other=0)) - tl.load(lse + row))
    d = tl.where(target == -100, 0.0, (p - (c == target).to(tl.float32)) * tl.load(factor))
    tl.store(at, _bfloat16(d), mask=c < V)


# -----------------------------------------------------------------------------
# AdamW with moments in BF16, for all tensors of a group at once

@triton.jit
def _pointer(table, i, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Where tensor i keeps its weights (kind 0, float32), gradients (1, float32), moments (2 and 3, bfloat16) or step (4)."""
    address = tl.load(table + i * 5 + kind)
    if kind == 2 or kind == 3:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _adamw_bf16(table, sizes, first_tile, tensor_of_tile, divisor, skip, lr, beta1, beta2, eps, decay, BLOCK: tl.constexpr,
                ALIGNED: tl.constexpr):
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0)
    i = tl.load(tensor_of_tile + tile)
    start, n = (tile - tl.load(first_tile + i)).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    size = tl.load(sizes + i)
    inside = _below(start, n, tl.multiple_of(size, 16) if ALIGNED else size)
    w_ptr, m_ptr = _pointer(table, i, 0, ALIGNED) + start + n, _pointer(table, i, 2, ALIGNED) + start + n
    v_ptr = _pointer(table, i, 3, ALIGNED) + start + n
    step = tl.load(_pointer(table, i, 4, False))
    w, g = tl.load(w_ptr, mask=inside), tl.load(_pointer(table, i, 1, ALIGNED) + start + n, mask=inside) / tl.load(divisor)
    m, v = _float(tl.load(m_ptr, mask=inside)), _float(tl.load(v_ptr, mask=inside))
    m += (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    small1, small2 = 1 - tl.exp2(step * tl.log2(beta1)), 1 - tl.exp2(step * tl.log2(beta2))  # moments began at 0
    w = w * (1 - lr * decay) - lr / small1 * m / (tl.sqrt(v / small2) + eps)
    tl.store(w_ptr, w, mask=inside)
    tl.store(m_ptr, _bfloat16(m), mask=inside)
    tl.store(v_ptr, _bfloat16(v), mask=inside)


# -----------------------------------------------------------------------------
# host side

def _cdiv(a, b):
    """triton.cdiv, which takes 2 us of the host's time."""
    return -(-a // b)


def _power_of_2(n):
    """The next one, triton.next_power_of_2, which takes 5 us of the host's time."""
    return 1 << max(n - 1, 0).bit_length()


def _launch(kernel, programs, *args, num_warps=4, **options):
    """So many programs, none for an empty tensor. No fused multiply-add but where it is written.

    A launch whose arguments are of known kinds goes straight to what was compiled for the first such: Triton would take three
    times as long to find it. Of its hooks and knobs, such a launch heeds those of launching alone."""
    if not programs:
        return
    if id(kernel) not in _COMPILED:  # hashing a kernel takes longer; the entry keeps it alive
        constants = [parameter.is_constexpr for parameter in getattr(kernel, "params", ())]  # none in the interpreter
        _COMPILED[id(kernel)] = kernel, constants, {}
    _, constants, compiled = _COMPILED[id(kernel)]
    device = args[0].device.index
    kinds, values = _kinds_and_values(args, constants)
    kinds = device, num_warps, *options.values(), *kinds
    with torch.cuda.device_of(args[0]):
        ready = compiled.get(kinds)
        if ready is None:  # always so in the interpreter, which compiles nothing
            compiled[kinds] = kernel[(programs,)](*args, **options, num_warps=num_warps, enable_fp_fusion=False)
        elif _listens(triton.knobs.runtime.launch_enter_hook) or _listens(triton.knobs.runtime.launch_exit_hook):
            ready[programs, 1, 1](*args)
        else:  # what that does where nobody listens
            stream = triton.runtime.driver.active.get_current_stream(device)
            ready.run(programs, 1, 1, stream, ready.function, ready.packed_metadata, None, None, None, *values)


_COMPILED = {}  # by a kernel's id: the kernel, which of its parameters are constants, and what was compiled, by kinds


def _listens(hook):
    """Whether anybody is to hear of launches: a chain of functions, or one, or None."""
    return bool(getattr(hook, "calls", hook))


def _kinds_and_values(args, constants):
    """All that Triton compiles for: constants, types, and which addresses and numbers 16 divides, or are 1. And the arguments
    with tensors as addresses, which the launcher takes as they are; tensors it looks up one by one."""
    kinds, values = [], []
    for arg, constant in zip(args, constants):
        if constant:
            kinds.append(arg)
        elif type(arg) is int:
            kinds.append((arg >> 31, arg & 15 == 0, arg == 1))
        elif isinstance(arg, torch.Tensor):
            dtype, on_gpu, arg = arg.dtype, arg.is_cuda, arg.data_ptr()
            kinds.append((dtype, on_gpu, arg & 15))  # on_gpu: Triton's own way refuses a CPU's tensor
        else:
            kinds.append((arg.base.dtype, *arg.block_shape) if type(arg) is TensorDescriptor else type(arg))
        values.append(arg)
    return kinds, values


def _multiprocessors(x):
    """Of x's GPU; on a CPU, where one program after the other runs, one."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def _bytes(data):
    """FP8 codes, or any rows whose numbers do not matter, as kernels see them: bytes."""
    return None if data is None else data.view(torch.uint8) if data.numel() else data.new_empty(data.shape, dtype=torch.uint8)


def _words(x):
    """x [.., K], a multiple of four bytes wide, as 32-bit words, copied where its strides do not allow that; a new output's
    always do."""
    if x is None:
        return None
    if not x.numel():
        return x.new_empty(0, dtype=torch.int32)
    x = x.contiguous()
    if any(n * x.element_size() % 4 for n in (x.storage_offset(), *x.stride()[:-1])):  # a lone row's stride may be odd
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def _words_apart(x):
    """The same of x [M, K] whose rows may lie apart, and how many words from one to the next. What is less aligned than a copy
    of it would be is copied: a thread would load fewer words at once, and sums would run in another order."""
    size = 4 // x.element_size()
    if x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if not x.numel() or x.stride(1) != 1 or x.stride(0) * x.element_size() % 16:
        return _words(x), x.shape[1] // size
    return x.view(torch.int32), x.stride(0) // size


def _columns(K, most):
    """Columns of a tile: as many as divide K, from 128 to most."""
    return max(128, math.gcd(K, most))


def _new_scale(like, rows, columns):
    """[rows, columns] with stride 1 along rows, as GEMMs load it."""
    return like.new_empty_strided((rows, columns), (1, rows), dtype=torch.float32)


def _new_fp8_rows(like, M, K):
    return like.new_empty((M, K), dtype=torch.float8_e4m3fn), _new_scale(like, M, _cdiv(K, 128))


def _new_fp8_cols(like, K, M):
    """Data [K, M], its rows a whole number of words apart, and the scale of each 128x128 tile."""
    data = like.new_empty((K, _cdiv(M, 4) * 4), dtype=torch.float8_e4m3fn)
    return data, _new_scale(like, _cdiv(K, 128), _cdiv(M, 128))


def _new_fp4_rows(like, M, K):
    return like.new_empty((M, K // 2), dtype=torch.uint8), like.new_empty((M, K // MX.value), dtype=torch.uint8)


def _fp8_out(fp8):
    """FP8 tensors, or (None, None), as arguments: data, scale, the scale's strides."""
    return (_bytes(fp8[0]), fp8[1], *(fp8[1].stride() if fp8[1] is not None else (0, 0)))


def _fp4_in(data, scale):
    """MXFP4 rows as arguments: words, 16 bytes between rows; bytes, those between rows. Rows may lie apart, as in messages."""
    if not data.numel():
        return _words(data), 0, scale, 0
    if data.stride(1) != 1 or data.stride(0) % 16 or data.storage_offset() % 16:
        data = _words(data).view(torch.uint8)
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    return data.view(torch.int32), data.stride(0) // 16, scale, scale.stride(0)


@functools.cache
def _e2m1_table(device):
    """[23] int64 for _look_up: the E4M3 codes of the eight magnitudes times 2^(n - 13), first in the lowest byte; and NaN.

    2^-13 leaves nothing of 6; 2^8 is met where a scale is held to 2^119."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat([magnitudes * 2.0 ** (n - 13) for n in range(22)]).clamp(max=448)
    codes = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([codes, torch.full((8,), E4M3_NAN.value, dtype=torch.uint8)]).view(torch.int64).to(device)


def _launch_quantize_rows(x, fp8=(None, None), fp4=(None, None), rule="even"):
    M, K = x.shape
    out = (*_fp8_out(fp8), _words(fp4[0]), fp4[1])
    if x.dtype == torch.bfloat16 and fp4[0] is not None and rule == "even":
        C = _columns(K, 1024)
        R = 1024 // C
        _launch(_quantize_pairs, _cdiv(M, R) * _cdiv(K, C), _words(x), *out, M, K, R, C, num_warps=1)
    else:
        R, C = 16, _columns(K, 256)
        _launch(_quantize_rows, _cdiv(M, R) * _cdiv(K, C), x, *x.stride(), *out, M, K, CARRY_MX[rule], R, C)


def quantize_fp8_rows(x):
    """x [M, K] float32, bfloat16 or float16 -> data [M, K] float8_e4m3fn, scale [M, ceil(K/128)] float32."""
    fp8 = _new_fp8_rows(x, *x.shape)
    _launch_quantize_rows(x, fp8=fp8)
    return fp8


def quantize_fp4_rows(x, rule="even"):
    """x [M, K], 32 | K -> data [M, K/2], scale [M, K/32], both uint8; rule "even", "floor" (OCP MX 1.0) or "ceil"."""
    fp4 = _new_fp4_rows(x, *x.shape)
    _launch_quantize_rows(x, fp4=fp4, rule=rule)
    return fp4


def quantize_fp8_fp4_rows(x):
    """x [M, K], 32 | K -> the four tensors of quantize_fp8_rows and quantize_fp4_rows (rule "even"), from one read."""
    fp8, fp4 = _new_fp8_rows(x, *x.shape), _new_fp4_rows(x, *x.shape)
    _launch_quantize_rows(x, fp8=fp8, fp4=fp4)
    return *fp8, *fp4


def quantize_fp8_rows_and_cols(x, block=False):
    """x [M, K] -> the two tensors of quantize_fp8_rows(x), and those of quantize_fp8_rows(x.t()), from one read.

    block: columns have one scale a 128x128 tile, [K/128, M/128], as those of quantize_fp8_blocks(x), transposed."""
    M, K = x.shape
    if x.dtype != torch.bfloat16 or K % 2:  # two reads
        data, scale = quantize_fp8_blocks(x) if block else quantize_fp8_rows(x.mT)
        return *quantize_fp8_rows(x), *((_bytes(data).mT.contiguous().view(data.dtype), scale.mT) if block else (data, scale))
    fp8, data_t = _new_fp8_rows(x, M, K), x.new_empty((K, _cdiv(M, 16) * 16), dtype=torch.float8_e4m3fn)
    scale_t = _new_scale(x, _cdiv(K, 128) if block else K, _cdiv(M, 128))
    _launch(_quantize_rows_and_cols, _cdiv(M, 128) * _cdiv(K, 128), _words(x), *_fp8_out(fp8)[:2], fp8[1].stride(1),
            _words(data_t), scale_t, *scale_t.stride(), M, K, _cdiv(M, 16), block, num_warps=8)
    return *fp8, data_t[:, :M], scale_t


def _launch_quantize_blocks(w, transpose):
    w_ENK = w if w.dim() == 3 else w[None]
    (E, N, K), lead = w_ENK.shape, w.shape[:-2]
    tiles_n, tiles_k, pitch = _cdiv(N, 128), _cdiv(K, 128), _cdiv(N, 4)
    data, scale = w.new_empty(w.shape, dtype=torch.float8_e4m3fn), w.new_empty((*lead, tiles_n, tiles_k), dtype=torch.float32)
    data_t = scale_t = None
    if transpose and K % BOTH_WAYS == 0:
        data_t = w.new_empty((*lead, K, 4 * pitch), dtype=torch.float8_e4m3fn)
        scale_t = w.new_empty((*lead, tiles_k, tiles_n), dtype=torch.float32)
    _launch(_quantize_blocks, E * tiles_n * tiles_k, w_ENK, *w_ENK.stride(), _bytes(data), scale, _words(data_t), scale_t, N, K,
            pitch)
    if transpose and data_t is None:
        return data, scale, _bytes(data).mT.contiguous().view(data.dtype), scale.mT.contiguous()
    return data, scale, data_t if data_t is None else data_t[..., :N], scale_t


def quantize_fp8_blocks(w):
    """w [N, K] or [E, N, K] -> data [.., N, K] float8_e4m3fn, scale [.., ceil(N/128), ceil(K/128)] float32."""
    return _launch_quantize_blocks(w, transpose=False)[:2]


def quantize_fp8_weight(w):
    """As quantize_fp8_blocks, and the same transposed: data_t [.., K, N], scale_t [.., ceil(K/128), ceil(N/128)]."""
    return _launch_quantize_blocks(w, transpose=True)


def rms_norm(x, weight, eps, bf16=True, fp8=False, fp4=False):
    """x [M, K] bfloat16, weight [K] float32 -> y [M, K] bfloat16, its FP8 rows, its MXFP4 rows; None for what is not asked.

    K is even, and a multiple of 32 with fp4."""
    (M, K), (words, pitch) = x.shape, _words_apart(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if bf16 else None
    rows8 = _new_fp8_rows(x, M, K) if fp8 else (None, None)
    rows4 = _new_fp4_rows(x, M, K) if fp4 else (None, None)
    C = min(1024, max(128, 1 << (K - 1).bit_length()))
    # Of narrow rows several a warp: four warps would pass sums and codes through shared memory, and begin for little work
    R, num_warps = (1, 4) if K > 1024 else (2048 // C, 1)
    _launch(_rms_norm, _cdiv(M, R), words, pitch, weight.view(torch.int64), _words(y), *_fp8_out(rows8), _words(rows4[0]),
            rows4[1], eps, M, K, C, R, num_warps=num_warps)
    return y, *rows8, *rows4


def rms_norm_backward(dy, x, weight, eps):
    """dy, x [M, K] bfloat16 -> dx [M, K] bfloat16, dw [K] float32."""
    (M, K), (words, pitch) = x.shape, _words_apart(x)
    HALF, num_warps = _power_of_2(K // 2), 4 if K >= 4096 else 2 if K >= 2048 else 1
    warps = max(8, min(32, 192 * 32 * num_warps // HALF))  # that a multiprocessor has registers for
    programs = min(_cdiv(M, 4), warps // num_warps * _multiprocessors(x))
    dx, dw = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((programs, K), dtype=torch.float32)
    _launch(_rms_norm_backward, programs, _words(dy), words, pitch, weight, _words(dx), dw, eps, M, K, HALF, num_warps=num_warps)
    return dx, dw.sum(0)


def attention_inputs(q, kv, k_rope, table, heads, nope):
    """kv [T, A*(N+V)], k_rope [T, R] bfloat16, table [2, S, R/2] float32: cosines and sines of positions -> k [T, A*(N+R)],
    v [T, A*V]. Rotates q [T, A*(N+R)], contiguous, where it lies; None leaves it out. N, R, V are even, S divides T."""
    (T, R), V = k_rope.shape, kv.shape[1] // heads - nope
    if k_rope.stride(1) != 1 or k_rope.stride(0) % 2 or k_rope.storage_offset() % 2:
        k_rope = k_rope.contiguous()
    k, v, H = kv.new_empty((T, heads * (nope + R))), kv.new_empty((T, heads * V)), min(32, _power_of_2(heads))
    _launch(_attention_inputs, T * _cdiv(heads, H), _words(kv), k_rope.view(torch.int32), k_rope.stride(0) // 2,
            None if q is None else q.view(torch.int32), table, _words(k), _words(v), table.shape[1], heads, nope // 2, R // 2,
            V // 2, H)
    return k, v


def attention_inputs_backward(dq, dk, dv, table, heads, nope):
    """Gradients of q, k, v as above, contiguous -> those of kv and k_rope, summed over heads in float32; dq turns in place."""
    (T, V), R = (len(dv), dv.shape[1] // heads), 2 * table.shape[2]
    dkv, dk_rope, H = dk.new_empty((T, heads * (nope + V))), dk.new_empty((T, R)), min(32, _power_of_2(heads))
    _launch(_attention_inputs_backward, T, dq.view(torch.int32), _words(dk), _words(dv), table, _words(dkv), _words(dk_rope),
            table.shape[1], heads, nope // 2, R // 2, V // 2, H)
    return dkv, dk_rope


def fp8_to_fp4(data, scale):
    """FP8 rows [M, K], 32 | K -> MXFP4 rows: data [M, K/2], scale [M, K/32], both uint8; rule "even"."""
    M, K = data.shape
    fp4, C = _new_fp4_rows(data, M, K), _columns(K, 1024)
    R = 4096 // C
    _launch(_fp8_to_fp4, _cdiv(M, R) * _cdiv(K, C), _words(data), scale, *scale.stride(), _words(fp4[0]), fp4[1], M,
            K, R, C, num_warps=1)
    return fp4


def fp4_fan_out_rows(data, scale, index=None, end=None, per=1):
    """MXFP4 rows [T, K/2], [T, K/32] -> FP8 rows: data [M, K], scale [M, ceil(K/128)].

    index [M] int32: row m comes from row index[m] // per, or is zero where that is negative; end [1] int32: rows from there
    on, a multiple of 128, are not written. Without an index rows stay where they are. So in all that fan out."""
    K, M = data.shape[1] * 2, len(data) if index is None else len(index)
    fp8, C = _new_fp8_rows(data, M, K), _columns(K, 1024)
    R = min(128, 16384 // C)
    _launch(_fp4_to_fp8_rows, _cdiv(M, R) * _cdiv(K, C), _e2m1_table(data.device), *_fp4_in(data, scale),
            index, end, _words(fp8[0]), *_fp8_out(fp8)[1:], M, K, per, R, C)
    return fp8


def fp4_fan_out_cols(data, scale, index=None, end=None, per=1):
    """MXFP4 rows -> FP8 cols: data [K, M], scale [ceil(K/128), ceil(M/128)], one value a 128x128 tile."""
    K, M = data.shape[1] * 2, len(data) if index is None else len(index)
    fp8 = _new_fp8_cols(data, K, M)
    _launch(_fp4_to_fp8_cols, _cdiv(M, 128) * _cdiv(K, 128), _e2m1_table(data.device), *_fp4_in(data, scale), index, end,
            _words(fp8[0]), *_fp8_out(fp8)[1:], M, K // 8, _cdiv(M, 4), K % 128 == 0, per, num_warps=1)
    return fp8[0][:, :M], fp8[1]


def _launch_fan_out(data, scale, out, index, end, per):
    (_, K), M, C = data.shape, len(out[0]), _columns(data.shape[1], 256)
    _launch(_fan_out_rows, _cdiv(M, 32) * _cdiv(K, C), data, *data.stride(), scale,
            *(scale.stride() if scale is not None else (0, 0)), index, end, *_fp8_out(out), M, K, per, 32, C)


def fan_out_rows(x, index, end=None, per=1):
    """x [T, K] of any dtype -> [M, K]."""
    out = x.new_empty((len(index), x.shape[1]))
    if not len(x):
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()  # rows may lie apart, as in messages
    _launch_fan_out(_bytes(x), None, (out, None), index, end, per)
    return out


def fp8_fan_out_rows(data, scale, index=None, end=None, per=1):
    """FP8 rows -> FP8 rows [M, K]."""
    fp8 = _new_fp8_rows(data, len(data) if index is None else len(index), data.shape[1])
    _launch_fan_out(_bytes(data), scale, fp8, index, end, per)
    return fp8


def fp8_fan_out_cols(data, scale, index=None, end=None, per=1, rows=False):
    """FP8 rows -> FP8 cols as fp4_fan_out_cols gives them and, if `rows`, what fp8_fan_out_rows gives, else None, None."""
    K, M = data.shape[1], len(data) if index is None else len(index)
    if rows and K % BOTH_WAYS:
        return *fp8_fan_out_cols(data, scale, index, end, per)[:2], *fp8_fan_out_rows(data, scale, index, end, per)
    fp8, rows8 = _new_fp8_cols(data, K, M), _new_fp8_rows(data, M, K) if rows else (None, None)
    _launch(_fp8_rows_to_cols, _cdiv(M, 128) * _cdiv(K, 128), _bytes(data), *data.stride(), scale, *scale.stride(),
            index, end, *_fp8_out(rows8), _words(fp8[0]), *_fp8_out(fp8)[1:], M, K, _cdiv(M, 4), per)
    return fp8[0][:, :M], fp8[1], *rows8


def fp4_to_fp8_rows(data, scale):
    """MXFP4 rows [M, K/2], [M, K/32] -> FP8 rows: data [M, K], scale [M, ceil(K/128)]."""
    return fp4_fan_out_rows(data, scale)


def _for_each_column(data, scale):
    """A scale [K/128, M/128] repeated for each of K."""
    return data, scale.repeat_interleave(128, 0)[: len(data)]


def fp4_to_fp8_cols(data, scale):
    """MXFP4 rows [M, K/2], [M, K/32] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], one value a 128x128 tile."""
    return _for_each_column(*fp4_fan_out_cols(data, scale))


def fp8_rows_to_cols(data, scale):
    """FP8 rows [M, K], [M, ceil(K/128)] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], one value a 128x128 tile."""
    return _for_each_column(*fp8_fan_out_cols(data, scale)[:2])


def swiglu(h, p, pair, shift, end, num_pairs, save_h="fp8"):
    """h [M, 2I] bfloat16 (gate, up), 128 | I and M; p [..] float32 by pair; pair, shift, end from group_rows -> a as FP8 rows
    [M, I], and h [num_pairs, 2I] in the format save_h, "fp8", "fp4" or none of them, as it is kept: (a8, scale, data, scale)."""
    M, I = h.shape[0], h.shape[1] // 2
    a, (h8, h4), C = _new_fp8_rows(h, M, I), ((None, None), (None, None)), _columns(I, 512)
    R, num_warps = 512 // C, 1
    if save_h == "fp8":
        h8 = (h.new_empty((num_pairs, 2 * I), dtype=torch.float8_e4m3fn),
              h.new_empty((num_pairs, 2 * I // 128), dtype=torch.float32))
    elif save_h == "fp4":
        h4, C = _new_fp4_rows(h, num_pairs, 2 * I), _columns(I, 1024)
        R, num_warps = (1024 // C, 1) if C > 128 else (16, 2)
    _launch(_swiglu, M // R * (I // C), _words(h), p, pair, shift, end, *_fp8_out(a), *_fp8_out(h8), _words(h4[0]), h4[1], M,
            I, R, C, num_warps=num_warps)
    return *a, *(h4 if save_h == "fp4" else h8)


def swiglu_backward(da, p, pair, shift, end, h, h_scale):
    """da [M, I] bfloat16, h as kept by swiglu, or bfloat16 [M, 2I] with h_scale None and shift of no meaning -> dh as FP8 rows
    [M, 2I] and cols [2I, M], a as FP8 cols [I, M] (both with a scale for each column of 128 rows), all rounded to bfloat16 first;
    dp [M, I/128] float32, of which the sum over a row is the gate weight's gradient."""
    M, I = da.shape
    n = {torch.uint8: 16, torch.float8_e4m3fn: 32, torch.bfloat16: 64}[h.dtype]  # words of 128 columns
    dh, dp = _new_fp8_rows(da, M, 2 * I), _new_scale(da, M, I // 128)
    cols = lambda K: (da.new_empty((K, M), dtype=torch.float8_e4m3fn), _new_scale(da, K, M // 128))
    dh_t, a_t = cols(2 * I), cols(I)
    strides = (0, 0) if h_scale is None else h_scale.stride()
    # two programs a multiprocessor: half of its registers and of its shared memory each
    _launch(_swiglu_backward, M // 128 * (I // 128), _words(da), p, pair, None if h_scale is None else shift, end, _words(h),
            h_scale, *strides, *_fp8_out(dh)[:2], dh[1].stride(1), _words(dh_t[0]), *_fp8_out(dh_t)[1:], _words(a_t[0]),
            *_fp8_out(a_t)[1:], dp, M, I, n, 4 if n == 16 else 1, num_warps=8, **({} if INTERPRET.value else {"maxnreg": 128}))
    return *dh, *dh_t, *a_t, dp


def swiglu_bf16(h, p, pair, end):
    """h [M, 2I] bfloat16 (gate, up) -> a = silu(gate) * up * p [M, I] bfloat16, zero in padding."""
    M, I = h.shape[0], h.shape[1] // 2
    out = h.new_empty((M, I))
    _launch(_swiglu_bf16, M // 8 * (I // 128), _words(h), p, pair, end, _words(out), M, I, 8, num_warps=1)
    return out


def swiglu_backward_bf16(da, h, p, pair, end):
    """da [M, I], h [M, 2I] bfloat16 -> dh [M, 2I], a [M, I] bfloat16, dp [M, I/128] float32, all zero in padding."""
    M, I = da.shape
    dh, a, dp = h.new_empty((M, 2 * I)), da.new_empty((M, I)), _new_scale(da, M, I // 128)
    _launch(_swiglu_backward_bf16, M // 4 * (I // 128), _words(da), _words(h), p, pair, end, _words(dh), _words(a), dp, M, I, 4,
            num_warps=1)
    return dh, a, dp


def split_float32(x, order):
    """x [M, N] float32, contiguous -> [M, len(order) * N] bfloat16: beside one another, for each entry of order, part 0, 1 or 2
    of x, which add up to x to the last bit, but for the smallest numbers."""
    (M, N), C = x.shape, _columns(x.shape[1], 1024)
    out, R = x.new_empty((M, len(order) * N), dtype=torch.bfloat16), 1024 // C
    _launch(_split_float32, _cdiv(M, R) * _cdiv(N, C), x, out, M, N, tuple(order), R, C)
    return out


def route(logits, bias, load, batch, top_k, groups, softmax, renormalise, scale, alpha, least):
    """Parts of logits [T, P, E] float32, contiguous, that add up to them -> scores [T, E], experts [T, top_k] int32 in falling
    order of score + bias, equals by their number, and gate weights [T, top_k], which are scale times the scores, or their
    quotients by their sum. Experts exist and differ, whatever the logits.

    bias: [E] or None. groups: (how many, how many are open, of how many best scores, 1 or 2, a group's score is the sum). load
    [E] int64, None outside training: the choices are added. Then there follow chosen [B, E], how often each of B = batch
    sequences chose each expert, and balance [B], alpha * sum_e chosen * E / (S * top_k) * the mean normalised score; else None,
    None. least: bounds both sums from below."""
    (T, P, E), (n, n_open, best), new = logits.shape, groups, logits.new_empty
    G, W = _power_of_2(n), _power_of_2(E // n)
    sequences = batch if load is not None else 1
    S, R = T // sequences, max(min(8192 // (G * W), 256), 1)
    chunks, vector = _cdiv(S, R), min(W, 4)
    scores, ids, weights = new((T, E)), new((T, top_k), dtype=torch.int32), new((T, top_k))
    sums = new((sequences * chunks, 2, E)) if load is not None else None
    _launch(_route, sequences * chunks, logits, bias, scores, ids, weights, sums, S, float(scale), least, P, E, top_k, n, n_open,
            best, softmax, renormalise, G, R, W, vector, min(W // vector, max(G * W // 32, 1), 32), num_warps=8)
    if load is None:
        return scores, ids, weights, None, None
    chosen, balance, bins = new((batch, E)), new(batch), _power_of_2(E)
    _launch(_balance, batch, sums, chosen, balance, load, chunks, E / (S * top_k), alpha / S, E, max(min(8192 // bins, 128), 1),
            bins, num_warps=8)
    return scores, ids, weights, chosen, balance


def route_backward(scores, ids, dweights, chosen, dbalance, softmax, renormalise, scale, alpha, least):
    """What route took and found, and the gradients of weights [T, K] and of balance [B], or None -> those of logits [T, E]."""
    (T, E), K = scores.shape, ids.shape[1]
    S, bins, dlogits = T // len(chosen) if chosen is not None else T, _power_of_2(E), torch.empty_like(scores)
    R = max(min(1024 // bins, 128), 1)
    of_sequence = max(S, 1)
    _launch(_route_backward, _cdiv(T, R), scores, ids, dweights, chosen, dbalance, dlogits, T, S, float(scale),
            E / (of_sequence * K), alpha / of_sequence, least, E, K, softmax, renormalise, R, bins, num_warps=1)
    return dlogits


def group_rows(ids, num_experts, num_rows, num_pairs=None):
    """ids [T, K] int32 expert of each pair, -1 for none here -> pair [num_rows], row [T, K], layout [3, E + 1], expert and shift
    of each 128-row tile [num_rows / 128], all int32. See the section on routing.

    num_rows: at least what the pairs take, each expert padded to 128; T * K + 127 * E, rounded up to 128, is always enough.
    num_pairs: at least as many as there are, if not T * K. Pairs that do not fit are left out, as if they were not here."""
    n, chunk, bins = ids.numel(), 128, max(2, _power_of_2(num_experts))
    new = lambda *shape: ids.new_empty(shape, dtype=torch.int32)
    chunks, (pair, expert, shift) = _cdiv(n, chunk), _new_maps(ids, num_rows)
    row, layout, counts, ids = new(*ids.shape), new(3, num_experts + 1), new(chunks, num_experts), ids.contiguous()
    _launch(_count_pairs, chunks, ids, counts, n, num_experts, _power_of_2(num_experts + 1), chunk)
    _launch(_lay_out, 1, counts, layout, chunks, num_rows, n if num_pairs is None else num_pairs, num_experts, bins,
            max(16, 4096 // bins))
    _launch(_place_pairs, max(chunks, 1), ids, counts, layout, expert, shift, pair, row, n, num_rows, num_experts, bins, chunk)
    return pair, row, layout, expert, shift


def _new_maps(like, num_rows):
    """pair, and the expert and shift of each tile."""
    return [like.new_empty(size, dtype=torch.int32) for size in (num_rows, num_rows // 128, num_rows // 128)]


def regroup_rows(row, layout, num_rows):
    """row, layout and num_rows of group_rows -> its pair, and the expert and shift of each tile."""
    n, E, chunk, (pair, expert, shift) = row.numel(), layout.shape[1] - 1, 128, _new_maps(row, num_rows)
    _launch(_regroup_rows, max(_cdiv(n, chunk), 1), row, layout, pair, expert, shift, n, num_rows, E,
            max(2, _power_of_2(E)), chunk)
    return pair, expert, shift


def sum_rows(y, row, scale=None, dtype=None):
    """y [M, H] bfloat16 or float32, or FP8 with its scale [M, H/128] (uint8: its biased exponents), each row contiguous, row
    [T, K] int32, -1 for none -> [T, H] of dtype, y's if not given, each token's rows summed in float32 by slot."""
    (T, K), H, C = row.shape, y.shape[1], 1024
    out = y.new_empty((T, H), dtype=dtype or y.dtype)
    y, where = (y, (None, 0, 0)) if scale is None else (_bytes(y), (scale, *scale.stride()))
    _launch(_sum_rows, T * _cdiv(H, C), y, y.stride(0), *where, row.contiguous(), out, H, K, C, num_warps=1)
    return out


def sum_parts(parts, row):
    """parts [M, N] float32, row [T, K] int32, -1 for none -> [T, K] float32, the sum over each row's N, in their order."""
    out = parts.new_empty(row.shape)
    _launch(_sum_parts, _cdiv(row.numel(), 256), parts, *parts.stride(), row.contiguous(), out, row.numel(), parts.shape[1], 256)
    return out


def count_messages(ids, local, sent):
    """ids [T, K] int32 expert of each choice, -1 for none, `local` of them on each rank; sent [ranks, local + 1] int32 receives
    the numbers of pairs and of tokens -> [chunks, ranks, local + 1], those in earlier chunks of the tokens, for place_messages.
    See the section on messages."""
    (T, K), (ranks, columns), ids, chunk = ids.shape, sent.shape, ids.contiguous(), _chunk_of_tokens(*ids.shape, len(sent))
    before = ids.new_empty((_cdiv(max(T, 1), chunk), ranks, columns), dtype=torch.int32)
    _launch(_count_tokens, len(before), ids, before, T, local, K, ranks, _power_of_2(ranks),
            _power_of_2(local * ranks + 1), chunk)
    _launch(_add_up_counts, _cdiv(ranks * columns, 32), before, sent, len(before), ranks * columns)
    return before


def _chunk_of_tokens(T, K, ranks):
    """Tokens that one program counts or places: more where there are many, since one program adds up all chunks; fewer where
    there are many ranks, since it compares each choice with each rank."""
    few = min(128, 512 // _power_of_2(ranks), max(128 // K, T // 256))
    return max(16, 2 ** (few.bit_length() - 1))


def place_messages(ids, local, before, sent):
    """ids and local of count_messages, what it gave, and what sent received -> token [T * min(ranks, K)], row [T, ranks] and
    place [T, K], int32."""
    (T, K), ranks, ids, chunk = ids.shape, len(sent), ids.contiguous(), _chunk_of_tokens(*ids.shape, len(sent))
    slots = min(ranks, K)
    token, row, place = (ids.new_empty(size, dtype=torch.int32) for size in (T * slots, (T, ranks), (T, K)))
    _launch(_place_tokens, len(before), ids, before, sent, token, row, place, T, local, K, ranks, _power_of_2(ranks), slots,
            chunk, num_warps=8)
    return token, row, place


def lay_out_messages(counts, layout, begin):
    """counts [ranks, E + 1] int32 of pairs and tokens that come -> layout [3, E + 1], and begin, of counts' shape, in place."""
    R, E = counts.shape[0], counts.shape[1] - 1
    bins = _power_of_2(E + 1)
    _launch(_lay_out_messages, 1, counts, layout, begin, R, E, bins, max(2, min(_power_of_2(R), 2048 // bins)))


def pack_rows(data, scale, others, index, size, per=1):
    """Rows of contiguous data [T, ..], a multiple of PART bytes each, their scale unless None, and up to two of [T * per, K],
    four bytes each, side by side -> messages [N, size] uint8; all rows, or those in index [N] int32, which counts as the last
    two do and of which -1 writes nothing."""
    N, codes = len(data if index is None else index), data.shape[1] * data.element_size()
    S, where = (0, (None, 0, 0)) if scale is None else (scale.shape[1], (scale, *scale.stride()))
    out, W, C = data.new_empty((N, size), dtype=torch.uint8), codes // 4, 256
    _launch(_pack_rows, _cdiv(N, 8) * _cdiv(W, C), _words(data), *where, *_other_parts(others), index, out, N, W, S,
            others[0].shape[1] if others else 1, per, size // 4, 8, C)
    return out


def _other_parts(others):
    """The last two parts of messages, as kernels see them; None for what there is none of."""
    return [*map(_words, others), None, None][:2]


def quantize_to_messages(x, others, index, size, per=1):
    """pack_rows of what quantize_fp8_rows makes of x [T, H], PART | H."""
    N, H = len(x if index is None else index), x.shape[1]
    out, C = x.new_empty((N, size), dtype=torch.uint8), _columns(H, 256)
    _launch(_quantize_to_messages, _cdiv(N, 16) * _cdiv(H, C), x, *x.stride(), *_other_parts(others), index, out, N, H,
            others[0].shape[1] if others else 1, per, size // 4, 16, C)
    return out


def unpack_rows(messages, codes, scales, scale):
    """FP8's scale [N, S] of messages that begin with so many bytes of codes and so many scales, parts padded to PART bytes."""
    (N, size), R = messages.shape, 32
    _launch(_unpack_rows, _cdiv(N, R), messages, scale, *scale.stride(), N, _cdiv(codes, PART) * PART, scales, size // 4, R)


def receive_rows(messages, codes, scales, scale, begin, layout, num_rows, held, num_experts, top_k):
    """Of messages with places and weights -> weights [N, top_k], then pair, row, expert and shift of group_rows; and FP8's scale,
    as unpack_rows, unless it is None. begin, layout: of lay_out_messages; held: the first expert here of num_experts."""
    (N, size), (senders, columns), R = messages.shape, begin.shape, 32
    E, codes = columns - 1, _cdiv(codes, PART) * PART
    weights, row = (messages.new_empty((N, top_k), dtype=kind) for kind in (torch.float32, torch.int32))
    pair, expert, shift = _new_maps(messages, num_rows)
    where = (None, 0, 0) if scale is None else (scale, *scale.stride())
    _launch(_receive_rows, _cdiv(N, R), messages, begin, layout, *where, _words(weights), row, pair, expert, shift, N, num_rows,
            held, num_experts, codes, scales, top_k, size // 4, R, E, senders, _power_of_2(senders),
            max(2, _power_of_2(E)))
    return weights, pair, row, expert, shift


def clear_empty_experts(out, offsets):
    """out [E, ..]: zeros for experts whose rows offsets[e] : offsets[e + 1] are none; the rest stays. In place, contiguous."""
    size, block = out[0].numel(), 2**16
    _launch(_clear_empty_experts, len(out) * _cdiv(size, block), out, offsets, size, block)


def _launch_gemm(a, a_scale, b, b_scale, experts, out, rows, N, K, group=16, wgrad=False, transpose=False, add=False):
    """a [.., K] with a scale for each row and 128 of K, b [.., K] with one for each 128x128 tile, out [E, .., ..]."""
    a_scale, b_scale = _along_rows(a_scale), _along_rows(b_scale) if wgrad else b_scale.contiguous()
    if any(x.data_ptr() % 16 or not x.is_contiguous() for x in (a, b, out)):
        _refuse("FP8 GEMM", "operands are contiguous, at multiples of 16 bytes", a, b, out)
    c = _descriptor(out, (1, 128, 64) if transpose else (1, 64, 128))
    _launch(_gemm, _multiprocessors(a), a_scale, a_scale.stride(1), b_scale, b_scale.stride(1) if wgrad else 1, experts,
            _descriptor(a, (128, 128)), _descriptor(b, (128, 128)), c, rows, N, K, len(out), group, wgrad, transpose, add,
            num_warps=4, maxnreg=168)


def _descriptor(x, tile):
    """A TMA descriptor of x, contiguous and at a multiple of 16 bytes: that of an empty tensor with x in its place, since to
    check it and to work its layout out takes 30 us of the host's time."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(_fields_of_descriptor(x.dtype, tile), base=x, shape=list(x.shape), strides=list(x.stride()))
    return descriptor


@functools.cache
def _fields_of_descriptor(dtype, tile):
    kinds = {torch.float8_e4m3fn: gl.float8e4nv, torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}
    layout = gl.NVMMASharedLayout.get_default_for(list(tile), kinds[dtype])
    return vars(TensorDescriptor.from_tensor(torch.empty(tile, dtype=dtype), list(tile), layout))


def _along_rows(scale):
    """With stride 1 along the first dimension."""
    return scale if scale.stride(0) == 1 else scale.t().contiguous().t()


def _refuse(name, why, *tensors):
    raise ValueError(f"{name}: {why}, got shapes {', '.join(str(tuple(x.shape)) for x in tensors)}")


def grouped_gemm(a, a_scale, b, b_scale, tile_expert, out):
    """out[m] = a[m] @ b[e]^T, e the expert of m's 128 rows; rows without one stay as they are.

    a [M, K], 128 | M, 16 | K, a_scale [M, ceil(K/128)] with stride 1 along M; b [E, N, K], 16 | N, b_scale [E, ceil(N/128),
    ceil(K/128)], contiguous; tile_expert [M/128] int32, -1 for none, or None for a single expert; out [M, N] bfloat16 or float32;
    memory at multiples of 16 bytes. ValueError otherwise."""
    (M, K), (E, N, _) = a.shape, b.shape
    whose = E == 1 if tile_expert is None else len(tile_expert) * 128 == M
    if M % 128 or K % 16 or N % 16 or out.shape != (M, N) or not whose:
        _refuse("grouped_gemm", "M is a multiple of 128, N and K of 16", a, b, out)
    if M:
        _launch_gemm(a, a_scale, b.view(E * N, K), b_scale, tile_expert, out[None], M, N, K)
    return out


def grouped_wgrad(a, a_scale, b, b_scale, offsets, out, accumulate=False):
    """out[e] = a[:, tokens of e] @ b[:, tokens of e]^T, or added to it; tokens offsets[e] ... offsets[e + 1], multiples of 128.

    a [N, M], b [K, M] FP8 cols, 128 | M, one of them with a scale for each column of 128 tokens ([N, M/128]), the other with one
    for each 128x128 tile ([ceil(N/128), M/128]), stride 1 along the first; offsets [E + 1] int32, or None for a single expert;
    out [E, N, K] bfloat16 or float32, 16 | N, K; memory at multiples of 16 bytes. Without tokens out[e] becomes 0, or stays as it
    is when accumulating. ValueError otherwise.

    A single expert whose tiles leave half of the multiprocessors idle has its tokens cut into parts, as if they were experts';
    the parts' gradients are then summed in float32, on cards alike always in the same order."""
    (E, N, K), M = out.shape, a.shape[1]
    whose = E == 1 if offsets is None else len(offsets) == E + 1
    if M % 128 or N % 16 or K % 16 or len(a) != N or b.shape != (K, M) or not whose:
        _refuse("grouped_wgrad", "M is a multiple of 128, N and K of 16", a, b, out)
    by_column = [len(a_scale) == N, len(b_scale) == K]
    if sum(by_column) != 1:
        _refuse("grouped_wgrad", "one operand has a scale a column, the other one a 128x128 tile", a_scale, b_scale)
    if not M:
        return out if accumulate else out.zero_()
    if by_column[1]:  # rows of a tile are those of the operand with a scale for each: tiles of out^T
        a, a_scale, b, b_scale = b, b_scale, a, a_scale
    gemm = functools.partial(_launch_gemm, a, a_scale, b, b_scale, rows=len(a), N=len(b), K=M, wgrad=True,
                             transpose=by_column[1])
    tiles = _cdiv(len(a), 128) * _cdiv(len(b), 256)
    parts = min(_multiprocessors(a) // tiles, M // 1024) if offsets is None else 1
    if parts < 2:
        gemm(experts=offsets, out=out, add=accumulate)
        return out
    sums = out.new_empty((parts, N, K), dtype=torch.float32)
    gemm(experts=_cuts(M, parts, a.device), out=sums)
    return out.add_(sums.sum(0)) if accumulate else out.copy_(sums.sum(0))


@functools.cache  # made once
def _cuts(M, parts, device):
    """Where M tokens are cut into parts of like length, multiples of 128."""
    return torch.arange(parts + 1, dtype=torch.int32, device=device) * (M // 128) // parts * 128


def token_losses(logits, targets):
    """logits [T, V] bfloat16, contiguous, targets [T] int64, -100: ignored -> cross entropies [T], 0 where ignored, and
    log-sum-exps [T], both float32. The loss of a target that is no column is NaN."""
    T, V = logits.shape
    loss, lse = logits.new_empty((2, T), dtype=torch.float32)
    _launch(_token_losses, T, logits, targets, loss, lse, V, 2048, num_warps=8)
    return loss, lse


def logit_gradients(logits, targets, lse, factor):
    """What token_losses took and found -> its gradients times factor, float32 [], in the place of the logits."""
    T, V = logits.shape
    _launch(_logit_gradients, T * _cdiv(V, 2048), logits, targets, lse, factor, V, 2048)
    return logits


@functools.lru_cache(maxsize=8)
def _tiles_of(sizes, block, device):
    """For tensors of so many elements: sizes int64 and first tile of each, and the tensor of each tile."""
    tiles = torch.tensor([_cdiv(n, block) for n in sizes])
    first = (tiles.cumsum(0) - tiles).int()
    owner = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(tiles)
    return [t.to(device) for t in (torch.tensor(sizes), first, owner)]


def adamw_bf16(weights, grads, first_moments, second_moments, steps, divisor, skip, lr, beta1, beta2, eps, weight_decay):
    """One AdamW step (decoupled decay) of lists of contiguous tensors, in place: weights and gradients float32, moments
    bfloat16, steps float32 [], already counting this one. One launch; moments are float32 in between, and rounded once.

    divisor float32 []: of gradients, which stay as they are; skip float32 []: not 0 leaves everything as it is."""
    lists, block, device = (weights, grads, first_moments, second_moments, steps), 2048, weights[0].device
    rows = [[t.data_ptr() for t in one] for one in zip(*lists)]
    table = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    counts = tuple(t.numel() for t in weights)
    aligned = not any(n % 16 for n in itertools.chain(counts, *(row[:4] for row in rows)))
    _launch(_adamw_bf16, sum(_cdiv(n, block) for n in counts), table, *_tiles_of(counts, block, device), divisor, skip, lr, beta1,
            beta2, eps, weight_decay, block, aligned, num_warps=8)
