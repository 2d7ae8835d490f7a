"""
A DeepSeek-like language model: multi-head latent attention (MLA) and a mixture of experts (MoE), read top to bottom.

A token's way: embedding -> n_layers times [x += attention(norm(x)); x += feed-forward(norm(x))] -> norm -> head -> loss. The
first layers' feed-forward is dense; in the others a router sends each token to top_k of n_experts, beside a shared expert
that sees every token. The residual stream, norms, attention itself, router, embedding and head stay in BF16 or FP32; every
linear and expert in between goes through quant.py, which alone knows about FP8 and FP4.

What backward needs is chosen by hand, not left to autograd. A layer keeps, per token: the residual before each
of its two norms; the latents c_q, c_kv and the shared rope key; q, k, v; the attention output; the normed inputs in the
format `save` names; what experts received; and FC1's outputs. `recompute` gives some of these up for arithmetic.
`kept_bytes` computes the whole table for any configuration.

Experts live behind two functions, `dispatch` and `combine`: the seam where ranks, or another transport, come in. On one rank
tokens do not move, but they change format all the same, so that what experts read does not depend on the number of ranks.

Shape suffixes: B batch, S sequence, T = B*S tokens, H hidden, A attention heads, D head width (N without position, R rope,
V value), L latent, E experts, K top-k, G expert groups, I expert width, Vo vocabulary,
R expert-parallel ranks, N tokens received.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import quant
from quant import RECIPES, Activation, Recipe

aten = torch.ops.aten
RECOMPUTE_SCOPES = ("norm", "mla_up", "attn", "mlp", "moe")


class Gate(NamedTuple):
    """How a router's logits become gate weights."""
    score: Callable[[Tensor], Tensor]  # logits [T, E] -> scores, what experts are chosen by and weighed with
    renormalise: bool                  # the weights of the chosen are made to sum to 1, before route_scale
    balanced: bool                     # a bias that follows the loads takes part in the choice, never in the weights


GATES = {"sigmoid": Gate(torch.sigmoid, True, True), "softmax": Gate(functools.partial(torch.softmax, dim=-1), False, False)}


# -----------------------------------------------------------------------------
# configuration

@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 384        # rows of embedding and head, at least the tokenizer's n_vocab
    n_layers: int = 3            # transformer layers, MTP not counted
    n_dense: int = 1             # how many of the first layers have a dense feed-forward
    hidden: int = 128            # width of the residual stream
    dense_width: int = 256       # inner width of the dense feed-forward
    n_heads: int = 2             # attention heads
    nope_dim: int = 128          # width of a head's query and key that carries no position
    rope_dim: int = 128          # width of a head's query, and of the shared key, that is rotated
    v_dim: int = 256             # width of a head's value
    q_lora: int = 128            # width of the query latent; 0: queries come straight from the hidden state
    kv_lora: int = 128           # width of the key-value latent
    n_experts: int = 8           # routed experts
    n_shared: int = 1            # shared experts, one feed-forward of n_shared * expert_width
    top_k: int = 2               # experts a token
    expert_width: int = 128      # inner width of one expert
    n_groups: int = 1            # groups of experts
    top_groups: int = 1          # groups a token may choose experts from
    group_score: str = "top2"    # a group's score: sum of its two best experts (top2), or its best (max)
    gate: str = "sigmoid"        # sigmoid (with a balance bias, weights renormalised) | softmax (neither): a name in GATES
    route_scale: float = 1.0     # factor of the gate weights
    balance_rate: float = 0.001  # u: step of the balance bias, sigmoid gates only
    balance_alpha: float = 1e-4  # weight of the sequence-wise balance loss
    mtp: bool = False            # one extra depth that predicts the token after the next
    mtp_weight: float = 0.3      # weight of its loss
    max_seq_len: int = 4096      # longest sequence
    rope_base: float = 1e4       # base of the rotary frequencies
    yarn_factor: float = 1.0     # YaRN: context extension; 1 is off
    yarn_origin: int = 4096      # YaRN: context before extension
    yarn_beta_fast: float = 32   # YaRN: dimensions that turn more often than this keep their frequency
    yarn_beta_slow: float = 1    # YaRN: dimensions that turn less often than this are stretched by the factor
    yarn_mscale: float = 1.0     # YaRN: the softmax scale grows by (0.1 * mscale * ln(factor) + 1)^2
    norm_eps: float = 1e-6       # added to the mean square in every norm
    init_std: float = 0.006      # standard deviation of initial weights

    def __post_init__(self):
        for field in fields(self):
            value, kinds = getattr(self, field.name), ("float", "int") if field.type == "float" else (field.type,)
            if type(value).__name__ not in kinds:
                raise ValueError(f"model configuration: {field.name} is {value!r}, which is no {field.type}")
            if field.type == "float" and not math.isfinite(value):
                raise ValueError(f"model configuration: {field.name} is {value}, which is no finite number")
        groups, best = max(self.n_groups, 1), 2 if self.group_score == "top2" else 1
        positive = ("vocab_size", "n_layers", "hidden", "dense_width", "n_heads", "nope_dim", "rope_dim", "v_dim", "kv_lora",
                    "n_experts", "top_k", "expert_width", "n_groups", "top_groups", "max_seq_len", "yarn_origin", "rope_base")
        not_negative = ("q_lora", "n_shared", "norm_eps", "init_std", "balance_rate", "balance_alpha", "mtp_weight")
        rules = {
            **{f"{name} is positive": getattr(self, name) > 0 for name in positive},
            **{f"{name} is not negative": getattr(self, name) >= 0 for name in not_negative},
            "n_dense is at most n_layers": 0 <= self.n_dense <= self.n_layers,
            "rope_dim is even": self.rope_dim % 2 == 0,
            f"gate is {' or '.join(GATES)}": self.gate in GATES,
            "group_score is top2 or max": self.group_score in ("top2", "max"),
            "n_groups divides n_experts": self.n_experts % groups == 0,
            "top_groups is at most n_groups": self.top_groups <= groups,
            "top_k is at most top_groups * n_experts / n_groups": self.top_k <= self.top_groups * self.n_experts // groups,
            "group_score=top2 needs n_experts of at least 2 * n_groups": groups == 1 or self.n_experts // groups >= best,
            "yarn_factor is at least 1": self.yarn_factor >= 1,
        }
        for rule, holds in rules.items():
            if not holds:
                named = [f.name for f in fields(self) if re.search(rf"\b{f.name}\b", rule)]
                have = ", ".join(f"{name}={getattr(self, name)}" for name in named)
                raise ValueError(f"model configuration: it must hold that {rule}; got {have}")

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def n_moe(self) -> int:
        return self.n_layers - self.n_dense


_DEEPSEEK = dict(nope_dim=128, rope_dim=64, v_dim=128, kv_lora=512)

PRESETS = {
    "tiny": ModelConfig(init_std=0.08),
    "small": ModelConfig(
        n_layers=8, hidden=768, dense_width=2048, n_heads=6, nope_dim=128, rope_dim=64, v_dim=128, q_lora=384, kv_lora=256,
        n_experts=64, n_shared=1, top_k=6, expert_width=256, route_scale=2.5, init_std=0.02),
    "v2-lite": ModelConfig(
        **_DEEPSEEK, vocab_size=102400, n_layers=27, hidden=2048, dense_width=10944, n_heads=16, q_lora=0,
        n_experts=64, n_shared=2, top_k=6, expert_width=1408, gate="softmax", group_score="max", yarn_mscale=0.707),
    "v2": ModelConfig(
        **_DEEPSEEK, vocab_size=102400, n_layers=60, hidden=5120, dense_width=12288, n_heads=128, q_lora=1536,
        n_experts=160, n_shared=2, top_k=6, expert_width=1536, n_groups=8, top_groups=3, gate="softmax", group_score="max",
        route_scale=16.0, yarn_mscale=0.707),
    "v3": ModelConfig(
        **_DEEPSEEK, vocab_size=129280, n_layers=61, n_dense=3, hidden=7168, dense_width=18432, n_heads=128, q_lora=1536,
        n_experts=256, n_shared=1, top_k=8, expert_width=2048, n_groups=8, top_groups=4, route_scale=2.5),
}


