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

Experts live behind two functions, `dispatch` and `combine`: the seam where another number of ranks, or another transport,
comes in. Here there is one rank, and tokens do not move, but they change format all the same, so that what experts read does
not depend on the number of ranks.

Shape suffixes: B batch, S sequence, T = B*S tokens, H hidden, A attention heads, D head width (N without position, R rope,
V value), L latent, E experts, K top-k, G expert groups, I expert width, Vo vocabulary.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import quant
from quant import RECIPES, Activation, Recipe

RECOMPUTE_SCOPES = ("norm", "mla_up", "attn", "mlp", "moe")


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
    gate: str = "sigmoid"        # sigmoid (with a balance bias, weights renormalised) | softmax (neither)
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
        groups, best = max(self.n_groups, 1), 2 if self.group_score == "top2" else 1
        positive = ("vocab_size", "n_layers", "hidden", "dense_width", "n_heads", "nope_dim", "rope_dim", "v_dim", "kv_lora",
                    "n_experts", "top_k", "expert_width", "n_groups", "top_groups", "max_seq_len", "yarn_origin", "rope_base")
        rules = {
            **{f"{name} is positive": getattr(self, name) > 0 for name in positive},
            "q_lora, n_shared, norm_eps and init_std are not negative":
                min(self.q_lora, self.n_shared, self.norm_eps, self.init_std) >= 0,
            "n_dense is at most n_layers": 0 <= self.n_dense <= self.n_layers,
            "rope_dim is even": self.rope_dim % 2 == 0,
            "gate is sigmoid or softmax": self.gate in ("sigmoid", "softmax"),
            "group_score is top2 or max": self.group_score in ("top2", "max"),
            "n_groups divides n_experts": self.n_experts % groups == 0,
            "top_groups is at most n_groups": self.top_groups <= groups,
            "top_k is at most top_groups * n_experts / n_groups": self.top_k <= self.top_groups * self.n_experts // groups,
            "group_score=top2 needs n_experts of at least 2 * n_groups": groups == 1 or self.n_experts // groups >= best,
            "yarn_factor is at least 1": self.yarn_factor >= 1,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"model configuration: {field.name} is {value}, which is no finite number")
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

def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax attention, q, k [B, S, A, D], v [B, S, A, V] -> [B, S, A, V]; a single query attends to every key.

    cuDNN takes values narrower than keys. Without it (CPU, float32, or deterministic algorithms, which it refuses) values are
    padded to the keys' width for the flash kernel."""
    if 1 < q.shape[1] < k.shape[1]:
        raise ValueError(f"{q.shape[1]} new tokens after {k.shape[1] - q.shape[1]} cached ones: give all at once, or one by one")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = q.shape[2] > 1
    if q.is_cuda and q.dtype != torch.float32 and not torch.are_deterministic_algorithms_enabled():
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(order, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    else:
        pad = q.shape[-1] - v.shape[-1]
        padded = F.pad(v, (0, pad)) if pad > 0 else v
        out = F.scaled_dot_product_attention(q, k, padded, is_causal=causal, scale=scale)[..., :v.shape[-1]]
    return out.transpose(1, 2)


class Pass(NamedTuple):
    """What is the same for every layer of one forward pass."""
    batch: int
    rope: Tensor          # cosines and sines of every position, cached ones included
    recipe: Recipe
    recompute: frozenset


def replayed(again: bool, f, *args):
    """f(*args), and where `again`, computed a second time in backward instead of keeping what is inside."""
    return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=False) if again else f(*args)


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
        o = replayed("mla_up" in run.recompute, lambda q, kv: self.attend(q, kv, run), q_TL, kv_TL)
        # wo keeps nothing of its own: attention's backward needs its output in BF16 anyway
        return quant.linear(o, self.wo, Recipe(run.recipe.compute))

    def attend(self, q_TL: Tensor, kv_TL: Tensor, run: Pass) -> Tensor:
        """Latents -> attention output [T, A*V]. The latents are kept raw; their norms are rebuilt in backward."""
        c = self.config
        normed = lambda x, weight: quant.rms_norm(x, weight, c.norm_eps, run.recipe, rebuild=True)
        heads = lambda x: rearrange(x, "(b s) (a d) -> b s a d", b=run.batch, a=c.n_heads)
        latent, k_rope = kv_TL.split([c.kv_lora, c.rope_dim], -1)
        q_TD = quant.linear(normed(q_TL, self.q_norm), self.wq_b) if c.q_lora else q_TL
        q_nope, q_rope = heads(q_TD).split([c.nope_dim, c.rope_dim], -1)
        k_nope, v = heads(quant.linear(normed(latent, self.kv_norm), self.wkv_b)).split([c.nope_dim, c.v_dim], -1)
        k_rope = rotate(rearrange(k_rope, "(b s) d -> b s 1 d", b=run.batch), run.rope)
        q = torch.cat([q_nope, rotate(q_rope, run.rope[:, -q_nope.shape[1]:])], -1)  # the last positions, where keys are cached
        k = torch.cat([k_nope, k_rope.expand(-1, -1, c.n_heads, -1)], -1)
        # contiguous: a view would keep k_nope's half of the up-projection alive
        return attention(q, k, v.contiguous(), self.scale).flatten(2).flatten(0, 1)


