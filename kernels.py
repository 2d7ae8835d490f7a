"""Triton kernels for FP8 and MXFP4 training on Hopper: conversions, and the data movement of an MoE layer around its
GEMMs. Tensors in, a flat tuple of tensors out; one launch each (routing: three), no host synchronisation.

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
  quantize_fp8_weight         4 (float32)          2                                 6.00
  quantize_fp4_rows           2                    1/2 + 1/32                        2.53
  quantize_fp8_fp4_rows       2                    1 + 4/128 + 1/2 + 1/32            3.56 (two kernels: 5.56)
  fp8_to_fp4                  1 + 4/128            1/2 + 1/32                        1.56
  fp4 -> fp8, rows or cols    1/2 + 1/32           1 + 4/128                         1.56 (by way of bfloat16: 5.56)
  fp8 rows -> cols            1 + 4/128            1                                 2.03 (and rows: 3.06)
  rms_norm                    2                    2 + 1.03 + 0.53                   5.56
  swiglu, an element of a     4 (of h)             1.03 + 2.06 (h in MXFP4: 1.06)    7.09 (6.09)
  swiglu_backward             2 + 2.06             2.06 + 2.06 + 1.03                9.22
  sum_rows                    2 for each expert    2

What costs beside bytes. An H100's memory delivers the bytes of an element in about the time in which its schedulers issue
20 instructions for it, so instructions count: elements are handled in pairs, fours and eights of a 32-bit word.

  FP8      the hardware converts two float32 at once; a block's largest magnitude is one maximum an element, with NaN
  -> E2M1  rounding to E2M1 is rounding min(4x, 2x + 2, x + 4), x half the value: the slopes 4, 2, 1 are where its steps are
           1/2, 1, 2. As a sum of three ramps held to 0 ... 1, 4 r(x) + 2 r(x - 1) + r(x - 2), each is exact, the last
           addition to a large number rounds to nearest even, and the code is what stands in the number's low bits.
           Two bfloat16 or float16 a word. x = 1.25: 4 + 2 * 0.25 + 0 = 4.5, a tie, to 4, the code of 2.0
  E2M1 ->  for one shift of the exponent eight magnitudes are eight bytes: one byte permutation decodes four codes
  cols     a thread holds the same columns of rows 4i ... 4i + 3, so that words of four rows go through shared memory

The interpreter has neither inline PTX nor correct casts to small formats; where a helper uses them, its twin in plain
integer and float32 operations stands beside it. Conversions multiply by powers of two alone, subnormals too (no .ftz in
their PTX: a test looks), and no multiply-add is fused but where it is written.

Offsets from a tile's origin are 64-bit (300 001 x 7168 elements pass 2^31), inside a tile 32-bit; tiles are counted along
grid x (y and z end at 65 535). Widths are compile-time constants: a model has few, and masks and strides fold away.
Every byte of an output is written. Data is contiguous, but cols and transposed weights begin a row at a whole word.

Legend: M rows (tokens, or token-expert pairs after fan-out), K columns, weights [E experts, N, K], I expert width, T tokens;
inside a tile R rows, C columns. `x_row`, `x_col` are strides in elements.
"""

import functools
import math

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
INF = tl.constexpr(0x7F800000)  # as float32 magnitude bits: from here on Inf and NaN
NO_NUMBER = tl.constexpr(128)  # the exponent of Inf and NaN
E4M3_NAN = tl.constexpr(0x7F)
MX_NAN = tl.constexpr(255)
LEAST_SCALE = tl.constexpr(2.0**-126)
MX = tl.constexpr(32)  # MXFP4: elements a scale, as quant.BLOCK says
PER_TILE, OCTETS = tl.constexpr(128 // MX.value), tl.constexpr(MX.value // 8)  # blocks in 128 columns; words of codes in a block
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
def _unpair(words):
    """Words of two bfloat16 -> two float32 tensors, first and second of each pair."""
    return _from_bits(words << 16), _from_bits(words & -65536)


@triton.jit
def _pair(first, second):
    """Two float32 tensors -> words of two bfloat16, rounded to nearest even."""
    if INTERPRET:
        return ((_rounded(first) >> 16) & 0xFFFF) | (_rounded(second) & -65536)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, True, 1)


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
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            abs.bf16x2 p, $1; abs.bf16x2 q, $2; abs.bf16x2 r, $3; abs.bf16x2 s, $4;
            max.NaN.bf16x2 p, p, q; max.NaN.bf16x2 r, r, s; max.NaN.bf16x2 p, p, r;
            and.b32 q, p, 0xFFFF0000; shl.b32 p, p, 16; max.u32 $0, p, q; }""",
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


@triton.jit
def _largest_code(a, b):
    """The largest of eight E4M3 codes in two words, without sign; NaN wins."""
    if INTERPRET:
        top = tl.zeros_like(a)
        for i in tl.static_range(4):
            top = tl.maximum(top, tl.maximum((a >> (8 * i)) & 0x7F, (b >> (8 * i)) & 0x7F))
        return top
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            and.b32 p, $1, 0x007F007F; and.b32 q, $2, 0x007F007F; and.b32 r, $1, 0x7F007F00; and.b32 s, $2, 0x7F007F00;
            max.u16x2 p, p, q; max.u16x2 r, r, s; shr.u32 r, r, 8; max.u16x2 p, p, r;
            shr.u32 r, p, 16; and.b32 p, p, 0x7F; max.u32 $0, p, r; }""",
            "=r,r,r", [a, b], tl.int32, True, 1)


# -----------------------------------------------------------------------------
# E2M1: see the top of the file for the three ramps

