"""
Formats, their exact conversions, and the recipe: what is computed, kept and sent in how many bits.

Hopper multiplies FP8 but has no FP4 unit. nanofp4 therefore computes in FP8, and uses FP4 where bits cost memory or wire:
for what is *kept* for backward and what is *sent* to other ranks. No conversion goes by way of BF16; codes of one
format become codes of the other by moving exponents (arXiv 2603.02731, on top of the casting-free FP8 of arXiv 2511.02302).

Three layouts of FP8 (E4M3), each with one power-of-two float32 scale a tile, 2^e with the least e such that amax <= 448 * 2^e:

    rows    data [M, K], one scale per 1x128 tile along K       what GEMMs read as activations
    blocks  data [N, K], one scale per 128x128 block            weights
    cols    data [K, M], the transposed rows, tiles along M     what Wgrad reads: it contracts over tokens, and Hopper's FP8
                                                                tensor cores want both operands contiguous along that axis
and one of MXFP4 (E2M1, OCP MX 1.0): data [M, K/2], two codes a byte, the first in the low nibble; one E8M0 byte, 2^(b-127),
per 1x32 block. Bits an element: BF16 16, FP8 rows 8.25, MXFP4 4.25.

The three GEMMs of y = x W^T, and what each reads (compute=fp8):

    forward  y  [T,N] = x8  rows [T,K] . W8  blocks [N,K]^T
    Dgrad    dx [T,K] = dy8 rows [T,N] . W8t blocks [K,N]^T     W8t: the same bytes as W8, transposed
    Wgrad    dW [N,K] = dy8 cols [N,T] . x8  cols   [K,T]^T     one side 1x128-scaled, the other 128x128-scaled, always

What stays alive between forward and backward is x in the format `save` names, nothing else. Bytes a token for a linear that
reads H = 7168: BF16 14336, FP8 7392, MXFP4 3808. A SwiGLU feed-forward layer (dense, shared or routed) keeps x and FC1's
output h (`save_h`); the activation a = silu(h_gate) * h_up * p is rebuilt from h, the expert output never needed, since the
gradient of the gate weight p is <da, silu(h_gate) * h_up>.

Why power-of-two scales: MXFP4 -> FP8 is then exact. An FP4 value has 2 significant bits and FP8 has room for 2^15 between
1 and its largest power, so 32-blocks whose scales differ by up to 2^14 share one FP8 scale without losing a bit, along rows
or along columns: experts compute on exactly the numbers that were sent, in both orientations.

Zero tiles get the smallest scale (never 1.0, which would wipe out neighbours when tiles are brought to one scale). A tile
that holds NaN or Inf decodes to NaN as a whole: nothing non-finite turns into an ordinary number.

Shape suffixes: T tokens, K top-k, H hidden, I expert width, E experts, M rows after fan-out (each expert padded to 128),
P real token-expert pairs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from dataclasses import dataclass, fields
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

if torch.cuda.is_available():
    try:
        import kernels
    except ImportError:
        kernels = None  # no Triton on this machine: nothing but plain linears works on its GPU

TILE = 128   # FP8: elements a scale, along a row or each side of a block
BLOCK = 32   # MXFP4: elements a scale, a multiple of 8 that divides TILE; kernels.MX is the same number
NAN_CODE = 0x7F  # E4M3


class Fp8(NamedTuple):
    """E4M3 values: data float8_e4m3fn and scale float32, in rows, blocks or cols layout (see the top of the file)."""
    data: Tensor
    scale: Tensor


class Fp4(NamedTuple):
    """MXFP4 rows: data uint8 [M, K/2], first element in the low nibble; scale uint8 [M, K/32], E8M0, 255 = NaN."""
    data: Tensor
    scale: Tensor


def _on_gpu(x: Tensor) -> bool:
    """Whether kernels.py does what follows with x; tests put Triton's interpreter in a GPU's place."""
    return x.is_cuda


# -----------------------------------------------------------------------------
# scale rules, encode and decode: the plain PyTorch reference that kernels match bit for bit

def _pow2(e: Tensor) -> Tensor:
    """2^e from its bits, exactly; e int32 in -126..127."""
    return ((e + 127) << 23).view(torch.float32)


def _scale(e: Tensor, bad: Tensor) -> Tensor:
    """2^e, and NaN where bad."""
    return _pow2(e).masked_fill(bad, math.nan)


def _exponent(scale: Tensor) -> Tensor:
    """e of a float32 power of two; 128 for NaN."""
    return (scale.view(torch.int32) >> 23 & 255) - 127


def _amax_bits(tiles: Tensor, dim) -> tuple[Tensor, Tensor]:
    """Bits of the largest magnitude (float32) over dim, and where it is not finite."""
    amax = tiles.abs().amax(dim, keepdim=True)
    return amax.view(torch.int32), ~torch.isfinite(amax)


def _fp8_exponent(bits: Tensor) -> Tensor:
    """Least e with amax <= 448 * 2^e: amax = m * 2^k gives k - 8, one more if m > 1.75."""
    return ((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000)).clamp(-126, 119)


def _fp4_byte(bits: Tensor, rule: str) -> Tensor:
    """E8M0 byte of a block from the bits of its amax; 0 for a block of zeros only."""
    mantissa = bits & 0x7FFFFF
    up = {"even": mantissa >= 0x600000, "ceil": mantissa > 0x400000, "floor": torch.zeros_like(mantissa)}[rule]
    return torch.where(bits == 0, 0, ((bits >> 23) - 2 + up).clamp(1, 252))


def _encode_fp8(v: Tensor, bad: Tensor) -> Tensor:
    """E4M3 of v: nearest even, saturating; NaN where bad. torch's own cast overflows differently in each version."""
    code = v.clamp(-448, 448).to(torch.float8_e4m3fn)
    if bad.any():
        code.view(torch.uint8).masked_fill_(bad, NAN_CODE)
    return code


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _decode_fp8(data: Tensor) -> Tensor:
    """Unscaled values of E4M3 codes, float32; on a CPU by table, five times as fast as torch's conversion."""
    if data.is_cuda:
        return data.float()
    return _E4M3.index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)


def _encode_fp4(v: Tensor, bad: Tensor) -> Tensor:
    """Packed E2M1 of v [..., K]: nearest, ties to the even code, saturating at 6; zeros where bad."""
    a = v.abs()
    code = (a > 0.25).to(torch.uint8)  # the codes 0..7 stand for 0 .5 1 1.5 2 3 4 6: count the midpoints below |v|
    for midpoint, tie_goes_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += a >= midpoint if tie_goes_up else a > midpoint
    code += torch.signbit(v).to(torch.uint8) << 3
    code.masked_fill_(bad, 0)
    return code[..., 0::2] | code[..., 1::2] << 4


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_E2M1_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], 1)  # [256, 2]: both values of a byte