# -----------------------------------------------------------------------------
# router

class Router(nn.Module):
    """Scores, group-limited top-k, gate weights, load counts and the balance bias (DeepSeek-V3, arXiv 2412.19437, §2.1.2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.hidden))
        if config.gate == "sigmoid":
            self.register_buffer("bias", torch.zeros(config.n_experts))  # moves selection only, never weights
        self.register_buffer("load", torch.zeros(config.n_experts, dtype=torch.long), persistent=False)

    def forward(self, x: Activation, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, H] -> expert ids [T, K] int32, gate weights [T, K] float32, and in training the balance losses [B]."""
        logits_TE = quant.router_linear(x, self.weight)
        scores_TE = logits_TE.sigmoid() if self.config.gate == "sigmoid" else logits_TE.softmax(-1)
        ids_TK = self.select(scores_TE.detach())
        weights_TK = self.weigh(scores_TE, ids_TK)
        balance = None
        if self.training and torch.is_grad_enabled():
            self.load.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))
            balance = self.balance_loss(scores_TE, ids_TK, batch)
        return ids_TK.int(), weights_TK, balance

    def select(self, scores_TE: Tensor) -> Tensor:
        """Top-k experts of the top groups by biased score, [T, K] int64."""
        c = self.config
        biased_TE = scores_TE + self.bias if c.gate == "sigmoid" else scores_TE
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
        if self.config.gate == "sigmoid":  # the floor keeps a row of underflowed scores finite, in backward too
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights_TK * self.config.route_scale

    def balance_loss(self, scores_TE: Tensor, ids_TK: Tensor, batch: int) -> Tensor:
        """[B], for each sequence alpha * sum_e f_e P_e: f its share of choices times E, P its mean normalised score."""
        c = self.config
        chosen_BE = scores_TE.new_zeros(batch, c.n_experts).scatter_add_(
            1, ids_TK.view(batch, -1), scores_TE.new_ones(batch, ids_TK.numel() // batch))
        share_BE = chosen_BE * (c.n_experts * batch / ids_TK.numel())
        normal_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
        return c.balance_alpha * (share_BE * normal_TE.unflatten(0, (batch, -1)).mean(1)).sum(-1)


# -----------------------------------------------------------------------------
# dispatch and combine: the seam for expert parallelism, or for another transport

class Received(NamedTuple):
    """Tokens as experts get them; all of this rank's own where there is one rank."""
    x: Tensor                  # [N, H] in full, or a carrier of the gradient where payload has the bits
    ids: Tensor                # [N, K] int32 local expert of each choice, -1 where it lives elsewhere
    weights: Tensor            # [N, K] float32 gate weights
    payload: quant.Fp8 | quant.Fp4 | None
    recipe: Recipe


def dispatch(x: Activation, ids: Tensor, weights: Tensor) -> Received:
    """Send tokens x [T, H] to the ranks of their experts ids [T, K], in the wire's format; differentiable in x and weights.

    ValueError if x was quantised without that format."""
    name = x.recipe.dispatch
    if name == "bf16":
        return Received(x.x, ids, weights, None, x.recipe)
    if x.format(name) is None:
        raise ValueError(f"the wire sends {name}, which this activation lacks: pass wire={name!r} to quantize or rms_norm")
    return Received(_Dispatch.apply(x.x, x.recipe.combine), ids, weights, x.format(name), x.recipe)


def combine(y: Tensor, received: Received) -> Tensor:
    """Bring the experts' sums y [N, H] back to their tokens [T, H]. Its backward sends dy in FP8 where dispatch was below BF16.

    y straight from `quant.experts` must have no other reader: its gradient then stays in FP8 (see `quant.carrier`)."""
    if received.recipe.wire == "bf16":
        return y
    in_full = torch.is_anomaly_enabled() or not quant.takes_wire(y)  # anomaly detection would stumble over the carrier's NaN
    return _Combine.apply(y, received.recipe.combine, in_full)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, combine_format):
        ctx.format = combine_format
        return quant.carrier(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return _over_wire(dx, ctx.format), None


class _Combine(torch.autograd.Function):
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
# layers and the model

class DenseFFN(nn.Module):
    """SwiGLU feed-forward: a dense layer's, or the shared expert's."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(2 * width, hidden))  # gate rows, then up rows
        self.w2 = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Activation, run: Pass) -> Tensor:
        return quant.mlp(x, self.w13, self.w2, "mlp" in run.recompute)


class MoE(nn.Module):
    """Routed experts beside a shared one."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.router = Router(c)
        self.w13 = nn.Parameter(torch.empty(c.n_experts, 2 * c.expert_width, c.hidden))
        self.w2 = nn.Parameter(torch.empty(c.n_experts, c.hidden, c.expert_width))
        self.shared = DenseFFN(c.hidden, c.n_shared * c.expert_width) if c.n_shared else None

    def forward(self, x: Activation, run: Pass) -> tuple[Tensor, Tensor | None]:
        """x [T, H], normed -> [T, H] and, in training, the balance losses [B]."""
        ids, weights, balance = self.router(x, run.batch)
        got = dispatch(x, ids, weights)
        y = quant.experts(got.x, got.ids, got.weights, self.w13, self.w2, run.recipe, got.payload, "moe" in run.recompute)
        y = combine(y, got)
        return y + self.shared(x, run) if self.shared is not None else y, balance


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, dense: bool):
        super().__init__()
        self.eps, self.dense = config.norm_eps, dense
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(config.hidden)), nn.Parameter(torch.ones(config.hidden))
        self.attn = MLA(config)
        self.ffn = DenseFFN(config.hidden, config.dense_width) if dense else MoE(config)

    def forward(self, x: Tensor, run: Pass, cache: list | None = None) -> tuple[Tensor, Tensor | None]:
        """Residual stream x [T, H] -> the same, and the balance losses [B] or None."""
        rebuild, wire = "norm" in run.recompute, "bf16" if self.dense else run.recipe.dispatch
        attend = lambda x: self.attn(quant.rms_norm(x, self.attn_norm, self.eps, run.recipe, rebuild), run, cache)
        x = x + replayed("attn" in run.recompute, attend, x)
        normed = quant.rms_norm(x, self.ffn_norm, self.eps, run.recipe, rebuild, wire)
        y, balance = (self.ffn(normed, run), None) if self.dense else self.ffn(normed, run)
        return x + y, balance


