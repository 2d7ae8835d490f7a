"""Triton kernels for the formats of FP8 and MXFP4 training on Hopper. Tensors in, a flat tuple of tensors out.

quant.py chooses between these and its plain PyTorch reference, checks shapes, and says what each tensor is used for.
The two agree on every byte.

The formats. All scales are powers of two, so a change of scale moves exponents and rounds at most once.

  E4M3     one byte, s eeee mmm: 2^-6 ... 448 with three mantissa bits, multiples of 2^-9 below; 0x7F and 0xFF are NaN
  E2M1     four bits, s ee m: 0 .5 1 1.5 2 3 4 6; two to a byte, the first element in the low nibble
  FP8      E4M3 codes and float32 scales 2^e, -126 <= e <= 119: one for each 1x128 tile ("rows"), or 128x128 ("blocks").
           "cols" is the transposed tensor, tiles along the old rows: what a GEMM reads when it contracts over tokens
  MXFP4    E2M1 codes and one scale byte b = 2^(b-127) for each 1x32 block of a row; 255 is NaN, 0 a block of zeros

Bytes that each conversion has to move, an element (a = bytes of an input element). Nothing computed here is worth
mention beside them, so these numbers over the memory's bandwidth are the time to aim at.

                              read                 write                          with bfloat16 in
  quantize_fp8_rows           a                    1 + 4/128                      3.03
  quantize_fp8_blocks         a                    1                              3.00
  quantize_fp8_weight         a                    2                              4.00 (float32 in: 6.00)
  quantize_fp4_rows           a                    1/2 + 1/32                     2.53
  quantize_fp8_fp4_rows       a                    1 + 4/128 + 1/2 + 1/32         3.56 (two kernels: 5.56)
  fp8_to_fp4                  1 + 4/128            1/2 + 1/32                     1.56
  fp4_to_fp8_rows, _cols      1/2 + 1/32           1 + 4/128                      1.56 (by way of bfloat16: 5.56)
  fp8_rows_to_cols            1 + 4/128            1 + 4/128                      2.06

Why integers. A hardware cast to FP8 saturates on one machine and gives NaN on another, rounds wrongly in Triton's
interpreter, and does not exist for E2M1 on Hopper. Float32 arithmetic on subnormals depends on a compiler flag, and
`max` drops NaN. So a value is held as the bits of its float32 magnitude: its maximum is an integer maximum, which NaN
and Inf win; its exponent is a shift; rounding to nearest even is an addition that carries into the exponent. Floating
point is left where normal operands make it exact, or make it round just as wanted: the product with a power of two, and
the sum with a large constant that pushes a small value's last bits out. GPU and interpreter, with or without
flush-to-zero, then give the same bytes.

One program handles a tile of ROWS rows by 128 columns: load, decode, compute, encode, store. In each row a tile has 128
elements, 64 bytes of nibble pairs, 4 MX scales and 1 FP8 scale, so one index map (`_span`) serves every tensor:

  tile (2, 3) with ROWS = 32 is rows 64 ... 95, and of a tensor with n columns a tile, columns 3n ... 3n + n - 1:
  elements 384 ... 511, nibble pairs 192 ... 255, MX scales 12 ... 15, FP8 scale 3

Offsets are 64-bit (300 001 x 7168 elements pass 2^31), tiles are counted along grid x (y and z end at 65 535), inputs
may have any strides; outputs are contiguous and every byte of them is written.

Legend: M rows (tokens), K columns (features), weights [E experts, N, K]; inside a tile R rows, C columns, B blocks.
"""

import torch
import triton
import triton.language as tl

ROWS = 32  # rows of a tile where every row stands alone; 128 where a tile has one scale or is transposed
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # a float32's bits without its sign
INF = tl.constexpr(0x7F800000)  # magnitudes from here on are Inf or NaN
NO_NUMBER = tl.constexpr(128)  # the exponent of Inf and NaN
E4M3_NAN = tl.constexpr(0x7F)
MX_NAN = tl.constexpr(255)
# Added to a magnitude, these carry into its exponent just where the scale must be a power of two larger (see _raised).
CARRY_FP8 = tl.constexpr(0x1FFFFF)  # mantissa above 1.75: 448 is 1.75 * 2^8
CARRY_MX = {"floor": 0, "even": 0x200000, "ceil": 0x3FFFFF}  # never; from 1.75 on; above 1.5: 6 is 1.5 * 2^2
CARRY_EVEN = tl.constexpr(CARRY_MX["even"])