def _decode_fp4(data: Tensor) -> Tensor:
    """Unscaled values of packed E2M1 [M, K/2] in blocks: [M, K/32, 32]."""
    pairs = _E2M1_PAIRS.to(data.device).index_select(0, data.flatten().int())
    return pairs.view(len(data), data.shape[1] * 2 // BLOCK, BLOCK)


def _tiles(x: Tensor, size: int, dim: int = -1) -> Tensor:
    """Split dim in tiles of size, the last one padded with zeros: [..., K, ...] -> [..., ceil(K/size), size, ...]."""
    short = -x.shape[dim] % size
    if short:
        x = F.pad(x, [0, 0] * (-dim - 1) + [0, short])
    return x.unflatten(dim, (x.shape[dim] // size, size))


def _check_scale(q: Fp8 | Fp4, name: str, tile: int):
    rows, columns = q.data.shape[0], q.data.shape[1] * (2 if isinstance(q, Fp4) else 1)
    if q.scale.shape != (rows, -(-columns // tile)):
        shapes = f"data {list(q.data.shape)}, scale {list(q.scale.shape)}"
        raise ValueError(f"{name} takes rows, one scale for {tile} elements; got {shapes}")


def _check(x: Tensor, name: str, ndims: tuple[int, ...], multiple: int = 1):
    if x.dim() not in ndims or x.shape[-1] % multiple:
        wide = f", the last dimension a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} takes {' or '.join(map(str, ndims))} dimensions{wide}; got shape {list(x.shape)}")


# -----------------------------------------------------------------------------
# BF16 (or any float) -> FP8, MXFP4. On CUDA the kernel of the same name, elsewhere the reference.

@torch.no_grad()
def quantize_fp8_rows(x: Tensor) -> Fp8:
    """x [M, K] -> data [M, K], scale [M, ceil(K/128)]. ValueError unless 2-D."""
    _check(x, "quantize_fp8_rows", (2,))
    if _on_gpu(x):
        return Fp8(*kernels.quantize_fp8_rows(x))
    tiles = _tiles(x.float().contiguous(), TILE)  # a maximum along a strided row is slow
    bits, bad = _amax_bits(tiles, -1)
    e = _fp8_exponent(bits)
    data = _encode_fp8(tiles * _pow2(-e), bad).flatten(1)[:, :x.shape[1]].contiguous()
    return Fp8(data, _scale(e, bad).squeeze(-1))


@torch.no_grad()
def quantize_fp8_rows_and_cols(x: Tensor, block: bool = False) -> tuple[Fp8, Fp8]:
    """x [M, K] -> its FP8 rows and its FP8 cols, those of x.t(), from one read: what a gradient's GEMMs read.

    block: the cols have one scale a 128x128 tile, [ceil(K/128), ceil(M/128)]. ValueError unless 2-D."""
    _check(x, "quantize_fp8_rows_and_cols", (2,))
    if _on_gpu(x):
        data, scale, data_t, scale_t = kernels.quantize_fp8_rows_and_cols(x, block)
        return Fp8(data, scale), Fp8(data_t, scale_t)
    if block:
        blocks = quantize_fp8_blocks(x)
        return quantize_fp8_rows(x), Fp8(blocks.data.t().contiguous(), blocks.scale.t())
    return quantize_fp8_rows(x), quantize_fp8_rows(x.t())


@torch.no_grad()
def quantize_fp8_blocks(w: Tensor) -> Fp8:
    """w [N, K] or [E, N, K] -> data of that shape, scale [..., ceil(N/128), ceil(K/128)]. ValueError otherwise."""
    _check(w, "quantize_fp8_blocks", (2, 3))
    if _on_gpu(w):
        return Fp8(*kernels.quantize_fp8_blocks(w))
    tiles = _tiles(_tiles(w.float(), TILE), TILE, -3)  # [..., N/128, 128, K/128, 128]
    bits, bad = _amax_bits(tiles, (-3, -1))
    e = _fp8_exponent(bits)
    data = _encode_fp8(tiles * _pow2(-e), bad).flatten(-2).flatten(-3, -2)[..., :w.shape[-2], :w.shape[-1]].contiguous()
    return Fp8(data, _scale(e, bad).squeeze(-1).squeeze(-2))


@torch.no_grad()
def quantize_fp8_weight(w: Tensor) -> tuple[Fp8, Fp8]:
    """w [N, K] or [E, N, K] -> its blocks, and the blocks of its transpose: the same bytes, for forward and Dgrad."""
    _check(w, "quantize_fp8_weight", (2, 3))
    if _on_gpu(w):
        data, scale, data_t, scale_t = kernels.quantize_fp8_weight(w)
        return Fp8(data, scale), Fp8(data_t, scale_t)
    q = quantize_fp8_blocks(w)
    return q, Fp8(q.data.mT.contiguous(), q.scale.mT.contiguous())


@torch.no_grad()
def quantize_fp4_rows(x: Tensor, rule: str = "even") -> Fp4:
    """x [M, K] -> MXFP4 rows; rule even | floor | ceil picks the block scale. ValueError unless 32 divides K."""
    _check(x, "quantize_fp4_rows", (2,), BLOCK)
    if rule not in ("even", "floor", "ceil"):
        raise ValueError(f"the MX scale rule is even, floor or ceil, not {rule!r}")
    if _on_gpu(x):
        return Fp4(*kernels.quantize_fp4_rows(x, rule))
    blocks = _tiles(x.float(), BLOCK)
    bits, bad = _amax_bits(blocks, -1)
    byte = _fp4_byte(bits, rule)
    data = _encode_fp4(blocks * _pow2(127 - byte), bad).flatten(1)
    return Fp4(data, byte.masked_fill(bad, 255).squeeze(-1).to(torch.uint8))


@torch.no_grad()
def quantize_fp8_fp4_rows(x: Tensor) -> tuple[Fp8, Fp4]:
    """x [M, K] -> its FP8 rows and its MXFP4 rows from one read, each rounded once. ValueError unless 32 divides K."""
    _check(x, "quantize_fp8_fp4_rows", (2,), BLOCK)
    if _on_gpu(x):
        data8, scale8, data4, scale4 = kernels.quantize_fp8_fp4_rows(x)
        return Fp8(data8, scale8), Fp4(data4, scale4)
    return quantize_fp8_rows(x), quantize_fp4_rows(x)


# -----------------------------------------------------------------------------
# FP8 <-> MXFP4 and rows -> cols: codes to codes, no BF16 in between

def fp8_to_fp4(q: Fp8) -> Fp4:
    """FP8 rows -> MXFP4 rows. Rounds a second time, so it is for tensors that exist in FP8 only. ValueError unless 32 | K."""
    _check(q.data, "fp8_to_fp4", (2,), BLOCK)
    _check_scale(q, "fp8_to_fp4", TILE)
    if _on_gpu(q.data):
        return Fp4(*kernels.fp8_to_fp4(*q))
    value = _tiles(_decode_fp8(q.data), BLOCK)  # in units of the tile's scale: at most 448, so exponents can simply be added
    bits, bad = _amax_bits(value, -1)
    e = _exponent(q.scale).repeat_interleave(TILE // BLOCK, 1)[:, :value.shape[1], None]
    bad = bad | (e == 128)
    byte = torch.where(bits == 0, 0, (_fp4_byte(bits, "even") + e).clamp(1, 252))
    data = _encode_fp4(value * _pow2((e - (byte - 127)).clamp(-126, 127)), bad).flatten(1)
    return Fp4(data, byte.masked_fill(bad, 255).squeeze(-1).to(torch.uint8))


def fp4_to_fp8_rows(q: Fp4) -> Fp8:
    """MXFP4 rows -> FP8 rows, exact while the block exponents inside a 1x128 tile differ by at most 14."""
    _check(q.data, "fp4_to_fp8_rows (packed data)", (2,), BLOCK // 2)
    _check_scale(q, "fp4_to_fp8_rows", BLOCK)
    if _on_gpu(q.data):
        return Fp8(*kernels.fp4_to_fp8_rows(*q))
    top = _tiles(q.scale.int(), TILE // BLOCK).amax(-1)  # [M, K/128]; a block of zeros has byte 0 and never decides
    e, bad = _target_exponent(top)
    return Fp8(_fp4_to_fp8(q, e, bad), _scale(e, bad))


def fp4_to_fp8_cols(q: Fp4) -> Fp8:
    """MXFP4 rows [M, K] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], one power of two per 128x128 tile.

    Exact while the block exponents inside a tile differ by at most 14, so it decodes to the numbers of fp4_to_fp8_rows."""
    _check(q.data, "fp4_to_fp8_cols (packed data)", (2,), BLOCK // 2)
    _check_scale(q, "fp4_to_fp8_cols", BLOCK)
    if _on_gpu(q.data):
        return Fp8(*kernels.fp4_to_fp8_cols(*q))
    top = _tiles(_tiles(q.scale.int(), TILE // BLOCK), TILE, -3).amax((-3, -1))  # [M/128, K/128]
    e, bad = _target_exponent(top)
    rows = _fp4_to_fp8(q, *(t.repeat_interleave(TILE, 0)[:len(q.data)] for t in (e, bad)))
    return _transpose(rows, _scale(e, bad))


def fp8_rows_to_cols(q: Fp8) -> Fp8:
    """FP8 rows [M, K] -> FP8 cols: data [K, M], scale [K, ceil(M/128)], the largest of each 128x128 tile's row scales.

    Codes move down by the difference of exponents, rounded to nearest even into the subnormals."""
    _check(q.data, "fp8_rows_to_cols", (2,))
    _check_scale(q, "fp8_rows_to_cols", TILE)
    if _on_gpu(q.data):
        return Fp8(*kernels.fp8_rows_to_cols(*q))
    e = _exponent(q.scale)
    top = _tiles(e + 127, TILE, -2).amax(-2) - 127  # [M/128, K/128]; + 127, so that padding, 0, never decides
    shift = (e - top.repeat_interleave(TILE, 0)[:len(e)]).clamp(min=-126)
    bad = top == 128
    value = _decode_fp8(q.data) * _pow2(shift).repeat_interleave(TILE, 1)[:, :q.data.shape[1]]
    bad_rows = bad.repeat_interleave(TILE, 0)[:len(e)].repeat_interleave(TILE, 1)[:, :q.data.shape[1]]
    return _transpose(_encode_fp8(value, bad_rows | value.isnan()), _scale(top.clamp(max=127), bad))


def _target_exponent(top: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 exponent for MXFP4 blocks of which the largest has byte top: 6 less, so that 6 becomes 384; and NaN tiles."""
    return (top - 127 - 6).clamp(-126, 119), top == 255


def _fp4_to_fp8(q: Fp4, e: Tensor, bad: Tensor) -> Tensor:
    """E4M3 codes of q [M, K] in units of 2^e; e and bad [M, K/128] for each element's target tile."""
    blocks = q.scale.shape[1]
    e, bad = (t.repeat_interleave(TILE // BLOCK, 1)[:, :blocks, None] for t in (e, bad))
    shift = (q.scale.int()[..., None] - 127 - e).clamp(-126, 127)
    return _encode_fp8(_decode_fp4(q.data) * _pow2(shift), bad).flatten(1)


def _transpose(data: Tensor, scale: Tensor) -> Fp8:
    """Row codes [M, K] whose 128x128 tiles share a scale [M/128, K/128] -> cols, the scale repeated for each of K."""
    return Fp8(data.t().contiguous(), scale.t().repeat_interleave(TILE, 0)[:data.shape[1]].contiguous())


def dequantize(q: Fp8 | Fp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that q stands for, [M, K] (or q.data's shape). BF16 holds them exactly, too, down to scales of 2^-124."""
    if isinstance(q, Fp4):
        byte = q.scale.int()
        scale = torch.where(byte == 0, 0x400000, byte << 23).view(torch.float32).masked_fill(byte == 255, math.nan)
        return (_decode_fp4(q.data) * scale[..., None]).flatten(1).to(dtype)
    n, k = q.data.shape[-2:]
    tiles = _tiles(_decode_fp8(q.data), TILE) * _rows_of(q.scale, n)[..., None]
    return tiles.flatten(-2)[..., :k].to(dtype)


def _rows_of(scale: Tensor, n: int) -> Tensor:
    """Scale of each of n rows: as it is for rows and cols, every 128-block's repeated for blocks."""
    return scale if scale.shape[-2] == n else scale.repeat_interleave(TILE, -2)[..., :n, :]


# -----------------------------------------------------------------------------
# the recipe: which format where

WIDTH = {"bf16": 16, "fp8": 8, "fp4": 4}  # "bf16" means: unquantised, in the dtype of the activations


@dataclass(frozen=True)
class Recipe:
    """What is computed, kept and sent in which format, each its own setting. ValueError for a value that is none."""
    compute: str = "bf16"  # GEMMs of experts and dense linears: bf16 | fp8
    save: str = "bf16"     # inputs of linears and experts kept for backward: bf16 | fp8 | fp4
    save_h: str = "bf16"   # FC1's output kept for backward: bf16 | fp8 | fp4
    wire: str = "bf16"     # dispatch: bf16 | fp8 | fp4; fp8-fp8 | fp4-fp8 send the combine in FP8 as well

    def __post_init__(self):
        kept = "bf16", "fp8", "fp4"
        allowed = {"compute": ("bf16", "fp8"), "save": kept, "save_h": kept, "wire": (*kept, "fp8-fp8", "fp4-fp8")}
        for field in fields(self):
            choices, value = allowed[field.name], getattr(self, field.name)
            if value not in choices:
                raise ValueError(f"{field.name} is one of {', '.join(choices)}; got {value!r}")

    @property
    def dispatch(self) -> str:
        """Format in which tokens are sent to experts."""
        return self.wire.split("-")[0]

    @property
    def combine(self) -> str:
        """Format in which expert outputs (and, in backward, input gradients) are sent back."""
        return "fp8" if "-" in self.wire else "bf16"


def bytes_per_row(width: int, name: str, element_size: int = 2) -> int:
    """Bytes of a row of width elements kept in a format, scales included; element_size is an unquantised one's."""
    return {"bf16": width * element_size, "fp8": width + 4 * -(-width // TILE), "fp4": width // 2 + width // BLOCK}[name]


RECIPES = {
    "bf16": Recipe(),
    "fp8": Recipe("fp8", save="fp8", save_h="fp8", wire="fp8"),
    "mxfp4": Recipe("fp8", save="fp4", save_h="fp8", wire="fp4"),
}


class Norm(NamedTuple):
    """Where a normed activation can be rebuilt from: the norm's input [T, H], its weight [H] and what it adds to the square."""
    raw: Tensor
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Activation:
    """An activation, quantised once for all that read it.

    What a wire sends may be any Fp8 or Fp4 rows (a coarser scale is one repeated for each tile): no reader needs a change."""
    x: Tensor                 # [T, H] in the model's dtype; carries the gradient
    recipe: Recipe
    fp8: Fp8 | None = None    # rows, what FP8 GEMMs and an FP8 wire read
    fp4: Fp4 | None = None    # rows, what save=fp4 keeps and an FP4 wire sends
    norm: Norm | None = None  # where x came from
    rebuild: bool = False     # linears keep nothing of x: backward rebuilds it from norm

    def format(self, name: str) -> Tensor | Fp8 | Fp4:
        return {"bf16": self.x.detach(), "fp8": self.fp8, "fp4": self.fp4}[name]

    @property
    def read(self):
        """What GEMMs read."""
        return self.format(self.recipe.compute)

    @property
    def kept(self):
        """What is kept for Wgrad."""
        return self.format(self.recipe.save)


def quantize(x: Tensor, recipe: Recipe, wire: str = "bf16") -> Activation:
    """x [T, H] in every format that compute, save and wire (a dispatch format) ask for, from one read."""
    return Activation(x, recipe, *_quantize_rows(x.detach(), {recipe.compute, recipe.save, wire}))


def _quantize_rows(x: Tensor, needed: set[str]) -> tuple[Fp8 | None, Fp4 | None]:
    if {"fp8", "fp4"} <= needed:
        return quantize_fp8_fp4_rows(x)
    return quantize_fp8_rows(x) if "fp8" in needed else None, quantize_fp4_rows(x) if "fp4" in needed else None


def narrow(q: Tensor | Fp8 | Fp4, name: str) -> Tensor | Fp8 | Fp4:
    """q brought to format name where that is narrower, else as it is: bits once lost do not come back."""
    if isinstance(q, Fp8):
        return fp8_to_fp4(q) if name == "fp4" else q
    if isinstance(q, Fp4) or name == "bf16":
        return q
    return quantize_fp8_rows(q) if name == "fp8" else quantize_fp4_rows(q)


# -----------------------------------------------------------------------------
# messages: what a wire carries of a token, one row of bytes

PART = 16  # bytes: where each part of a message begins


def _message_parts(name: str, width: int, dtype: torch.dtype = torch.bfloat16, *others: tuple[torch.dtype, int]):
    """(dtype, width) of what is in a message side by side; of an FP8 scale that is its exponent byte."""
    return [*{"bf16": [(dtype, width)], "fp8": [(torch.float8_e4m3fn, width), (torch.uint8, -(-width // TILE))],
              "fp4": [(torch.uint8, width // 2), (torch.uint8, width // BLOCK)]}[name], *others]


def message_bytes(*packed) -> int:
    """Bytes of a message: name of the format, width, dtype of what BF16 stands for, then (dtype, width) of what is beside."""
    return sum(-(-columns * kind.itemsize // PART) * PART for kind, columns in _message_parts(*packed))


def pack(x: Tensor | Fp8 | Fp4, name: str, *others: Tensor, index: Tensor | None = None, per: int = 1) -> Tensor:
    """Rows x [T, H], brought to format name, and up to two others [T * per, K] of four bytes each side by side: uint8 [N, L],
    which every backend sends; FP8 types not all do. All rows, or those in index [N] int32, which counts as the others do; -1
    stands for any bytes. per, where there is an index: so many rows of others share one of x, each a message of its own."""
    assert per == 1 or index is not None
    codes, scale = x if isinstance(x, tuple) else (x, None)
    quantizes = scale is None and name == "fp8"
    if scale is None and not quantizes and not others and index is None:
        return x.contiguous().view(torch.uint8)
    if _on_gpu(codes) and codes.shape[1] * (1 if quantizes else codes.element_size()) % PART == 0:
        width, dtype = codes.shape[1] * (2 if isinstance(x, Fp4) else 1), codes.dtype
        size = message_bytes(name, width, dtype, *((t.dtype, t.shape[1]) for t in others))
        if quantizes:
            return kernels.quantize_to_messages(codes, others, index, size, per)
        return kernels.pack_rows(codes, scale, others, index, size, per)
    x = narrow(x, name)
    if isinstance(x, Fp8):
        x = x.data, (x.scale.view(torch.int32) >> 23).to(torch.uint8)  # the biased exponent, 255 for NaN
    parts = []
    for t, share in (*((t, per) for t in (x if isinstance(x, tuple) else [x])), *((t, 1) for t in others)):
        rows = t.contiguous().view(torch.uint8)
        rows = rows if index is None else rows.index_select(0, index.clamp(min=0) // share)
        parts.append(F.pad(rows, (0, -rows.shape[1] % PART)))
    return torch.cat(parts, 1)


def unpack(message: Tensor, name: str, width: int, dtype: torch.dtype, *others: tuple[torch.dtype, int]):
    """What pack took, (x, *others), from its rows: views but for FP8's scales. others: (dtype, width) of each."""
    parts = _parts_of(message, name, width, dtype, *others)
    if name == "bf16":
        return parts
    if name == "fp4":
        return Fp4(*parts[:2]), *parts[2:]
    return Fp8(parts[0], _scale_of(message, *parts[:2])), *parts[2:]


def sum_messages(message: Tensor, name: str, width: int, dtype: torch.dtype, row_TK: Tensor, *others: tuple[torch.dtype, int]):
    """Sums of what pack took, (x [T, width] of dtype, *others), over each token's messages, as sum_rows adds them."""
    if name == "fp8" and _on_gpu(message):  # scales are read as they were sent
        codes, byte, *rest = _parts_of(message, name, width, dtype, *others)
        x = kernels.sum_rows(codes, row_TK, byte, dtype)
    else:
        x, *rest = unpack(message, name, width, dtype, *others)
        x = sum_rows(x, row_TK, dtype)
    return x, *(sum_rows(part, row_TK) for part in rest)


def _scale_of(message: Tensor, data: Tensor, byte: Tensor) -> Tensor:
    """FP8's scale from the bytes sent."""
    scale = _new_scale(byte)
    if _on_gpu(message):
        kernels.unpack_rows(message, data.shape[1], byte.shape[1], scale)
        return scale
    return scale.copy_((byte.int() << 23).view(torch.float32).masked_fill(byte == 255, math.nan))


def _new_scale(byte: Tensor) -> Tensor:
    """Room for it with stride 1 along rows, as GEMMs load it."""
    return torch.empty_strided(byte.shape, (1, len(byte)), dtype=torch.float32, device=byte.device)


class Arrivals(NamedTuple):
    """What a rank is told of the token-expert pairs that come, before they do: where experts' rows lie, and each sender's there.

    Example: of two experts, two senders' pairs and tokens [[2, 1, 2], [2, 1, 2]] -> layout [[0, 128, 256], [0, 124, 0], [4, 130,
    0]], begin_RE [[0, 128, 0], [2, 129, 2]]."""
    layout: Tensor    # [3, E + 1] int32: see Groups
    begin_RE: Tensor  # [R, E + 1] int32: the first row of a sender's pairs of each expert here, and its first message
    held: range       # experts here
    num_experts: int  # in all

    def lay_out(self, counts_RE: Tensor):
        """Fills both from the numbers of pairs of each expert, and of tokens, that each sender announces, [R, E + 1] int32."""
        if _on_gpu(counts_RE):
            return kernels.lay_out_messages(counts_RE, self.layout, self.begin_RE)
        self.layout.copy_(_layout(counts_RE[:, :-1].sum(0)))
        self.begin_RE.copy_(counts_RE.cumsum(0) - counts_RE)
        self.begin_RE[:, :-1] += self.layout[0, :-1]


def receive(message: Tensor, name: str, width: int, dtype: torch.dtype, top_k: int, arrivals: Arrivals, num_pairs: int):
    """x, weights [N, K] and Groups of tokens that were packed with places and weights and have num_pairs pairs here: x as unpack
    gives it, weights contiguous.

    A place is nth * num_experts + expert, -1 for none: the nth of the sender's pairs of that expert, in its order."""
    if not _on_gpu(message):
        q, place, weights = unpack(message, name, width, dtype, (torch.int32, top_k), (torch.float32, top_k))
        return q, weights.contiguous(), regroup(_rows_of_places(place, arrivals), arrivals.layout, num_pairs)
    codes, scale = _parts_of(message, name, width, dtype), None
    if name == "fp8":
        scale = _new_scale(codes[1])
    scales, num_rows = codes[1].shape[1] if name != "bf16" else 0, _room(num_pairs, len(arrivals.held))
    weights, pair_M, row_NK, *of_tiles = kernels.receive_rows(
        message, codes[0].shape[1] * codes[0].element_size(), scales, scale, arrivals.begin_RE, arrivals.layout, num_rows,
        arrivals.held.start, arrivals.num_experts, top_k)
    q = codes[0] if name == "bf16" else Fp4(*codes) if name == "fp4" else Fp8(codes[0], scale)
    return q, weights, Groups(pair_M, row_NK, arrivals.layout, arrivals.layout[0], *of_tiles, num_pairs)


def _rows_of_places(place_NK: Tensor, arrivals: Arrivals) -> Tensor:
    """row_NK of Groups."""
    begin_RE, E = arrivals.begin_RE, len(arrivals.held)
    sender_N = torch.searchsorted(begin_RE[:, -1].contiguous(), torch.arange(len(place_NK), dtype=torch.int32), right=True) - 1
    nth, expert = place_NK // arrivals.num_experts, place_NK % arrivals.num_experts - arrivals.held.start
    here = (place_NK >= 0) & (expert >= 0) & (expert < E)
    return torch.where(here, begin_RE[sender_N[:, None], expert.clamp(0, E - 1)] + nth, -1)


def _parts_of(message: Tensor, *packed) -> list[Tensor]:
    parts, start = [], 0
    for kind, columns in _message_parts(*packed):
        size = columns * kind.itemsize
        parts.append(message[:, start:start + size].view(kind))
        start += -(-size // PART) * PART
    return parts


# -----------------------------------------------------------------------------
# weights: quantised once an optimizer step, reused by every micro-batch

_epoch = 0
_copies = WeakTensorKeyDictionary()


def new_epoch(*_):
    """Forget quantised weights. Every optimizer's step calls it; call it yourself after changing `.data` in other ways.

    Tensor versions are not enough: fused AdamW and `.data.copy_` change values without moving `_version`."""
    global _epoch
    _epoch += 1


register_optimizer_step_post_hook(new_epoch)


def weight_operands(weight: Tensor, compute: str, dtype: torch.dtype, fill: Callable[[Tensor], Tensor] | None = None):
    """(what forward reads, what Dgrad reads) of weight [N, K] or [E, N, K]: blocks and transposed blocks, or one dtype copy;
    of a router, with compute=parts, what _RouterLinear says.

    Dgrad's operand is laid out as the weight of the transposed linear: [K, N] or [E, K, N]. fill: adds rows or columns of zeros
    first. Copies are kept until the weight changes, but for one whose attribute `sharded` is true: to keep copies of all it
    consists of would undo the sharding."""
    values = weight.detach()
    if compute == "bf16" and weight.dtype == dtype and fill is None:
        return values, values.mT
    # an inference tensor has no version that would tell of a change; what FSDP gathers is there for a moment only
    if weight.is_inference() or getattr(weight, "sharded", False):
        return _weight_copies(values, compute, dtype, fill)
    key = (_epoch, weight._version, weight.data_ptr(), compute, dtype, fill)
    cached = _copies.get(weight)
    if cached is None or cached[0] != key:
        cached = _copies[weight] = key, _weight_copies(values, compute, dtype, fill)
    return cached[1]


def _weight_copies(values: Tensor, compute: str, dtype: torch.dtype, fill: Callable[[Tensor], Tensor] | None):
    values = values if fill is None else fill(values)
    if compute == "fp8":
        return quantize_fp8_weight(values)
    if compute == "parts":
        N, parts = len(values), _parts(values.reshape(1, -1), (2, 0, 1, 0)).view(-1, values.shape[1])
        return parts[:3 * N], parts[N:]
    copy = values.to(dtype)
    return copy, copy.mT


# -----------------------------------------------------------------------------
# GEMMs: FP8 kernels on a GPU, elsewhere plain PyTorch on decoded operands. An E4M3 value times a power of two (from 2^-124 up)
# is exact in BF16 and in float32, so these give what FP8 tensor cores do, with all sums in float32

def _values(a: Tensor | Fp8 | Fp4, b: Tensor | Fp8 | Fp4) -> tuple[Tensor, Tensor]:
    """GEMM operands as plain tensors, b in a's dtype; decoded ones in BF16 on CUDA, else in float32."""
    a, b = (q if isinstance(q, Tensor) else dequantize(q, torch.bfloat16 if q.data.is_cuda else torch.float32) for q in (a, b))
    return a, b.to(a.dtype)


def _mm(a: Tensor | Fp8, b: Tensor | Fp8, out: torch.dtype) -> Tensor:
    """out_MN = a_MK @ b_NKᵀ."""
    if _fp8_gemm(a, b, out):
        y = a.data.new_empty((len(a.data), len(b.data)), dtype=out)
        kernels.grouped_gemm(*a, *(t[None] for t in b), None, y)
        return y
    return _product(*_values(a, b), out)


def _fp8_gemm(a: Tensor | Fp8, b: Tensor | Fp8, out: torch.dtype) -> bool:
    """Whether the FP8 kernels take rows a [M, K] and blocks b [.., N, K]: on Hopper, M a multiple of 128, N and K of 16."""
    return (isinstance(a, Fp8) and _on_hopper(a.data) and out in (torch.bfloat16, torch.float32)
            and not (a.data.shape[0] % TILE or a.data.shape[1] % 16 or b.data.shape[-2] % 16))


def _on_hopper(x: Tensor) -> bool:
    return x.is_cuda and _major(x.device) == 9


@functools.cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _product(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a @ bᵀ in dtype out; BF16 operands keep their float32 sums where out is float32, which a plain matmul would round."""
    if a.is_cuda and out == torch.float32 and a.dtype != out:
        return torch.mm(a, b.t(), out_dtype=out)
    return (a @ b.t()).to(out)


def _grouped_mm(a: Tensor | Fp8, b: Tensor | Fp8, groups: Groups, dtype: torch.dtype) -> Tensor:
    """out_MN = a_MK @ b_ENKᵀ of the row's expert; expert e owns rows offsets[e] : offsets[e+1]."""
    if _fp8_gemm(a, b, dtype):
        y = a.data.new_empty((len(a.data), b.data.shape[1]), dtype=dtype)
        kernels.grouped_gemm(*a, *b, groups.expert, y)
        return y
    a, b = _values(a, b)
    if groups.dense:
        return _product(a, b[0], dtype)
    if a.dtype == torch.bfloat16 and a.is_cuda and len(a):
        return F.grouped_mm(a, b.mT, offs=groups.offsets[1:]).to(dtype)
    y = a.new_zeros((len(a), b.shape[1]), dtype=dtype)  # rows behind the last expert's, too
    for e, (s, t) in enumerate(itertools.pairwise(groups.offsets.tolist())):
        y[s:t] = a[s:t] @ b[e].t()
    return y


def _grouped_wgrad(a: Tensor | Fp8, b: Tensor | Fp8, groups: Groups, weight: Tensor) -> Tensor:
    """The gradient of weight: out_ENK = a_NM @ b_KMᵀ over each expert's own M, added to weight.grad: see gradient_buffer."""
    if groups.dense:
        return _wgrad(a, b, weight)
    if _fp8_wgrad(a, b, weight.dtype):
        return _fp8_wgrad_into(a, b, groups.offsets, weight)
    a, b = _values(a, b)
    if a.dtype == torch.bfloat16 and a.is_cuda and a.shape[1]:
        # torch's grouped GEMM writes BF16 only, so sums are rounded once; and nothing where an expert has no rows
        dw_ENK = F.grouped_mm(a, b.t(), offs=groups.offsets[1:]).contiguous()  # where 8 does not divide K it has gaps
        kernels.clear_empty_experts(dw_ENK, groups.offsets)
        return _wide_gradient(dw_ENK.view_as(weight), weight)
    out, accumulate = gradient_buffer(weight)
    out_ENK = out.view(-1, *out.shape[-2:])
    for e, (s, t) in enumerate(itertools.pairwise(groups.offsets.tolist())):
        dw = _product(a[:, s:t], b[:, s:t], out.dtype) if t > s else 0
        out_ENK[e] = out_ENK[e] + dw if accumulate else dw
    return out


def _wgrad(a: Tensor | Fp8, b: Tensor | Fp8, weight: Tensor) -> Tensor:
    """The same for a linear and a dense feed-forward: out_NK = a_NM @ b_KMᵀ."""
    if _fp8_wgrad(a, b, weight.dtype):
        return _fp8_wgrad_into(a, b, None, weight)
    a, b = _values(a, b)
    return add_product(gradient_buffer(weight)[0], a, b.t()) if _adds(weight) else _product(a, b, weight.dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a @ b; a CPU rounds what BF16 operands give to BF16 before."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b)
    if out.is_cuda and out.dtype == torch.float32:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(a @ b)


def _wide_gradient(dw: Tensor, weight: Tensor) -> Tensor:
    """dw in weight's dtype, added to weight.grad: see gradient_buffer."""
    return gradient_buffer(weight)[0].add_(dw) if _adds(weight) else dw.to(weight.dtype)


def _fp8_wgrad(a: Tensor | Fp8, b: Tensor | Fp8, out: torch.dtype) -> bool:
    """Whether the FP8 kernels take cols a [N, M] and b [K, M]: on Hopper, M a multiple of 128, N and K of 16."""
    return (isinstance(a, Fp8) and _on_hopper(a.data) and out in (torch.bfloat16, torch.float32)
            and not (a.data.shape[1] % TILE or len(a.data) % 16 or len(b.data) % 16))


def _fp8_wgrad_into(a: Fp8, b: Fp8, offsets: Tensor | None, weight: Tensor) -> Tensor:
    out, accumulate = gradient_buffer(weight)
    kernels.grouped_wgrad(*a, *b, offsets, out.view(-1, *out.shape[-2:]), accumulate)
    torch.autograd.graph.increment_version(out)  # which a kernel's writing does not
    return out


def gradient_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """Where a weight's gradient goes: (its .grad, which leaves it until autograd puts back what Wgrad added there, True), so
    that no second buffer is filled and added; or (new memory, False).

    So whoever holds .grad sees it change, hooks of several gradients see the sum, and a backward pass that fails loses it."""
    if not _adds(weight):
        return torch.empty_like(weight, memory_format=torch.contiguous_format), False
    grad, weight.grad = weight.grad, None
    return grad, True


def _adds(weight: Tensor) -> bool:
    """Whether Wgrad adds to weight.grad: one is there, fits the kernels, and no hook wants this pass's gradient alone."""
    grad = weight.grad if weight.is_leaf and not weight._backward_hooks else None
    fits = grad is not None and grad.dtype == weight.dtype and grad.is_contiguous() and grad.data_ptr() % 16 == 0
    return fits and _accumulates(weight)


def _accumulates(weight: Tensor) -> bool:
    """Whether this backward pass adds to weight.grad; torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # what it says of a leaf under torch.autograd.grad
        return False


def _cols(kept: Tensor | Fp8 | Fp4, compute: str) -> Tensor | Fp8:
    """What was kept of x [M, K], as Wgrad reads it: [K, M], in FP8 one scale a 128x128 tile."""
    if compute == "bf16":
        return (kept if isinstance(kept, Tensor) else dequantize(kept)).t()
    kept = quantize_fp8_rows(kept) if isinstance(kept, Tensor) else kept
    if _on_gpu(kept.data):  # its scales once, not once a column
        return Fp8(*(kernels.fp4_fan_out_cols if isinstance(kept, Fp4) else kernels.fp8_fan_out_cols)(*kept)[:2])
    return fp4_to_fp8_cols(kept) if isinstance(kept, Fp4) else fp8_rows_to_cols(kept)


# -----------------------------------------------------------------------------
# autograd: what is kept

def _save(ctx, *values):
    """save_for_backward for tensors inside tuples too, so that autograd's hooks see every byte that is kept.

    torch's own trees would take several times as long, 0.1 ms of the host's time a layer."""
    tensors = []
    ctx.values = [_without_tensors(v, tensors) for v in values]
    ctx.save_for_backward(*tensors)


def _saved(ctx):
    tensors = ctx.saved_tensors
    return [_with_tensors(v, tensors) for v in ctx.values]


class _Place(int):
    """Of a tensor among those that were saved."""


def _without_tensors(v, tensors: list[Tensor]):
    if isinstance(v, Tensor):
        tensors.append(v)
        return _Place(len(tensors) - 1)
    return getattr(v, "_make", tuple)([_without_tensors(part, tensors) for part in v]) if isinstance(v, tuple) else v


def _with_tensors(v, tensors):
    if isinstance(v, _Place):
        return tensors[v]
    return getattr(v, "_make", tuple)([_with_tensors(part, tensors) for part in v]) if isinstance(v, tuple) else v


def _replay(source, recipe: Recipe):
    """(what forward read, what Wgrad reads) from what was kept: a norm's input, or the operand itself."""
    if not isinstance(source, Norm):
        return source, source
    with torch.no_grad():
        activation = rms_norm(*source, recipe)
    return activation.read, activation.kept


def _norm_values(raw: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm: output in raw's dtype, and in float32 (or wider) the normalised input and its factor [T, 1]."""
    wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight).to(raw.dtype), wide * factor, factor


class _RMSNorm(torch.autograd.Function):
    """y, then the tensors of its FP8 and its MXFP4 rows where they are needed, None elsewhere: on a GPU from one read of raw."""

    @staticmethod
    def forward(ctx, raw, weight, eps, needed):
        ctx.eps = eps
        ctx.save_for_backward(raw, weight)
        ctx.set_materialize_grads(False)
        if _norm_fuses(raw, weight):
            y, *codes = kernels.rms_norm(raw, weight, eps, True, "fp8" in needed, "fp4" in needed)
        else:
            y = _norm_values(raw, weight, eps)[0]
            codes = [t for q in _quantize_rows(y, needed) for t in q or (None, None)]
        ctx.mark_non_differentiable(*(t for t in codes if t is not None))
        return y, *codes

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        raw, weight = ctx.saved_tensors
        if _norm_fuses(raw, weight):
            dx, dw = kernels.rms_norm_backward(dy, raw, weight, ctx.eps)
            return dx, dw, None, None
        _, unit, factor = _norm_values(raw, weight, ctx.eps)
        dy = dy.to(unit.dtype)
        du = dy * weight
        draw = factor * (du - unit * (du * unit).mean(-1, keepdim=True))
        return draw.to(raw.dtype), (dy * unit).sum(0).to(weight.dtype), None, None


def _norm_fuses(raw: Tensor, weight: Tensor) -> bool:
    """Whether the norm's kernels take it: bfloat16 on a GPU, and a float32 weight that can be read in pairs."""
    if not (weight.is_contiguous() and weight.data_ptr() % 8 == 0):
        return False
    return _on_gpu(raw) and raw.dtype == torch.bfloat16 and weight.dtype == torch.float32 and raw.shape[1] % 2 == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, recipe: Recipe, rebuild: bool = False, wire: str = "bf16") -> Activation:
    """RMSNorm of x [T, H], quantised for all its readers. Keeps x alone.

    rebuild: linears that read the result keep nothing, and rebuild it from x in backward."""
    needed = {recipe.compute, recipe.save, wire}
    _check(x, "rms_norm", (2,), BLOCK if "fp4" in needed else 1)
    y, *codes = _RMSNorm.apply(x, weight, eps, needed)
    fp8, fp4 = Fp8(*codes[:2]) if "fp8" in needed else None, Fp4(*codes[2:]) if "fp4" in needed else None
    return Activation(y, recipe, fp8, fp4, Norm(x.detach(), weight.detach(), eps), rebuild)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe, read, source):
        ctx.recipe, ctx.dtype = recipe, x.dtype
        _save(ctx, weight, source if ctx.needs_input_grad[1] else None)
        return _mm(read, weight_operands(weight, recipe.compute, x.dtype)[0], x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        recipe, (weight, source) = ctx.recipe, _saved(ctx)
        if recipe.compute != "fp8":
            dy_rows, dy_cols = dy, dy.t()
        elif all(ctx.needs_input_grad[:2]):
            dy_rows, dy_cols = quantize_fp8_rows_and_cols(dy)
        else:
            dy_rows = dy_cols = quantize_fp8_rows(dy if ctx.needs_input_grad[0] else dy.t())
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _mm(dy_rows, weight_operands(weight, recipe.compute, ctx.dtype)[1], ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = _wgrad(dy_cols, _cols(_replay(source, recipe)[1], recipe.compute), weight)
        return dx, dw, None, None, None


def linear(x: Tensor | Activation, weight: Tensor, recipe: Recipe = RECIPES["bf16"]) -> Tensor:
    """y [..., N] = x [..., K] @ weight [N, K]ᵀ, keeping x as recipe.save says; y has x's dtype.

    An Activation [T, K] brings its own recipe and shares its quantised copies with others that read it.
    ValueError if K differs, or is not a multiple of 32 where x is kept in FP4."""
    values = x.x if isinstance(x, Activation) else x
    _check_call("linear", values, recipe)
    if weight.dim() != 2 or values.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x {list(values.shape)} does not fit weight {list(weight.shape)} ([N, K])")
    if not isinstance(x, Activation):
        x = quantize(values.reshape(math.prod(values.shape[:-1]), values.shape[-1]), recipe)
    source = x.norm if x.rebuild else x.x if x.recipe.save == "bf16" else x.kept
    y = _Linear.apply(x.x, weight, x.recipe, x.read, source)
    return y.view(*values.shape[:-1], len(weight))


class _RouterLinear(torch.autograd.Function):
    """In float32. Tensor cores multiply BF16 exactly and add in float32, and three BF16 hold a float32; x is BF16 as it is. So
    BF16 GEMMs on parts of weight and gradient do it, ten times as fast as float32 units. With numbers for parts, 0 the largest:

        forward  y  [T,3,E] = x . [w2; w0; w1]^T             three summands of y, for whoever reads them to add
        Dgrad    dx [T,H]   = [d0 d0 d1] . [w0; w1; w0]      what is left out is below dx's rounding
        Wgrad    dW [3,E,H] = [d0 d1 d2]^T . x               three summands"""

    @staticmethod
    def forward(ctx, x, weight, norm):
        _save(ctx, weight, norm if norm is not None else x)
        if not _splits(x, weight):
            return (x.to(weight.dtype) @ weight.t())[:, None]
        parts = weight_operands(weight, "parts", x.dtype)[0]
        return torch.mm(x, parts.t(), out_dtype=torch.float32).unflatten(1, (3, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, source = _saved(ctx)
        dy = dy[:, 0]  # each summand's gradient is the sum's
        x = _RMSNorm.apply(*source, set())[0] if isinstance(source, Norm) else source
        if not _splits(x, weight):
            return (dy @ weight).to(x.dtype), dy.t() @ x.to(weight.dtype), None
        E, parts = len(weight), _parts(dy, (0, 0, 1, 2))
        dx = parts[:, :3 * E] @ weight_operands(weight, "parts", x.dtype)[1]
        return dx, torch.mm(parts[:, E:].t(), x, out_dtype=torch.float32).unflatten(0, (3, -1)).sum(0), None


def _splits(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.float32


def _parts(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """BF16 parts of float32 x [M, N], for each entry of order one, beside one another. Part 0 is x rounded, 1 what that leaves, 2
    what both leave: the three add up to x to the last bit, but for the smallest numbers."""
    if _on_gpu(x):
        return kernels.split_float32(x.contiguous(), order)
    parts = []
    for _ in range(3):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1]
    return torch.cat([parts[i] for i in order], 1)


def router_linear(x: Activation, weight: Tensor) -> Tensor:
    """Summands of a router's logits [T, P, E] in weight's dtype (float32): three where BF16 is multiplied, else one. Only their
    sum over P is differentiable. Nothing is quantised; x is not kept but rebuilt from its norm's input."""
    return _RouterLinear.apply(x.x, weight, x.norm)


# -----------------------------------------------------------------------------
# SwiGLU feed-forward layers: experts, and the dense FFN or shared expert as one expert that reads every token

class Groups(NamedTuple):
    """Where each token-expert pair stands once pairs are sorted by expert and every expert is padded to 128 rows.

    Example: ids [[1], [0], [1]], 2 experts -> pair_M = [1, -1 x 127, 0, 2, -1 x 126], row_TK = [[128], [0], [129]],
    offsets = [0, 128, 256], expert = [0, 1], shift = [0, 127]."""
    pair_M: Tensor   # [M] which pair (token * K + slot) a row holds; -1 is padding
    row_TK: Tensor   # [T, K] int32 row of each pair; -1 where the expert is not here
    layout: Tensor | None  # [3, E + 1] int32: offsets, shifts of experts, ends of their pairs; a last 0 in the latter two
    offsets: Tensor  # [E + 1], of layout; rows of expert e: offsets[e] : offsets[e + 1]
    expert: Tensor   # [M / 128] int32 expert of each tile of 128 rows; on a GPU -1 behind the last one's
    shift: Tensor    # [M / 128] int32 h is kept without padding: row m of it is row m - shift[m // 128] there
    num_pairs: int   # rows kept of h: real pairs, on a GPU perhaps fewer than this
    dense: bool = False  # every token once, in its own row: nothing is fanned out or summed, layout is left out

    @property
    def on_gpu(self) -> bool:
        """Whether kernels do all of the following; they read no sizes back, so rows behind offsets[-1] hold anything."""
        return _on_gpu(self.pair_M)

    @property
    def index(self) -> tuple[Tensor, Tensor, int]:
        """What fan-out kernels gather by: pairs, the first row behind the last expert's, pairs a token."""
        return self.pair_M, self.offsets[-1:], self.row_TK.shape[1]

    @property
    def kept(self) -> tuple:
        """All that `regroup` needs to make the others again: 4 bytes a pair, 12 (E + 1) in all."""
        return self.row_TK, self.layout, self.num_pairs

    @property
    def row_P(self) -> Tensor:
        """[P] row of each real pair; to count them waits for a GPU."""
        return (self.pair_M >= 0).nonzero().squeeze(1)

    def take(self, h_M: Tensor) -> Tensor:
        """[P, ..] rows of real pairs."""
        return h_M if self.dense else h_M[self.row_P]

    def put(self, h_P: Tensor) -> Tensor:
        """The inverse of `take`, zeros elsewhere."""
        return h_P if self.dense else h_P.new_zeros(len(self.pair_M), h_P.shape[1]).index_copy_(0, self.row_P, h_P)


def group_rows(ids_TK: Tensor, num_experts: int, num_pairs: int | None = None) -> Groups:
    """ids_TK [T, K] int32 expert of each pair, -1 for none here; num_pairs: how many are not -1, all if not given.

    On a GPU nothing is read back: M has room for num_pairs, every expert padded; pairs beyond that, and of experts that do not
    exist, are left out. On a CPU M and num_pairs are exact."""
    if _on_gpu(ids_TK):
        num_pairs = ids_TK.numel() if num_pairs is None else num_pairs
        num_rows = _room(num_pairs, num_experts)
        pair_M, row_TK, layout, *of_tiles = kernels.group_rows(ids_TK.int(), num_experts, num_rows, num_pairs)
        return Groups(pair_M, row_TK, layout, layout[0], *of_tiles, num_pairs)
    ids = ids_TK.flatten().long()
    if bool((ids >= num_experts).any()):
        raise ValueError(f"expert {ids.max()} does not exist: there are {num_experts}")
    counts_E, nth = count_pairs(ids, num_experts)
    layout = _layout(counts_E)
    row_TK = torch.where(ids < 0, -1, layout[0, ids.clamp(min=0)] + nth).view(ids_TK.shape).int()
    return regroup(row_TK, layout, int(counts_E.sum()))


def count_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [..] int64, of pairs in their order -> how many pairs each expert has, and of each pair how many of its expert's came
    before it. What is no expert counts nowhere."""
    ids = ids.flatten()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    counts = torch.bincount(ids, minlength=num_experts + 1)
    order = torch.sort(ids, stable=True).indices
    first = (counts.cumsum(0) - counts)[ids[order]]
    return counts[:-1], torch.empty_like(ids).index_copy_(0, order, torch.arange(len(ids)) - first)


def _room(num_pairs: int, num_experts: int) -> int:
    """Rows that so many pairs can take, every expert's padded."""
    return (num_pairs + (TILE - 1) * min(num_experts, num_pairs) + TILE - 1) // TILE * TILE


def _layout(counts_E: Tensor) -> Tensor:
    """Groups' layout for so many pairs of each expert."""
    padded = (counts_E + TILE - 1) // TILE * TILE
    offsets, first = (F.pad(n.cumsum(0), (1, 0)) for n in (padded, counts_E))
    return torch.stack([offsets, *(F.pad(n[:-1], (0, 1)) for n in (offsets - first, offsets + F.pad(counts_E, (0, 1))))]).int()


def regroup(row_TK: Tensor, layout: Tensor, num_pairs: int) -> Groups:
    """The Groups of which these are kept."""
    if _on_gpu(row_TK):
        pair_M, expert, shift = kernels.regroup_rows(row_TK, layout, _room(num_pairs, layout.shape[1] - 1))
        return Groups(pair_M, row_TK, layout, layout[0], expert, shift, num_pairs)
    row = row_TK.flatten().long()
    pair_P = (row >= 0).nonzero().squeeze(1)
    pair_M = torch.full((int(layout[0, -1]),), -1).index_copy_(0, row[pair_P], pair_P)
    expert = torch.repeat_interleave(torch.arange(layout.shape[1] - 1), layout[0].diff() // TILE)
    return Groups(pair_M, row_TK, layout, layout[0], expert.int(), layout[1, expert], num_pairs)


def _groups_of_one(T: int, like: Tensor) -> Groups:
    """Of a dense layer: its only expert reads every token. On a GPU tokens that fill no tile are padded as an expert's are."""
    if _on_gpu(like) and T % TILE:
        return group_rows(torch.zeros(T, 1, dtype=torch.int32, device=like.device), 1)
    return _dense_groups(T, like.device)


@functools.cache  # made once: filling them takes four launches
def _dense_groups(T: int, device: torch.device) -> Groups:
    row, zeros = torch.arange(T, device=device, dtype=torch.int32), torch.zeros(-(-T // TILE), device=device, dtype=torch.int32)
    return Groups(row, row[:, None], None, torch.arange(2, device=device, dtype=torch.int32) * T, zeros, zeros, T, dense=True)


def _gather(q: Tensor | Fp8 | Fp4, index_M: Tensor):
    """Rows of q by index; zeros where it is -1, which in a quantised format means the smallest scale, too."""
    if isinstance(q, Fp8):
        scale = q.scale[index_M].masked_fill((index_M < 0)[:, None], 2.0 ** -126)
        return Fp8(_gather(q.data.view(torch.uint8), index_M).view(q.data.dtype), scale)
    if isinstance(q, Fp4):
        return Fp4(_gather(q.data, index_M), _gather(q.scale, index_M))
    if not len(q):
        return q.new_zeros(len(index_M), *q.shape[1:])
    return q[index_M].masked_fill((index_M < 0).view(-1, *[1] * (q.dim() - 1)), 0)


def _fan_out_rows(read: Tensor | Fp8 | Fp4, groups: Groups, compute: str) -> Tensor | Fp8:
    """[M, H], what the expert GEMMs read of x [T, H]: a row for each pair, zeros for padding; FP4 becomes FP8 here."""
    if groups.dense:
        rows = fp4_to_fp8_rows(read) if isinstance(read, Fp4) else read
    elif not groups.on_gpu:
        rows = _gather(read, _token(groups))
        rows = fp4_to_fp8_rows(rows) if isinstance(rows, Fp4) and compute == "fp8" else rows
    elif isinstance(read, Tensor):
        rows = kernels.fan_out_rows(read, *groups.index)
    else:
        fan_out = kernels.fp4_fan_out_rows if isinstance(read, Fp4) else kernels.fp8_fan_out_rows
        rows = Fp8(*fan_out(*read, *groups.index))
    return rows if compute == "fp8" or isinstance(rows, Tensor) else dequantize(rows)


class FannedOut:
    """Rows to be taken once, so that they last no longer than FC1. No list: FSDP2 copies those that modules are called with."""

    def __init__(self, rows: Tensor | Fp8):
        self.rows = rows

    def take(self) -> Tensor | Fp8 | None:
        rows, self.rows = self.rows, None
        return rows


def fan_out(read: Tensor | Fp8 | Fp4, groups: Groups, recipe: Recipe) -> FannedOut | None:
    """What FC1 reads of tokens that arrived, for `experts` to take; None where it quantises them first."""
    if recipe.compute == "fp8" and isinstance(read, Tensor):
        return None
    return FannedOut(_fan_out_rows(read, groups, recipe.compute))


def _fan_out_cols(kept: Tensor | Fp8 | Fp4, groups: Groups, compute: str) -> Tensor | Fp8:
    """[H, M], what Wgrad reads of x [T, H]; in FP8 with a scale for each 128x128 tile."""
    if compute == "bf16":
        return _fan_out_rows(kept, groups, compute).t()
    if groups.dense:
        return _cols(kept, compute)
    kept = quantize_fp8_rows(kept) if isinstance(kept, Tensor) else kept
    if not groups.on_gpu:
        return _cols(_gather(kept, _token(groups)), compute)
    fan_out = kernels.fp4_fan_out_cols if isinstance(kept, Fp4) else kernels.fp8_fan_out_cols
    return Fp8(*fan_out(*kept, *groups.index)[:2])


def _fan_out_both(dy: Tensor | Fp8, groups: Groups, compute: str):
    """Rows and cols of a gradient, from one read where it is FP8, or is quantised here."""
    if groups.dense and compute == "fp8" and isinstance(dy, Tensor):
        return quantize_fp8_rows_and_cols(dy, True)  # one scale a tile
    if not groups.on_gpu or isinstance(dy, Tensor):
        rows = _fan_out_rows(dy, groups, compute)
        return rows, _cols(rows, compute)
    data_t, scale_t, data, scale = kernels.fp8_fan_out_cols(*dy, *groups.index, rows=True)
    return Fp8(data, scale), Fp8(data_t, scale_t)


def _sum_rows(y_MH: Tensor, groups: Groups) -> Tensor:
    return y_MH if groups.dense else sum_rows(y_MH, groups.row_TK)


def sum_rows(y_MH: Tensor | Fp8, row_TK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[T, H] of y's dtype, or dtype: each token's rows (-1: none) summed in float32 or wider, slot by slot, so that every run
    adds in the same order."""
    y, scale = y_MH if isinstance(y_MH, Fp8) else (y_MH, None)
    if _on_gpu(y) and (scale is not None or y.dtype in (torch.bfloat16, torch.float32)):
        return kernels.sum_rows(y, row_TK, scale, dtype)
    y = y if scale is None else dequantize(y_MH)
    total = y.new_zeros(len(row_TK), y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for row_T in row_TK.t():
        total += _gather(y, row_T)
    return total.to(dtype or y.dtype)


def _wide(h: Tensor | Fp8 | Fp4) -> Tensor:
    return h.to(torch.promote_types(h.dtype, torch.float32)) if isinstance(h, Tensor) else dequantize(h)


def swiglu(gate: Tensor, up: Tensor, p: Tensor) -> Tensor:
    return F.silu(gate) * up * p


def swiglu_gradients(da: Tensor, gate: Tensor, up: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and p [.., 1]."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = da * up * p * (sigmoid + silu * (1 - sigmoid))
    return dgate, da * silu * p, (da * silu * up).sum(-1, keepdim=True)


def _fuses(like: Tensor, recipe: Recipe) -> bool:
    """Whether the SwiGLU kernels take a layer: bfloat16 on a GPU, h in a format they know. Of any width: see _fills."""
    return _on_gpu(like) and like.dtype == torch.bfloat16 and (recipe.compute == "fp8" or recipe.save_h == "bf16")


def _fills(w2: Tensor, like: Tensor, recipe: Recipe):
    """What brings w13 and w2 to whole tiles of the width between them, for kernels that want those: see weight_operands."""
    return (_fill_w13, _fill_w2) if w2.shape[-1] % TILE and _fuses(like, recipe) else (None, None)


def _fill_w13(w13: Tensor) -> Tensor:
    """Zeros behind the gate's rows and behind up's, whose h and gradients are zeros then."""
    return F.pad(w13.unflatten(-2, (2, -1)), (0, 0, 0, -(w13.shape[-2] // 2) % TILE)).flatten(-3, -2)


def _fill_w2(w2: Tensor) -> Tensor:
    return F.pad(w2, (0, -w2.shape[-1] % TILE))


def _unfilled(cols: Tensor | Fp8, width: int, parts: int):
    """Cols [parts * I', M] as Wgrad reads them, without the rows that were filled in: [parts * width, M]."""
    if isinstance(cols, Tensor):  # its rows are what lies together
        return cols.t().unflatten(1, (parts, -1))[..., :width].flatten(1).t()
    return Fp8(*(q.unflatten(0, (parts, -1))[:, :width].flatten(0, 1) for q in cols))


def _swiglu_forward(h_M: Tensor, weights_TK: Tensor, groups: Groups, recipe: Recipe):
    """h [M, 2I] -> a as FC2 reads it, and h as it is kept: one fused step, float32 in between. Kept are the rows of real pairs;
    where h stays BF16, the kernels' h with its padding, for a copy would cost more than that."""
    if _fuses(h_M, recipe):
        p, end = weights_TK.float().contiguous(), groups.offsets[-1:]
        if recipe.compute == "bf16":
            return kernels.swiglu_bf16(h_M, p, groups.pair_M, end), h_M
        data, scale, *kept = kernels.swiglu(h_M, p, groups.pair_M, groups.shift, end, groups.num_pairs, recipe.save_h)
        return Fp8(data, scale), {"bf16": lambda *_: h_M, "fp8": Fp8, "fp4": Fp4}[recipe.save_h](*kept)
    a = swiglu(*_wide(h_M).chunk(2, -1), _gate(weights_TK, groups))
    a_read = quantize_fp8_rows(a) if recipe.compute == "fp8" else a.to(h_M.dtype)
    return a_read, narrow(groups.take(h_M), recipe.save_h)


def _rebuilt(h_M: Tensor, groups: Groups, recipe: Recipe) -> Tensor:
    """h that was not kept but computed again, as _swiglu_backward takes it."""
    return h_M if _fuses(h_M, recipe) else groups.take(h_M)


def _swiglu_backward(da_M: Tensor, h_kept, weights_TK: Tensor, groups: Groups, recipe: Recipe):
    """da [M, I], kept h -> dh rows, dh cols, a cols, and summands [M, ..] of the gradient of each gate weight: one fused step."""
    if _fuses(da_M, recipe):
        p, end = weights_TK.float().contiguous(), groups.offsets[-1:]
        if recipe.compute == "bf16":
            dh, a, dp = kernels.swiglu_backward_bf16(da_M, h_kept, p, groups.pair_M, end)
            return dh, dh.t(), a.t(), dp
        h = h_kept if isinstance(h_kept, Fp8 | Fp4) else (h_kept, None)
        *codes, dp = kernels.swiglu_backward(da_M, p, groups.pair_M, groups.shift, end, *h)
        return *(Fp8(*codes[i:i + 2]) for i in (0, 2, 4)), dp
    p_M, (gate, up) = _gate(weights_TK, groups), groups.put(_wide(h_kept)).chunk(2, -1)
    dgate, dup, dp_M = swiglu_gradients(_wide(da_M), gate, up, p_M)
    dh, a = torch.cat([dgate, dup], -1).to(da_M.dtype), swiglu(gate, up, p_M).to(da_M.dtype)
    if recipe.compute == "fp8":
        return quantize_fp8_rows(dh), quantize_fp8_rows(dh.t()), quantize_fp8_rows(a.t()), dp_M
    return dh, dh.t(), a.t(), dp_M


def _of_pairs(parts_MN: Tensor, like_TK: Tensor, groups: Groups) -> Tensor:
    """Summands of a number of each row -> their sum for each pair [T, K], 0 where the expert is not here."""
    if groups.on_gpu and parts_MN.dtype == torch.float32:
        return kernels.sum_parts(parts_MN, groups.row_TK).to(like_TK.dtype)
    return _gather(parts_MN.sum(1), groups.row_TK.flatten()).view_as(like_TK).to(like_TK.dtype)


def _expert_operands(weight: Tensor, recipe: Recipe, dtype: torch.dtype, fill: Callable[[Tensor], Tensor] | None):
    """weight_operands with an expert axis, also where the layer is dense and its weight has none."""
    both = weight_operands(weight, recipe.compute, dtype, fill)
    if weight.dim() == 3:
        return both
    return [Fp8(q.data[None], q.scale[None]) if isinstance(q, Fp8) else q[None] for q in both]


class _SwiGLU(torch.autograd.Function):
    """Forward: fan out, unless dispatch did, FC1, SwiGLU, FC2, sum. Keeps x (source) before fan-out, h (unless recomputed), rows
    of pairs and weights.

    The other routing maps are made again in backward: that costs one small launch, keeping them 4 bytes a row. What is `dense`
    has none of its own, and is kept as it is."""

    @staticmethod
    def forward(ctx, x, weights_TK, w13, w2, groups, recipe, read, source, recompute, depart, fanned_out):
        ctx.recipe, ctx.dtype, ctx.depart, ctx.dense = recipe, x.dtype, depart, groups if groups.dense else None
        fill_w13, fill_w2 = _fills(w2, x, recipe)
        # h in full is freed here, unless it is what is kept: nothing else refers to it
        a_M, h_kept = _swiglu_forward(
            _SwiGLU.fc1(read, w13, groups, recipe, x.dtype, fill_w13, fanned_out), weights_TK, groups, recipe)
        _save(ctx, weights_TK, w13, w2, None if groups.dense else groups.kept, source, None if recompute else h_kept)
        del h_kept
        return _sum_rows(_grouped_mm(a_M, _expert_operands(w2, recipe, x.dtype, fill_w2)[0], groups, x.dtype), groups)

    @staticmethod
    def fc1(read, w13, groups, recipe, dtype, fill, fanned_out=None):
        x_M = fanned_out.take() if fanned_out is not None else None
        if x_M is None:
            x_M = _fan_out_rows(read, groups, recipe.compute)
        return _grouped_mm(x_M, _expert_operands(w13, recipe, dtype, fill)[0], groups, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        recipe, dtype = ctx.recipe, ctx.dtype
        weights_TK, w13, w2, groups, source, h_kept = _saved(ctx)
        groups, (fill_w13, fill_w2) = ctx.dense or regroup(*groups), _fills(w2, dy, recipe)
        read, kept = _replay(source, recipe)
        if h_kept is None:
            h_kept = _rebuilt(_SwiGLU.fc1(read, w13, groups, recipe, dtype, fill_w13), groups, recipe)
        if not groups.dense or getattr(dy, "wire", None) is not None:
            dy = _received_gradient(dy, recipe)
        dy_rows, dy_cols = _fan_out_both(dy, groups, recipe.compute)
        da_M = _grouped_mm(dy_rows, _expert_operands(w2, recipe, dtype, fill_w2)[1], groups, dtype)
        del dy_rows
        dh_rows, dh_cols, a_cols, dp_MN = _swiglu_backward(da_M, h_kept, weights_TK, groups, recipe)
        if fill_w13:
            dh_cols, a_cols = (_unfilled(cols, w2.shape[-1], n) for cols, n in ((dh_cols, 2), (a_cols, 1)))
        dx = dw13 = dw2 = dweights_TK = None
        if ctx.needs_input_grad[1] or ctx.depart is not None:
            dweights_TK = _of_pairs(dp_MN, weights_TK, groups)
        if ctx.needs_input_grad[3]:
            dw2 = _grouped_wgrad(dy_cols, a_cols, groups, w2)
        del da_M, h_kept, dy_cols, a_cols
        if ctx.needs_input_grad[0]:
            dx = _sum_rows(_grouped_mm(dh_rows, _expert_operands(w13, recipe, dtype, fill_w13)[1], groups, dtype), groups)
            if ctx.depart is not None:
                ctx.depart(dx, dweights_TK)
        if ctx.needs_input_grad[2]:
            dw13 = _grouped_wgrad(dh_cols, _fan_out_cols(kept, groups, recipe.compute), groups, w13)
        return dx, dweights_TK, dw13, dw2, *[None] * 7


def _token(groups: Groups) -> Tensor:
    """[M] token of each row, -1 for padding."""
    return torch.div(groups.pair_M, max(groups.row_TK.shape[1], 1), rounding_mode="floor")


def _gate(weights_TK: Tensor, groups: Groups) -> Tensor:
    """[M, 1] gate weight of each row, 0 for padding."""
    return _gather(weights_TK.flatten(), groups.pair_M)[:, None]


def _received_gradient(dy: Tensor, recipe: Recipe):
    """dy as it came over the wire, or quantised here if it came in full: the only cast in an expert layer's backward."""
    wire = getattr(dy, "wire", None)
    if wire is not None:
        return wire if recipe.compute == "fp8" else dequantize(wire, dy.dtype)
    return quantize_fp8_rows(dy) if recipe.compute == "fp8" else dy


def carrier(like: Tensor, wire: Fp8 | None = None) -> Tensor:
    """A tensor of like's shape and no memory that stands in autograd's graph for one that travels in few bits.

    Autograd wants floating-point tensors of the right shape on its edges; the bits go beside it (forward: as further outputs;
    backward: as the attribute `wire`). It reads as NaN, so whoever takes it for the data finds out at once."""
    stand_in = constant(math.nan, like.dtype, like.device).expand(like.shape)
    stand_in.wire = wire
    return stand_in


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar made once, not to be written to: filling one takes a launch."""
    with torch.inference_mode(False):  # autograd does not save what was made there
        return torch.full((), value, dtype=dtype, device=device)


def takes_wire(y: Tensor) -> bool:
    """Whether y comes from `experts` (or `mlp`), whose backward reads a carrier's `wire`; others need a gradient in full."""
    return isinstance(y.grad_fn, _SwiGLU._backward_cls)


def mlp(x: Activation, w13: Tensor, w2: Tensor, recompute: bool = False) -> Tensor:
    """Dense SwiGLU feed-forward: x [T, H], w13 [2I, H] (gate rows first), w2 [H, I] -> [T, H]. Keeps x and h.

    recompute: keeps no h, and replays from the norm's input what forward did."""
    width, twice = x.x.shape[-1], w13.shape[0]
    if x.x.dim() != 2 or w13.shape != (twice, width) or twice % 2 or w2.shape != (width, twice // 2):
        shapes = ", ".join(str(list(t.shape)) for t in (x.x, w13, w2))
        raise ValueError(f"mlp takes x [T, H], w13 [2I, H], w2 [H, I]; got {shapes}")
    source = x.norm if x.norm is not None and (x.rebuild or recompute) else x.read if recompute else x.kept
    ones = constant(1.0, torch.float32, x.x.device).expand(len(x.x), 1)  # no memory: only the shape is kept
    return _SwiGLU.apply(x.x, ones, w13, w2, _groups_of_one(len(x.x), x.x), x.recipe, x.read, source, recompute, None, None)


def experts(x: Tensor, ids: Tensor | Groups, weights: Tensor, w13: Tensor, w2: Tensor, recipe: Recipe = RECIPES["bf16"],
            payload: Fp8 | Fp4 | None = None, recompute: bool = False, num_pairs: int | None = None,
            depart: Callable[[Tensor, Tensor], None] | None = None, fanned_out: FannedOut | None = None) -> Tensor:
    """y [T, H]: for each token the sum over its experts of weight * FFN(x), FFN(x) = w2 (silu(w_gate x) * (w_up x)).

    x [T, H]; ids [T, K] in 0..E-1, or -1 for none, or the Groups of such; weights [T, K] float32; w13 [E, 2I, H] (gate rows
    first), w2 [E, H, I].
    payload: x as it came over the wire, which is then what experts read (x only carries the gradient, see `carrier`);
    without one x is brought to the wire's format here, so that codes do not depend on where tokens come from.
    recompute: h is not kept but rebuilt, in full, by one FC1 GEMM from the bits that forward read, which are then what is kept
    of x, also where `save` is narrower. num_pairs: how many ids are not -1, where the caller knows; on a GPU memory is laid out
    for that many, or for all; Groups know themselves. depart: called in backward with the gradients of x and weights as soon as
    they are there, before that of w13; then x and weights must have no other reader. fanned_out: of `fan_out`, which is done here
    where there is none. ValueError for shapes that do not fit.
    """
    _check_call("experts", x, recipe)
    _check_experts(x, ids, weights, w13, w2)
    if payload is None and recipe.dispatch != "bf16":
        payload = quantize(x, Recipe(), wire=recipe.dispatch).format(recipe.dispatch)
    if payload is not None:
        read, kept = payload, narrow(payload, recipe.save)
    else:
        activation = quantize(x, recipe)
        read, kept = activation.read, x if recipe.save == "bf16" else activation.kept
    groups = ids if isinstance(ids, Groups) else group_rows(ids, len(w13), num_pairs)
    return _SwiGLU.apply(x, weights, w13, w2, groups, recipe, read, read if recompute else kept, recompute, depart,
                         fanned_out)


def _check_call(name: str, x: Tensor, recipe: Recipe):
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name} takes a quant.Recipe, such as quant.RECIPES['mxfp4']; got {recipe!r}")
    if not x.is_floating_point():
        raise ValueError(f"{name} takes floating-point values; got {x.dtype}")


def _check_experts(x, ids, weights, w13, w2):
    width, num_experts = x.shape[-1], w13.shape[0]
    if isinstance(ids, Groups):
        if ids.layout.shape[1] != num_experts + 1:
            raise ValueError(f"experts takes Groups of as many experts as there are weights; got {ids.layout.shape[1] - 1}"
                             f" and w13 {list(w13.shape)}")
        ids = ids.row_TK
    fits = (x.dim() == 2 and w13.dim() == 3 and ids.shape == weights.shape and ids.dim() == 2 and len(ids) == len(x)
            and w13.shape[2] == width and w13.shape[1] % 2 == 0 and w2.shape == (num_experts, width, w13.shape[1] // 2))
    if not fits:
        named = {"x": x, "ids": ids, "weights": weights, "w13": w13, "w2": w2}
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in named.items())
        raise ValueError(f"experts takes x [T, H], ids and weights [T, K], w13 [E, 2I, H], w2 [E, H, I]; got {shapes}")


# -----------------------------------------------------------------------------
# the loss: nothing is quantised, but on a GPU a kernel spares the float32 logits

def token_losses(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropies [T], 0 where a target is -100, and log-sum-exps [T], in at least float32."""
    if _on_gpu(logits_TV) and logits_TV.dtype == torch.bfloat16:
        return kernels.token_losses(logits_TV.contiguous(), targets_T)
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    lse_T = wide.logsumexp(-1)
    return F.nll_loss(wide - lse_T[:, None], targets_T, reduction="none", ignore_index=-100), lse_T


def logit_gradients(logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, dloss: Tensor) -> Tensor:
    """Gradients of the sum of token_losses, times dloss [], in logits' dtype; the logits may be overwritten."""
    if _on_gpu(logits_TV) and logits_TV.dtype == torch.bfloat16:
        return kernels.logit_gradients(logits_TV.contiguous(), targets_T, lse_T, dloss)
    d = (logits_TV.to(lse_T.dtype) - lse_T[:, None]).exp_()
    valid_T = targets_T != -100
    d.scatter_add_(1, targets_T.clamp(min=0)[:, None], -valid_T.to(d.dtype)[:, None])
    return (d * (dloss * valid_T)[:, None]).to(logits_TV.dtype)


# -----------------------------------------------------------------------------
# diagnostics: what quantisation does to each tensor. Nothing above knows of it, so nothing is spent where it is not asked for

@contextlib.contextmanager
def replaced(owner, **functions):
    """Functions of a module, or static methods of a class, replaced for a while."""
    before = {name: vars(owner)[name] for name in functions}
    try:
        for name, f in functions.items():
            setattr(owner, name, staticmethod(f) if isinstance(owner, type) else f)
        yield
    finally:
        for name, f in before.items():
            setattr(owner, name, f)


class Diagnosis:
    """Inside `watching`, of each tensor that is quantised: signal-to-noise, nonzero values that became zero, and values beyond
    the largest code; of MXFP4, 1x128 and 128x128 tiles whose block exponents spread by more than 14, where FP8 stops being
    exact; of FP8 rows turned into cols, codes that the shift rounds to zero.

    names: {data_ptr: name} of weights. A tensor is called "<weight> x" (a norm's output by the norm's weight), "dy", "weight",
    and of a feed-forward layer "a", "h", "dh"; "wire" is what travels to or from experts. Those of one name are added up.
    Fused kernels do not let go of what they quantise, so meanwhile norms and SwiGLU run unfused: slower, and rounded alike."""

    def __init__(self, names: dict[int, str] | None = None):
        self.names, self.labels, self.sums, self.inside, self.turning = names or {}, [], {}, False, False

    @contextlib.contextmanager
    def watching(self):
        here, unfused = globals(), lambda *_: False
        quantisers = {name: self._quantiser(name, here[name]) for name in (
            "quantize_fp8_rows", "quantize_fp4_rows", "quantize_fp8_fp4_rows", "quantize_fp8_rows_and_cols",
            "quantize_fp8_blocks", "quantize_fp8_weight", "fp8_to_fp4")}
        of_weight = lambda x, weight, *_: f"{self.name(weight)} x"
        named = {"rms_norm": of_weight, "linear": of_weight,
                 "narrow": lambda *_: f"{self.layer} h" if self.labels else "experts x"}
        named = {name: self._labelled(here[name], label) for name, label in named.items()}
        swiglu = {"_swiglu_forward": self._labelled(self._without_padding(_swiglu_forward), lambda *_: f"{self.layer} a"),
                  "_swiglu_backward": self._labelled(self._without_padding(_swiglu_backward), lambda *_: iter(
                      [f"{self.layer} {part}" for part in ("dh", "dh cols", "a cols")]))}
        cols = {name: self._turned(name, here[name]) for name in ("_cols", "_fan_out_cols", "_fan_out_both")}
        layer = lambda w13: self.name(w13).removesuffix(".w13")
        new_epoch()  # so that weights are quantised here
        with contextlib.ExitStack() as stack:
            enter = lambda owner, **functions: stack.enter_context(replaced(owner, **functions))
            enter(_Linear, backward=self._labelled(_Linear.backward, lambda ctx, _: f"{self.name(_saved(ctx)[0])} dy"))
            enter(_SwiGLU, forward=self._labelled(_SwiGLU.forward, lambda _, x, p, w13, *__: f"{layer(w13)} x"),
                  backward=self._labelled(_SwiGLU.backward, lambda ctx, _: f"{layer(_saved(ctx)[1])} dy"))
            enter(sys.modules[__name__], **quantisers, **named, **swiglu, **cols, _fuses=unfused, _norm_fuses=unfused)
            yield self

    def name(self, weight: Tensor) -> str:
        return self.names.get(weight.data_ptr(), "linear" if weight.dim() == 2 else "norm" if weight.dim() == 1 else "experts")

    @property
    def layer(self) -> str:
        """The tensor quantised now, less its last word: which layer that is in."""
        return self.labels[-1].rpartition(" ")[0]

    def _labelled(self, f, label):
        def labelled(*args, **options):
            self.labels.append(label(*args))
            try:
                return f(*args, **options)
            finally:
                self.labels.pop()

        return labelled

    def _without_padding(self, swiglu):
        """On a GPU rows without a pair may hold anything; they are no part of a tensor."""
        def without_padding(x_M, *args):
            padding_M = next(groups for groups in args if isinstance(groups, Groups)).pair_M < 0
            return swiglu(x_M.masked_fill(padding_M[:, None], 0), *args)

        return without_padding

    def _quantiser(self, name, f):
        def quantiser(x, *args, **options):
            if self.inside:
                return f(x, *args, **options)
            self.inside = True
            try:
                result = f(x, *args, **options)
            finally:
                self.inside = False
            label = self.labels[-1] if self.labels else "wire"
            if name == "quantize_fp8_weight":
                label, made = f"{self.name(x)} weight", result[:1]  # the other is its transpose
            else:
                label, made = label if isinstance(label, str) else next(label), result
            values = x if isinstance(x, Tensor) else dequantize(x)
            if name == "quantize_fp8_rows_and_cols":
                self.compare(f"{label} cols", values.t(), result[1])
                made = result[:1]
            for q in [made] if isinstance(made, Fp8 | Fp4) else made:
                self.compare(label, values, q)
            return result

        return quantiser

    def _turned(self, name, f):
        """Of rows that become cols after f has fanned them out."""
        def turned(q, *args):
            outermost = not self.turning and args[-1] == "fp8"
            self.turning |= outermost
            if outermost and name != "_fan_out_both":
                self.labels.append(f"{self.layer} x")
            try:
                if outermost and not isinstance(q, Tensor):
                    groups = args[0] if isinstance(args[0], Groups) else None
                    self.turn(f"{self.labels[-1]} cols", q if groups is None or groups.dense else _gather(q, _token(groups)))
                return f(q, *args)
            finally:
                if outermost and name != "_fan_out_both":
                    self.labels.pop()
                self.turning &= not outermost

        return turned

    def add(self, name: str, **numbers: Tensor | int):
        sums = self.sums.setdefault(name, {})
        for key, number in numbers.items():
            sums[key] = sums.get(key, 0) + number

    @torch.no_grad()
    def compare(self, label: str, x: Tensor, q: Fp8 | Fp4):
        """x and the codes that were made of it."""
        x, y = x.float(), dequantize(q)
        if isinstance(q, Fp4):
            top = (torch.stack([q.data & 7, q.data >> 4 & 7], -1).flatten(-2)) == 7
            self.spread(f"{label}, fp4", _tiles(q.scale.int(), TILE // BLOCK), (-1,), "row_tiles")
        else:
            top = (q.data.view(torch.uint8) & 0x7F) == 0x7E
        self.add(f"{label}, {'fp4' if isinstance(q, Fp4) else 'fp8'}", signal=x.square().sum(dtype=torch.float64),
                 noise=(x - y).square().sum(dtype=torch.float64), nonzero=(x != 0).sum(),
                 zero=((x != 0) & (y == 0)).sum(), saturated=(top & (x.abs() > y.abs())).sum())

    @torch.no_grad()
    def turn(self, label: str, q: Fp8 | Fp4):
        """Rows of which one scale a 128x128 tile is made."""
        if isinstance(q, Fp4):
            tiles = _tiles(_tiles(q.scale.int(), TILE // BLOCK), TILE, -3)
            return self.spread(f"{label}, fp4", tiles, (-3, -1), "tiles")
        e = _exponent(q.scale)
        top = (_tiles(e + 127, TILE, -2).amax(-2) - 127).repeat_interleave(TILE, 0)[:len(e)]
        shift = (e - top).clamp(min=-126).repeat_interleave(TILE, 1)[:, :q.data.shape[1]]
        value = _decode_fp8(q.data).abs()
        lost = (value > 0) & (value * _pow2(shift) <= 2.0 ** -10)  # half the least code; a tie goes to zero
        self.add(f"{label}, fp8", codes=(value > 0).sum(), shifted_to_zero=lost.sum())

    def spread(self, label: str, bytes_: Tensor, dims: tuple[int, ...], what: str):
        """Counts tiles, and those whose block exponents spread by more than 14; blocks of zeros have none, nor has NaN."""
        top, least = bytes_.amax(dims), bytes_.masked_fill(bytes_ == 0, 255).amin(dims)
        self.add(label, **{what: (top > 0).sum(), f"wide_{what}": ((top - least > 14) & (top < 255)).sum()})

    def report(self) -> dict[str, dict[str, float | None]]:
        """By tensor and format: snr_db (None: exact, or not finite), and the shares `zero` and `saturated` of nonzero values,
        `wide_row_tiles` and `wide_tiles` of tiles, `shifted_to_zero` of nonzero codes."""
        table, share_of = {}, {"zero": "nonzero", "saturated": "nonzero", "wide_row_tiles": "row_tiles", "wide_tiles": "tiles",
                               "shifted_to_zero": "codes"}
        for name, sums in self.sums.items():
            sums = {key: float(number) for key, number in sums.items()}
            row = table[name] = {}
            if "noise" in sums:
                ratio = sums["signal"] / sums["noise"] if sums["noise"] else 0.0
                row["snr_db"] = 10 * math.log10(ratio) if 0 < ratio < math.inf else None
            row |= {key: sums[key] / max(sums[whole], 1) for key, whole in share_of.items() if key in sums}
        return table