class MTP(nn.Module):
    """One extra depth of prediction: h' = M [norm(h); norm(emb(next))], a layer, a norm (arXiv 2412.19437, §2.2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.h_norm, self.next_norm, self.out_norm = (nn.Parameter(torch.ones(config.hidden)) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden))
        self.layer = Layer(config, dense=False)

    def forward(self, model: Model, h_TH: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of cross entropies of the token after the next, and the layer's balance losses [B]."""
        run = model.new_pass(len(targets_BS), targets_BS.shape[1] - 1)
        normed = lambda x, weight: quant.rms_norm(x, weight, self.layer.eps, RECIPES["bf16"]).x
        h = h_TH.unflatten(0, targets_BS.shape)[:, :-1].flatten(0, 1)
        after = model.embed_tokens(targets_BS[:, :-1].clamp(min=0))
        x = quant.linear(torch.cat([normed(h, self.h_norm), normed(after, self.next_norm)], -1), self.proj, run.recipe)
        x, balance = self.layer(x, run)
        # where the next token is unknown there is nothing to predict from
        labels = targets_BS[:, 1:].masked_fill(targets_BS[:, :-1] < 0, -100)
        return model.cross_entropy(x, self.out_norm, labels), balance


class Model(nn.Module):
    """The language model. Parameters are FP32 and nothing is quantised until `recipe` says so.

    recipe: a quant.Recipe; dtype: of activations, None for the parameters' own; recompute: a subset of RECOMPUTE_SCOPES.
    All three may change between calls."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.recipe, self.dtype, self.recompute = config, RECIPES["bf16"], None, frozenset()
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(Layer(config, dense=i < config.n_dense) for i in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.mtp = MTP(config) if config.mtp else None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_std)
        quant.new_epoch()
        self.register_load_state_dict_post_hook(quant.new_epoch)

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

    def logits(self, x_TH: Tensor, norm: Tensor) -> Tensor:
        """[T, Vo] in at least float32, from the residual stream; norm is the last norm's weight."""
        y = quant.linear(quant.rms_norm(x_TH, norm, self.config.norm_eps, RECIPES["bf16"], rebuild=True), self.head)
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def cross_entropy(self, x_TH: Tensor, norm: Tensor, targets_BS: Tensor) -> Tensor:
        """Summed over valid targets."""
        return F.cross_entropy(self.logits(x_TH, norm), targets_BS.flatten(), ignore_index=-100, reduction="sum")

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
    def update_balance(self, move: bool = True) -> Tensor:
        """Once after each optimizer step: move the balance biases against the step's loads, clear them; -> max / mean load.

        bias += u * sign(mean - load), load summed over all ranks and micro-batches (arXiv 2408.15664). Mean of the layers, 0-dim.
        move=False, after a skipped step, only clears the loads."""
        routers = [m for m in self.modules() if isinstance(m, Router)]
        if not routers:
            return torch.ones(())
        load = torch.stack([r.load for r in routers])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(load)
        load = load.double()
        mean = load.mean(1, keepdim=True)
        for router, sign in zip(routers, (mean - load).sign()):
            if move and self.config.gate == "sigmoid":
                router.bias += self.config.balance_rate * sign.to(router.bias.dtype)
            router.load.zero_()
        return (load.amax(1) / mean.squeeze(1).clamp(min=1 / load.shape[1])).mean().float()