# -----------------------------------------------------------------------------
# index maps

@triton.jit
def _tile(K):
    """The program's row tile and column tile. Columns run fastest, so neighbours read neighbouring memory."""
    tiles_k = tl.cdiv(K, 128)
    return tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k


@triton.jit
def _span(tile, n: tl.constexpr):
    """Indices of a tile's n rows or columns, 64-bit so that no offset made from them overflows."""
    return tile.to(tl.int64) * n + tl.arange(0, n)


@triton.jit
def _load(ptr, rows, cols, row_stride, col_stride, num_rows, num_cols):
    """Elements at rows x cols; 0 outside the tensor."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0)


@triton.jit
def _store(ptr, value, rows, cols, row_stride, col_stride, num_rows, num_cols):
    """value [R, C], or of width or height 1 and repeated, to rows x cols inside the tensor."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    value = tl.broadcast_to(value, inside.shape)
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, value, mask=inside)


@triton.jit
def _spread(x, n: tl.constexpr):
    """[R, B] -> [R, B * n], each column n times over: from one a block to one an element."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], n)), (x.shape[0], x.shape[1] * n))


@triton.jit
def _block_max(x, n: tl.constexpr):
    """[R, B * n] -> [R, B]: the maximum of each n columns."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // n, n)), 2)


@triton.jit
def _tile_max(x, SQUARE: tl.constexpr):
    """[R, C] -> [R, 1], the maximum of each row, or, if SQUARE, that of the tile, a scalar."""
    if SQUARE:
        return tl.max(tl.max(x, 1), 0)
    else:
        return tl.max(x, 1, keep_dims=True)


# -----------------------------------------------------------------------------
# numbers: float32 by its bits, powers of two, the two small formats

@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float_bits(x):
    """float32, bfloat16 or float16 -> the bits of its float32 value. bfloat16 is the upper half of them, also for
    subnormals, which Triton's interpreter converts wrongly."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        return _bits(x.to(tl.float32))


@triton.jit
def _power(e):
    """2^e as float32, built from bits; e is held to -126 ... 127, so that it is a normal number."""
    return ((tl.minimum(tl.maximum(e, -126), 127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _ldexp(magnitude, e):
    """Magnitude bits times 2^e as float32; exact where the result is at least 2^-100, far below the least code.

    A subnormal is never multiplied: it is magnitude * 2^-149, and the integer magnitude makes a normal float32."""
    normal = magnitude.to(tl.float32, bitcast=True) * _power(e)
    subnormal = magnitude.to(tl.float32) * _power(e - 149)
    return tl.where(magnitude < 0x00800000, subnormal, normal)


@triton.jit
def _encode(value, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr):
    """Float32 value >= 0 -> unsigned code of the format with MANTISSA bits and least normal 2^LOWEST: nearest, ties to
    even, saturating.

    E4M3 (3, -6) of 17, bits 10000011 0001000...: half a step less one, 0x7FFFF, and the last kept bit, 0, do not carry;
    the upper bits 10000011 000 = 1048 less (126 - 6) << 3 = 960 are code 88, 16. For 19, 10000011 0011000..., the last
    kept bit is 1, 0x80000 is added in all and carries: code 90, 20."""
    drop: tl.constexpr = 23 - MANTISSA
    bits = _bits(tl.minimum(value, LARGEST))
    normal = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop) - ((126 + LOWEST) << MANTISSA)
    # Below the normals a code counts steps of 2^(LOWEST - MANTISSA): the last bit of float32 numbers from `large` on.
    large: tl.constexpr = 2.0 ** (23 + LOWEST - MANTISSA)
    subnormal = _bits(value + large) - ((150 + LOWEST - MANTISSA) << 23)
    return tl.where(value < 2.0 ** LOWEST, subnormal, normal)


@triton.jit
def _decode(code, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Unsigned code -> float32, exact; the inverse of _encode."""
    normal = ((code << (23 - MANTISSA)) + ((126 + LOWEST) << 23)).to(tl.float32, bitcast=True)
    subnormal = code.to(tl.float32) * 2.0 ** (LOWEST - MANTISSA)
    return tl.where(code < (1 << MANTISSA), subnormal, normal)