def _ramps(kind, ones, minus_ones, twos, minus_twos, fours, minus_fours, magic, ramp):
    """PTX that turns four words of two `kind` numbers, c0 ... c3, into a word $0 of eight E2M1 codes; `half` is the factor.

    `magic` is 1.5 * 2^(mantissa bits) + 4 twice over: less 4 times the sign's +-1, it leaves 8 in the low bits of negatives."""
    names = dict(one=ones, minus1=minus_ones, two=twos, minus2=minus_twos, four=fours, minus4=minus_fours, magic=magic)
    ptx = ".reg .b32 t0, t1, t2, t3, a, r, zero, " + ", ".join(names) + "; mov.b32 zero, 0;"
    ptx += "".join(f"mov.b32 {name}, {value};" for name, value in names.items())
    for i in range(4):
        ptx += f"lop3.b32 t{i}, c{i}, 0x80008000, {ones}, 0xEA; abs.{kind} a, c{i};"
        ptx += f"fma.rn.{kind} t{i}, t{i}, minus4, magic;"
        for offset, slope in (("zero", "four"), ("minus1", "two"), ("minus2", "one")):
            ptx += ramp.format(offset=offset) + f"fma.rn.{kind} t{i}, r, {slope}, t{i};"
    # the low byte of each half is the code, below it may stand a constant: gather bytes, then nibbles
    ptx += "prmt.b32 t0, t0, t1, 0x6420; prmt.b32 t2, t2, t3, 0x6420; and.b32 t0, t0, 0x0F0F0F0F; and.b32 t2, t2, 0x0F0F0F0F;"
    return ptx + "shr.u32 t1, t0, 4; shr.u32 t3, t2, 4; or.b32 t0, t0, t1; or.b32 t2, t2, t3; prmt.b32 $0, t0, t2, 0x6420;"


_BF16_RAMPS = _ramps("bf16x2", "0x3F803F80", "0xBF80BF80", "0x40004000", "0xC000C000", "0x40804080", "0xC080C080", "0x43444344",
                     "fma.rn.relu.bf16x2 r, a, half, {offset}; min.bf16x2 r, r, one;")
_F16_RAMPS = _ramps("f16x2", "0x3C003C00", "0xBC00BC00", "0x40004000", "0xC000C000", "0x44004400", "0xC400C400", "0x66046604",
                    "fma.rn.sat.f16x2 r, a, half, {offset};")
PAIRS_TO_E2M1 = tl.constexpr("{ .reg .b32 c0, c1, c2, c3, half; mov.b32 c0, $1; mov.b32 c1, $2; mov.b32 c2, $3;"
                             "mov.b32 c3, $4; mov.b32 half, $5;" + _BF16_RAMPS + "}")
CODES_TO_E2M1 = tl.constexpr("{ .reg .b32 c0, c1, c2, c3, half; .reg .b16 l, h; mov.b32 half, $3;"
                             "mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 c0, l; cvt.rn.f16x2.e4m3x2 c1, h;"
                             "mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 c2, l; cvt.rn.f16x2.e4m3x2 c3, h;" + _F16_RAMPS + "}")


@triton.jit
def _ramp(a, c, b: tl.constexpr):
    return tl.minimum(tl.maximum(a * c + b, 0.0), 1.0)


@triton.jit
def _encode_e2m1(x, half):
    """float32 x, of which x * 2 * half is what is encoded -> E2M1 codes, 0 ... 15."""
    a = tl.abs(x)
    code = _ramp(a, half, 0.0) * 4.0 + tl.where(_bits(x) < 0, 12582920.0, 12582912.0)  # 1.5 * 2^23, and 8 for the sign
    code = _ramp(a, half, -1.0) * 2.0 + code
    return _bits(_ramp(a, half, -2.0) + code) & 15


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
def _codes_to_e2m1(a, b, half):
    """Eight E4M3 codes in two words, times 2 * half (a float16 twice over) -> a word of eight E2M1 codes."""
    if INTERPRET:
        factor, out = (half & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), tl.zeros_like(a)
        for i in tl.static_range(4):
            for j in tl.static_range(2):
                code = ((b if j else a) >> (8 * i)).to(tl.uint8)
                out |= _encode_e2m1(_decode_e4m3(code), factor) << (4 * (4 * j + i))
        return out
    else:
        return tl.inline_asm_elementwise(CODES_TO_E2M1, "=r,r,r,r", [a, b, half], tl.int32, True, 1)


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
    byte = tl.where(amax >= INF, MX_NAN, tl.where(amax == 0, 0, (raised >> 23) - 2))
    return byte, (255 << 23) - raised


@triton.jit
def _mx_byte(amax, e):
    """The byte of a magnitude times 2^e, which itself may be no float32, by the rule "even"."""
    byte = tl.minimum(tl.maximum(((tl.minimum(amax, INF) + CARRY_EVEN) >> 23) - 2 + e, 1), 252)
    return tl.where(amax == 0, 0, tl.where(amax < INF, byte, MX_NAN))


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
def _pairs_to_fp8(words):
    """Pairs of bfloat16 [R, C/2] -> E4M3 bytes [R, C], scales [R, C/128]."""
    first, second = _unpair(words)
    return _to_fp8(tl.interleave(first, second))