@functools.cache  # once
def compile_elementwise():
    """torch.compile the chains of elementwise operations between GEMMs and quantisers, for all models of this process."""
    global rotate
    compiled = lambda f: torch.compile(f, dynamic=True)  # token counts change from batch to batch
    rotate = compiled(rotate)
    quant.swiglu, quant.swiglu_gradients = compiled(quant.swiglu), compiled(quant.swiglu_gradients)


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
    router = c.n_experts * c.hidden + (c.n_experts if c.gate == "sigmoid" else 0)
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
    have the same format. element_size: bytes of an unquantised activation. dense: a layer with a dense feed-forward.
    Where attention pads values to the keys' width (see `attention`), v and its output are that wide instead."""
    c, e = config, element_size
    size = lambda width, name: quant.bytes_per_row(width, name, e)
    attn, norm, mla_up = "attn" in recompute, "norm" in recompute, "mla_up" in recompute or "attn" in recompute
    rows = {"residual": 2 * c.hidden * e}
    query = 0 if c.q_lora else c.n_heads * c.qk_dim  # without a latent, recomputing the rest needs the queries themselves
    latents = c.q_lora + c.kv_lora + c.rope_dim + (query if mla_up else 0)
    rows["latents"] = 0 if attn else latents * e
    rows["q, k, v"] = 0 if mla_up else c.n_heads * (2 * c.qk_dim + c.v_dim) * e
    rows["attention output"] = 0 if attn else c.n_heads * c.v_dim * e
    rows["log-sum-exp"] = 0 if mla_up else c.n_heads * 4
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
    rows["h"] = 0 if "moe" in recompute else c.top_k * size(2 * c.expert_width, recipe.save_h)
    rows["h, shared"] = 0 if "mlp" in recompute or not c.n_shared else size(2 * c.n_shared * c.expert_width, recipe.save_h)
    rows["routing"] = tokens * c.top_k * 8 + c.n_experts * 4  # ids and weights where experts are, scores at home
    return rows