@triton.jit
def _encode_e4m3(value, sign, bad):
    """Float32 value >= 0, sign 0 or 0x80 -> E4M3 bytes, NaN where bad."""
    return tl.where(bad, E4M3_NAN, _encode(value, 3, -6, 448.0) | sign).to(tl.uint8)


@triton.jit
def _decode_e4m3(codes):
    """E4M3 codes -> float32 magnitudes; NaN codes, which callers look for themselves, give 480."""
    return _decode(codes & 0x7F, 3, -6)


@triton.jit
def _encode_e2m1(value, sign, bad):
    """Float32 value >= 0, sign 0 or 8, [R, C] -> E2M1 codes, zeros where bad, packed in bytes [R, C/2]."""
    codes = tl.where(bad, 0, _encode(value, 1, 0, 6.0) | sign)
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _unpack(pairs):
    """Bytes [R, C/2] -> four-bit codes [R, C]."""
    return tl.interleave(pairs & 15, pairs >> 4)


# -----------------------------------------------------------------------------
# scale rules

@triton.jit
def _raised(amax, CARRY: tl.constexpr):
    """Biased exponent of a magnitude m * 2^k: k + 127, and one more where m reaches what CARRY stands for.

    With CARRY_FP8: 1.75 = 0x3FE00000 becomes 0x3FFFFFFF, 127; the next float32, 0x3FE00001, becomes 0x40000000, 128."""
    return (tl.minimum(amax, INF) + CARRY) >> 23  # the bits of a NaN could overflow


@triton.jit
def _fp8_exponent(amax):
    """Magnitude -> the least e with amax <= 448 * 2^e, held to -126 ... 119."""
    return tl.minimum(tl.maximum(_raised(amax, CARRY_FP8) - 127 - 8, -126), 119)


@triton.jit
def _fp8_scale(e, bad):
    return tl.where(bad, float("nan"), _power(e))


@triton.jit
def _mx_scale(amax, e, CARRY: tl.constexpr):
    """Magnitude times 2^e -> E8M0 byte by the rule of CARRY; 0 for a block of zeros alone, 255 for Inf and NaN."""
    byte = tl.minimum(tl.maximum(_raised(amax, CARRY) - 2 + e, 1), 252)
    return tl.where(amax == 0, 0, tl.where(amax < INF, byte, MX_NAN))


@triton.jit
def _load_fp8_exponents(scale, rows, tile_k, row_stride, col_stride, M, K):
    """Exponents of a tile's FP8 scales, [R, 1]; NO_NUMBER for NaN, and -127, below all others, outside the tensor."""
    scales = _load(scale, rows, _span(tile_k, 1), row_stride, col_stride, M, tl.cdiv(K, 128))
    return ((_bits(scales) >> 23) & 255) - 127


# -----------------------------------------------------------------------------
# where results go: a tile of [M, K], with its scales

@triton.jit
def _store_fp8_rows(data, scale, codes, scales, rows, tile_k, M, K):
    tiles_k = tl.cdiv(K, 128)
    _store(data, codes, rows, _span(tile_k, 128), K, 1, M, K)
    _store(scale, scales, rows, _span(tile_k, 1), tiles_k, 1, M, tiles_k)


@triton.jit
def _store_fp8_cols(data, scale, codes, scales, tile_m, tile_k, M, K):
    """The tensors are [K, M] and [K, M/128]: a step along M is 1. The tile's one scale is repeated for each of K."""
    tiles_m, cols = tl.cdiv(M, 128), _span(tile_k, 128)
    _store(data, codes, _span(tile_m, 128), cols, 1, M, M, K)
    _store(scale, scales, _span(tile_m, 1), cols, 1, tiles_m, tiles_m, K)