def check_recipe(config: ModelConfig, recipe: Recipe):
    """ValueError where the recipe keeps or sends in MXFP4 what its blocks of 32 do not divide."""
    multiples = {}  # h is gate and up, twice as wide as its name
    if "fp4" in (recipe.save, recipe.dispatch):
        multiples |= dict.fromkeys(("hidden", "q_lora", "kv_lora"), quant.BLOCK)
    if recipe.save_h == "fp4":
        multiples |= dict.fromkeys(("dense_width",) * (config.n_dense > 0) + ("expert_width",), quant.BLOCK // 2)
    for name, multiple in multiples.items():
        if getattr(config, name) % multiple:
            raise ValueError(f"with {recipe} the model's {name} must be a multiple of {multiple}, for MXFP4's blocks;"
                             f" {name} is {getattr(config, name)}")


# -----------------------------------------------------------------------------
# rotary position

def rope_table(config: ModelConfig, length: int, device) -> Tensor:
    """Cosines and sines [2, S, R/2] of positions 0..length-1, float32; with YaRN's stretched frequencies where it is on."""
    share = torch.arange(0, config.rope_dim, 2, device=device, dtype=torch.float32) / config.rope_dim
    frequency = config.rope_base ** -share
    if config.yarn_factor > 1:  # arXiv 2309.00071, §3.2
        turning = lambda turns: (config.rope_dim * math.log(config.yarn_origin / (turns * 2 * math.pi))
                                 / (2 * math.log(config.rope_base)))  # the dimension that turns so often in yarn_origin
        low = max(math.floor(turning(config.yarn_beta_fast)), 0)
        high = min(math.ceil(turning(config.yarn_beta_slow)), config.rope_dim - 1)
        ramp = (torch.arange(len(share), device=device, dtype=torch.float32) - low) / max(high - low, 0.001)
        stretched = ramp.clamp(0, 1)
        frequency = frequency * (1 - stretched + stretched / config.yarn_factor)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [B, S, A, R] by the table's angles [2, S, R/2]; float32 inside, x's dtype out."""
    cos, sin = table[:, :, None]
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


# -----------------------------------------------------------------------------
# multi-head latent attention

class Pass(NamedTuple):
    """What is the same for every layer of one forward pass."""
    batch: int
    rope: Tensor          # cosines and sines of every position, cached ones included
    recipe: Recipe
    recompute: frozenset


def replayed(again: bool, f, *args):
    """f(*args), and where `again`, computed a second time in backward instead of keeping what is inside."""
    return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=False) if again else f(*args)


def heads(q_TD: Tensor | None, kv_TD: Tensor, k_rope: Tensor, run: Pass, c: ModelConfig) -> tuple[Tensor | None, Tensor, Tensor]:
    """q_TD [T, A*(N+R)], kv_TD [T, A*(N+V)], k_rope [T, R] -> what attention reads: q, k [B, S, A, N+R], v [B, S, A, V].

    Queries are rotated where they lie (None stays None), and are those of the last positions where keys are cached. The shared
    key becomes part of every head's; values are copied, for a view would keep all of kv_TD alive."""
    batched = lambda x: x.view(run.batch, -1, c.n_heads, x.shape[1] // c.n_heads)
    q = batched(q_TD) if q_TD is not None else None
    if _heads_fuse(kv_TD, q, run, c):
        k, v = quant.kernels.attention_inputs(q_TD, kv_TD, k_rope, run.rope, c.n_heads, c.nope_dim)
        return q, batched(k), batched(v)
    if q is not None:
        q_rope = q[..., c.nope_dim:]
        q_rope.copy_(rotate(q_rope, run.rope[:, -q.shape[1]:]))
    k_nope, v = batched(kv_TD).split([c.nope_dim, c.v_dim], -1)
    k_rope = rotate(rearrange(k_rope, "(b s) r -> b s 1 r", b=run.batch), run.rope)
    return q, torch.cat([k_nope, k_rope.expand(-1, -1, c.n_heads, -1)], -1), v.contiguous()


def heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, run: Pass, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q_TD, kv_TD and k_rope, the last one summed over heads in float32; overwrites dq."""
    dq, dk, dv = (t.contiguous() for t in (dq, dk, dv))
    flat = lambda t: t.flatten(2).flatten(0, 1)
    if _heads_fuse(dk, dq, run, c):
        return flat(dq), *quant.kernels.attention_inputs_backward(*map(flat, (dq, dk, dv)), run.rope, c.n_heads, c.nope_dim)
    back = torch.stack([run.rope[0], -run.rope[1]])
    dq_rope, (dk_nope, dk_rope) = dq[..., c.nope_dim:], dk.split([c.nope_dim, c.rope_dim], -1)
    dq_rope.copy_(rotate(dq_rope, back[:, -dq.shape[1]:]))
    total = dk_rope.sum(2, keepdim=True, dtype=torch.promote_types(dk.dtype, torch.float32))
    return flat(dq), flat(torch.cat([dk_nope, dv], -1)), flat(rotate(total, back).to(dk.dtype))


def _heads_fuse(k: Tensor, q: Tensor | None, run: Pass, c: ModelConfig) -> bool:
    """Whether the kernels put heads together: bfloat16 on a GPU, in pairs, and no key older than the queries."""
    alike = q is None or q.shape[1] == run.rope.shape[1]
    return quant._on_gpu(k) and k.dtype == torch.bfloat16 and alike and c.nope_dim % 2 == c.v_dim % 2 == 0


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, list[Tensor], str]:
    """Causal softmax attention, q, k [B, S, A, D], v [B, S, A, V] -> [B, S, A, V], what backward needs beside that and q, k, v
    (log-sum-exp, and on a GPU random state), and the kernel's name. A single query attends to every key.

    cuDNN takes values narrower than keys. It refuses deterministic algorithms, and GPUs before Hopper: there the flash kernel
    takes padded ones (its backward is up to ten times as fast as the memory-efficient kernel's, which is left for float32).
    ValueError for several, not all, of the queries."""
    if 1 < q.shape[1] < k.shape[1]:
        raise ValueError(f"{q.shape[1]} new tokens after {k.shape[1] - q.shape[1]} cached ones: give all at once, or one by one")
    causal, name = q.shape[1] > 1, _attention_kernel(q, k, v)
    width, (q, k, v) = v.shape[-1], _for_attention(name, q, k, v)
    if name == "cudnn":
        out, lse, _, _, _, _, *random, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    elif name == "flash":
        out, lse, _, _, _, _, *random, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    elif name == "efficient":
        out, lse, *random = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    else:
        (out, lse), random = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), []
    return out[..., :width].transpose(1, 2), [lse, *random], name


def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: list[Tensor], name: str, scale: float):
    """Gradients of q, k, v from what `attention` read and gave."""
    widths, lengths, causal = [t.shape[-1] for t in (q, k, v)], (q.shape[1], k.shape[1]), q.shape[1] > 1
    q, k, v, out, dout = _for_attention(name, q, k, v, out, dout)
    if name == "cudnn":
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, *rest, None, None, None, *lengths, 0.0, causal, scale=scale)
    elif name == "flash":
        lse, *random = rest
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, *random, scale=scale)
    elif name == "efficient":
        grads = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, *rest, 0.0, [True, True, True, False], causal, scale=scale)
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, *rest, 0.0, causal, scale=scale)
    return [grad[..., :width].transpose(1, 2) for grad, width in zip(grads, widths)]


def _attention_kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
    """cuDNN's where scaled_dot_product_attention would take it for training, so that evaluation reads the same numbers."""
    if not q.is_cuda:
        return "cpu"
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    params = torch.backends.cuda.SDPAParams(*leaves, None, 0.0, q.shape[1] > 1, False)
    if not torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[-1], v.shape[-1]) <= 256 else "efficient"


def _for_attention(name: str, *tensors: Tensor) -> list[Tensor]:
    """[B, S, A, D] -> [B, A, S, D'], padded with zeros to the width that the kernel takes."""
    widths = [t.shape[-1] for t in tensors]
    if name in ("flash", "cpu"):  # one width for all
        widths = [max(widths)] * len(tensors)
    if name != "cudnn":
        widths = [-(-width // 8) * 8 for width in widths]
    padded = (F.pad(t, (0, width - t.shape[-1])) if width > t.shape[-1] else t for t, width in zip(tensors, widths))
    return [t.transpose(1, 2) for t in padded]


class _Attend(torch.autograd.Function):
    """Heads and their attention: q_TD, kv_TD, k_rope as `heads` takes them -> [T, A*V]. Overwrites q_TD, whose only reader it is.

    Keeps q, k, v, the output and its log-sum-exp. With latents (q_TL, kv_TL) it keeps those in place of q, k, v, and computes
    the up-projections and the heads again in backward, to the same bits; attention itself runs once. Weights and norms have
    no part in that: autograd's graph of the up-projections stands, holding latents only, and takes the gradients from here.
    So every weight gets its gradient once, added inside Wgrad as any other, and whoever hooks or shards it sees it."""

    @staticmethod
    def forward(ctx, q_TD, kv_TD, k_rope, mla, run, *latents):
        ctx.mla, ctx.run, c = mla, run, mla.config
        q, k, v = heads(q_TD.detach(), kv_TD, k_rope, run, c)
        if q_TD.requires_grad:  # so that autograd would find out if somebody had kept it
            torch.autograd.graph.increment_version(q_TD)
        out, rest, ctx.kernel = attention(q, k, v, mla.scale)
        out = out.flatten(2).flatten(0, 1)
        if latents:  # without a latent of their own the queries are kept, rotated
            q, k, v = None if c.q_lora else q, None, None
        ctx.save_for_backward(q, k, v, out, *latents, *rest)
        ctx.latents = len(latents)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        mla, run, c = ctx.mla, ctx.run, ctx.mla.config
        q, k, v, out, *rest = ctx.saved_tensors
        latents, rest = rest[:ctx.latents], rest[ctx.latents:]
        if latents:
            with torch.no_grad():
                fresh, k, v = heads(*mla.up(*latents, run), run, c)
            q = fresh if q is None else q
            del fresh
        batched = lambda x: x.view(run.batch, -1, c.n_heads, c.v_dim)
        grads = attention_backward(batched(dout), q, k, v, batched(out), rest, ctx.kernel, mla.scale)
        del q, k, v
        return *heads_backward(*grads, run, c), *[None] * (2 + len(latents))


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c, self.config = config, config
        weight = lambda n, k: nn.Parameter(torch.empty(n, k))
        if c.q_lora:
            self.wq_a, self.q_norm = weight(c.q_lora, c.hidden), nn.Parameter(torch.ones(c.q_lora))
        self.wq_b = weight(c.n_heads * c.qk_dim, c.q_lora or c.hidden)
        self.wkv_a, self.kv_norm = weight(c.kv_lora + c.rope_dim, c.hidden), nn.Parameter(torch.ones(c.kv_lora))
        self.wkv_b = weight(c.n_heads * (c.nope_dim + c.v_dim), c.kv_lora)
        self.wo = weight(c.hidden, c.n_heads * c.v_dim)
        mscale = 0.1 * c.yarn_mscale * math.log(c.yarn_factor) + 1 if c.yarn_factor > 1 else 1.0
        self.scale = mscale ** 2 / math.sqrt(c.qk_dim)

    def forward(self, x: Activation, run: Pass, cache: list | None = None) -> Tensor:
        """x [T, H], normed -> [T, H]. cache: latents of earlier positions, [B, S, L + R] each, which this call extends."""
        q_TL = quant.linear(x, self.wq_a if self.config.q_lora else self.wq_b)  # the latent, or the queries themselves
        kv_TL = quant.linear(x, self.wkv_a)
        if cache is not None:
            cache.append(kv_TL.unflatten(0, (run.batch, -1)))
            kv_TL = torch.cat(cache, 1).flatten(0, 1)
        q_TD, kv_TD, k_rope = self.up(q_TL, kv_TL, run)
        latents = ()
        if "mla_up" in run.recompute and "attn" not in run.recompute:  # whose replay comes just before it would be of use
            latents = q_TL.detach() if self.config.q_lora else None, kv_TL.detach()
        o = _Attend.apply(q_TD, kv_TD, k_rope, self, run, *latents)
        # wo keeps nothing of its own: attention's backward needs its output in BF16 anyway
        return quant.linear(o, self.wo, Recipe(run.recipe.compute))

    def up(self, q_TL: Tensor | None, kv_TL: Tensor, run: Pass) -> tuple[Tensor | None, Tensor, Tensor]:
        """Latents -> q_TD, kv_TD, k_rope, nothing rotated. Latents are kept raw; their norms are rebuilt in backward."""
        c = self.config
        normed = lambda x, weight: quant.rms_norm(x, weight, c.norm_eps, run.recipe, rebuild=True)
        latent, k_rope = kv_TL.split([c.kv_lora, c.rope_dim], -1)
        q_TD = quant.linear(normed(q_TL, self.q_norm), self.wq_b) if c.q_lora else q_TL
        return q_TD, quant.linear(normed(latent, self.kv_norm), self.wkv_b), k_rope


# -----------------------------------------------------------------------------
# router

LEAST_SUM = 1e-20  # of scores, to divide by: keeps a row of underflowed ones finite, in backward too


class Router(nn.Module):
    """Scores, group-limited top-k, gate weights, load counts and the balance bias (DeepSeek-V3, arXiv 2412.19437, §2.1.2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.hidden))
        self.gate = GATES[config.gate]
        if self.gate.balanced:
            self.register_buffer("bias", torch.zeros(config.n_experts))  # moves selection only, never weights
        self.register_buffer("load", torch.zeros(config.n_experts, dtype=torch.long), persistent=False)

    def forward(self, x: Activation, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, H] -> expert ids [T, K] int32, gate weights [T, K] float32, and in training the balance losses [B]."""
        logits_TPE, learns = quant.router_linear(x, self.weight), self.training and torch.is_grad_enabled()
        if quant._on_gpu(logits_TPE) and logits_TPE.dtype == torch.float32:
            return _Route.apply(logits_TPE, self, batch, learns)
        scores_TE = self.gate.score(logits_TPE.sum(1))
        ids_TK = self.select(scores_TE.detach())
        weights_TK = self.weigh(scores_TE, ids_TK)
        balance = None
        if learns:
            self.load.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))
            balance = self.balance_loss(scores_TE, ids_TK, batch)
        return ids_TK.int(), weights_TK, balance

    def select(self, scores_TE: Tensor) -> Tensor:
        """Top-k experts of the top groups by biased score, [T, K] int64."""
        c = self.config
        biased_TE = scores_TE + self.bias if self.gate.balanced else scores_TE
        if c.n_groups > 1:
            grouped_TGE = biased_TE.unflatten(-1, (c.n_groups, -1))
            best = 2 if c.group_score == "top2" else 1
            kept_TG = grouped_TGE.topk(best, -1).values.sum(-1).topk(c.top_groups, -1).indices
            closed_TG = torch.ones_like(grouped_TGE[..., 0], dtype=torch.bool).scatter_(1, kept_TG, False)
            biased_TE = grouped_TGE.masked_fill(closed_TG[..., None], -math.inf).flatten(1)
        return biased_TE.topk(c.top_k, -1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Gate weights from the unbiased scores; sigmoid's are renormalised over the chosen."""
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.gate.renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
        return weights_TK * self.config.route_scale

    def balance_loss(self, scores_TE: Tensor, ids_TK: Tensor, batch: int) -> Tensor:
        """[B], for each sequence alpha * sum_e f_e P_e: f its share of choices times E, P its mean normalised score."""
        c = self.config
        chosen_BE = scores_TE.new_zeros(batch, c.n_experts).scatter_add_(
            1, ids_TK.view(batch, -1), scores_TE.new_ones(batch, ids_TK.numel() // batch))
        share_BE = chosen_BE * (c.n_experts * batch / ids_TK.numel())
        normal_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
        return c.balance_alpha * (share_BE * normal_TE.unflatten(0, (batch, -1)).mean(1)).sum(-1)


class _Route(torch.autograd.Function):
    """What Router does behind its linear, by three kernels in place of sixty. Keeps scores and ids, and how often each sequence
    chose each expert."""

    @staticmethod
    def forward(ctx, logits_TPE, router, batch, learns):
        c, gate, ctx.num_parts = router.config, router.gate, logits_TPE.shape[1]
        ctx.rule = c.gate == "softmax", gate.renormalise, c.route_scale, c.balance_alpha, LEAST_SUM
        groups = c.n_groups, c.top_groups, 2 if c.group_score == "top2" else 1
        scores_TE, ids_TK, weights_TK, chosen_BE, balance_B = quant.kernels.route(
            logits_TPE.contiguous(), router.bias if gate.balanced else None, router.load if learns else None, batch, c.top_k,
            groups, *ctx.rule)
        ctx.save_for_backward(scores_TE, ids_TK, chosen_BE)
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, balance_B

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dweights_TK, dbalance_B):
        scores_TE, ids_TK, chosen_BE = ctx.saved_tensors
        whole = lambda d: d.contiguous() if d is not None else None
        dlogits_TE = quant.kernels.route_backward(scores_TE, ids_TK, whole(dweights_TK), chosen_BE, whole(dbalance_B), *ctx.rule)
        return dlogits_TE[:, None].expand(-1, ctx.num_parts, -1), None, None, None  # that of each summand


# -----------------------------------------------------------------------------
# dispatch and combine: the seam for expert parallelism, or for another transport

class Received(NamedTuple):
    """Tokens as experts get them; all of this rank's own where there is one rank."""
    x: Tensor                  # [N, H] in full, or a carrier of the gradient where payload has the bits
    ids: Tensor | quant.Groups  # [N, K] int32 local expert of each choice, -1 where it lives elsewhere; or the groups of such
    weights: Tensor            # [N, K] float32 gate weights
    payload: quant.Fp8 | quant.Fp4 | None
    recipe: Recipe
    num_pairs: int | None = None  # how many ids are not -1, where that is known without asking the GPU; groups know themselves
    depart: Callable[[Tensor, Tensor], None] | None = None  # sends off the gradients of x and weights: see quant.experts
    route: Any = None             # what combine needs to know of the way that the tokens came
    fanned_out: quant.FannedOut | None = None  # what experts read, a row for each pair: see quant.experts


def dispatch(x: Activation, ids: Tensor, weights: Tensor, group: dist.ProcessGroup | None = None,
             num_experts: int | None = None) -> Received:
    """Send tokens x [T, H] to the ranks of their experts ids [T, K], in the wire's format; differentiable in x and weights.

    group: of its R ranks each holds num_experts / R experts, in order. A token goes once to each rank that needs it, as one
    message, and is fanned out there. All ranks call together. ValueError if x was quantised without the wire's format."""
    name = x.recipe.dispatch
    if x.format(name) is None:
        raise ValueError(f"the wire sends {name}, which this activation lacks: pass wire={name!r} to quantize or rms_norm")
    if group is not None:
        return _send(x, ids, weights, group, num_experts)
    if name == "bf16":
        return Received(x.x, ids, weights, None, x.recipe)
    return Received(_Dispatch.apply(x.x, x.recipe.combine), ids, weights, x.format(name), x.recipe)


def combine(y: Tensor, received: Received, beside: Callable[[], Tensor] | None = None) -> Tensor:
    """Bring the experts' sums y [N, H] back to their tokens [T, H], where those of several ranks are summed in float32, rank by
    rank. Its backward sends dy in FP8 where dispatch was below BF16.

    beside: computes, while they travel, what is then added; its backward runs while dy travels. y straight from `quant.experts`
    must have no other reader: its gradient then stays in FP8 (see `quant.carrier`)."""
    recipe, route, way = received.recipe, received.route, []
    in_full = torch.is_anomaly_enabled() or not quant.takes_wire(y)  # anomaly detection would stumble over the carrier's NaN
    if route is not None:
        y = _Leave.apply(y, route, recipe, way, in_full)
    elif recipe.wire != "bf16":
        y = _Combine.apply(y, recipe.combine, in_full)
    more = beside() if beside is not None else None
    if route is not None:
        y = _Home.apply(y, route, recipe, way)
    return y if more is None else y + more


class _Dispatch(torch.autograd.Function):
    """Of one rank: nothing is sent, but formats change all the same."""

    @staticmethod
    def forward(ctx, x, combine_format):
        ctx.format = combine_format
        return quant.carrier(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return _over_wire(dx, ctx.format), None


class _Combine(torch.autograd.Function):
    """Of one rank."""

    @staticmethod
    def forward(ctx, y, combine_format, in_full):
        ctx.in_full = in_full
        return _over_wire(y, combine_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        wire = quant.quantize_fp8_rows(dy)
        return quant.dequantize(wire, dy.dtype) if ctx.in_full else quant.carrier(dy, wire), None, None


def _over_wire(x: Tensor, name: str) -> Tensor:
    return quant.dequantize(quant.quantize_fp8_rows(x), x.dtype) if name == "fp8" else x.view_as(x)


# -----------------------------------------------------------------------------
# the exchange between ranks: one message a token and rank; what goes where is counted on the GPU, read by the host once a layer
#
# Rows are sent by rank, then in the tokens' order; they arrive in that order from rank 0, rank 1, ... and go home in it. Example:
# two ranks of two experts, ids [[0, 1], [3, 0], [2, 2]] -> sent [2, 2], token_N [0, 1, 1, 2], row_TR [[0, -1], [1, 2], [-1, 3]].
#
# A message names no experts but places: the nth of its sender's pairs of an expert. With the numbers of tokens come those of
# pairs of each expert, so that a rank knows where its experts' rows lie, and each sender's in them, before it has any message.

class Route(NamedTuple):
    """The way of one layer's tokens, kept until they are back, in backward too."""
    group: dist.ProcessGroup
    token_N: Tensor      # int32 token of each row sent
    row_TR: Tensor       # [T, R] int32 row that took a token to a rank, -1 where none did
    sent: list[int]      # rows to each rank
    received: list[int]  # rows from each rank


class _Exchange:
    """Rows uint8 [.., L] on their way to other ranks until `wait`: out as a route says, or back home."""

    def __init__(self, rows: Tensor, route: Route, home: bool = False):
        sent, received = (route.received, route.sent) if home else (route.sent, route.received)
        self.rows, self.arriving = rows, rows.new_empty(sum(received), rows.shape[1])
        self.work = dist.all_to_all_single(self.arriving, rows, received, sent, group=route.group, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.arriving


def _send(x: Activation, ids: Tensor, weights: Tensor, group: dist.ProcessGroup, num_experts: int, per: int = 1) -> Received:
    """dispatch between ranks.

    per > 1 is bench.py's, to measure a wire that sends a token once to each of its experts: a token has so many rows of ids and
    weights, [T * per, 1], each in a message of its own; the gradients of its weights come back as one sum, in rows of others."""
    recipe, local, ids = x.recipe, num_experts // group.size(), ids.int()
    counts_2RE, place = _count(ids, local, group.size())
    held = range(group.rank() * local, (group.rank() + 1) * local)
    arrivals = quant.Arrivals(counts_2RE.new_empty(3, local + 1), torch.empty_like(counts_2RE[1]), held, num_experts)
    counting = dist.all_to_all_single(counts_2RE[1], counts_2RE[0], group=group, async_op=True)
    # placed and packed before their number is known, so that the GPU has work while the host waits for it
    token_N, row_TR, place_TK = place()
    rows = quant.pack(x.format(recipe.dispatch), recipe.dispatch, place_TK, weights.detach(), index=token_N, per=per)
    if per > 1:
        token_N, row_TR, weights = token_N // per, row_TR.amax(1).view(-1, per), weights[:len(ids) // per]
    told = _read(counts_2RE, counting, arrivals)
    # From here on the GPU may wait for the host: what is sent first, then what experts read of it, then autograd
    sent, received = ([row[-1] for row in each] for each in told)
    route = Route(group, token_N[:sum(sent)], row_TR, sent, received)
    message = _Exchange(rows[:sum(sent)], route).wait()
    del rows  # it is as large as what is fanned out
    num_pairs = sum(sum(row[:-1]) for row in told[1])
    read, weights_NK, groups = quant.receive(message, recipe.dispatch, *_kind(x.x), ids.shape[1], arrivals, num_pairs)
    fanned_out, way = quant.fan_out(read, groups, recipe), []
    x, weights_NK = _Send.apply(x.x, weights, read, weights_NK, route, recipe, way)
    return Received(x, groups, weights_NK, read if isinstance(read, tuple) else None, recipe, route=route, fanned_out=fanned_out,
                    depart=functools.partial(_depart, route, recipe, way))


def _read(counts_2RE: Tensor, counting: dist.Work, arrivals: quant.Arrivals) -> list:
    """The host's one read of a layer, of counts: it waits for their exchange, and for nothing that was begun since. Arrivals are
    laid out before, on the same stream, so that whatever the host begins afterwards finds them there. Their memory must have
    been there when the exchange began, which waits for all that used it before."""
    if not counts_2RE.is_cuda:
        counting.wait()
        arrivals.lay_out(counts_2RE[1])
        return counts_2RE.tolist()
    stream = _reader(counts_2RE.device)
    here = torch.empty(counts_2RE.shape, dtype=torch.int32, device="cpu", pin_memory=True)  # written to without the driver's help
    with torch.cuda.stream(stream):
        counting.wait()
        arrivals.lay_out(counts_2RE[1])
        here.copy_(counts_2RE, non_blocking=True)
    stream.synchronize()
    return here.tolist()


@functools.cache
def _reader(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # before what is left of packing


def _depart(route: Route, recipe: Recipe, way: list, dx: Tensor, dweights: Tensor):
    """Gradients of what dispatch brought, on their way home."""
    way.append((_Exchange(quant.pack(dx, recipe.combine, dweights), route, home=True), dx.data_ptr()))


def _count(ids_TK: Tensor, local: int, ranks: int) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor, Tensor]]]:
    """-> counts [2, R, E + 1], for each rank the pairs of each of its E experts, and the tokens, then room for what each rank
    says; and a function that places: token_N with room for all that could be sent, row_TR, place_TK (see quant.receive).
    ValueError for more pairs than places can number."""
    if ids_TK.numel() * local * ranks > 2**31:
        raise ValueError(f"dispatch: {ids_TK.numel()} choices among {local * ranks} experts are too many for 32-bit places")
    counts_2RE = torch.empty(2, ranks, local + 1, dtype=torch.int32, device=ids_TK.device)
    if quant._on_gpu(ids_TK):
        before = quant.kernels.count_messages(ids_TK, local, counts_2RE[0])
        return counts_2RE, lambda: quant.kernels.place_messages(ids_TK, local, before, counts_2RE[0])
    pairs_E, nth = quant.count_pairs(ids_TK.long(), local * ranks)
    here_TR = (torch.div(ids_TK, local, rounding_mode="floor")[..., None] == torch.arange(ranks)).any(1)
    counts_2RE[0] = torch.cat([pairs_E.view(ranks, local), here_TR.sum(0)[:, None]], 1)
    return counts_2RE, lambda: _place(ids_TK, nth.view(ids_TK.shape), local, here_TR)


def _place(ids_TK: Tensor, nth_TK: Tensor, local: int, here_TR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """_count's places on a CPU, from each pair's number among those of its expert, and which ranks hold a token's experts."""
    (T, K), ranks = ids_TK.shape, here_TR.shape[1]
    row_TR = (here_TR.t().flatten().cumsum(0) - 1).view(ranks, T).t().masked_fill(~here_TR, -1).int()
    token_N = torch.full((T * min(ranks, K),), -1, dtype=torch.int32)
    token_N[:int(here_TR.sum())] = here_TR.t().nonzero()[:, 1].int()
    num_experts = local * ranks
    place_TK = torch.where((ids_TK < 0) | (ids_TK >= num_experts), -1, nth_TK * num_experts + ids_TK).int()
    return token_N, row_TR, place_TK


class _Send(torch.autograd.Function):
    """Stands in autograd's graph between tokens and what arrived of them; in backward gradients come home. `way` has what
    `_depart` sent off; if nobody called that before, backward does."""

    @staticmethod
    def forward(ctx, x, weights, read, weights_NK, route, recipe, way):
        ctx.route, ctx.recipe, ctx.way, ctx.kinds = route, recipe, way, (*_kind(x), (weights.dtype, weights_NK.shape[1]))
        return read if isinstance(read, Tensor) else quant.carrier(_rows(x, len(weights_NK))), weights_NK

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, dweights):
        if not ctx.way:
            _depart(ctx.route, ctx.recipe, ctx.way, dx, dweights)
        exchange, departed = ctx.way.pop()
        if departed != dx.data_ptr():
            raise RuntimeError("gradients of dispatched tokens departed before their last reader had added to them")
        width, dtype, of_weights = ctx.kinds
        sums = quant.sum_messages(exchange.wait(), ctx.recipe.combine, width, dtype, ctx.route.row_TR, of_weights)
        return *sums, *[None] * 5


class _Leave(torch.autograd.Function):
    """Sums on their way home; backward waits for dy. Autograd goes backwards through what was called between this and _Home, so
    that runs while they travel, in either direction."""

    @staticmethod
    def forward(ctx, y, route, recipe, way, in_full):
        ctx.recipe, ctx.way, ctx.in_full, ctx.y = recipe, way, in_full, _kind(y)
        way.append(_Exchange(quant.pack(y, recipe.combine), route, home=True))
        return quant.carrier(_rows(y, len(route.row_TR)))

    @staticmethod
    @once_differentiable
    def backward(ctx, like):
        dy, = quant.unpack(ctx.way.pop().wait(), _gradient_format(ctx.recipe), *ctx.y)
        if not isinstance(dy, Tensor):
            dy = quant.dequantize(dy, like.dtype) if ctx.in_full else quant.carrier(_rows(like, len(dy.data)), dy)
        return dy, None, None, None, None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx, like, route, recipe, way):
        ctx.route, ctx.recipe, ctx.way = route, recipe, way
        return quant.sum_messages(way.pop().wait(), recipe.combine, *_kind(like), route.row_TR)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        ctx.way.append(_Exchange(quant.pack(dy, _gradient_format(ctx.recipe), index=ctx.route.token_N), ctx.route))
        return _rows(dy, len(dy)), None, None, None


def _gradient_format(recipe: Recipe) -> str:
    """In which dy is sent: never below FP8."""
    return "bf16" if recipe.wire == "bf16" else "fp8"


def _rows(like: Tensor, n: int) -> Tensor:
    """A stand-in for n rows like those of another tensor."""
    return quant.constant(0.0, like.dtype, like.device).expand(n, like.shape[1])


def _kind(x: Tensor) -> tuple[int, torch.dtype]:
    return x.shape[1], x.dtype


def message_bytes(config: ModelConfig, recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """Bytes that a token costs on its way to one rank and back, by exchange; counts, 4 bytes a rank and 4 an expert in a layer,
    left out."""
    places, weights = (torch.int32, config.top_k), (torch.float32, config.top_k)
    size = lambda name, *others: quant.message_bytes(name, config.hidden, dtype, *others)
    return {"dispatch": size(recipe.dispatch, places, weights), "combine": size(recipe.combine),
            "combine, backward": size(_gradient_format(recipe)),
            "dispatch, backward": size(recipe.combine, weights)}


# -----------------------------------------------------------------------------
# layers and the model

class DenseFFN(nn.Module):
    """SwiGLU feed-forward: a dense layer's, or the shared expert's."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(2 * width, hidden))  # gate rows, then up rows
        self.w2 = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Activation, run: Pass) -> Tensor:
        return quant.mlp(x, self.w13, self.w2, "mlp" in run.recompute)


class Experts(nn.Module):
    """The weights of a rank's routed experts; a module of its own, as they may be sharded over other ranks than the rest."""

    def __init__(self, config: ModelConfig, local: int):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(local, 2 * config.expert_width, config.hidden))
        self.w2 = nn.Parameter(torch.empty(local, config.hidden, config.expert_width))
        self.received = 0  # tokens that came last

    def forward(self, got: Received, run: Pass) -> Tensor:
        """Tokens as they arrived -> the sum of what their experts here make of each."""
        self.received = len(got.weights)
        return quant.experts(got.x, got.ids, got.weights, self.w13, self.w2, run.recipe, got.payload, "moe" in run.recompute,
                             got.num_pairs, got.depart, got.fanned_out)


class MoE(nn.Module):
    """Routed experts beside a shared one. Of R ranks in the group `ep`, rank r holds experts r * E/R ... (r+1) * E/R - 1."""

    def __init__(self, config: ModelConfig, ep: dist.ProcessGroup | None = None):
        super().__init__()
        c, self.ep = config, ep
        self.experts = Experts(c, c.n_experts // (ep.size() if ep is not None else 1))
        self.router = Router(c)
        self.shared = DenseFFN(c.hidden, c.n_shared * c.expert_width) if c.n_shared else None

    def forward(self, x: Activation, run: Pass) -> tuple[Tensor, Tensor | None]:
        """x [T, H], normed -> [T, H] and, in training, the balance losses [B]."""
        ids, weights, balance = self.router(x, run.batch)
        got = dispatch(x, ids, weights, self.ep, self.router.config.n_experts)
        y = self.experts(got, run)
        return combine(y, got, (lambda: self.shared(x, run)) if self.shared is not None else None), balance


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, dense: bool, ep: dist.ProcessGroup | None = None):
        super().__init__()
        self.eps, self.dense = config.norm_eps, dense
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(config.hidden)), nn.Parameter(torch.ones(config.hidden))
        self.attn = MLA(config)
        self.ffn = DenseFFN(config.hidden, config.dense_width) if dense else MoE(config, ep)

    def forward(self, x: Tensor, run: Pass, cache: list | None = None) -> tuple[Tensor, Tensor | None]:
        """Residual stream x [T, H] -> the same, and the balance losses [B] or None."""
        rebuild, wire = "norm" in run.recompute, "bf16" if self.dense else run.recipe.dispatch
        attend = lambda x: self.attn(quant.rms_norm(x, self.attn_norm, self.eps, run.recipe, rebuild), run, cache)
        x = x + replayed("attn" in run.recompute, attend, x)
        normed = quant.rms_norm(x, self.ffn_norm, self.eps, run.recipe, rebuild, wire)
        y, balance = (self.ffn(normed, run), None) if self.dense else self.ffn(normed, run)
        return x + y, balance


class MTP(nn.Module):
    """One extra depth of prediction: h' = M [norm(h); norm(emb(next))], a layer, a norm (arXiv 2412.19437, §2.2).

    The paper does not say whether h comes before or after the model's final norm. It comes after: published V3 weights
    are run so by vLLM, SGLang and transformers."""

    def __init__(self, config: ModelConfig, ep: dist.ProcessGroup | None = None):
        super().__init__()
        self.h_norm, self.next_norm, self.out_norm = (nn.Parameter(torch.ones(config.hidden)) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden))
        self.layer = Layer(config, False, ep)

    def forward(self, model: Model, h_TH: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream -> sum of cross entropies of the token after the next, and the layer's balance losses [B]."""
        run = model.new_pass(len(targets_BS), targets_BS.shape[1] - 1)
        normed = lambda x, weight: quant.rms_norm(x, weight, self.layer.eps, RECIPES["bf16"]).x
        h = normed(h_TH.unflatten(0, targets_BS.shape)[:, :-1].flatten(0, 1), model.norm)
        after = model.embed_tokens(targets_BS[:, :-1].clamp(min=0))
        x = quant.linear(torch.cat([normed(h, self.h_norm), normed(after, self.next_norm)], -1), self.proj, run.recipe)
        x, balance = self.layer(x, run)
        # where the next token is unknown there is nothing to predict from
        labels = targets_BS[:, 1:].masked_fill(targets_BS[:, :-1] < 0, -100)
        return model.cross_entropy(x, self.out_norm, labels), balance


LOGIT_BYTES = 2**29  # float32 logits of so many bytes at once: 1024 tokens of V3, which still make its GEMMs large


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits x weightᵀ, summed over valid targets, for a chunk of tokens at a time; x is norm's output.

    Keeps a number a token: backward computes the logits again, a third more of the head's arithmetic and under 1 % of a V3
    step's. Gradients taken in forward would spare that, but hold a float32 [Vo, H] each (V3: 3.7 GB, with MTP twice) until
    backward brings their factor, just when memory is fullest."""

    @staticmethod
    def forward(ctx, x, weight, targets_T, norm):
        *tensors, ctx.eps = norm
        read, losses, lses = quant.weight_operands(weight, "bf16", x.dtype)[0], [], []
        for x_CH, targets_C in _chunks(len(weight), x, targets_T):
            loss_C, lse_C = quant.token_losses(x_CH @ read.t(), targets_C)
            losses, lses = [*losses, loss_C.sum()], [*lses, lse_C]
        ctx.save_for_backward(weight, targets_T, torch.cat(lses), *tensors)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        weight, targets_T, lse_T, *norm = ctx.saved_tensors
        x = quant.rms_norm(*norm, ctx.eps, RECIPES["bf16"]).x
        dx, dw, read = torch.empty_like(x), None, quant.weight_operands(weight, "bf16", x.dtype)[0]
        if ctx.needs_input_grad[1]:
            dw, accumulate = quant.gradient_buffer(weight)
            dw = dw if accumulate else dw.zero_()
        for x_CH, targets_C, lse_C, dx_CH in _chunks(len(weight), x, targets_T, lse_T, dx):
            dlogits = quant.logit_gradients(x_CH @ read.t(), targets_C, lse_C, dloss)
            torch.mm(dlogits, read, out=dx_CH)
            if dw is not None:
                quant.add_product(dw, dlogits.t(), x_CH)
        return dx, dw, None, None


def _chunks(vocab_size: int, *of_tokens: Tensor):
    """Tensors [T, ..] cut alike into chunks of about equal length, whose logits take LOGIT_BYTES in float32 at most."""
    longest = max(LOGIT_BYTES // (4 * vocab_size), 1)
    count = max(-(-len(of_tokens[0]) // longest), 1)  # no tokens: one empty chunk
    return zip(*(t.chunk(count) for t in of_tokens))


class Model(nn.Module):
    """The language model. Parameters are FP32 and nothing is quantised until `recipe` says so.

    recipe: a quant.Recipe; dtype: of activations, None for the parameters' own; recompute: a subset of RECOMPUTE_SCOPES.
    All three may change between calls.

    ep: a group of R ranks over which each layer's experts are spread, E/R to a rank; all else is whole on each. Weights are
    those of one process with the same random state. The ranks of a group call the model together, with the same sequence
    length; each gives its own sequences and a loss divided by the whole step's num_tokens. Then every gradient is a sum, never
    a mean: `expert_parameters` get theirs complete over ep, by the wire, and want the sum over the groups that hold the same
    experts; all others want the sum over all ranks. ValueError unless R divides the number of experts."""

    def __init__(self, config: ModelConfig, ep: dist.ProcessGroup | None = None):
        super().__init__()
        ep = ep if ep is not None and ep.size() > 1 else None
        if ep is not None and config.n_experts % ep.size():
            raise ValueError(f"{config.n_experts} experts do not spread evenly over {ep.size()} expert-parallel ranks")
        self.config, self.recipe, self.dtype, self.recompute = config, RECIPES["bf16"], None, frozenset()
        self.ep = ep
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(Layer(config, i < config.n_dense, ep) for i in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.mtp = MTP(config, ep) if config.mtp else None
        self.init_weights()
        self.register_load_state_dict_post_hook(quant.new_epoch)

    @torch.no_grad()
    def init_weights(self, copy: Callable[[nn.Parameter, Tensor], object] = torch.Tensor.copy_):
        """Normal matrices, norms of ones, buffers of zeros. Each parameter is drawn whole, one at a time, so that weights
        are those of one process; copy(parameter, values) then writes what this rank holds of it: of experts its own."""
        for parameter in self.parameters():
            mine = slice(None) if parameter.dim() < 3 else slice(_held(self).start, _held(self).stop)
            shape = parameter.shape if parameter.dim() < 3 else (self.config.n_experts, *parameter.shape[1:])
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            copy(parameter, (whole.normal_(std=self.config.init_std) if whole.dim() > 1 else whole.fill_(1))[mine])
        for buffer in self.buffers():
            buffer.zero_()
        quant.new_epoch()

    def expert_parameters(self) -> list[nn.Parameter]:
        """w13 and w2 of every layer's routed experts: what differs between the ranks of `ep`."""
        return [w for m in self.modules() if isinstance(m, Experts) for w in m.parameters()]

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None, num_tokens: int | None = None):
        """-> (logits [B, S, Vo], None), or with targets (-100: ignored) (None, loss).

        The loss's value is the next-token cross entropy in nats, summed and divided by num_tokens (the valid targets, unless
        given: pass the whole step's count, and micro-batches and ranks add up). In training its gradient is that of the whole
        objective: MTP and balance terms are added with the value zero. ValueError for a sequence the model does not take.
        """
        x_TH, balance = self.trunk(tokens_BS)
        if targets_BS is None:
            return self.logits(x_TH, self.norm).unflatten(0, tokens_BS.shape), None
        valid_B = (targets_BS >= 0).sum(1)
        loss = self.cross_entropy(x_TH, self.norm, targets_BS)
        if self.training and torch.is_grad_enabled():
            extra = loss.new_zeros(())
            if self.mtp is not None and tokens_BS.shape[1] > 1:
                mtp_loss, mtp_balance = self.mtp(self, x_TH, targets_BS)
                extra, balance = extra + self.config.mtp_weight * mtp_loss, balance + [mtp_balance]
            for term_B in balance:  # a sequence counts by its valid tokens, as in the cross entropy
                extra = extra + (term_B * valid_B).sum()
            loss = loss + (extra - extra.detach())
        return None, loss / (num_tokens if num_tokens is not None else valid_B.sum().clamp(min=1))

    def new_pass(self, batch: int, length: int) -> Pass:
        """ValueError for what the model does not take: an empty or too long sequence, or an unknown recompute scope."""
        if not 0 < length <= self.config.max_seq_len:
            raise ValueError(f"a sequence has 1 to max_seq_len={self.config.max_seq_len} tokens; got {length}")
        if unknown := set(self.recompute) - set(RECOMPUTE_SCOPES):
            raise ValueError(f"recompute takes {', '.join(RECOMPUTE_SCOPES)}; got {', '.join(sorted(unknown))}")
        return Pass(batch, rope_table(self.config, length, self.embed.device), self.recipe, self.recompute)

    def trunk(self, tokens_BS: Tensor, caches: list | None = None) -> tuple[Tensor, list[Tensor]]:
        """Tokens -> the residual stream after the last layer [T, H], and the balance losses."""
        if tokens_BS.dim() != 2:
            raise ValueError(f"tokens have the shape [B, S]; got {list(tokens_BS.shape)}")
        past = sum(t.shape[1] for t in caches[0]) if caches else 0
        run = self.new_pass(len(tokens_BS), past + tokens_BS.shape[1])
        x, balance = self.embed_tokens(tokens_BS), []
        for i, layer in enumerate(self.layers):
            x, term = layer(x, run, caches[i] if caches else None)
            balance += [term] if term is not None else []
        return x, balance

    def embed_tokens(self, tokens_BS: Tensor) -> Tensor:
        if not tokens_BS.is_cuda and tokens_BS.numel() and not 0 <= tokens_BS.min() <= tokens_BS.max() < len(self.embed):
            raise ValueError(f"token ids are 0 to {len(self.embed) - 1}; got {tokens_BS.min()} to {tokens_BS.max()}")
        return F.embedding(tokens_BS, self.embed).to(self.dtype or self.embed.dtype).flatten(0, 1)

    def head_input(self, x_TH: Tensor, norm: Tensor) -> Activation:
        """What the head reads of the residual stream; norm is the last norm's weight."""
        return quant.rms_norm(x_TH, norm, self.config.norm_eps, RECIPES["bf16"], rebuild=True)

    def logits(self, x_TH: Tensor, norm: Tensor) -> Tensor:
        """[T, Vo] in at least float32, from the residual stream."""
        y = quant.linear(self.head_input(x_TH, norm), self.head)
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def cross_entropy(self, x_TH: Tensor, norm: Tensor, targets_BS: Tensor) -> Tensor:
        """That of the logits with targets (-100: ignored), summed; never holds all logits."""
        x = self.head_input(x_TH, norm)
        return _CrossEntropy.apply(x.x, self.head, targets_BS.flatten(), x.norm)

    @torch.no_grad()
    def generate(self, tokens_BS: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        """Continue each row: [B, S] -> [B, S + max_new_tokens] int64; temperature 0 takes the likeliest. Caches latents only.

        ValueError if there is nothing to continue, or the result would be longer than max_seq_len; FloatingPointError if
        logits are not finite."""
        if tokens_BS.shape[1] + max_new_tokens > self.config.max_seq_len:
            raise ValueError(f"{tokens_BS.shape[1]} + {max_new_tokens} tokens do not fit max_seq_len={self.config.max_seq_len}")
        caches, tokens_BS = [[] for _ in self.layers], tokens_BS.long()
        fresh = tokens_BS
        for _ in range(max_new_tokens):
            x, _ = self.trunk(fresh, caches)
            logits = self.logits(x.unflatten(0, fresh.shape)[:, -1], self.norm)
            if not torch.isfinite(logits).all():
                raise FloatingPointError("the model's logits are not finite")
            if temperature == 0:
                fresh = logits.argmax(-1, keepdim=True)
            else:
                fresh = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens_BS = torch.cat([tokens_BS, fresh], 1)
        return tokens_BS

    @torch.no_grad()
    def update_balance(self, move: bool | Tensor = True) -> Tensor:
        """Once after each optimizer step: move the balance biases against the step's loads, clear them; -> [2], max / mean load
        of experts, and of a group's ranks that hold them where that is worst, in the mean of the layers.

        bias += u * sign(mean - load), load summed over all ranks and micro-batches (arXiv 2408.15664). move=False (or a tensor
        that is), after a skipped step, only clears the loads."""
        routers = [m for m in self.modules() if isinstance(m, Router)]
        if not routers:
            return torch.ones(2)
        load = torch.stack([r.load for r in routers])
        uneven = self._rank_balance(load) if self.ep is not None else load.new_ones((), dtype=torch.double)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(load)
        load = load.double()
        mean = load.mean(1, keepdim=True)
        for router, sign in zip(routers, (mean - load).sign()):
            if router.gate.balanced:
                router.bias += self.config.balance_rate * (sign * move).to(router.bias.dtype)
            router.load.zero_()
        return torch.stack([(load.amax(1) / mean.squeeze(1).clamp(min=1 / load.shape[1])).mean(), uneven]).float()

    def _rank_balance(self, load_LE: Tensor) -> Tensor:
        """max / mean of what the ranks of an expert-parallel group have to do in a layer, of the group that is worst, 0-dim."""
        here = load_LE.double()
        dist.all_reduce(here, group=self.ep)
        here = here.unflatten(1, (self.ep.size(), -1)).sum(2)
        uneven = (here.amax(1) / here.mean(1).clamp(min=1 / here.shape[1])).mean()
        dist.all_reduce(uneven, dist.ReduceOp.MAX)
        return uneven


@functools.cache  # once
def compile_elementwise():
    """torch.compile the chains of elementwise operations between GEMMs and quantisers, for all models of this process."""
    global rotate
    compiled = lambda f: torch.compile(f, dynamic=True)  # token counts change from batch to batch
    rotate = compiled(rotate)
    quant.swiglu, quant.swiglu_gradients = compiled(quant.swiglu), compiled(quant.swiglu_gradients)


# -----------------------------------------------------------------------------
# Hugging Face in and out: checkpoints of DeepSeek-V2, V2-Lite and V3; one table serves both directions

_HF_NAMES = {  # hf_tensors takes gate and up from one another, and experts
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight",
    "attn.wq_a": "self_attn.q_a_proj.weight", "attn.q_norm": "self_attn.q_a_layernorm.weight",
    "attn.wq_b": "self_attn.q_b_proj.weight", "attn.wq_b without wq_a": "self_attn.q_proj.weight",
    "attn.wkv_a": "self_attn.kv_a_proj_with_mqa.weight", "attn.kv_norm": "self_attn.kv_a_layernorm.weight",
    "attn.wkv_b": "self_attn.kv_b_proj.weight", "attn.wo": "self_attn.o_proj.weight",
    "ffn.w13": "mlp.gate_up_proj.weight", "ffn.w2": "mlp.down_proj.weight",
    "ffn.experts.w13": "mlp.experts.gate_up_proj.weight", "ffn.experts.w2": "mlp.experts.down_proj.weight",
    "ffn.shared.w13": "mlp.shared_experts.gate_up_proj.weight", "ffn.shared.w2": "mlp.shared_experts.down_proj.weight",
    "ffn.router.weight": "mlp.gate.weight", "ffn.router.bias": "mlp.gate.e_score_correction_bias",
    "h_norm": "hnorm.weight", "next_norm": "enorm.weight", "proj": "eh_proj.weight",
    "out_norm": "shared_head.norm.weight"}
_HF_COPIES = {"embed_tokens.weight": "embed", "shared_head.head.weight": "head"}  # lie beside MTP's own tensors as well
_HF_FIELDS = dict(
    vocab_size="vocab_size", n_layers="num_hidden_layers", n_dense="first_k_dense_replace", hidden="hidden_size",
    dense_width="intermediate_size", n_heads="num_attention_heads", nope_dim="qk_nope_head_dim",
    rope_dim="qk_rope_head_dim", v_dim="v_head_dim", q_lora="q_lora_rank", kv_lora="kv_lora_rank",
    n_experts="n_routed_experts", n_shared="n_shared_experts", top_k="num_experts_per_tok",
    expert_width="moe_intermediate_size", n_groups="n_group", top_groups="topk_group",
    route_scale="routed_scaling_factor", max_seq_len="max_position_embeddings", init_std="initializer_range")
_HF_YARN = dict(yarn_factor="factor", yarn_origin="original_max_position_embeddings", yarn_beta_fast="beta_fast",
                yarn_beta_slow="beta_slow", yarn_mscale="mscale_all_dim")
_HF_FIXED = dict(  # as it is here without a word; the latents' norms have this eps whatever a config says
    hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
    moe_layer_freq=1, ep_size=1, rope_interleave=True, rms_norm_eps=1e-6)
_HF_GATES = {
    "softmax": dict(model_type="deepseek_v2", scoring_func="softmax", norm_topk_prob=False),
    "sigmoid": dict(model_type="deepseek_v3", scoring_func="sigmoid", norm_topk_prob=True, topk_method="noaux_tc")}
_HF_DTYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # and bytes an element


def hf_tensors(model: Model, fused: bool = False) -> dict[str, Tensor]:
    """Views of the model's tensors under a checkpoint's names: what loading fills and saving writes; of experts those held here.

    fused: a layer's experts in one tensor, as transformers 5 writes them with save_original_format=False."""
    views, first = {}, _held(model).start
    for ours, t in model.state_dict().items():
        ours = re.sub(r"^mtp\.(layer\.)?", f"layers.{model.config.n_layers}.", ours)
        layer, part = re.fullmatch(r"(layers\.\d+\.)?(.+)", ours).groups("")
        part += " without wq_a" if part == "attn.wq_b" and not model.config.q_lora else ""
        name = (layer and f"model.{layer}") + _HF_NAMES[part]
        if t.dim() == 3 and fused:
            views[name.removesuffix(".weight")] = t
            continue
        weights = {name.replace("experts", f"experts.{e}"): w for e, w in enumerate(t, first)} if t.dim() == 3 else {name: t}
        for name, weight in weights.items():
            names = [name.replace("gate_up", half) for half in ("gate", "up")] if "gate_up" in name else [name]
            views |= zip(names, weight.chunk(len(names)))
    return views


def _held(model: Model) -> range:
    """The experts of each layer that this rank holds."""
    local = model.config.n_experts // (model.ep.size() if model.ep is not None else 1)
    first = local * (model.ep.rank() if model.ep is not None else 0)
    return range(first, first + local)


def _turned(name: str, t: Tensor) -> Tensor:
    """From one side to the other: MTP's projection reads [norm(emb); norm(h)] there, [norm(h); norm(emb)] here."""
    return t.roll(t.shape[1] // 2, 1) if name.endswith("eh_proj.weight") else t


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {path.parent} is no Hugging Face checkpoint") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def config_from_hf(folder) -> ModelConfig:
    """The model that config.json describes. `mtp` is off: a config may announce it without its tensors being there.

    ValueError, in one line, for what is no config.json, or asks for what this model does not compute."""
    path = Path(folder) / "config.json"
    hf = _read_json(path)
    try:
        return _parse_hf(hf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_hf(hf: dict) -> ModelConfig:
    def demand(have: dict, **wanted):
        for key, value in wanted.items():
            if have.get(key, value) != value:
                raise ValueError(f"{key}={have[key]!r} is not what this model computes; it takes {value!r}")

    for key in ("rope_scaling", "rope_parameters", "quantization_config"):
        if not isinstance(hf.get(key) or {}, dict):
            raise ValueError(f"{key}={hf[key]!r} is no JSON object")
    gate = {fixed["model_type"]: gate for gate, fixed in _HF_GATES.items()}.get(str(hf.get("model_type")))
    if gate is None:
        raise ValueError(f"model_type={hf.get('model_type')!r} is neither deepseek_v2 nor deepseek_v3")
    if gate == "softmax" and hf.get("topk_method", "greedy") == "greedy":
        hf = hf | dict(n_group=1, topk_group=1)
    elif gate == "softmax":
        demand(hf, topk_method="group_limited_greedy")
    may_be_null = "q_lora_rank", "n_shared_experts"
    for key in _HF_FIELDS.values():
        if key not in hf or hf[key] is None and key not in may_be_null:
            raise ValueError(f"{key} is missing")
    values = {ours: hf[theirs] or 0 if theirs in may_be_null else hf[theirs] for ours, theirs in _HF_FIELDS.items()}
    demand(hf, **_HF_FIXED, **_HF_GATES[gate], num_key_value_heads=hf["num_attention_heads"])
    if hf.get("num_nextn_predict_layers"):
        demand(hf, num_nextn_predict_layers=1)
    demand(hf.get("quantization_config") or {}, quant_method="fp8", fmt="e4m3", weight_block_size=[quant.TILE] * 2)

    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # before and since transformers 5
    rope = {key: value for key, value in rope.items() if value is not None}
    values |= dict(gate=gate, group_score="max" if gate == "softmax" else "top2",
                   rope_base=rope.get("rope_theta", hf.get("rope_theta", 1e4)))
    demand(rope, partial_rotary_factor=1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        demand(dict(rope_type=kind), rope_type="yarn")
        demand(rope, attention_factor=1.0, truncate=True)
        if not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim"):  # would scale only what is rotated
            raise ValueError(f"mscale={rope.get('mscale')!r} with mscale_all_dim={rope.get('mscale_all_dim')!r} is not"
                             " what this model computes; it takes equal ones")
        values |= {ours: rope.get(theirs) for ours, theirs in _HF_YARN.items()}
        values |= dict(yarn_beta_fast=rope.get("beta_fast", 32), yarn_beta_slow=rope.get("beta_slow", 1))
        demand(hf, original_max_position_embeddings=values["yarn_origin"])
    return ModelConfig(**values)


def _hf_config(c: ModelConfig) -> dict:
    """config.json, but for dtype and token ids. ValueError where that has no word for what c computes."""
    if c.gate not in _HF_GATES:
        raise ValueError(f"transformers' DeepSeek models have no gate={c.gate}")
    hf = _HF_FIXED | _HF_GATES[c.gate] | {theirs: getattr(c, ours) for ours, theirs in _HF_FIELDS.items()}
    hf |= dict(architectures=[f"Deepseek{hf['model_type'][-2:].upper()}ForCausalLM"], q_lora_rank=c.q_lora or None,
               num_key_value_heads=c.n_heads, num_nextn_predict_layers=int(c.mtp), rope_theta=c.rope_base)
    if c.gate == "softmax":
        hf["topk_method"] = "greedy" if c.n_groups == 1 else "group_limited_greedy"
    if c.yarn_factor > 1:  # the older spelling, which newer readers take as well
        yarn = {theirs: getattr(c, ours) for ours, theirs in _HF_YARN.items()}
        hf["rope_scaling"] = dict(type="yarn", mscale=c.yarn_mscale, **yarn)
    lost = "n_shared" if not c.n_shared else "mtp" if c.mtp and c.gate == "softmax" else _difference(c, _parse_hf(hf))
    if lost:
        raise ValueError(f"transformers' {hf['model_type']} does not compute {lost}={getattr(c, lost)}")
    return hf


def _difference(a: ModelConfig, b: ModelConfig, free: tuple = ()) -> str | None:
    """The first field in which they compute differently, but for those in `free`."""
    moot = {"balance_rate", "balance_alpha", "mtp", "mtp_weight", *free}
    moot |= {"group_score"} if a.n_groups == b.n_groups == 1 else set()
    moot |= set(_HF_YARN) if a.yarn_factor == b.yarn_factor == 1 else set()
    return next((f.name for f in fields(a) if f.name not in moot and getattr(a, f.name) != getattr(b, f.name)), None)


def _safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("a Hugging Face checkpoint needs safetensors: pip install '.[hf]'") from None
    return safetensors


@contextlib.contextmanager
def _opened(file: Path):
    """A safetensors file, mapped into memory. ValueError where it is missing or damaged."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(file, "pt") as opened:
            yield opened
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the checkpoint is incomplete") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _hf_index(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        with _opened(single) as f:
            return dict.fromkeys(f.keys(), single)
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or any(not isinstance(file, str) or "/" in file for file in files.values()):
        raise ValueError(f"{index} is damaged: its weight_map does not name a file beside it for each tensor")
    return {name: folder / file for name, file in files.items() if not name.endswith("rotary_emb.inv_freq")}


def load_hf(folder) -> Model:
    """The model of a Hugging Face checkpoint, float32, on the CPU; with MTP where its tensors are there.

    ValueError or OSError, in one line, for what is damaged, incomplete or foreign; ImportError without safetensors."""
    config = config_from_hf(folder)
    mtp = f"model.layers.{config.n_layers}.eh_proj.weight" in _hf_index(Path(folder))
    with torch.device("meta"):  # spares the random weights
        model = Model(replace(config, mtp=mtp))
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    fill_from_hf(model, folder)
    return model


@torch.no_grad()
def fill_from_hf(model: Model, folder):
    """Copy a checkpoint's tensors into the model, wherever that is, one by one; MTP's if the model has it, and of experts those
    that this rank holds.

    Errors as `load_hf`'s, and ValueError if sizes or routes differ. Some tensors may have been copied by then."""
    folder, mtp = Path(folder), f"model.layers.{model.config.n_layers}."
    theirs, index = config_from_hf(folder), _hf_index(folder)
    if field := _difference(model.config, theirs, ("max_seq_len", "rope_base", *_HF_YARN, "norm_eps", "init_std")):
        ours = getattr(model.config, field)
        raise ValueError(f"{folder} has {field}={getattr(theirs, field)}, this model has {field}={ours}")
    if model.mtp is None and mtp + "eh_proj.weight" in index:
        index = {name: file for name, file in index.items() if not name.startswith(mtp)}
    slots = hf_tensors(model, any(name.endswith("mlp.experts.gate_up_proj") for name in index))
    known = {*slots, *(mtp + name for name in _HF_COPIES if model.mtp is not None)}
    held, some = _held(model), f".mlp.experts.{_held(model).start}."
    known |= {name.replace(some, f".mlp.experts.{e}.") for name in slots if some in name for e in range(model.config.n_experts)}
    unknown = {name for name in index if name.removesuffix("_scale_inv") not in known}
    for what, names in ("lacks", slots.keys() - index), ("has unexpected", unknown):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{folder} {what} tensors: {min(names)}{more}")
    for file, names in itertools.groupby(sorted(slots, key=index.get), index.get):
        with _opened(file) as opened:
            for name in names:
                shape = slots[name].shape
                whole = (model.config.n_experts, *shape[1:]) if len(shape) == 3 else shape
                slots[name].copy_(_turned(name, _read_hf(name, whole, held, opened, index)))
    quant.new_epoch()


def _read_hf(name: str, shape: torch.Size, held: range, opened, index: dict[str, Path]) -> Tensor:
    """One tensor as it lies there, the held experts' part of one that has all; or for FP8 the numbers it stands for: its scale
    may be in another file."""
    t = opened.get_slice(name)
    have, t = t.get_shape(), t[held.start:held.stop] if len(shape) == 3 else opened.get_tensor(name)
    where, scale_file = f"{index[name]}: {name}", index.get(f"{name}_scale_inv")
    if have != list(shape):
        raise ValueError(f"{where} has the shape {have}; by config.json it is {list(shape)}")
    if t.dtype in _HF_DTYPES and scale_file is None:
        return t
    if t.dtype != torch.float8_e4m3fn or t.dim() != 2 or scale_file is None:
        raise ValueError(f"{where} is {t.dtype} {'without' if scale_file is None else 'with'} a scale; weights are"
                         " float32, bfloat16, float16, or float8_e4m3fn with weight_scale_inv")
    with contextlib.nullcontext(opened) if scale_file == index[name] else _opened(scale_file) as f:
        scale = f.get_tensor(f"{name}_scale_inv")
    blocks = [-(-n // quant.TILE) for n in shape]
    if scale.dtype != torch.float32 or list(scale.shape) != blocks or not scale.isfinite().all():
        raise ValueError(f"{where}_scale_inv: it takes {blocks} finite float32; got {list(scale.shape)} {scale.dtype}")
    return quant.dequantize(quant.Fp8(t, scale))


@torch.no_grad()
def save_hf(model: Model, folder, dtype: torch.dtype = torch.bfloat16, eos: int | None = None,
            shard_bytes: int = 5 * 10**9):
    """Write a checkpoint for transformers: weights in dtype, but the router's in float32; eos: the id that ends a text.

    It is written as <folder>.tmp and renamed; no more than shard_bytes are held beside the model. ValueError for a
    folder that is not empty, another dtype, a model that transformers does not compute or that holds a part of its experts;
    OSError: cannot be written."""
    folder, safetensors = Path(folder).resolve(), _safetensors()
    if model.ep is not None:
        raise ValueError(f"this model holds {len(_held(model))} of {model.config.n_experts} experts: save one that has all")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no empty folder: name another")
    if dtype not in _HF_DTYPES:
        raise ValueError(f"weights are written as float32, bfloat16 or float16, not as {dtype}")
    dtype_name = str(dtype).removeprefix("torch.")
    hf = _hf_config(model.config) | dict(torch_dtype=dtype_name, bos_token_id=None, eos_token_id=eos, pad_token_id=None)
    tensors = hf_tensors(model)
    if model.mtp is not None:
        layer = f"model.layers.{model.config.n_layers}."
        tensors |= {layer + name: getattr(model, ours) for name, ours in _HF_COPIES.items()}
    written = lambda name: torch.float32 if ".mlp.gate." in name else dtype
    shards, room = [], 0
    for name, t in tensors.items():
        room -= (size := t.numel() * _HF_DTYPES[written(name)])
        if room < 0:
            shards, room = [*shards, []], shard_bytes - size
        shards[-1].append(name)
    aside, files = folder.with_name(f"{folder.name}.tmp"), {}
    try:
        shutil.rmtree(aside, ignore_errors=True)  # a killed run's
        aside.mkdir(parents=True)
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            files |= dict.fromkeys(names, file)
            safetensors.torch.save_file({name: _turned(name, tensors[name]).to("cpu", written(name), copy=True)
                                         for name in names}, aside / file, {"format": "pt"})
        if len(shards) > 1:
            index = {"metadata": {}, "weight_map": files}
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (aside / "config.json").write_text(json.dumps(hf, indent=1))
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except safetensors.SafetensorError as error:
        raise OSError(f"{folder} could not be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# -----------------------------------------------------------------------------
# formulas: parameters, arithmetic and memory of any configuration, without building it

def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Parameters by part (a layer's or the model's), their `total` without MTP, and those `active` for a token.

    Balance biases count; `active` leaves out the input embedding, which multiplies nothing, and experts not chosen."""
    c = config
    query = c.n_heads * c.qk_dim
    attention = (c.hidden * c.q_lora + c.q_lora + c.q_lora * query if c.q_lora else c.hidden * query)
    attention += c.hidden * (c.kv_lora + c.rope_dim) + c.kv_lora
    attention += c.kv_lora * c.n_heads * (c.nope_dim + c.v_dim) + c.n_heads * c.v_dim * c.hidden
    norms, dense, expert = 2 * c.hidden, 3 * c.hidden * c.dense_width, 3 * c.hidden * c.expert_width
    router = c.n_experts * c.hidden + (c.n_experts if GATES[c.gate].balanced else 0)
    outside = c.vocab_size * c.hidden  # embedding, and as much again for the head
    moe = lambda chosen: attention + norms + router + (chosen + c.n_shared) * expert
    total = 2 * outside + c.hidden + c.n_dense * (attention + norms + dense) + c.n_moe * moe(c.n_experts)
    mtp = moe(c.n_experts) + 2 * c.hidden ** 2 + 3 * c.hidden
    active = outside + c.hidden + c.n_dense * (attention + norms + dense) + c.n_moe * moe(c.top_k)
    return dict(attention=attention, dense=dense, expert=expert, router=router, embedding=outside, mtp=mtp,
                total=total, active=active)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward a token, as MFU counts them: 6 x active parameters and causal attention's two matmuls.

    Recomputation and MTP are not counted, quantisation neither."""
    scores_and_values = 3 * seq_len * config.n_heads * (config.qk_dim + config.v_dim) * config.n_layers
    return 6 * parameter_count(config)["active"] + scores_and_values


def tokens_received(config: ModelConfig, ranks: int) -> float:
    """Tokens a rank receives for each of its own when experts are spread over `ranks` and choices are uniform.

    A token goes once to each rank that holds one of its top_k experts; group-limited routing keeps it to few ranks.
    V3 on 32 ranks: 6.60 (6.45 if a token could draw an expert twice).
    ValueError unless ranks and groups divide one another and the experts."""
    c = config
    if ranks < 1 or c.n_experts % ranks or (c.n_groups % ranks and ranks % c.n_groups):
        raise ValueError(f"{c.n_experts} experts in {c.n_groups} groups do not spread evenly over {ranks} ranks")
    group, local = c.n_experts // c.n_groups, c.n_experts // ranks
    held = max(c.n_groups // ranks, 1)  # groups that a rank holds, or holds a part of
    missed = 0.0
    for kept in range(min(held, c.top_groups) + 1):  # how many of them the token keeps
        chance = math.comb(held, kept) * math.comb(c.n_groups - held, c.top_groups - kept) / math.comb(c.n_groups, c.top_groups)
        open_experts = c.top_groups * group
        elsewhere = open_experts - kept * min(group, local)
        missed += chance * math.comb(elsewhere, c.top_k) / math.comb(open_experts, c.top_k)
    return ranks * (1 - missed)


def kept_bytes(config: ModelConfig, recipe: Recipe, recompute: frozenset = frozenset(), ranks: int = 1, dense: bool = False,
               element_size: int = 2) -> dict[str, float]:
    """Bytes a token of one layer that autograd holds between forward and backward, by tensor.

    ranks: expert-parallel ranks; on one, what experts received and the shared expert's input are the same tensor where they
    have the same format. element_size: bytes of an unquantised activation. dense: a layer with a dense feed-forward. Left out are
    12 bytes for each expert here and 12 more, where experts' rows lie, and what GPU kernels fill up: columns of h to 128, where
    it stays BF16 its rows, too, and 4 bytes a token of a dense layer whose tokens fill no tiles."""
    c, e = config, element_size
    size = lambda width, name: quant.bytes_per_row(width, name, e)
    attn, norm, mla_up = "attn" in recompute, "norm" in recompute, "mla_up" in recompute or "attn" in recompute
    rows = {"residual": 2 * c.hidden * e}
    query = 0 if c.q_lora else c.n_heads * c.qk_dim  # without a latent, recomputing the rest needs the queries themselves
    latents = c.q_lora + c.kv_lora + c.rope_dim + (query if mla_up else 0)
    rows["latents"] = 0 if attn else latents * e
    rows["q, k, v"] = 0 if mla_up else c.n_heads * (2 * c.qk_dim + c.v_dim) * e
    rows["attention output"] = 0 if attn else c.n_heads * c.v_dim * e
    rows["log-sum-exp"] = 0 if attn else c.n_heads * 4
    rows["normed input, attention"] = 0 if norm or attn else size(c.hidden, recipe.save)
    rebuilt = norm or "mlp" in recompute
    if dense:
        rows["normed input, FFN"] = 0 if rebuilt else size(c.hidden, recipe.save)
        rows["h"] = 0 if "mlp" in recompute else size(2 * c.dense_width, recipe.save_h)
        return rows
    ffn_input = c.n_shared > 0 and not rebuilt
    arrives = recipe.compute if recipe.dispatch == "bf16" else recipe.dispatch  # what expert GEMMs read
    received = arrives if "moe" in recompute else recipe.save if recipe.dispatch == "bf16" else min(
        recipe.dispatch, recipe.save, key=quant.WIDTH.get)
    same_tensor = ranks == 1 and ffn_input and received == recipe.save == recipe.dispatch
    tokens = tokens_received(c, ranks)
    rows["normed input, FFN"] = size(c.hidden, recipe.save) if ffn_input and not same_tensor else 0
    rows["received"] = tokens * size(c.hidden, received)
    if ranks > 1 and received == recipe.dispatch:  # kept as part of the message; FP8's scales beside it
        dtype, four = torch.float32 if e == 4 else torch.bfloat16, (torch.int32, c.top_k)  # bytes of a place, and of a weight
        scales = 4 * -(-c.hidden // quant.TILE) if received == "fp8" else 0
        rows["received"] = tokens * (quant.message_bytes(received, c.hidden, dtype, four, four) + scales)
    rows["h"] = 0 if "moe" in recompute else c.top_k * size(2 * c.expert_width, recipe.save_h)
    rows["h, shared"] = 0 if "mlp" in recompute or not c.n_shared else size(2 * c.n_shared * c.expert_width, recipe.save_h)
    rows["routing"] = tokens * c.top_k * 8  # rows and weights of pairs where experts are
    rows["routing"] += c.top_k * 4 + c.n_experts * 4  # ids and scores at home
    rows["routing"] += 4 * (ranks + min(ranks, c.top_k)) if ranks > 1 else 0  # which rows went where: Route
    return rows


@dataclass(frozen=True)
class Share:
    """What one rank holds and does of a model: all that its memory and time depend on."""
    config: ModelConfig
    recipe: Recipe
    recompute: frozenset = frozenset()
    tokens: int = 4096       # of a micro-batch
    seq_len: int = 4096
    ep: int = 1              # ranks over which experts are spread
    fsdp: int = 1            # ranks over which dense parameters are cut; a rank's experts over fsdp / ep of them
    moment: int = 4          # bytes of each of AdamW's two moments
    micro_batches: int = 1   # of a step
    in_flight: int = 1       # micro-batches that may have been forward and not yet backward
    first: int = 0           # of the layers of a pipeline's stage; the first stage has the embedding
    last: int | None = None  # behind its last one, which has the head; None: all
    element: int = 2         # bytes of an unquantised activation
    balance: float = 1       # what this rank's experts have to do, over the mean of all ranks

    @property
    def layers(self) -> list[bool]:
        """Whether each layer here is dense; MTP's comes behind the last."""
        c, last = self.config, self.config.n_layers if self.last is None else self.last
        return [i < c.n_dense for i in range(self.first, last)] + [False] * (c.mtp and last == c.n_layers)

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether embedding and head are here."""
        return self.first == 0, self.last in (None, self.config.n_layers)

    @property
    def received(self) -> float:
        """Tokens that arrive at a layer's experts."""
        return self.tokens * min(self.balance * tokens_received(self.config, self.ep), self.ep)

    @property
    def pairs(self) -> float:
        """Token-expert pairs of a layer's experts here."""
        return self.tokens * self.config.top_k * self.balance

    @property
    def rows(self) -> float:
        """Rows of the experts' GEMMs, with room for 127 of padding an expert."""
        return self.pairs + 127 * self.config.n_experts // self.ep


def linears(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of attention's projections."""
    queries = {"wq_a": (c.q_lora, c.hidden)} if c.q_lora else {}
    return queries | {"wq_b": (c.n_heads * c.qk_dim, c.q_lora or c.hidden), "wkv_a": (c.kv_lora + c.rope_dim, c.hidden),
                      "wkv_b": (c.n_heads * (c.nope_dim + c.v_dim), c.kv_lora), "wo": (c.hidden, c.n_heads * c.v_dim)}


def parameters_here(s: Share) -> dict[str, list[int]]:
    """Parameters of a rank's layers in forward order, before fsdp cuts them: `attention` with both norms, `dense` (feed-forward,
    or router and shared expert), `experts`; `outside`: of embedding, head with its norm, MTP's projection."""
    c, count = s.config, parameter_count(s.config)
    moe = c.n_experts * c.hidden + c.n_shared * count["expert"]  # the balance bias is no parameter
    embed, head = s.ends
    return {"attention": [count["attention"] + 2 * c.hidden for _ in s.layers],
            "dense": [count["dense"] if dense else moe for dense in s.layers],
            "experts": [0 if dense else c.n_experts // s.ep * count["expert"] for dense in s.layers],
            "outside": [embed * count["embedding"], head * (count["embedding"] + c.hidden),
                        head * c.mtp * c.hidden * (2 * c.hidden + 3)]}


# names in kept_bytes of what is there until attention's backward is through
ATTENTION_KEEPS = ("residual", "latents", "q, k, v", "attention output", "log-sum-exp", "normed input, attention")


def memory(s: Share) -> dict[str, float]:
    """Bytes a rank's memory holds at the fullest moment of a step, by what; kernels' code and the allocator's gaps left out.

    Backward goes from the last layer to the first: kept activations fall and gradients, unless they are there from an earlier
    micro-batch, grow. Of each layer two moments count, its feed-forward's backward and attention's. `gathered`: of what FSDP2
    shards, the outermost parameters and their gradients whole, and of the largest layer two sets of weights (one is being
    gathered) and of gradients (one is being reduced)."""
    c, here, of_layer = s.config, parameters_here(s), {dense: kept_here(s, dense) for dense in set(s.layers)}
    cut, cut_experts = s.fsdp, max(s.fsdp // s.ep, 1)
    part = {name: [-(-n // (cut_experts if name == "experts" else cut)) for n in counts] for name, counts in here.items()}
    total = sum(map(sum, part.values()))
    copied = s.recipe.compute == "fp8" or s.element < 4  # FP8 and its transpose, or BF16
    routers = sum(c.n_experts * c.hidden for dense in s.layers if not dense)
    no_copy = 2 * c.hidden * len(s.layers) + routers
    dense_copies = sum(map(sum, (here["attention"], here["dense"], here["outside"][1:]))) - no_copy
    sharded = [(a + d) * (cut > 1) + e * (cut_experts > 1)
               for a, d, e in zip(here["attention"], here["dense"], here["experts"])]
    fixed = {"weights": 4 * total, "gradients": 0, "moments": 2 * s.moment * total,
             "copies to multiply": (2 * copied * (dense_copies * (cut == 1) + sum(here["experts"]) * (cut_experts == 1))
                                    + 8 * (s.element < 4) * routers * (cut == 1)),  # four BF16 parts
             "gathered": 8 * sum(here["outside"]) * (cut > 1) + 16 * max(sharded)}
    candidates, layers = [], s.layers
    for flying, there in {(s.in_flight, s.micro_batches > s.in_flight), (1, s.micro_batches > 1)}:
        kept = s.tokens * flying * sum(sum(of_layer[dense].values()) for dense in s.layers)
        grads = 4 * (total if there else sum(part["outside"][1:]))
        if s.ends[1]:
            logits = min(LOGIT_BYTES, 4 * s.tokens * c.vocab_size)  # of a chunk, and their gradients, in BF16
            candidates.append((grads, kept, logits + 2 * _stream(s)))
        for i in reversed(range(len(layers))):
            of_attention = sum(of_layer[layers[i]][name] for name in ATTENTION_KEEPS)
            grads += 0 if there else 4 * (part["dense"][i] + part["experts"][i])
            candidates.append((grads, kept, _ffn_backward(s, layers[i])))
            kept -= s.tokens * (sum(of_layer[layers[i]].values()) - of_attention)
            grads += 0 if there else 4 * part["attention"][i]
            candidates.append((grads, kept, _attention_backward(s, of_layer[layers[i]])))
            kept -= s.tokens * of_attention
    candidates.append((4 * total, 0, 0))  # the optimizer's step
    return fixed | dict(zip(("gradients", "kept activations", "passing"), max(candidates, key=sum)))


def kept_here(s: Share, dense: bool) -> dict[str, float]:
    """kept_bytes of a layer of this rank."""
    kept = kept_bytes(s.config, s.recipe, s.recompute, s.ep, dense, s.element)
    more = {"received": s.received / s.tokens / tokens_received(s.config, s.ep), "h": s.balance}
    return kept if dense else kept | {name: kept[name] * times for name, times in more.items()}


def _stream(s: Share) -> int:
    """Bytes of a residual stream, or of its gradient."""
    return s.tokens * s.config.hidden * s.element


def _ffn_backward(s: Share, dense: bool) -> float:
    """Bytes that a feed-forward's backward holds for the moment, beside kept tensors and gradients: see quant._SwiGLU."""
    c, e, fp8 = s.config, s.element, s.recipe.compute == "fp8"
    width = c.dense_width if dense else c.expert_width
    M, N = (s.tokens, s.tokens) if dense else (s.rows, s.received)
    H, I, dx = M * c.hidden, M * width, 0 if dense else N * c.hidden * e
    again = 2 * e * I * (("mlp" if dense else "moe") in s.recompute)  # h
    if fp8:
        steps = (H + (e + 5) * I + again, 2 * H + e * I + again, e * H + 4 * I + dx, H + 4 * I + dx)
    else:  # one tensor is rows and columns; weight gradients of experts come in BF16 first
        narrow = 0 if dense else 2 * c.n_experts // s.ep * c.hidden * width
        steps = (e * (H + 4 * I) + narrow + again, e * (H + 2 * I) + dx, e * (H + 2 * I) + 2 * narrow + dx)
    if s.ep > 1 and not dense:  # dy stays as it arrived; dx is on its way home, packed here and room for what comes there
        size = message_bytes(c, s.recipe, torch.bfloat16 if e == 2 else torch.float32)
        steps = *steps[:-1], steps[-1] + 2 * N * size["dispatch, backward"]
        return max(steps) + N * size["combine, backward"] + 3 * _stream(s)
    return max(steps) + 3 * _stream(s)


def _attention_backward(s: Share, kept: dict[str, float]) -> float:
    """The same of attention's backward: what it reads and was not kept, the gradients of q, k, v and of the output, and cuDNN's
    sums of dq in float32."""
    c, e = s.config, s.element
    qkv, out = c.n_heads * (2 * c.qk_dim + c.v_dim) * e, c.n_heads * c.v_dim * e
    rebuilt = (0 if kept["q, k, v"] else qkv) + (0 if kept["attention output"] else out)
    return s.tokens * (rebuilt + qkv + out + c.n_heads * c.qk_dim * 4) + 3 * _stream(s)


class Op(NamedTuple):
    """A piece of work: a GEMM out_MN = a_MK b_NKᵀ, its M rows spread over E experts; attention; bytes that a kernel moves."""
    part: str         # of the model
    kind: str         # fp8 | bf16: operands of a GEMM; attention, its backward; else the kernel, as bench.py kernels names it
    amount: float     # FLOPs, or bytes read and written
    shape: tuple = () # (E, M, N, K) of a GEMM
    wgrad: bool = False


class Work:
    """What one micro-batch costs a rank, gathered in `ops`. Left out: choosing experts, small launches, the host's delays."""

    def __init__(self, s: Share):
        self.s, self.c, self.ops, self.fp8 = s, s.config, [], s.recipe.compute == "fp8"
        self.size = {name: quant.bytes_per_row(4096, name) / 4096 for name in quant.WIDTH}  # bytes an element, scales included

    def gemm(self, part: str, M: float, N: int, K: int, E: int = 1, wgrad: bool = False, kind: str = ""):
        self.ops.append(Op(part, kind or self.s.recipe.compute, 2 * M * N * K, (E, M, N, K), wgrad))

    def move(self, part: str, kernel: str, elements: float, *formats: str):
        """So many elements, read or written in each of the formats."""
        self.ops.append(Op(part, kernel, elements * sum(self.size[name] for name in formats)))

    def norm(self, width: int, wire: str = "bf16"):
        codes = [name for name in ("fp8", "fp4") if name in (self.s.recipe.compute, self.s.recipe.save, wire)]
        kernel = ", ".join(["rms_norm -> bf16", *(("fp8", "fp4") if "fp4" in codes else codes)])
        self.move("norms", kernel, self.s.tokens * width, "bf16", "bf16", *codes)

    def add(self, times: int = 1):
        self.move("residual", "copy", times * self.s.tokens * self.c.hidden, "bf16", "bf16", "bf16")

    def wgrad(self, part: str, M: float, N: int, K: int, E: int = 1):
        """A weight's gradient, and what float32 costs beside BF16's 2 bytes: 4 written, 4 read where there is one already."""
        self.gemm(part, M, N, K, E, wgrad=True)
        there = 4 if self.s.micro_batches > 1 else 0
        extra = (6 if part == "experts" and not self.fp8 else 2) + there  # grouped_mm writes BF16: a second pass
        self.ops.append(Op("gradients in float32", "copy", E * N * K * extra))

    def linear_backward(self, part: str, N: int, K: int, kept: str):
        T = self.s.tokens
        if self.fp8:
            self.move(part, "quantize_fp8_rows_and_cols", T * N, "bf16", "fp8", "fp8")
            self.columns(part, T * K, T * K, kept)
        self.gemm(part, T, K, N)
        self.wgrad(part, T, N, K)

    def columns(self, part: str, elements: float, rows: float, kept: str):
        """What Wgrad reads of a kept x, of so many elements, fanned out to rows' elements."""
        if kept == "bf16":
            self.move(part, "quantize_fp8_rows", elements, "bf16", "fp8")
        self.move(part, f"{'fp4' if kept == 'fp4' else 'fp8'} fan-out cols", rows, "fp4" if kept == "fp4" else "fp8", "fp8")

    def swiglu(self, part: str, width: int, rows: float, pairs: float, backward: bool = False):
        back, save_h = "_backward" * backward, self.s.recipe.save_h
        if not self.fp8:
            self.move(part, f"swiglu{back}_bf16", width * (3 * (rows + pairs) if backward else rows + 2 * pairs), "bf16")
            return
        elements = (width * rows * (5 if backward else 1) * self.size["fp8"] + width * pairs * (2 if backward else 4)
                    + 2 * width * pairs * self.size[save_h])
        self.ops.append(Op(part, f"swiglu{back}, h in {'fp4' if save_h == 'fp4' else 'fp8'}", elements))

    def heads(self):
        """Rotary position and the shared key into what attention reads, or back; no table has it: it moves as fast as a norm."""
        c = self.c
        width = 2 * c.nope_dim + 3 * c.rope_dim + 2 * c.v_dim
        self.move("attention", "rms_norm -> bf16", self.s.tokens * c.n_heads * width, "bf16")

    def up(self):
        c, T, shapes = self.c, self.s.tokens, linears(self.c)
        if c.q_lora:
            self.norm(c.q_lora)
            self.gemm("linears", T, *shapes["wq_b"])
        self.norm(c.kv_lora)
        self.gemm("linears", T, *shapes["wkv_b"])
        self.heads()

    def attention(self):
        """From the residual stream to attention's output projection."""
        c, T, shapes = self.c, self.s.tokens, linears(self.c)
        self.norm(c.hidden)
        for name in ("wq_a" if c.q_lora else "wq_b", "wkv_a"):
            self.gemm("linears", T, *shapes[name])
        self.up()
        half = T * self.s.seq_len * c.n_heads * (c.qk_dim + c.v_dim)  # two matrix products, causal: half of each
        self.ops.append(Op("attention", "attention", half))
        if self.fp8:
            self.move("linears", "quantize_fp8_rows", T * c.n_heads * c.v_dim, "bf16", "fp8")
        self.gemm("linears", T, *shapes["wo"])

    def attention_backward(self):
        c, s, shapes = self.c, self.s, linears(self.c)
        if "attn" in s.recompute:
            self.attention()
        elif "mla_up" in s.recompute:
            self.up()
        self.linear_backward("linears", *shapes["wo"], "bf16")
        half = s.tokens * s.seq_len * c.n_heads * (c.qk_dim + c.v_dim)
        self.ops.append(Op("attention", "attention, backward", 2.5 * half))  # five products of the same size
        # cuDNN multiplies dO by O before them, and brings dq from float32 to BF16 after
        self.ops.append(Op("attention", "copy", s.tokens * c.n_heads * (4 * c.v_dim + 6 * c.qk_dim)))
        self.heads()
        for latent, name in ((c.q_lora, "wq_b"), (c.kv_lora, "wkv_b")):
            if latent:
                self.norm(latent)  # rebuilt
                self.linear_backward("linears", *shapes[name], s.recipe.save)
                self.move("norms", "rms_norm_backward", s.tokens * latent, *["bf16"] * 3)
        for name in ("wq_a" if c.q_lora else "wq_b", "wkv_a"):
            if "norm" in s.recompute:
                self.norm(c.hidden)
            self.linear_backward("linears", *shapes[name], s.recipe.save)
        self.move("norms", "rms_norm_backward", s.tokens * c.hidden, *["bf16"] * 3)
        self.add(2)

    def mlp(self, part: str, width: int):
        T, H = self.s.tokens, self.c.hidden
        self.gemm(part, T, 2 * width, H)
        self.swiglu(part, width, T, T)
        self.gemm(part, T, H, width)
        self.add()

    def mlp_backward(self, part: str, width: int):
        s, T, H = self.s, self.s.tokens, self.c.hidden
        if {"norm", "mlp"} & s.recompute:
            self.norm(H)
        if "mlp" in s.recompute:
            self.gemm(part, T, 2 * width, H)
        if self.fp8:
            self.move(part, "quantize_fp8_rows_and_cols", T * H, "bf16", "fp8", "fp8")
        self.gemm(part, T, width, H)
        self.swiglu(part, width, T, T, backward=True)
        self.wgrad(part, T, H, width)
        self.gemm(part, T, H, 2 * width)
        if self.fp8:
            self.columns(part, T * H, T * H, s.recipe.save)
        self.wgrad(part, T, 2 * width, H)
        self.add()

    def fan_out(self):
        """The rows that FC1 reads."""
        arrives, H = self.s.recipe.dispatch if self.fp8 else "bf16", self.c.hidden
        arrives = "fp8" if self.fp8 and arrives == "bf16" else arrives
        self.move("experts, data", "group_rows (3 launches)", self.s.received * self.c.top_k * 6, "bf16")
        self.move("experts, data", f"{arrives} fan-out rows", self.s.rows * H, arrives, "fp8" if self.fp8 else "bf16")

    def fc1(self):
        c, s = self.c, self.s
        self.fan_out()
        self.gemm("experts", s.rows, 2 * c.expert_width, c.hidden, c.n_experts // s.ep)

    def experts(self):
        c, s, pairs = self.c, self.s, self.s.pairs
        self.move("wire, data", "copy", s.received * c.hidden, s.recipe.dispatch, s.recipe.dispatch)
        self.fc1()
        self.swiglu("experts, data", c.expert_width, s.rows, pairs)
        self.gemm("experts", s.rows, c.hidden, c.expert_width, c.n_experts // s.ep)
        self.move("experts, data", "sum_rows", (pairs + s.received) * c.hidden, "bf16")
        self.move("wire, data", "sum_rows", (s.received + s.tokens) * c.hidden, "bf16")

    def experts_backward(self):
        c, s, pairs, E = self.c, self.s, self.s.pairs, self.c.n_experts // self.s.ep
        H, I, code = c.hidden, c.expert_width, "fp8" if self.fp8 else "bf16"
        if self.fp8:
            self.move("wire, data", "quantize_fp8_rows", s.tokens * H, "bf16", "fp8")
        self.move("wire, data", "copy", s.received * H, code, code)
        if "moe" in s.recompute:
            self.fc1()
        if self.fp8:
            self.move("experts, data", "fp8 fan-out rows and cols", s.rows * H, "fp8", "fp8", "fp8")
        else:
            self.move("experts, data", "bf16 fan-out rows", s.rows * H, "bf16", "bf16")
        self.gemm("experts", s.rows, I, H, E)
        self.swiglu("experts, data", I, s.rows, pairs, backward=True)
        self.wgrad("experts", s.rows, H, I, E)
        self.gemm("experts", s.rows, H, 2 * I, E)
        self.move("experts, data", "sum_rows", (pairs + s.received) * H, "bf16")
        self.move("wire, data", "sum_rows", (s.received + s.tokens) * H, "bf16")
        if self.fp8:
            kept = min(s.recipe.dispatch, s.recipe.save, key=quant.WIDTH.get)
            self.columns("experts, data", s.received * H, s.rows * H, kept)
        else:
            self.move("experts, data", "bf16 fan-out rows", s.rows * H, "bf16", "bf16")
        self.wgrad("experts", s.rows, 2 * I, H, E)

    def layer(self, dense: bool):
        c, s = self.c, self.s
        self.attention()
        self.add()
        self.norm(c.hidden, "bf16" if dense else s.recipe.dispatch)
        if dense:
            return self.mlp("dense", c.dense_width)
        self.gemm("router", s.tokens, 3 * c.n_experts, c.hidden, kind="bf16")  # float32 as three BF16
        self.experts()
        if c.n_shared:
            self.mlp("shared", c.n_shared * c.expert_width)
        self.add()

    def layer_backward(self, dense: bool):
        c, T = self.c, self.s.tokens
        if dense:
            self.mlp_backward("dense", c.dense_width)
        else:
            if c.n_shared:
                self.mlp_backward("shared", c.n_shared * c.expert_width)
            self.experts_backward()
            self.move("router", "rms_norm -> bf16", T * c.hidden, "bf16", "bf16")  # its input, rebuilt
            self.gemm("router", T, c.hidden, 3 * c.n_experts, kind="bf16")
            self.gemm("router", T, c.hidden, 3 * c.n_experts, kind="bf16")
            self.add()
        self.move("norms", "rms_norm_backward", T * c.hidden, *["bf16"] * 3)
        self.add()
        self.attention_backward()

    def ends(self):
        """Embedding and head, forward and backward: logits twice, in chunks whose gradients of the head add up in float32."""
        c, T, (embed, head), matrix = self.c, self.s.tokens, self.s.ends, self.c.vocab_size * self.c.hidden
        if embed:
            self.move("embedding", "copy", T * c.hidden * 8 + 2 * matrix, "bf16")  # float32 rows both ways, the gradient's zeros
        for _ in range((1 + c.mtp) * head):
            for N, K in ((c.vocab_size, c.hidden),) * 2 + ((c.hidden, c.vocab_size),):
                self.gemm("head", T, N, K, kind="bf16")
            self.gemm("head", T, c.vocab_size, c.hidden, kind="bf16", wgrad=True)
            chunks = max(math.ceil(4 * T * c.vocab_size / LOGIT_BYTES), 1)
            self.move("head", "copy", 3 * T * c.vocab_size + 4 * chunks * matrix, "bf16")  # losses, gradients; sums
            self.norm(c.hidden)
            self.norm(c.hidden)
            self.move("norms", "rms_norm_backward", T * c.hidden, *["bf16"] * 3)


def micro_batch_work(s: Share) -> dict[str, list[Op]]:
    """All Ops of a micro-batch of a rank: `layers` and `ends`."""
    layers, ends = Work(s), Work(s)
    for dense in s.layers:
        layers.layer(dense)
        layers.layer_backward(dense)
    ends.ends()
    return {"layers": layers.ops, "ends": ends.ops}


def step_bytes(s: Share) -> dict[str, float]:
    """Bytes a step moves once: AdamW (20 a parameter with BF16 moments, else 28, and 4 for the norm), quantising weights (6)."""
    counts = parameters_here(s)
    here = sum(-(-n // (max(s.fsdp // s.ep, 1) if name == "experts" else s.fsdp)) for name, ns in counts.items() for n in ns)
    again = 2 * s.micro_batches  # what is sharded is quantised after each gathering
    dense = sum(map(sum, (counts["attention"], counts["dense"], counts["outside"][1:])))
    return {"optimizer": (12 + 4 * s.moment + 4) * here,
            "weights": 6 * (dense * (again if s.fsdp > 1 else 1) + sum(counts["experts"]) * (again if s.fsdp > s.ep else 1))}


def wire_bytes(s: Share) -> dict[str, float]:
    """Bytes between a rank and others for one micro-batch and MoE layer, by exchange (see message_bytes): what it receives of
    dispatch, which in a balance is what it sends."""
    away = s.received * (s.ep - 1) / s.ep
    return {name: away * size for name, size in message_bytes(s.config, s.recipe).items()}