@triton.jit
def _pairs_to_fp4(words):
    """Pairs of bfloat16 [R, C/2] -> words of eight E2M1 codes [R, C/8], E8M0 bytes [R, C/32]."""
    a, b, c, d = _quarters(words)
    amax = tl.max(_blocks(_amax_of_pairs(a, b, c, d), OCTETS), 2)
    byte, half = _mx_scales(amax, CARRY_EVEN)
    codes = _pairs_to_e2m1(a, b, c, d, _spread(half | (half >> 16), OCTETS))
    return tl.where(_spread(byte, OCTETS) == MX_NAN, 0, codes), byte.to(tl.uint8)


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
def _store_fp4_rows(data, scale, codes, scales, row0, r, tile_k, C: tl.constexpr, M, K: tl.constexpr):
    """data [M, K/2] as words [M, K/8]."""
    _store(data, codes, row0, r, _origin(tile_k, C // 8), tl.arange(0, C // 8), K // 8, 1, M, K // 8)
    _store(scale, scales, row0, r, _origin(tile_k, C // MX), tl.arange(0, C // MX), K // MX, 1, M, K // MX)


@triton.jit
def _store_cols(data, words, tile_m, tile_k, C: tl.constexpr, pitch, K):
    """Words [32, C] of four rows each -> the transposed tensor [K, pitch] in words."""
    _store(data, tl.trans(words), _origin(tile_k, C), tl.arange(0, C), _origin(tile_m, 32), tl.arange(0, 32), pitch, 1, K, pitch)


@triton.jit
def _store_scale_of_cols(scale, scales, tile_m, tile_k, n: tl.constexpr, s_row, s_col, width):
    """scales [1, n], for n tiles or columns from tile_k * n on -> column tile_m of [width, M/128]."""
    _store(scale, tl.trans(scales), _origin(tile_k, n), tl.arange(0, n), _origin(tile_m, 1), tl.arange(0, 1), s_row, s_col,
           width, tile_m + 1)


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
        _store_fp8_rows(data8, scale8, s_row, s_col, codes, scales, row0, r, tile_k, C, M, K)
    if data4 is not None:
        codes, scales = _pairs_to_fp4(words)
        _store_fp4_rows(data4, scale4, codes, scales, row0, r, tile_k, C, M, K)


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
def _rms_norm(x, weight, y, data8, scale8, s_row, s_col, data4, scale4, eps, M, K: tl.constexpr, R: tl.constexpr,
              C: tl.constexpr):
    """R rows, a chunk of C columns at a time; x, y and weight (int64) in pairs. What is quantised is the bfloat16 y."""
    row0, r, c = _origin(tl.program_id(0), R), tl.arange(0, R), tl.arange(0, C // 2)
    total = tl.zeros((R, C // 2), tl.float32)
    chunks = ()
    for tile in tl.static_range((K + C - 1) // C):
        chunks += (_load(x, row0, r, tile * (C // 2), c, K // 2, 1, M, K // 2),)
        first, second = _unpair(chunks[tile])
        total = tl.fma(first, first, tl.fma(second, second, total))
    factor = tl.rsqrt(tl.sum(total, 1) / K + eps)[:, None]
    for tile in tl.static_range((K + C - 1) // C):
        tile_k = tl.program_id(1) + tile  # 0: a tensor, as the index maps want
        first, second = _unpair(chunks[tile])
        w = tl.load(weight + tile * (C // 2) + c, mask=tile * (C // 2) + c < K // 2, other=0)[None, :]
        words = _pair(first * factor * _from_bits(w.to(tl.int32)), second * factor * _from_bits((w >> 32).to(tl.int32)))
        if y is not None:
            _store(y, words, row0, r, tile * (C // 2), c, K // 2, 1, M, K // 2)
        _store_pairs_as(words, data8, scale8, s_row, s_col, data4, scale4, row0, r, tile_k, C, M, K)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_backward(dy, x, weight, dx, dw, eps, M, K: tl.constexpr, HALF: tl.constexpr):
    """dy, x, dx in pairs, a row at a time. Each program sums dw [programs, K] over its rows: no atomics, one order."""
    c = tl.arange(0, HALF)
    inside = c < K // 2
    w_first = _float(tl.load(weight + 2 * c, mask=inside, other=0))
    w_second = _float(tl.load(weight + 2 * c + 1, mask=inside, other=0))
    dw_first, dw_second = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = (row + tl.zeros((HALF,), tl.int64)) * (K // 2) + c
        x1, x2 = _unpair(tl.load(x + at, mask=inside, other=0))
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
# one small format -> another, through an index where rows fan out to experts. New exponents come from old ones; an element
# is rounded once. `index` None: rows stay where they are; `end`: [1], the first row behind the last expert's.

@triton.jit(do_not_specialize=["M"])
def _fp8_to_fp4(data, scale, s_row, s_col, data4, scale4, M, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """FP8 rows, data as words [M, K/4] -> MXFP4 rows: a block's largest code gives its exponent."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    a, b = tl.split(_blocks(_load(data, row0, r, _origin(tile_k, C // 4), tl.arange(0, C // 4), K // 4, 1, M, K // 4), 2))
    scales = _load(scale, row0, r, _origin(tile_k, C // 128), tl.arange(0, C // 128), s_row, s_col, M, tl.cdiv(K, 128))
    e = _spread(_exponent(scales), PER_TILE)
    top = tl.max(_blocks(_largest_code(a, b), OCTETS), 2)
    amax = tl.where((top == E4M3_NAN) | (e == NO_NUMBER), INF, _bits(_decode_e4m3(top.to(tl.uint8))))
    byte = _mx_byte(amax, e)
    half = tl.minimum(tl.maximum(e - byte + 126 + 15, 0), 30) << 10  # 2^(e - (byte - 127) - 1), a float16
    codes = _codes_to_e2m1(a, b, _spread(half | (half << 16), OCTETS))
    codes = tl.where(_spread(byte, OCTETS) == MX_NAN, 0, codes)
    _store_fp4_rows(data4, scale4, codes, byte.to(tl.uint8), row0, r, tile_k, C, M, K)


@triton.jit(do_not_specialize=["M"])
def _fp4_to_fp8_rows(table, data, byte, index, end, data8, scale8, s_row, s_col, M, K: tl.constexpr, PER: tl.constexpr,
                     R: tl.constexpr, C: tl.constexpr):
    """MXFP4 rows, data as words [.., K/8] -> FP8 rows as words. The largest block's exponent less 6 puts its 6 at 384, and
    keeps every code of blocks down to 2^-14 of it exact."""
    tile_m, tile_k = _tile(K, C)
    row0, r = _origin(tile_m, R), tl.arange(0, R)
    if _past_end(end, row0):
        return
    rows = _source(index, row0, r, M, PER)
    words = _gather(data, rows, _origin(tile_k, C // 8), tl.arange(0, C // 8), K // 8, 1, K // 8, 0)
    b = _gather(byte, rows, _origin(tile_k, C // MX), tl.arange(0, C // MX), K // MX, 1, K // MX, 0).to(tl.int32)
    e, bad = _fp8_of_mx(tl.max(_blocks(b, PER_TILE), 2))  # a block of zeros has the least byte, so it never decides
    low, high, sign = _look_up(table, b - 127 - _spread(e, PER_TILE), _spread(bad, PER_TILE))
    first, second = _decode_e2m1(words, _spread(low, OCTETS), _spread(high, OCTETS), _spread(sign, OCTETS))
    n: tl.constexpr = C // 128
    _store(data8, tl.interleave(first, second), row0, r, _origin(tile_k, C // 4), tl.arange(0, C // 4), K // 4, 1, M, K // 4)
    _store(scale8, _fp8_scale(e, bad), row0, r, _origin(tile_k, n), tl.arange(0, n), s_row, s_col, M, tl.cdiv(K, 128))


@triton.jit
def _fp4_row(r: tl.constexpr, data, byte, index, row0, tile_k, M, K: tl.constexpr, PER: tl.constexpr):
    """Of rows r, 16 + r, ..., 112 + r four words for each of 32 threads, [32] each, and the bytes of the words' blocks."""
    g, q = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4
    rows, at = _source(index, row0, 16 * g + r, M, PER), _origin(tile_k, 16) + 4 * q
    words = _gather_at(data, rows, at, tl.arange(0, 4), K // 8)
    b = ()
    for n in tl.static_range(0, 4, OCTETS):
        k = (at + n) // OCTETS
        b += (tl.load(byte + rows * (K // MX) + k, mask=(rows >= 0) & (k < K // MX), other=0).to(tl.int32),)
    w0, w1, w2, w3 = _quarters(words)
    return (tl.reshape(w0, (32,)), tl.reshape(w1, (32,)), tl.reshape(w2, (32,)), tl.reshape(w3, (32,))), b


@triton.jit
def _gather_at(ptr, rows, at, c, width):
    """Elements c from column `at` on, which is each row's own."""
    inside = (rows >= 0) & (at < width)
    return tl.load(ptr + (rows * width + at)[:, None] + c[None, :], mask=inside[:, None], other=0)


@triton.jit
def _transpose_words(a, b, c, d):
    """Words of four bytes of four rows -> four words, each of one column's four bytes."""
    even, odd = tl.full(a.shape, 0x5140, tl.int32), tl.full(a.shape, 0x7362, tl.int32)
    low, high = tl.full(a.shape, 0x5410, tl.int32), tl.full(a.shape, 0x7632, tl.int32)
    ab, ab_ = _byte_permute(a, b, even), _byte_permute(a, b, odd)
    cd, cd_ = _byte_permute(c, d, even), _byte_permute(c, d, odd)
    return _byte_permute(ab, cd, low), _byte_permute(ab, cd, high), _byte_permute(ab_, cd_, low), _byte_permute(ab_, cd_, high)


@triton.jit
def _fp4_to_fp8_cols(table, data, byte, index, end, data8, scale8, s_row, s_col, M, K: tl.constexpr, pitch,
                     PER: tl.constexpr):
    """MXFP4 rows -> FP8 cols [K, pitch] in words, one scale [K/128, M/128] a 128x128 tile: as exact as rows.

    One warp a tile: a thread holds 32 columns of 16 neighbouring rows, which are 16 neighbouring bytes of each column."""
    tile_m, tile_k = _tile_down(M)
    row0 = _origin(tile_m, 128)
    N: tl.constexpr = (4 + OCTETS - 1) // OCTETS  # block bytes of four words
    if _past_end(end, row0):
        return
    words, blocks, tables = (), (), ()
    for r in tl.static_range(16):
        w, b = _fp4_row(r, data, byte, index, row0, tile_k, M, K, PER)
        words, blocks = words + w, blocks + b
    top = blocks[0]
    for i in tl.static_range(1, 16 * N):
        top = tl.maximum(top, blocks[i])
    e, bad = _fp8_of_mx(tl.max(top))  # a block of zeros has the least byte, so it never decides
    for i in tl.static_range(16 * N):
        tables += (_look_up(table, blocks[i] - 127 - e, bad),)
    for w in tl.static_range(4):
        columns = ()
        for r in tl.static_range(0, 16, 4):
            f0, s0 = _decode_e2m1(words[4 * r + w], *tables[N * r + w // OCTETS])
            f1, s1 = _decode_e2m1(words[4 * r + 4 + w], *tables[N * r + N + w // OCTETS])
            f2, s2 = _decode_e2m1(words[4 * r + 8 + w], *tables[N * r + 2 * N + w // OCTETS])
            f3, s3 = _decode_e2m1(words[4 * r + 12 + w], *tables[N * r + 3 * N + w // OCTETS])
            columns += _transpose_words(f0, f1, f2, f3) + _transpose_words(s0, s1, s2, s3)
        for j in tl.static_range(8):
            _store_16_rows(data8, columns[j], columns[8 + j], columns[16 + j], columns[24 + j], tile_m, tile_k, 8 * w + j, pitch, K)
    tl.store(scale8 + tile_k.to(tl.int64) * s_row + tile_m.to(tl.int64) * s_col, _fp8_scale(e, bad))


@triton.jit
def _store_16_rows(data, a, b, c, d, tile_m, tile_k, j: tl.constexpr, pitch, K: tl.constexpr):
    """Words [32] of rows 16g, 16g + 4, 16g + 8, 16g + 12 and the three behind each, of columns 32q + j -> [K, pitch]."""
    words, t = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (32, 4)), tl.arange(0, 32)
    k = (_origin(tile_k, 128) + 32 * (t % 4) + j)[:, None]
    m = (tile_m * 32 + 4 * (t // 4))[:, None] + tl.arange(0, 4)[None, :]
    tl.store(data + k * pitch + m, words, mask=(k < K) & (m < pitch))


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
def _keep_half(words, rows, tile_k, HALF: tl.constexpr, h8, h8_scale, h_row, h_col, h4, h4_scale, I: tl.constexpr):
    """A tile of h, gate (HALF 0) or up (1), to the rows that are kept."""
    tile = tile_k + HALF * (I // 128)
    if h8 is not None:
        codes, scales = _pairs_to_fp8(words)
        _scatter(h8, codes, rows, _origin(tile, 128), tl.arange(0, 128), 2 * I, 1, 2 * I)
        _scatter(h8_scale, scales, rows, _origin(tile, 1), tl.arange(0, 1), h_row, h_col, 2 * I // 128)
    if h4 is not None:
        codes, scales = _pairs_to_fp4(words)
        _scatter(h4, codes, rows, _origin(tile, 16), tl.arange(0, 16), I // 4, 1, I // 4)
        _scatter(h4_scale, scales, rows, _origin(tile, PER_TILE), tl.arange(0, PER_TILE), 2 * I // MX, 1, 2 * I // MX)


@triton.jit(do_not_specialize=["M"])
def _swiglu(h, p, pair, shift, end, a8, a_scale, a_row, a_col, h8, h8_scale, h_row, h_col, h4, h4_scale, M, I: tl.constexpr,
            R: tl.constexpr):
    """h [M, 2I] in pairs (gate, then up) -> a = silu(gate) * up * p as FP8 rows, and h as it is kept."""
    tile_m, tile_k = _tile(I, 128)
    row0, r, c = _origin(tile_m, R), tl.arange(0, R), tl.arange(0, 64)
    if _past_end(end, row0):
        return
    of_row = tl.load(pair + row0 + r)
    rows = tl.where(of_row < 0, -1, row0 + r)
    gate = _gather(h, rows, _origin(tile_k, 64), c, I, 1, I, 0)
    up = _gather(h, rows, _origin(tile_k, 64) + I // 2, c, I, 1, I, 0)
    weight = tl.load(p + of_row, mask=of_row >= 0, other=0)[:, None]
    gate_1, gate_2 = _unpair(gate)
    up_1, up_2 = _unpair(up)
    a = tl.interleave(gate_1 * _sigmoid(gate_1) * up_1 * weight, gate_2 * _sigmoid(gate_2) * up_2 * weight)
    codes, scales = _to_fp8(a)
    _store_fp8_rows(a8, a_scale, a_row, a_col, codes, scales, row0, r, tile_k, 128, M, I)
    kept = tl.where(of_row < 0, -1, rows - tl.load(shift + row0 // 128))
    _keep_half(gate, kept, tile_k, 0, h8, h8_scale, h_row, h_col, h4, h4_scale, I)
    _keep_half(up, kept, tile_k, 1, h8, h8_scale, h_row, h_col, h4, h4_scale, I)


@triton.jit
def _kept_half(rows, tile_k, HALF: tl.constexpr, h8, h8_scale, h_row, h_col, h4, h4_scale, I: tl.constexpr):
    """A tile of gate or up from what is kept of h, float32, and a factor [R, 1] still to be multiplied."""
    tile = tile_k + HALF * (I // 128)
    if h8 is not None:
        codes = _gather(h8, rows, _origin(tile, 128), tl.arange(0, 128), 2 * I, 1, 2 * I, 0)
        return _decode_e4m3(codes), _gather(h8_scale, rows, _origin(tile, 1), tl.arange(0, 1), h_row, h_col, 2 * I // 128, 0.0)
    else:
        pairs = _gather(h4, rows, _origin(tile, 64), tl.arange(0, 64), I, 1, I, 0).to(tl.int32)
        b = _gather(h4_scale, rows, _origin(tile, PER_TILE), tl.arange(0, PER_TILE), 2 * I // MX, 1, 2 * I // MX, 0).to(tl.int32)
        codes = tl.interleave(pairs & 15, pairs >> 4)
        magnitude = codes & 7
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, _from_bits((magnitude << 22) + (126 << 23)))
        scale = tl.where(b == MX_NAN, float("nan"), _power(b - 127))
        return _from_bits(_bits(value) | ((codes & 8) << 28)) * _spread(scale, MX), tl.full((32, 1), 1.0, tl.float32)


@triton.jit
def _swiglu_quad(j: tl.constexpr, da, p, pair, shift, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, tile_m, tile_k, M,
                 I: tl.constexpr):
    """Rows 4i + j: dgate, dup, a [32, 128]; the scales of dgate's and dup's rows, which are stored here; dp's part [32, 1]."""
    row0, r, col0, c = _origin(tile_m, 128), _quad(j), _origin(tile_k, 128), tl.arange(0, 128)
    of_row = tl.load(pair + row0 + r)
    rows = tl.where(of_row < 0, -1, row0 + r)
    kept = tl.where(of_row < 0, -1, rows - shift)
    d = _float(_gather(da, rows, col0, c, I, 1, I, 0))
    gate, gate_scale = _kept_half(kept, tile_k, 0, h8, h8_scale, h_row, h_col, h4, h4_scale, I)
    up, up_scale = _kept_half(kept, tile_k, 1, h8, h8_scale, h_row, h_col, h4, h4_scale, I)
    weight = tl.load(p + of_row, mask=of_row >= 0, other=0)[:, None]
    gate = gate * gate_scale
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    d_silu = d * silu
    dp = tl.sum(d_silu * up, 1)[:, None] * up_scale
    up = up * (up_scale * weight)
    dup = d_silu * weight
    dgate = (d * up) * tl.fma(silu, 1.0 - sigmoid, sigmoid)
    codes, gate_scales = _to_fp8(dgate)
    _store(dh8, codes, row0, r, col0, c, 2 * I, 1, M, 2 * I)
    codes, up_scales = _to_fp8(dup)
    _store(dh8, codes, row0, r, col0 + I, c, 2 * I, 1, M, 2 * I)
    return dgate, dup, silu * up, gate_scales, up_scales, dp


@triton.jit
def _store_as_cols(v0, v1, v2, v3, data, scale, s_row, s_col, tile_m, tile_k, M, K: tl.constexpr):
    """float32 of four row quads -> FP8 cols [K, M], a scale for each column of 128 rows."""
    top = _larger(_larger(tl.abs(v0), tl.abs(v1)), _larger(tl.abs(v2), tl.abs(v3)))
    scales, inverse = _fp8_scales(_amax(top, 0)[None, :])
    words = _encode_columns(v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse)
    _store_cols(data, words, tile_m, tile_k, 128, M // 4, K)
    _store_scale_of_cols(scale, scales, tile_m, tile_k, 128, s_row, s_col, K)


@triton.jit
def _swiglu_backward(da, p, pair, shift, end, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, dh_scale, d_row, d_col,
                     dh_t, dh_t_scale, dt_row, dt_col, a_t, a_t_scale, at_row, at_col, dp, M, I: tl.constexpr):
    """da [M, I], kept h, p -> dh as FP8 rows [M, 2I] and cols [2I, M], a as FP8 cols [I, M]; dp [M, I/128], a part a tile."""
    tile_m, tile_k = _tile(I, 128)
    row0, r, one, up_k = _origin(tile_m, 128), tl.arange(0, 128), tl.arange(0, 1), tile_k + I // 128
    if _past_end(end, row0):
        return
    s = tl.load(shift + tile_m)
    g0, u0, a0, x0, y0, z0 = _swiglu_quad(0, da, p, pair, s, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, tile_m, tile_k, M, I)
    g1, u1, a1, x1, y1, z1 = _swiglu_quad(1, da, p, pair, s, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, tile_m, tile_k, M, I)
    g2, u2, a2, x2, y2, z2 = _swiglu_quad(2, da, p, pair, s, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, tile_m, tile_k, M, I)
    g3, u3, a3, x3, y3, z3 = _swiglu_quad(3, da, p, pair, s, h8, h8_scale, h_row, h_col, h4, h4_scale, dh8, tile_m, tile_k, M, I)
    _store(dh_scale, _joined(x0, x1, x2, x3), row0, r, _origin(tile_k, 1), one, d_row, d_col, M, 2 * I // 128)
    _store(dh_scale, _joined(y0, y1, y2, y3), row0, r, _origin(up_k, 1), one, d_row, d_col, M, 2 * I // 128)
    _store(dp, _joined(z0, z1, z2, z3), row0, r, _origin(tile_k, 1), one, 1, M, M, I // 128)
    _store_as_cols(g0, g1, g2, g3, dh_t, dh_t_scale, dt_row, dt_col, tile_m, tile_k, M, 2 * I)
    _store_as_cols(u0, u1, u2, u3, dh_t, dh_t_scale, dt_row, dt_col, tile_m, up_k, M, 2 * I)
    _store_as_cols(a0, a1, a2, a3, a_t, a_t_scale, at_row, at_col, tile_m, tile_k, M, I)


# -----------------------------------------------------------------------------
# routing: where each token-expert pair stands once pairs are sorted by expert and every expert is padded to 128 rows.
# ids [[1], [0], [1]], two experts: pair = [1, -1 x 127, 0, 2, -1 x 126], row = [[128], [0], [129]], offsets = [0, 128, 256]

@triton.jit
def _count_pairs(ids, counts, n, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of a chunk's pairs each expert gets: counts [chunks, E]. Bin E takes those that live elsewhere."""
    at = _origin(tl.program_id(0), CHUNK) + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < n, other=-1)
    count, e = tl.histogram(tl.where(expert < 0, E, expert), BINS), tl.arange(0, BINS)
    tl.store(counts + _origin(tl.program_id(0), E) + e, count, mask=e < E)


@triton.jit
def _lay_out(counts, offsets, tile_expert, tile_shift, pair, chunks, tiles, E: tl.constexpr, BINS: tl.constexpr):
    """One program: counts become the numbers of pairs in earlier chunks; offsets [E + 1]; each tile's expert (-1: none) and
    what to subtract from a row for its number without padding; -1 in pair's padding."""
    e, step = tl.arange(0, BINS), tl.arange(0, 16)
    total = tl.zeros((BINS,), tl.int32)
    for chunk in range(0, chunks, 16):
        at = counts + (chunk + step)[:, None] * E + e[None, :]
        inside = (chunk + step < chunks)[:, None] & (e < E)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    padded = (total + 127) // 128 * 128
    first, begin = tl.cumsum(total, 0) - total, tl.cumsum(padded, 0) - padded
    tl.store(offsets + e, begin, mask=e <= E)  # bins from E on are empty, so entry E is the end
    for tile in range(0, tiles, 16):
        row = (tile + step)[:, None] * 128
        here = (row >= begin[None, :]) & (row < (begin + padded)[None, :])
        expert = tl.sum(tl.where(here, e[None, :] + 1, 0), 1) - 1
        tl.store(tile_expert + tile + step, expert, mask=tile + step < tiles)
        tl.store(tile_shift + tile + step, tl.sum(tl.where(here, (begin - first)[None, :], 0), 1), mask=tile + step < tiles)
    for r in range(0, 128, 16):
        row = (total + r)[None, :] + step[:, None]
        tl.store(pair + begin[None, :] + row, -1, mask=row < padded[None, :])


@triton.jit
def _place_pairs(ids, before, offsets, pair, row, n, E: tl.constexpr, CHUNK: tl.constexpr):
    """A pair's row: its expert's first, and the pairs of that expert in earlier chunks, and earlier in this one."""
    i = tl.arange(0, CHUNK)
    at = _origin(tl.program_id(0), CHUNK) + i
    expert = tl.load(ids + at, mask=at < n, other=-1)
    rank = tl.sum(((expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    here = expert >= 0
    earlier = tl.load(before + _origin(tl.program_id(0), E) + expert, mask=here, other=0)
    place = tl.load(offsets + expert, mask=here, other=0) + earlier + rank
    tl.store(row + at, tl.where(here, place, -1), mask=at < n)
    tl.store(pair + place, at.to(tl.int32), mask=here)


@triton.jit
def _sum_rows(y, row_of, out, H: tl.constexpr, PER: tl.constexpr, C: tl.constexpr):
    """Expert rows y [M, H] back to tokens: out [T, H] is the sum of the rows in row_of [T, PER], -1 for none, in float32 and
    in the order of slots."""
    token, tile = _tile(H, C)
    at, c = token.to(tl.int64) * PER, _origin(tile, C) + tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    for slot in tl.static_range(PER):
        row = tl.load(row_of + at + slot)
        if row >= 0:
            total += _float(tl.load(y + row.to(tl.int64) * H + c, mask=c < H, other=0))
    if out.dtype.element_ty == tl.bfloat16:
        total = (_rounded(total) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out + token.to(tl.int64) * H + c, total, mask=c < H)


# -----------------------------------------------------------------------------
# host side

def _launch(kernel, programs, *args, num_warps=4, **constants):
    """So many programs, none for an empty tensor. No fused multiply-add but where it is written."""
    if programs:
        with torch.cuda.device_of(args[0]):
            kernel[(programs,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)


def _bytes(data):
    """FP8 codes, or any rows whose numbers do not matter, as kernels see them: bytes."""
    return None if data is None else data.view(torch.uint8)


def _words(x):
    """x [.., K] as 32-bit words, copied where its strides do not allow that; a new output's always do."""
    if x is None:
        return None
    if not x.numel():
        return x.new_empty(0, dtype=torch.int32)
    x = x.contiguous()
    if x.storage_offset() * x.element_size() % 4:
        x = x.clone()
    return x.view(torch.uint8).view(torch.int32)


def _columns(K, most):
    """Columns of a tile: as many as divide K, from 128 to most."""
    return max(128, math.gcd(K, most))


def _new_scale(like, rows, columns):
    """[rows, columns] with stride 1 along rows, as GEMMs load it."""
    return like.new_empty((columns, rows), dtype=torch.float32).t()


def _new_fp8_rows(like, M, K):
    return like.new_empty((M, K), dtype=torch.float8_e4m3fn), _new_scale(like, M, triton.cdiv(K, 128))


def _new_fp8_cols(like, K, M):
    """Data [K, M], its rows a whole number of words apart, and the scale of each 128x128 tile."""
    data = like.new_empty((K, triton.cdiv(M, 4) * 4), dtype=torch.float8_e4m3fn)
    return data, _new_scale(like, triton.cdiv(K, 128), triton.cdiv(M, 128))


def _new_fp4_rows(like, M, K):
    return like.new_empty((M, K // 2), dtype=torch.uint8), like.new_empty((M, K // MX.value), dtype=torch.uint8)


def _fp8_out(fp8):
    """FP8 tensors, or (None, None), as arguments: data, scale, the scale's strides."""
    return (_bytes(fp8[0]), fp8[1], *(fp8[1].stride() if fp8[1] is not None else (0, 0)))


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
        _launch(_quantize_pairs, triton.cdiv(M, R) * triton.cdiv(K, C), _words(x), *out, M, K, R, C, num_warps=1)
    else:
        R, C = 16, _columns(K, 256)
        _launch(_quantize_rows, triton.cdiv(M, R) * triton.cdiv(K, C), x, *x.stride(), *out, M, K, CARRY_MX[rule], R, C)


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


def _launch_quantize_blocks(w, transpose):
    w_ENK = w if w.dim() == 3 else w[None]
    (E, N, K), lead = w_ENK.shape, w.shape[:-2]
    tiles_n, tiles_k, pitch = triton.cdiv(N, 128), triton.cdiv(K, 128), triton.cdiv(N, 4)
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
    M, K = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if bf16 else None
    rows8 = _new_fp8_rows(x, M, K) if fp8 else (None, None)
    rows4 = _new_fp4_rows(x, M, K) if fp4 else (None, None)
    C = min(1024, max(128, triton.next_power_of_2(K)))
    _launch(_rms_norm, M, _words(x), weight.view(torch.int64), _words(y), *_fp8_out(rows8), _words(rows4[0]), rows4[1], eps, M, K,
            1, C)
    return y, *rows8, *rows4


def rms_norm_backward(dy, x, weight, eps):
    """dy, x [M, K] bfloat16 -> dx [M, K] bfloat16, dw [K] float32."""
    M, K = x.shape
    num_warps = 4 if K > 4096 else 2 if K > 2048 else 1
    programs = min(M, 8 // num_warps * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1))
    dx, dw = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((programs, K), dtype=torch.float32)
    _launch(_rms_norm_backward, programs, _words(dy), _words(x), weight, _words(dx), dw, eps, M, K,
            triton.next_power_of_2(K // 2), num_warps=num_warps)
    return dx, dw.sum(0)


def fp8_to_fp4(data, scale):
    """FP8 rows [M, K], 32 | K -> MXFP4 rows: data [M, K/2], scale [M, K/32], both uint8; rule "even"."""
    M, K = data.shape
    fp4, C = _new_fp4_rows(data, M, K), _columns(K, 1024)
    R = 4096 // C
    _launch(_fp8_to_fp4, triton.cdiv(M, R) * triton.cdiv(K, C), _words(data), scale, *scale.stride(), _words(fp4[0]), fp4[1], M,
            K, R, C, num_warps=1)
    return fp4


def fp4_fan_out_rows(data, scale, index=None, end=None, per=1):
    """MXFP4 rows [T, K/2], [T, K/32] -> FP8 rows: data [M, K], scale [M, ceil(K/128)].

    index [M] int32: row m comes from row index[m] // per, or is zero where that is negative; end [1] int32: rows from there
    on, a multiple of 128, are not written. Without an index rows stay where they are. So in all that fan out."""
    K, M = data.shape[1] * 2, len(data) if index is None else len(index)
    fp8, C = _new_fp8_rows(data, M, K), _columns(K, 1024)
    R = min(128, 16384 // C)
    _launch(_fp4_to_fp8_rows, triton.cdiv(M, R) * triton.cdiv(K, C), _e2m1_table(data.device), _words(data), scale.contiguous(),
            index, end, _words(fp8[0]), *_fp8_out(fp8)[1:], M, K, per, R, C)
    return fp8


def fp4_fan_out_cols(data, scale, index=None, end=None, per=1):
    """MXFP4 rows -> FP8 cols: data [K, M], scale [ceil(K/128), ceil(M/128)], one value a 128x128 tile."""
    K, M = data.shape[1] * 2, len(data) if index is None else len(index)
    fp8 = _new_fp8_cols(data, K, M)
    _launch(_fp4_to_fp8_cols, triton.cdiv(M, 128) * triton.cdiv(K, 128), _e2m1_table(data.device), _words(data),
            scale.contiguous(), index, end, _words(fp8[0]), *_fp8_out(fp8)[1:], M, K, triton.cdiv(M, 4), per,
            num_warps=1)
    return fp8[0][:, :M], fp8[1]


def _launch_fan_out(data, scale, out, index, end, per):
    (_, K), M, C = data.shape, len(out[0]), _columns(data.shape[1], 256)
    _launch(_fan_out_rows, triton.cdiv(M, 32) * triton.cdiv(K, C), data, *data.stride(), scale,
            *(scale.stride() if scale is not None else (0, 0)), index, end, *_fp8_out(out), M, K, per, 32, C)


def bf16_fan_out_rows(x, index, end=None, per=1):
    """x [T, K] bfloat16 -> [M, K]."""
    out = x.new_empty((len(index), x.shape[1]))
    _launch_fan_out(_bytes(x.contiguous()), None, (out, None), index, end, per)
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
    _launch(_fp8_rows_to_cols, triton.cdiv(M, 128) * triton.cdiv(K, 128), _bytes(data), *data.stride(), scale, *scale.stride(),
            index, end, *_fp8_out(rows8), _words(fp8[0]), *_fp8_out(fp8)[1:], M, K, triton.cdiv(M, 4), per)
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
    [M, I], and h [num_pairs, 2I] in the format save_h, "fp8" or "fp4", as it is kept: (a8, scale, data, scale)."""
    M, I = h.shape[0], h.shape[1] // 2
    a, (h8, h4) = _new_fp8_rows(h, M, I), ((None, None), (None, None))
    if save_h == "fp8":
        h8 = (h.new_empty((num_pairs, 2 * I), dtype=torch.float8_e4m3fn),
              h.new_empty((num_pairs, 2 * I // 128), dtype=torch.float32))
    else:
        h4 = _new_fp4_rows(h, num_pairs, 2 * I)
    R, num_warps = (4, 1) if save_h == "fp8" else (16, 2)
    _launch(_swiglu, M // R * (I // 128), _words(h), p, pair, shift, end, *_fp8_out(a), *_fp8_out(h8), _words(h4[0]), h4[1], M,
            I, R, num_warps=num_warps)
    return *a, *(h8 if save_h == "fp8" else h4)


def swiglu_backward(da, p, pair, shift, end, h, h_scale):
    """da [M, I] bfloat16, h as kept by swiglu -> dh as FP8 rows [M, 2I] and cols [2I, M], a as FP8 cols [I, M] (both with a
    scale for each column of 128 rows), dp [M, I/128] float32, of which the sum over a row is the gate weight's gradient."""
    M, I = da.shape
    fp8, fp4 = ((h, h_scale), (None, None)) if h.dtype == torch.float8_e4m3fn else ((None, None), (h, h_scale))
    dh, dp = _new_fp8_rows(da, M, 2 * I), _new_scale(da, M, I // 128)
    cols = lambda K: (da.new_empty((K, M), dtype=torch.float8_e4m3fn), _new_scale(da, K, M // 128))
    dh_t, a_t = cols(2 * I), cols(I)
    _launch(_swiglu_backward, M // 128 * (I // 128), da, p, pair, shift, end, *_fp8_out(fp8), *fp4, *_fp8_out(dh),
            _words(dh_t[0]), *_fp8_out(dh_t)[1:], _words(a_t[0]), *_fp8_out(a_t)[1:], dp, M, I, num_warps=8)
    return *dh, *dh_t, *a_t, dp


def group_rows(ids, num_experts, num_rows):
    """ids [T, K] int32 expert of each pair, -1 for none here -> pair [num_rows], row [T, K], offsets [E + 1], expert and shift
    of each 128-row tile [num_rows / 128], all int32.

    num_rows: at least what the pairs take, each expert padded to 128; T * K + 127 * E, rounded up to 128, is always enough."""
    n, chunk, bins = ids.numel(), 128, triton.next_power_of_2(num_experts + 1)
    chunks, tiles = triton.cdiv(n, chunk), num_rows // 128
    new = lambda *shape: ids.new_empty(shape, dtype=torch.int32)
    pair, row, offsets, expert, shift = new(num_rows), new(*ids.shape), new(num_experts + 1), new(tiles), new(tiles)
    counts = new(chunks, num_experts)
    ids = ids.contiguous()
    _launch(_count_pairs, chunks, ids, counts, n, num_experts, bins, chunk)
    _launch(_lay_out, 1, counts, offsets, expert, shift, pair, chunks, tiles, num_experts, bins, num_warps=8)
    _launch(_place_pairs, chunks, ids, counts, offsets, pair, row, n, num_experts, chunk)
    return pair, row, offsets, expert, shift


def sum_rows(y, row):
    """y [M, H] bfloat16 or float32, row [T, K] int32, -1 for none -> [T, H], each token's rows summed in float32 by slot."""
    (T, K), H = row.shape, y.shape[1]
    out, C = y.new_empty((T, H)), 1024
    _launch(_sum_rows, T * triton.cdiv(H, C), y, row, out, H, K, C, num_warps=1)
    return out