@triton.jit
def _store_fp4_rows(data, scale, pairs, scales, rows, tile_k, M, K):
    _store(data, pairs, rows, _span(tile_k, 64), K // 2, 1, M, K // 2)
    _store(scale, scales, rows, _span(tile_k, 4), K // 32, 1, M, K // 32)


# -----------------------------------------------------------------------------
# float -> FP8 and MXFP4. `x_row`, `x_col` are strides in elements, here and below.

@triton.jit
def _to_fp8(bits, SQUARE: tl.constexpr):
    """Float32 bits of a tile -> E4M3 bytes and float32 scales, one a row or one in all."""
    magnitude = bits & MAGNITUDE
    amax = _tile_max(magnitude, SQUARE)
    e, bad = _fp8_exponent(amax), amax >= INF
    return _encode_e4m3(_ldexp(magnitude, -e), (bits >> 24) & 0x80, bad), _fp8_scale(e, bad)


@triton.jit
def _to_fp4(bits, CARRY: tl.constexpr):
    """Float32 bits of a tile -> packed E2M1 codes and E8M0 bytes."""
    magnitude = bits & MAGNITUDE
    byte = _mx_scale(_block_max(magnitude, 32), 0, CARRY)
    b = _spread(byte, 32)
    return _encode_e2m1(_ldexp(magnitude, 127 - b), (bits >> 28) & 8, b == MX_NAN), byte.to(tl.uint8)


@triton.jit(do_not_specialize=["M"])  # the number of tokens changes from step to step: one compilation for all of them
def _quantize_rows(x, x_row, x_col, data8, scale8, data4, scale4, M, K, CARRY: tl.constexpr, ROWS: tl.constexpr):
    """Float rows -> FP8 rows, MXFP4 rows or both from one read; a format not wanted has None for its tensors."""
    tile_m, tile_k = _tile(K)
    rows = _span(tile_m, ROWS)
    bits = _float_bits(_load(x, rows, _span(tile_k, 128), x_row, x_col, M, K))
    if data8 is not None:
        codes, scales = _to_fp8(bits, False)
        _store_fp8_rows(data8, scale8, codes, scales, rows, tile_k, M, K)
    if data4 is not None:
        pairs, scales = _to_fp4(bits, CARRY)
        _store_fp4_rows(data4, scale4, pairs, scales, rows, tile_k, M, K)


@triton.jit
def _quantize_blocks(w, w_expert, w_row, w_col, data, scale, data_t, scale_t, N, K):
    """Float [E, N, K] -> FP8 blocks and, unless data_t is None, the same codes and scales transposed."""
    tile, tile_k = _tile(K)
    tiles_n, tiles_k = tl.cdiv(N, 128), tl.cdiv(K, 128)
    expert, tile_n = (tile // tiles_n).to(tl.int64), tile % tiles_n
    rows, cols = _span(tile_n, 128), _span(tile_k, 128)
    row, col = _span(tile_n, 1), _span(tile_k, 1)
    codes, scales = _to_fp8(_float_bits(_load(w + expert * w_expert, rows, cols, w_row, w_col, N, K)), True)
    _store(data + expert * N * K, codes, rows, cols, K, 1, N, K)
    _store(scale + expert * tiles_n * tiles_k, scales, row, col, tiles_k, 1, tiles_n, tiles_k)
    if data_t is not None:
        _store(data_t + expert * N * K, codes, rows, cols, 1, N, N, K)
        _store(scale_t + expert * tiles_n * tiles_k, scales, row, col, 1, tiles_n, tiles_n, tiles_k)


# -----------------------------------------------------------------------------
# one small format -> another. New exponents come from old ones; an element is rounded once.

@triton.jit(do_not_specialize=["M"])
def _fp8_to_fp4(data, data_row, data_col, scale, scale_row, scale_col, data4, scale4, M, K, ROWS: tl.constexpr):
    """FP8 rows -> MXFP4 rows: a block's largest code gives its exponent, elements keep one of three mantissa bits."""
    tile_m, tile_k = _tile(K)
    rows = _span(tile_m, ROWS)
    codes = _load(data, rows, _span(tile_k, 128), data_row, data_col, M, K).to(tl.int32)
    e = _load_fp8_exponents(scale, rows, tile_k, scale_row, scale_col, M, K)
    top = _block_max(codes & 0x7F, 32)
    amax = tl.where((top == E4M3_NAN) | (e == NO_NUMBER), INF, _bits(_decode_e4m3(top)))
    byte = _mx_scale(amax, e, CARRY_EVEN)
    b = _spread(byte, 32)
    pairs = _encode_e2m1(_decode_e4m3(codes) * _power(e - (b - 127)), (codes >> 4) & 8, b == MX_NAN)
    _store_fp4_rows(data4, scale4, pairs, byte.to(tl.uint8), rows, tile_k, M, K)


@triton.jit
def _fp4_to_fp8(data, data_row, data_col, byte, byte_row, byte_col, data8, scale8, M, K,
                TRANSPOSE: tl.constexpr, ROWS: tl.constexpr):
    """MXFP4 rows -> FP8 rows or, with one scale a 128x128 tile, FP8 cols.

    The largest block's exponent less 6 puts its 6 at 384, and keeps every code of blocks down to 2^-14 of it exact."""
    tile_m, tile_k = _tile(K)
    rows = _span(tile_m, ROWS)
    codes = _unpack(_load(data, rows, _span(tile_k, 64), data_row, data_col, M, K // 2).to(tl.int32))
    b = _load(byte, rows, _span(tile_k, 4), byte_row, byte_col, M, K // 32).to(tl.int32)
    top = _tile_max(b, TRANSPOSE)  # a block of zeros has the least byte, so it never decides
    e, bad = tl.minimum(tl.maximum(top - 127 - 6, -126), 119), top == MX_NAN
    value = _decode(codes & 7, 1, 0) * _spread(_power(b - 127 - e), 32)
    codes, scales = _encode_e4m3(value, (codes & 8) << 4, bad), _fp8_scale(e, bad)
    if TRANSPOSE:
        _store_fp8_cols(data8, scale8, codes, scales, tile_m, tile_k, M, K)
    else:
        _store_fp8_rows(data8, scale8, codes, scales, rows, tile_k, M, K)


@triton.jit
def _fp8_rows_to_cols(data, data_row, data_col, scale, scale_row, scale_col, data8, scale8, M, K):
    """FP8 rows -> FP8 cols: 128 rows are brought to their largest exponent, small codes rounded into the subnormals."""
    tile_m, tile_k = _tile(K)
    rows = _span(tile_m, 128)
    codes = _load(data, rows, _span(tile_k, 128), data_row, data_col, M, K).to(tl.int32)
    e = _load_fp8_exponents(scale, rows, tile_k, scale_row, scale_col, M, K)
    top = _tile_max(e, True)
    bad = top == NO_NUMBER
    value = _decode_e4m3(codes) * _power(e - top)
    codes = _encode_e4m3(value, codes & 0x80, bad | ((codes & 0x7F) == E4M3_NAN))
    _store_fp8_cols(data8, scale8, codes, _fp8_scale(top, bad), tile_m, tile_k, M, K)


# -----------------------------------------------------------------------------
# host side

def _launch(kernel, tiles, *args, num_warps=4, **constants):
    """One program a tile, none for an empty tensor. No fused multiply-add: each step rounds as it is written."""
    if tiles:
        with torch.cuda.device_of(args[0]):
            kernel[(tiles,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)


def _num_tiles(M, K, rows):
    return triton.cdiv(M, rows) * triton.cdiv(K, 128)


def _bytes(data):
    """FP8 codes as kernels see them: integers."""
    return None if data is None else data.view(torch.uint8)


def _new_fp8(like, shape, scale_shape):
    return like.new_empty(shape, dtype=torch.float8_e4m3fn), like.new_empty(scale_shape, dtype=torch.float32)


def _new_fp8_rows(like, M, K):
    return _new_fp8(like, (M, K), (M, triton.cdiv(K, 128)))


def _new_fp4_rows(like, M, K):
    return like.new_empty((M, K // 2), dtype=torch.uint8), like.new_empty((M, K // 32), dtype=torch.uint8)


def _launch_quantize_rows(x, fp8=(None, None), fp4=(None, None), rule="even"):
    M, K = x.shape
    out = (_bytes(fp8[0]), fp8[1], *fp4)
    _launch(_quantize_rows, _num_tiles(M, K, ROWS), x, *x.stride(), *out, M, K, CARRY=CARRY_MX[rule], ROWS=ROWS)


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
    tiles_n, tiles_k = triton.cdiv(N, 128), triton.cdiv(K, 128)
    fp8 = _new_fp8(w, (*lead, N, K), (*lead, tiles_n, tiles_k))
    fp8_t = _new_fp8(w, (*lead, K, N), (*lead, tiles_k, tiles_n)) if transpose else (None, None)
    out = (_bytes(fp8[0]), fp8[1], _bytes(fp8_t[0]), fp8_t[1])
    _launch(_quantize_blocks, E * tiles_n * tiles_k, w_ENK, *w_ENK.stride(), *out, N, K, num_warps=8)
    return *fp8, *fp8_t


def quantize_fp8_blocks(w):
    """w [N, K] or [E, N, K] -> data [.., N, K] float8_e4m3fn, scale [.., ceil(N/128), ceil(K/128)] float32."""
    return _launch_quantize_blocks(w, transpose=False)[:2]


def quantize_fp8_weight(w):
    """As quantize_fp8_blocks, and the same transposed: data_t [.., K, N], scale_t [.., ceil(K/128), ceil(N/128)]."""
    return _launch_quantize_blocks(w, transpose=True)


def fp8_to_fp4(data, scale):
    """FP8 rows [M, K], 32 | K -> MXFP4 rows: data [M, K/2], scale [M, K/32], both uint8; rule "even"."""
    M, K = data.shape
    fp4 = _new_fp4_rows(data, M, K)
    source = (_bytes(data), *data.stride(), scale, *scale.stride())
    _launch(_fp8_to_fp4, _num_tiles(M, K, ROWS), *source, *fp4, M, K, ROWS=ROWS)
    return fp4


def _launch_fp4_to_fp8(data, scale, fp8, transpose):
    M, K = data.shape[0], data.shape[1] * 2
    rows, num_warps = (128, 8) if transpose else (ROWS, 4)
    source = (data, *data.stride(), scale, *scale.stride())
    _launch(_fp4_to_fp8, _num_tiles(M, K, rows), *source, _bytes(fp8[0]), fp8[1], M, K,
            TRANSPOSE=transpose, ROWS=rows, num_warps=num_warps)
    return fp8


def fp4_to_fp8_rows(data, scale):
    """MXFP4 rows [M, K/2], [M, K/32] -> FP8 rows: data [M, K], scale [M, ceil(K/128)]."""
    return _launch_fp4_to_fp8(data, scale, _new_fp8_rows(data, len(data), data.shape[1] * 2), transpose=False)


def fp4_to_fp8_cols(data, scale):
    """MXFP4 rows [M, K/2], [M, K/32] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], one value a 128x128 tile."""
    return _launch_fp4_to_fp8(data, scale, _new_fp8_rows(data, data.shape[1] * 2, len(data)), transpose=True)


def fp8_rows_to_cols(data, scale):
    """FP8 rows [M, K], [M, ceil(K/128)] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], one value a 128x128 tile."""
    M, K = data.shape
    fp8 = _new_fp8_rows(data, K, M)
    source = (_bytes(data), *data.stride(), scale, *scale.stride())
    _launch(_fp8_rows_to_cols, _num_tiles(M, K, 128), *source, _bytes(fp8[0]), fp8[1], M, K, num_warps=8)
    return fp8
