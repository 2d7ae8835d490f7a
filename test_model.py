"""
Tests of model.py: formulas, router, mixture of experts, the whole model. Small sizes, one process, one core.

Whatever can be, is compared with a second, plainer implementation written here: the model token by token and head by
head in float64, parameters by counting them on the meta device, kept bytes by asking autograd. Bounds other than zero
say where they come from; signal-to-noise floors follow from the formats' relative errors, 2.6 % for E4M3 (31.6 dB) and
11.2 % for MXFP4 (19 dB); errors of independent operands add in squares.

Shape suffixes as in model.py: B batch, S sequence, T = B*S tokens, H hidden, Vo vocabulary.
"""

import contextlib
import copy
import math
import os
import re
import weakref
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
import quant
from model import MLA, PRESETS, RECOMPUTE_SCOPES, Layer, Model, ModelConfig, MoE, Pass, Router
from model import combine, dispatch, flops_per_token, kept_bytes, parameter_count, rope_table, tokens_received
from quant import RECIPES, Recipe

# torch reads it once, at the first GEMM on a GPU, and without it refuses GEMMs under deterministic algorithms
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
name_of = lambda value: "+".join(value) or "none"
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
every_recipe = pytest.mark.parametrize("name", list(RECIPES))
every_scope = pytest.mark.parametrize(
    "scopes", [(), *[(s,) for s in RECOMPUTE_SCOPES], ("attn", "norm", "moe"), RECOMPUTE_SCOPES], ids=name_of)
WIRES = ["bf16", "fp8", "fp4", "fp8-fp8", "fp4-fp8"]

SMALL = ModelConfig(
    vocab_size=61, n_layers=2, n_dense=1, hidden=128, dense_width=96, n_heads=2, nope_dim=32, rope_dim=32, v_dim=64,
    q_lora=64, kv_lora=32, n_experts=8, n_shared=1, top_k=2, expert_width=64, max_seq_len=64, init_std=0.1)
YARN = dict(yarn_factor=4.0, yarn_origin=16, yarn_beta_fast=2.0, yarn_beta_slow=0.25, yarn_mscale=0.707)


def build(config=SMALL, recipe="bf16", recompute=(), seed=0):
    torch.manual_seed(seed)
    net = Model(config)
    net.recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    net.recompute = frozenset(recompute)
    return net


def build_part(kind, *args, std=0.1):
    """A layer or a part of one with random weights, its norms' around 1."""
    torch.manual_seed(0)
    part = kind(*args)
    for p in part.parameters():
        torch.nn.init.normal_(p, float(p.dim() == 1), std)
    return part


def one_pass(batch, length, recipe=RECIPES["bf16"], scopes=(), config=SMALL, device="cpu"):
    return Pass(batch, rope_table(config, length, device), recipe, frozenset(scopes))


def tokens(batch=2, length=16, seed=1):
    return torch.randint(SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_and_targets(batch=2, length=16, seed=1, device="cpu"):
    ids = tokens(batch, length + 1, seed).to(device)
    return ids[:, :-1], ids[:, 1:].clone()


@contextlib.contextmanager
def repeatable():
    """On a GPU attention's backward adds in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(net, ids, targets, num_tokens=None, pieces=1):
    """{"loss": value, parameter: gradient}, added up over micro-batches."""
    net.zero_grad()
    total = 0
    for part_ids, part_targets in zip(ids.chunk(pieces), targets.chunk(pieces)):
        loss = net(part_ids, part_targets, num_tokens)[1]
        loss.backward()
        total = total + loss.detach()
    return {"loss": total, **{k: p.grad for k, p in net.named_parameters() if p.grad is not None}}


def assert_same(a: dict, b: dict):
    different = [k for k in b if not torch.equal(a[k], b[k])]
    assert a.keys() == b.keys() and not different, f"bits differ in {different}"


def assert_close(a: dict, b: dict, bound: float):
    """Relative to each tensor's norm."""
    worst = {k: ((a[k] - b[k]).norm() / b[k].norm().clamp(min=1e-30)).item() for k in b}
    assert a.keys() == b.keys() and max(worst.values()) <= bound, {k: v for k, v in worst.items() if not v <= bound}


def snr(x, reference):
    """Signal to noise in dB, of tensors or of all gradients together."""
    x, reference = (torch.cat([g.flatten().double().cpu() for k, g in t.items() if k != "loss"]) if isinstance(t, dict)
                    else t.double().cpu() for t in (x, reference))
    return (10 * torch.log10(reference.square().sum() / (x - reference).square().sum())).item()


# -----------------------------------------------------------------------------
# parameters, FLOPs

def count_on_meta(config):
    with torch.device("meta"):
        net = Model(config)
    return sum(t.numel() for t in [*net.parameters(), *(b for k, b in net.named_buffers() if k.endswith("bias"))])


@pytest.mark.parametrize("change", [
    {}, dict(q_lora=0), dict(n_shared=0), dict(n_shared=3), dict(gate="softmax"), dict(n_dense=0), dict(n_dense=2),
    dict(mtp=True)], ids=str)
def test_parameter_formula_counts_a_built_model(change):
    config = replace(SMALL, **change)
    counted = parameter_count(config)
    assert counted["total"] + config.mtp * counted["mtp"] == count_on_meta(config)
    idle = config.n_moe * (config.n_experts - config.top_k) * 3 * config.hidden * config.expert_width
    assert counted["active"] == counted["total"] - config.vocab_size * config.hidden - idle


@pytest.mark.parametrize("preset, total, active", [
    ("v3", 671_026_419_200, 37e9), ("v2", 235_741_434_880, 21e9), ("v2-lite", 15_706_484_224, 2.4e9)])
def test_parameters_of_the_published_models(preset, total, active):
    """Active: 37 B, 21 B, 2.4 B are published, not whether the input embedding (0.2 to 0.9 B) counts."""
    config, counted = PRESETS[preset], parameter_count(PRESETS[preset])
    assert counted["total"] == total == count_on_meta(config)
    assert counted["active"] == pytest.approx(active, abs=config.vocab_size * config.hidden)
    assert preset != "v3" or counted["mtp"] == 11_610_068_224


def test_flops_case_24():
    base = replace(SMALL, hidden=1024, expert_width=512, n_experts=64, top_k=6, n_shared=2)
    flops = lambda seq_len=128, **change: flops_per_token(replace(base, **change), seq_len)
    experts = flops() - flops(top_k=5, n_shared=0) + flops(top_k=6) - flops(top_k=5)  # 3 of them, and 1 once more
    assert experts * 2 == 75_497_472 == 6 * 8 * 1_572_864
    assert flops(n_experts=128) - flops() == 6 * 64 * (1024 + 1)  # not chosen: the router's row alone
    assert flops(vocab_size=62) - flops() == 6 * 1024  # the head's row; the embedding's multiplies nothing
    # a causal token sees S/2 keys on average: 2 FLOPs a product, once forward and twice backward
    assert flops(seq_len=1128) - flops() == 3 * 1000 * base.n_layers * base.n_heads * (base.qk_dim + base.v_dim)
    assert flops(mtp=True) == flops()


# -----------------------------------------------------------------------------
# kept bytes

def received_by_simulation(config, ranks, samples=20_000):
    """Ranks that each token needs, from uniform choices of groups, then of experts in them."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.rand(samples, config.n_groups, generator=generator).argsort(1)[:, :config.top_groups]
    closed = torch.ones(samples, config.n_groups).scatter_(1, groups, 0)
    scores = torch.rand(samples, config.n_groups, config.n_experts // config.n_groups, generator=generator)
    chosen = (scores - 2 * closed[..., None]).flatten(1).topk(config.top_k, 1).indices
    return F.one_hot(chosen // (config.n_experts // ranks), ranks).amax(1).sum(1).double().mean().item()


@pytest.mark.parametrize("preset, ranks", [
    ("v3", 1), ("v3", 2), ("v3", 8), ("v3", 32), ("v3", 256), ("v2", 16), ("v2", 4), ("v2-lite", 8), ("small", 4)])
def test_tokens_received_by_simulation(preset, ranks):
    """20 000 samples; the standard error is below 0.3 %. Ranks that do not divide the experts are refused."""
    config = PRESETS[preset]
    assert tokens_received(config, ranks) == pytest.approx(received_by_simulation(config, ranks), rel=0.01)
    for bad in (0, 3 * ranks, 2 * config.n_experts):
        with pytest.raises(ValueError, match=str(bad)):
            tokens_received(config, bad)


@pytest.mark.parametrize("column, name", list(enumerate(RECIPES)))
def test_kept_bytes_of_v3_by_hand(column, name):
    """32 ranks of 8 experts, 4 a group: a rank gets a token if its group is one of 4 in 8, and one of 8 choices among
    the 128 open experts is its own. FP8: 4 bytes more for each 128; FP4: half a byte, and one more for each 32.
    Received is the message: with 8 ids and weights of 4, and FP8's 56 scales as bytes, filled up to 64, too."""
    received = 32 * 0.5 * (1 - math.comb(120, 8) / math.comb(128, 8))
    stream = (14336, 7168 + 4 * 56, 3584 + 224)[column]
    message = stream + 2 * 8 * 4 + (0, 64, 0)[column]
    h = (8192, 4096 + 4 * 32, 4096 + 4 * 32)[column]
    by_hand = {  # row: bytes a token, scopes that save it
        "residual": (2 * 14336, ""), "latents": ((1536 + 512 + 64) * 2, "attn"),
        "q, k, v": (128 * (192 + 192 + 128) * 2, "mla_up attn"), "attention output": (128 * 128 * 2, "attn"),
        "log-sum-exp": (128 * 4, "attn"), "normed input, attention": (stream, "norm attn"),
        "normed input, FFN": (stream, "norm mlp"), "received": (received * message, ""), "h": (8 * h, "moe"),
        "h, shared": (h, "mlp"), "routing": (received * 8 * (4 + 4) + 8 * 4 + 256 * 4 + 4 * (32 + 8), "")}
    for scope in ("none", *RECOMPUTE_SCOPES):
        kept = kept_bytes(PRESETS["v3"], RECIPES[name], frozenset({scope}), ranks=32)
        assert kept == pytest.approx({k: size * (scope not in scopes.split()) for k, (size, scopes) in by_hand.items()})


class Alive(TorchDispatchMode):
    """Every storage that an operator made, by weak reference: what is left is held by somebody, whoever that is."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage), t.dtype, tuple(t.shape)
        return result

    def left(self, known, least):
        """{storage: (dtype, shape)} of more than `least` bytes."""
        alive = {key: (ref(), *what) for key, (ref, *what) in self.made.items() if key not in known}
        return {key: what for key, (storage, *what) in alive.items() if storage and storage.nbytes() > least}


def storages(*values):
    copies = [copies for _, copies in quant._copies.values()]  # of weights: kept once a step, not once a forward
    return {t.untyped_storage()._cdata for t in tree_leaves((values, copies)) if isinstance(t, torch.Tensor)}


WIDE = ModelConfig(  # every width another
    vocab_size=61, n_layers=2, hidden=512, dense_width=288, n_heads=2, nope_dim=48, rope_dim=16, v_dim=80, q_lora=96,
    kv_lora=32, n_experts=8, top_k=3, expert_width=96, init_std=0.1)
BATCH, LENGTH = 8, 16


def saved_by_layer(config, dense, recipe, scopes, device="cpu", dtype=torch.float32):
    """Forward of one layer -> {storage: (bytes, dtype, shape)} of what autograd saved; nothing else may still live."""
    layer = build_part(Layer, config, dense).to(device)
    run = one_pass(BATCH, LENGTH, recipe, scopes, config, device)
    x = torch.randn(BATCH * LENGTH, config.hidden, device=device, dtype=dtype, requires_grad=True)
    layer(x, run)  # from here on the weights' quantised copies exist
    saved = {}

    def pack(t):
        saved.setdefault(t.untyped_storage()._cdata, (t.untyped_storage().nbytes(), t.dtype, tuple(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Alive() as alive:
        out = layer(x, run)
    known = storages(list(layer.parameters()), list(layer.buffers()), run.rope)
    # a few scales and expanded numbers are smaller than this
    assert not alive.left(saved.keys() | known | storages(x, out), 512), "alive, though no backward will read it"
    return {key: what for key, what in saved.items() if key not in known}


ABLATIONS = [Recipe("fp8", "fp8", "fp8", "bf16"), Recipe("fp8", "fp4", "fp4", "fp8"), Recipe("fp8"), Recipe(wire="fp4"),
             Recipe("fp8", "fp8", "bf16", "fp4"), Recipe("bf16", "fp8", "fp8", "bf16")]
OTHERS = [dict(q_lora=0), dict(n_shared=0), dict(gate="softmax"), dict(n_shared=2, top_k=1), dict(v_dim=40)]


@pytest.mark.parametrize("recipe, dense, change", [
    *[(r, dense, {}) for r in RECIPES.values() for dense in (True, False)], *[(r, False, {}) for r in ABLATIONS],
    *[(RECIPES["mxfp4"], False, change) for change in OTHERS]], ids=str)
@every_scope
def test_autograd_keeps_what_the_formula_says(recipe, dense, change, scopes):
    """To the byte, but for the router: ids are int64 there (4 K bytes a token more), and what its normalisations read
    again is 10, for sigmoid gates 4 K + 18. Altogether 4 bytes are gate weights of a dense feed-forward's only expert, 12 (E + 1) say
    where the rows of experts lie."""
    config = replace(WIDE, **change)
    formula = sum(kept_bytes(config, recipe, frozenset(scopes), dense=dense, element_size=4).values())
    router = 0 if dense else 4 * config.top_k + (4 * config.top_k + 18 if config.gate == "sigmoid" else 10)
    saved = sum(size for size, _, _ in saved_by_layer(config, dense, recipe, scopes).values()) / (BATCH * LENGTH)
    maps = 0 if dense else 12 * (config.n_experts + 1) / (BATCH * LENGTH)
    assert saved == pytest.approx(formula + router + maps, abs=0.1)


@needs_cuda
@every_scope
@every_recipe
@pytest.mark.parametrize("q_lora", [96, 0])
def test_gpu_keeps_what_the_formula_says(name, scopes, q_lora):
    """A dense layer in BF16, attention as wide as DeepSeek's; beside the formula some numbers, such as random state."""
    config = replace(WIDE, nope_dim=128, rope_dim=64, v_dim=128, q_lora=q_lora, dense_width=256)
    saved = saved_by_layer(config, True, RECIPES[name], scopes, "cuda", torch.bfloat16).values()
    formula = sum(kept_bytes(config, RECIPES[name], frozenset(scopes), dense=True).values())
    assert sum(size for size, _, _ in saved) / (BATCH * LENGTH) == pytest.approx(formula, abs=1)


@every_recipe
def test_nothing_outlives_backward(name):
    net, batch = build(recipe=name), inputs_and_targets()
    gradients(net, *batch)
    with Alive() as alive:
        result = gradients(net, *batch)
    assert not alive.left(storages(list(net.parameters()), list(net.buffers()), result, batch), 64)


# -----------------------------------------------------------------------------
# rotary position, YaRN

def public_frequencies(c):
    """Of each pair of dimensions, as DeepSeek-V3's inference code computes them; a factor of 1 stretches nothing."""
    dims = c.rope_dim
    dim_of = lambda rotations: dims * math.log(c.yarn_origin / (rotations * 2 * math.pi)) / (2 * math.log(c.rope_base))
    low = max(math.floor(dim_of(c.yarn_beta_fast)), 0)
    high = min(math.ceil(dim_of(c.yarn_beta_slow)), dims - 1)
    frequencies = []
    for i in range(dims // 2):
        frequency = 1.0 / c.rope_base ** (2 * i / dims)
        smooth = 1 - min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        frequencies.append(frequency / c.yarn_factor * (1 - smooth) + frequency * smooth)
    return torch.tensor(frequencies, dtype=torch.float64)


V3_YARN = replace(PRESETS["v3"], yarn_factor=40.0)


@pytest.mark.parametrize("config", [
    SMALL, V3_YARN, replace(V3_YARN, yarn_origin=64), replace(SMALL, **YARN), replace(V3_YARN, rope_dim=4)],
    ids=["plain", "v3", "v3 from 64", "small", "narrow"])
def test_rope_table(config):
    """Position 40 turns by up to 40 radians, which float32 holds to 2e-6."""
    angle = torch.outer(torch.arange(41).double(), public_frequencies(config))
    cos, sin = rope_table(config, 41, "cpu")
    assert torch.allclose(cos.double(), angle.cos(), rtol=0, atol=1e-5)
    assert torch.allclose(sin.double(), angle.sin(), rtol=1e-5, atol=1e-5)


# -----------------------------------------------------------------------------
# attention

def plain_attention(q_TD, kv_TD, k_rope, run, c, scale):
    """Heads one after the other, each with its own copy of the shared key."""
    of_head = lambda x: x.unflatten(0, (run.batch, -1)).chunk(c.n_heads, -1)
    turn = torch.polar(torch.ones_like(run.rope[0]).double(), torch.atan2(run.rope[1].double(), run.rope[0].double()))
    complex = lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    rotated = lambda x: torch.view_as_real(complex(x) * turn).flatten(-2)
    heads, future = [], torch.ones(len(turn), len(turn)).triu(1).bool()
    for q, kv in zip(of_head(q_TD), of_head(kv_TD)):
        q = torch.cat([q[..., :c.nope_dim], rotated(q[..., c.nope_dim:])], -1)
        k = torch.cat([kv[..., :c.nope_dim], rotated(k_rope.unflatten(0, (run.batch, -1)))], -1)
        weights = (q @ k.mT * scale).masked_fill(future, -math.inf).softmax(-1)
        heads.append(weights @ kv[..., c.nope_dim:])
    return torch.cat(heads, -1).flatten(0, 1)


@pytest.mark.parametrize("batch, length, heads, widths, device, dtype", [
    (2, 16, 3, (32, 16, 40), "cpu", torch.float32), (1, 7, 2, (6, 2, 16), "cpu", torch.float32),
    *[pytest.param(*case, "cuda", dtype, marks=needs_cuda) for dtype in (torch.bfloat16, torch.float32)
      for case in ((2, 512, 16, (128, 64, 128)), (1, 300, 4, (128, 64, 128)), (2, 40, 3, (36, 12, 20)))]], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_against_a_plain_implementation(batch, length, heads, widths, device, dtype, deterministic):
    """Every kernel, through rotation and back. BF16: probabilities and a dozen sums are rounded, 50 dB each."""
    config = ModelConfig(n_heads=heads, **dict(zip(("nope_dim", "rope_dim", "v_dim"), widths)))
    mla, (nope, rope, value) = build_part(MLA, config), widths
    exact = [torch.randn(batch * length, n).to(dtype).double().requires_grad_()
             for n in (heads * (nope + rope), heads * (nope + value), rope)]
    dy = torch.randn(batch * length, heads * value).to(dtype)
    reference = plain_attention(*exact, one_pass(batch, length, config=config), config, mla.scale)
    expected = torch.autograd.grad(reference, exact, dy.double())
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in exact]
    run = one_pass(batch, length, config=config, device=device)
    with repeatable() if deterministic else contextlib.nullcontext():
        out = model_module._Attend.apply(leaves[0].clone(), *leaves[1:], mla, run)
        grads = torch.autograd.grad(out, leaves, dy.to(device))
    out_floor, grad_floor = (45, 40) if dtype == torch.bfloat16 else (100, 100)
    assert snr(out.detach(), reference.detach()) >= out_floor
    assert all(snr(ours, ref) >= grad_floor for ours, ref in zip(grads, expected))


class AttentionCalls(TorchDispatchMode):
    """Attention's own kernels as they are called: [(name, the tensors and numbers it is given)].

    Random state, two tensors of one integer, is left out: without dropout nobody writes it, nor reads it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "dot_product" in str(function):
            given = [t.clone() if isinstance(t, torch.Tensor) else t for t in tree_leaves((args, kwargs or {}))]
            self.seen.append((str(function), [t for t in given if not isinstance(t, torch.Tensor) or t.dim()]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device, dtype, length", [
    ("cpu", torch.float32, 16), ("cpu", torch.bfloat16, 16),
    *[pytest.param("cuda", dtype, length, marks=needs_cuda)
      for dtype, length in ((torch.bfloat16, 512), (torch.bfloat16, 64), (torch.float32, 64))]], ids=str)
@pytest.mark.parametrize("change", [{}, dict(q_lora=0)], ids=str)
@every_recipe
def test_attention_runs_once(name, change, device, dtype, length):
    """Where up-projections are recomputed: a layer has one forward and one backward, which reads the bits forward read.

    512 keys are more than one tile, whose sums cuDNN's backward adds in any order: there its results may differ."""
    config, runs = replace(SMALL, nope_dim=128, rope_dim=64, v_dim=128, max_seq_len=512, **change), []
    for scopes in ((), ("mla_up",)):
        net = build(config, name, scopes).to(device)
        net.dtype = dtype
        with AttentionCalls() as calls:
            runs.append((gradients(net, *inputs_and_targets(2, length, device=device)), calls.seen))
    (kept, calls), (rebuilt, calls_again) = runs
    assert [("backward" in name) for name, _ in calls] == [False] * config.n_layers + [True] * config.n_layers
    assert len(calls_again) == len(calls) and (device == "cpu" or dtype == torch.float32 or "cudnn" in calls[0][0])
    same = len(calls) if length < 512 else config.n_layers + 1  # behind it, another layer's backward is in the gradient
    for (name, given), (name_again, given_again) in list(zip(calls, calls_again))[:same]:
        assert name == name_again and len(given) == len(given_again)
        for a, b in zip(given, given_again):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    if length < 512:
        assert_same(rebuilt, kept)


# -----------------------------------------------------------------------------
# router

def identity_router(**changes):
    """A router whose logits are its inputs."""
    config = replace(SMALL, **changes)
    router = Router(replace(config, hidden=config.n_experts))
    router.weight.data.copy_(torch.eye(config.n_experts))
    return router


def route(router, logits):
    ids, weights, balance = router(quant.quantize(logits, RECIPES["bf16"]), 1)
    return ids.long(), weights, balance


def test_bias_moves_selection_only_case_16():
    router = identity_router(n_experts=3, top_k=2, route_scale=2.5)
    router.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    ids, weights, _ = route(router, torch.logit(torch.tensor([[0.9, 0.8, 0.1]])))
    found = dict(zip(ids[0].tolist(), weights[0].tolist()))
    assert found == {1: pytest.approx(2.5 * 0.8 / 0.9), 2: pytest.approx(2.5 * 0.1 / 0.9)}


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("logit", [-120.0, -100.0, -60.0, 120.0])
def test_extreme_logits_stay_finite_case_16(gate, logit):
    """At -120 every sigmoid underflows to 0, at -100 to a subnormal."""
    router = identity_router(gate=gate, n_groups=4, top_groups=2, balance_alpha=1.0)
    logits = torch.full((6, 8), logit, requires_grad=True)
    ids, weights, balance = route(router, logits)
    ((weights * torch.randn(6, 2)).sum() + balance.sum()).backward()
    assert all(t.isfinite().all() for t in (weights, balance, logits.grad, router.weight.grad))
    assert all(len(set(row)) == 2 for row in ids.tolist())


def plain_route(logits, bias, c):
    """One token -> {expert: weight}: DeepSeek-V2's and V3's gates, one number after another."""
    scores = logits.sigmoid() if c.gate == "sigmoid" else logits.softmax(-1)
    biased = (scores + bias).tolist()
    size = c.n_experts // c.n_groups
    first = 2 if c.group_score == "top2" else 1
    best = [sum(sorted(biased[g * size:(g + 1) * size])[-first:]) for g in range(c.n_groups)]
    groups = sorted(range(c.n_groups), key=lambda g: -best[g])[:c.top_groups]
    chosen = sorted((e for e in range(c.n_experts) if e // size in groups), key=lambda e: -biased[e])[:c.top_k]
    whole = sum(scores[e] for e in chosen) if c.gate == "sigmoid" else 1
    return {e: c.route_scale * scores[e] / whole for e in chosen}


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("groups", [(1, 1, 6), (4, 2, 3), (8, 3, 6), (8, 8, 2), (4, 1, 4)], ids=str)
def test_router_against_a_plain_implementation(gate, group_score, groups):
    n_groups, top_groups, top_k = groups
    router = identity_router(gate=gate, group_score=group_score, n_experts=16 if n_groups < 8 else 32, route_scale=2.5,
                             n_groups=n_groups, top_groups=top_groups, top_k=top_k)
    torch.manual_seed(0)
    logits, bias = torch.randn(64, router.config.n_experts), torch.zeros(())
    if gate == "sigmoid":
        bias = router.bias.normal_(0, 0.3)
    assert hasattr(router, "bias") == (gate == "sigmoid")
    ids, weights, _ = route(router, logits)
    for token in range(64):
        expected = {e: w.item() for e, w in plain_route(logits[token], bias, router.config).items()}
        assert dict(zip(ids[token].tolist(), weights[token].tolist())) == pytest.approx(expected, rel=1e-5)


def test_balance_loss_by_hand():
    """Two sequences of two tokens, two experts, top-1, alpha 0.5.

    Sequence 0 chooses 0, 1: f = (1, 1), normalised scores (.75 .25), (.25 .75), so P = (.5, .5): 1.
    Sequence 1 chooses 0, 0: f = (2, 0), scores (.8 .2), (.75 .25), so P = (.775, .225): 1.55.
    """
    router = identity_router(n_experts=2, top_k=1, balance_alpha=0.5)
    scores = torch.tensor([[0.6, 0.2], [0.3, 0.9], [0.8, 0.2], [0.6, 0.2]], requires_grad=True)
    loss_B = router.balance_loss(scores, torch.tensor([[0], [1], [0], [0]]), batch=2)
    loss_B.sum().backward()
    assert loss_B.tolist() == pytest.approx([0.5 * 1, 0.5 * 1.55])
    # d/ds of 0.5 * 2 * mean over 2 tokens of s_0 / (s_0 + s_1): s_1 / (s_0 + s_1)^2 / 2
    assert scores.grad[2].tolist() == pytest.approx([0.2 / 2, -0.8 / 2])
    assert scores.grad[0].tolist() == pytest.approx([0, 0], abs=1e-7)


@pytest.mark.parametrize("change, load, move, worst, bias", [
    ({}, [8, 4], True, 8 / 6, 0.001), ({}, [5, 5], True, 1, 0.0), ({}, [9, 3], False, 1.5, 0.0),
    (dict(gate="softmax"), [8, 4], True, 8 / 6, None), (dict(n_experts=4), [1, 1, 0, 0], True, 2, None),
    (dict(n_dense=2), None, True, 1, None)],
    ids=["[8, 0] + [0, 4]", "equal", "skipped step", "softmax", "fewer choices than experts", "dense model"])
def test_update_balance_case_14(change, load, move, worst, bias):
    net = build(replace(SMALL, **dict(n_experts=2, top_k=1) | change))
    routers = [m for m in net.modules() if isinstance(m, Router)]
    for router in routers:
        router.load.copy_(torch.tensor(load))
    assert net.update_balance(move).tolist() == pytest.approx([worst, 1]) and not any(r.load.any() for r in routers)
    assert not any("load" in k for k in net.state_dict())
    if bias is not None:
        assert torch.allclose(net.state_dict()["layers.1.ffn.router.bias"], torch.tensor([-bias, bias]))


@every_device
@every_scope
@every_recipe
def test_loads_are_counted_once_case_13(name, scopes, device):
    """64 tokens, top-2, four micro-batches: 128 each, whatever is recomputed; evaluation and generation: none."""
    net = build(recipe=name, recompute=scopes).to(device)
    load = net.layers[1].ffn.router.load
    for step in range(1, 5):
        net(*inputs_and_targets(4, 16, step, device))[1].backward()
        assert load.sum() == 128 * step
    net.generate(tokens().to(device), 2)
    with torch.no_grad():
        net(*inputs_and_targets(device=device))
    net.eval()(*inputs_and_targets(device=device))
    assert load.sum() == 512


@every_device
@pytest.mark.parametrize("step", [10.0, 0.01], ids=["all tie", "many tie"])
@every_recipe
def test_router_decides_once_case_12(name, step, device, monkeypatch):
    """Logits rounded to a step: recomputing everything changes no choice, and not a bit of loss or gradient."""
    calls, forward, linear = [], Router.forward, quant.router_linear

    def spied(self, *args):
        calls.append(forward(self, *args))
        return calls[-1]

    def rounded(x, weight):
        logits = linear(x, weight)
        return logits - logits.detach() + (logits.detach() / step).round() * step  # first 0, so that ties stay ties

    monkeypatch.setattr(Router, "forward", spied)
    monkeypatch.setattr(quant, "router_linear", rounded)
    config, recipe = replace(SMALL, n_experts=16), replace(RECIPES[name], save_h="bf16")
    with repeatable():
        assert_same(*(gradients(build(config, recipe, s).to(device), *inputs_and_targets(device=device))
                      for s in ((), RECOMPUTE_SCOPES)))
    assert len(calls) == 2 and torch.equal(calls[0][0], calls[1][0])  # one MoE layer, once a forward, never in backward


@every_device
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_router_of_zeros_case_12(name, device):
    """Every score ties, in selection and in weights: recomputing changes no bit."""
    results = []
    for scopes in ((), RECOMPUTE_SCOPES):
        model = build(SMALL, replace(RECIPES[name], save_h="bf16"), scopes).to(device)
        for router in (m for m in model.modules() if isinstance(m, Router)):
            router.weight.data.zero_()
        with repeatable():
            results.append(gradients(model, *inputs_and_targets(device=device)))
    assert_same(*results)


# -----------------------------------------------------------------------------
# the mixture of experts

def fp8(x):
    return quant.dequantize(quant.quantize_fp8_rows(x))


def moe_case(recipe, config=SMALL, dtype=torch.float32, arrives=lambda dy: dy):
    """-> output and every gradient of a normed MoE layer, 64 tokens."""
    moe, gain = build_part(MoE, config, std=0.09).to(dtype), (1 + 0.1 * torch.randn(config.hidden)).to(dtype)
    raw, dy = torch.randn(2, 64, config.hidden).to(dtype)
    leaves = {"raw": raw.requires_grad_(), "gain": gain.requires_grad_(), **dict(moe.named_parameters())}
    y, _ = moe(quant.rms_norm(raw, gain, 1e-6, recipe, wire=recipe.dispatch), one_pass(4, 16, recipe))
    return {"out": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), arrives(dy))))}


# (output, gradients) by the coarsest format. Relative errors: activation and weight codes 2.6 % each, so a GEMM 3.7 %;
# SwiGLU multiplies two of them, silu' adds a little: 6 %, and FC2's own operands bring the output to 7 % (23 dB); a
# gradient passes dy, FC2, h, FC1: 8 % (22 dB). MXFP4 x has 11.2 %, so SwiGLU 16-17 %, the output 17-18 % (15 dB), dh
# too, and FC1's Wgrad 11 % more, 20 % (14 dB). Floors are 1.5 dB lower. bf16 here is float32 against float64: 144 dB,
# less a few sums.
FLOORS = {"fp4": (13.5, 12.5), "fp8": (21.5, 20.5), "bf16": (110, 110)}


@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), *(Recipe(c, wire=w) for c in ("bf16", "fp8") for w in WIRES)], ids=str)
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_moe_layer_signal_to_noise(recipe, gate):
    """Whatever is computed, kept or sent in few bits: everything learns what it would learn without."""
    config = replace(SMALL, gate=gate, group_score="max", n_groups=4, top_groups=2)
    exact, ours = moe_case(RECIPES["bf16"], config, torch.float64), moe_case(recipe, config)
    out, gradient = next(floors for name, floors in FLOORS.items() if name in str(recipe))
    noise = {k: snr(ours[k], exact[k]) for k in exact}
    assert all(noise[k] >= (out if k == "out" else gradient) for k in exact), noise


@pytest.mark.parametrize("wire", WIRES[1:])
def test_moe_layer_combines_in_fp8(wire):
    """In backward always: a gradient that FP8 holds exactly is the same gradient. In forward where the wire says so."""
    config = replace(SMALL, n_shared=0)
    ours = moe_case(Recipe(wire=wire), config)
    assert_same(moe_case(Recipe(wire=wire), config, arrives=fp8), ours)
    y = moe_case(Recipe(wire=wire.split("-")[0]), config)["out"]
    assert torch.equal(ours["out"], fp8(y) if "-" in wire else y)


class Payload(torch.autograd.Function):
    """What a user writes who brings own experts: read the bits, hand the gradient to the tensor that carries it."""

    @staticmethod
    def forward(ctx, carrier, payload):
        return carrier.clone() if payload is None else quant.dequantize(payload, carrier.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


@pytest.mark.parametrize("wire", WIRES)
def test_identity_experts_case_17(wire):
    """x's gradient of sum(y) is the token's sum of weights, exactly; a weight's is the sum of what experts read.

    An activation that was not quantised for the wire is an error at once, not NaN somewhere later."""
    recipe, x = Recipe(wire=wire), torch.randn(16, 256, requires_grad=True)
    ids, weights = torch.zeros(16, 2).int(), torch.tensor([[0.75, 0.5]]).repeat(16, 1).requires_grad_()
    received = dispatch(quant.quantize(x, recipe, wire=recipe.dispatch), ids, weights)
    y = combine(Payload.apply(received.x, received.payload) * received.weights.sum(1, keepdim=True), received)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1.25))
    read = x if wire == "bf16" else fp8(x) if "fp4" not in wire else quant.dequantize(quant.quantize_fp4_rows(x))
    assert torch.allclose(weights.grad, read.sum(1, keepdim=True).expand(-1, 2), atol=1e-3)
    assert snr(y, 1.25 * read) >= (28 if "-" in wire else 100)  # 31.6 dB is E4M3's; exact without it
    if recipe.dispatch != "bf16":
        with pytest.raises(ValueError, match=recipe.dispatch):
            dispatch(quant.quantize(x, recipe), ids, weights)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_experts_output_may_be_read_twice(name):
    """quant.experts' result goes to combine and elsewhere: its gradient arrives, or is NaN, never a part of it."""
    torch.manual_seed(0)
    recipe, grads, weights = RECIPES[name], [], torch.rand(16, 2)
    x0, w13, w2 = torch.randn(16, 128), torch.randn(4, 128, 128) / 11, torch.randn(4, 128, 64) / 8
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(16)]).int()
    for twice in (False, True):
        x = x0.clone().requires_grad_()
        received = dispatch(quant.quantize(x, recipe, wire=recipe.dispatch), ids, weights)
        y = quant.experts(received.x, received.ids, received.weights, w13, w2, recipe, received.payload)
        (combine(y, received).sum() + (y.sum() if twice else 0)).backward()
        grads.append(x.grad)
    assert grads[0].isfinite().all() and (grads[1].isnan().all() or torch.allclose(grads[1], 2 * grads[0], rtol=1e-3))


@pytest.mark.parametrize("wire", WIRES)
def test_anomaly_detection_changes_nothing(wire):
    """Who hunts a NaN turns it on: a healthy step passes, with the same gradients to a bit."""
    net = build(recipe=replace(RECIPES["mxfp4"], wire=wire))
    plain = gradients(net, *inputs_and_targets())
    with torch.autograd.set_detect_anomaly(True):
        assert_same(gradients(net, *inputs_and_targets()), plain)


# -----------------------------------------------------------------------------
# the model: loss and gradient

def norm(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + SMALL.norm_eps).rsqrt() * gain


def plain_mla(x_SH, w, c):
    """One sequence, head by head: the equations of arXiv 2405.04434, §2.1, and YaRN's softmax scale."""
    turn = torch.exp(1j * torch.outer(torch.arange(len(x_SH)).double(), public_frequencies(c)))
    rotated = lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
    mscale = 0.1 * c.yarn_mscale * math.log(c.yarn_factor) + 1
    queries = (norm(x_SH @ w["wq_a"].T, w["q_norm"]) if c.q_lora else x_SH) @ w["wq_b"].T
    latent, key_rope = (x_SH @ w["wkv_a"].T).split([c.kv_lora, c.rope_dim], -1)
    keys_values = norm(latent, w["kv_norm"]) @ w["wkv_b"].T
    future = torch.ones(len(x_SH), len(x_SH)).triu(1).bool()
    heads = []
    for q, kv in zip(queries.chunk(c.n_heads, -1), keys_values.chunk(c.n_heads, -1)):
        scores = q[:, :c.nope_dim] @ kv[:, :c.nope_dim].T
        scores = scores + (rotated(q[:, c.nope_dim:]) @ rotated(key_rope).conj().T).real
        weights = (scores * mscale ** 2 / math.sqrt(c.nope_dim + c.rope_dim)).masked_fill(future, -math.inf).softmax(-1)
        heads.append(weights @ kv[:, c.nope_dim:])
    return torch.cat(heads, -1) @ w["wo"].T


def plain_logits(ids, w, c):
    """One sequence [S] -> [S, Vo]: the whole model token by token, expert by expert; w: its state_dict."""
    part = lambda name: {k[len(name):]: v for k, v in w.items() if k.startswith(name)}
    swiglu = lambda x, w13, w2: (F.silu(x @ w13.chunk(2)[0].T) * (x @ w13.chunk(2)[1].T)) @ w2.T
    x_SH = w["embed"][ids]
    for i in range(c.n_layers):
        layer, ffn = part(f"layers.{i}."), part(f"layers.{i}.ffn.")
        x_SH = x_SH + plain_mla(norm(x_SH, layer["attn_norm"]), part(f"layers.{i}.attn."), c)
        rows = []
        for x in norm(x_SH, layer["ffn_norm"]):
            if i < c.n_dense:
                rows.append(swiglu(x, ffn["w13"], ffn["w2"]))
                continue
            y = swiglu(x, ffn["shared.w13"], ffn["shared.w2"]) if c.n_shared else 0
            for e, weight in plain_route(ffn["router.weight"] @ x, ffn.get("router.bias", 0), c).items():
                y = y + weight * swiglu(x, ffn["experts.w13"][e], ffn["experts.w2"][e])
            rows.append(y)
        x_SH = x_SH + torch.stack(rows)
    return norm(x_SH, w["norm"]) @ w["head"].T


@pytest.mark.parametrize("change", [
    dict(route_scale=2.5), dict(gate="softmax", group_score="max", n_groups=4, top_groups=2, route_scale=16.0),
    dict(q_lora=0, n_shared=2, top_k=3, n_dense=0, n_groups=2, **YARN), dict(n_shared=0, v_dim=32),
    dict(v_dim=96, **YARN)], ids=str)
def test_model_against_a_plain_implementation(change):
    """Logits and all gradients in float64, at twice YaRN's original context. 1e-5: angles are float32."""
    config = replace(SMALL, **change)
    net, ids = build(config).double().eval(), tokens(2, 32)
    for t in net.state_dict().values():
        if t.dim() == 1:  # norms of 1 and biases of 0 would hide a lot
            t.add_(0.2 * torch.randn_like(t))
    leaves = dict(net.named_parameters())
    plain = torch.stack([plain_logits(row, leaves | dict(net.named_buffers()), config) for row in ids])
    dy = torch.randn_like(plain)
    results = [{"logits": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy)))}
               for y in (net(ids)[0], plain)]
    assert_close(*results, 1e-5)


@every_recipe
def test_no_token_sees_the_future_or_its_neighbours(name):
    """Bit for bit: at this size every expert's rows fill one padded tile, so all shapes stay the same."""
    net, ids = build(recipe=name).eval(), tokens()
    before = net(ids)[0]
    for j in (0, 1, 7, 15):
        changed = torch.where(torch.arange(16) == j, (ids + 1) % SMALL.vocab_size, ids)
        after = net(torch.stack([changed[0], ids[1]]))[0]
        assert torch.equal(after[0, :j], before[0, :j]) and torch.equal(after[1], before[1])
        assert (after[0, j:] != before[0, j:]).any(-1).all()


def cross_entropy(net, ids, targets):
    return F.cross_entropy(net(ids)[0].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


@every_recipe
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_loss_is_next_token_cross_entropy(name, train):
    """MTP and balance terms with large weights do not move its value."""
    net = build(replace(SMALL, mtp=True, balance_alpha=1.0), name).train(train)
    ids, targets = inputs_and_targets()
    targets[0, 3:9] = -100
    logits, nothing = net(ids)
    assert logits.shape == (2, 16, SMALL.vocab_size) and nothing is None and logits.dtype == torch.float32
    empty, loss = net(ids, targets)
    assert empty is None and torch.allclose(loss, cross_entropy(net, ids, targets) / 26, rtol=1e-6)
    assert torch.allclose(net(ids, targets, num_tokens=52)[1], loss / 2, rtol=1e-6)


def test_gradient_is_that_of_the_whole_objective():
    """Cross entropy and MTP summed over tokens, balance terms once for each valid token of their sequence, over 25."""
    config, (ids, targets) = replace(SMALL, mtp=True, balance_alpha=0.3, mtp_weight=0.7), inputs_and_targets()
    net = build(config).double()
    targets[:, 4] = targets[1, 9:14] = -100
    ours = gradients(net, ids, targets)
    x, balance = net.trunk(ids)
    mtp, mtp_balance = net.mtp(net, x, targets)
    balance = ((balance[0] + mtp_balance) * torch.tensor([15, 10])).sum()
    net.zero_grad()
    ((cross_entropy(net, ids, targets) + 0.7 * mtp + balance) / 25).backward()
    assert_close(ours, {"loss": ours["loss"], **{k: p.grad for k, p in net.named_parameters()}}, 1e-9)
    assert all(g.norm() > 0 for g in ours.values())
    assert not any("mtp" in k for k in gradients(net.eval(), ids, targets))


@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize("valid", [[16] * 8, [16, 13, 1, 9, 15, 0, 7, 14], [0, 0, 0, 0, 0, 5, 0, 0]], ids=str)
def test_micro_batches_add_up_to_the_whole_batch_case_18_20(pieces, valid):
    """The whole objective in float64, to rounding. valid: how many targets each sequence has."""
    net, (ids, targets) = build(replace(SMALL, mtp=True, balance_alpha=0.1)).double(), inputs_and_targets(8, 16)
    targets = targets.masked_fill(torch.arange(16) < 16 - torch.tensor(valid)[:, None], -100)
    assert_close(gradients(net, ids, targets, sum(valid), pieces), gradients(net, ids, targets), 1e-9)


@every_recipe
@pytest.mark.parametrize("num_tokens", [None, 32])
def test_micro_batch_without_a_valid_token_case_20(name, num_tokens):
    net, (ids, targets) = build(replace(SMALL, mtp=True), name), inputs_and_targets()
    result = gradients(net, ids, torch.full_like(targets, -100), num_tokens)
    assert result["loss"] == 0 and not any(g.any() for g in result.values())


@every_recipe
@pytest.mark.parametrize("scopes", [(), RECOMPUTE_SCOPES], ids=["kept", "recomputed"])
def test_layer_called_twice_case_18(name, scopes):
    """Its gradient is the sum of two layers' that share no weights but have the same."""
    layer = build_part(Layer, SMALL, False)
    first, second = copy.deepcopy(layer), copy.deepcopy(layer)
    x, run = torch.randn(32, SMALL.hidden), one_pass(2, 16, RECIPES[name], scopes)
    layer(layer(x, run)[0], run)[0].square().sum().backward()
    second(first(x, run)[0], run)[0].square().sum().backward()
    both = {k: first.get_parameter(k).grad + second.get_parameter(k).grad for k, _ in layer.named_parameters()}
    assert_close({k: p.grad for k, p in layer.named_parameters()}, both, 1e-5)


# -----------------------------------------------------------------------------
# cross entropy in chunks of tokens

@pytest.fixture
def chunks_of_16(monkeypatch):
    """Tokens whose logits are held at once: 16 take LOGIT_BYTES but for 100 bytes, too few for a 17th."""
    monkeypatch.setattr(model_module, "LOGIT_BYTES", 16 * 4 * SMALL.vocab_size + 100)


def head_batch(length, ignored=(), dtype=torch.float32):
    """A residual stream [T, H] and targets [T], -100 for the tokens in ignored."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, SMALL.hidden, generator=generator).to(dtype)
    targets = torch.randint(SMALL.vocab_size, (length,), generator=generator)
    return x, targets.index_fill(0, torch.tensor([i for i in ignored if i < length], dtype=torch.long), -100)


def in_chunks(net, x, targets):
    return net.cross_entropy(x, net.norm, targets)


def all_at_once(net, x, targets):
    return F.cross_entropy(net.logits(x, net.norm), targets, ignore_index=-100, reduction="sum")


def head_gradients(f, net, x, targets, factor=-0.37):
    """{"loss": f, "x" and parameters: gradients of factor * f}; those of parameters are added to what is there."""
    x = x.clone().requires_grad_()
    loss = f(net, x, targets)
    (factor * loss).backward()
    return {"loss": loss.detach(), "x": x.grad, "norm": net.norm.grad, "head": net.head.grad}


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 100])
@pytest.mark.parametrize("ignored", [(), (3, 4, 16, 99), range(100)], ids=["none", "some", "all"])
@pytest.mark.parametrize("dtype, bound", [
    (torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.01)], ids=str)
def test_cross_entropy_against_float64(chunks_of_16, length, ignored, dtype, bound):
    """Loss and gradients. BF16: activations, logits, their gradient and, on a CPU, each chunk's product are rounded, by
    0.17 % rms each; logits are around 1, so that probabilities move no more than that."""
    wide = dtype if dtype == torch.float64 else torch.float32
    x, targets = head_batch(length, ignored, dtype)
    ours = head_gradients(in_chunks, build().to(wide), x, targets)
    exact = head_gradients(all_at_once, build().double(), x.double(), targets)
    assert {k: t.dtype for k, t in ours.items()} == {"loss": wide, "x": dtype, "norm": wide, "head": wide}
    assert_close({k: t.double() for k, t in ours.items()}, exact, bound)
    if length == len(set(ignored) & set(range(length))):
        assert not any(t.any() for t in ours.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["activations", "parameters too"])
def test_cross_entropy_of_one_chunk_is_pytorchs(dtype, whole):
    """To the rounding of a gradient: here exp(x - lse), there exp(log_softmax(x))."""
    x, targets = head_batch(100, (3, 99), dtype)
    net = build().to(dtype if whole else torch.float32)
    other = copy.deepcopy(net)
    for _ in range(2):  # the second one adds to .grad
        ours, theirs = head_gradients(in_chunks, net, x, targets), head_gradients(all_at_once, other, x, targets)
        assert_close(ours, theirs, 1e-6 if dtype == torch.float32 else 2.0**-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_in_chunks_is_that_of_each(chunks_of_16, dtype):
    """Bit for bit, but for the sum over tokens in the norm's gradient."""
    (x, targets), net, parts = head_batch(48, (3, 40), dtype), build(), build()
    ours = head_gradients(in_chunks, net, x, targets)
    each = [head_gradients(in_chunks, parts, *part) for part in zip(x.split(16), targets.split(16))]
    stacked = {"loss": torch.stack([one["loss"] for one in each]).sum(), "x": torch.cat([one["x"] for one in each])}
    assert_same({k: t for k, t in ours.items() if k != "norm"}, stacked | {"head": parts.head.grad})


def test_cross_entropy_adds_to_the_heads_gradient(chunks_of_16):
    """In place, in backward; torch.autograd.grad, or a frozen head, leaves .grad alone."""
    net, (x, targets) = build(), head_batch(40)
    once = head_gradients(in_chunks, net, x, targets)["head"].clone()
    buffer = net.head.grad.data_ptr()
    head_gradients(in_chunks, net, x, targets)
    assert net.head.grad.data_ptr() == buffer
    twice, (apart,) = net.head.grad.clone(), torch.autograd.grad(in_chunks(net, x, targets), [net.head])
    assert_close({"twice": twice, "apart": -0.37 * apart}, {"twice": 2 * once, "apart": once}, 1e-6)
    net.head.requires_grad_(False)
    ours, plain = (head_gradients(f, net, x, targets) for f in (in_chunks, all_at_once))
    assert torch.equal(net.head.grad, twice)
    assert_close({"x": ours["x"]}, {"x": plain["x"]}, 1e-6)


class Logits(TorchDispatchMode):
    """The most tokens for which an operator gave something as large as their logits."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and SMALL.vocab_size in t.shape and SMALL.hidden not in t.shape:
                self.most = max(self.most, t.numel() // SMALL.vocab_size)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_never_holds_all_logits(chunks_of_16, dtype):
    """Neither in forward nor in backward; and between the two it keeps nothing but what it was given."""
    net, (x, targets) = build(), head_batch(100, (3,), dtype)
    with Logits() as seen:
        head_gradients(in_chunks, net, x, targets)
    with Logits() as plain:
        head_gradients(all_at_once, net, x, targets)
    assert seen.most <= 16 and plain.most == 100
    given = x.clone().requires_grad_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), Alive() as alive:
            loss = in_chunks(net, given, targets)
        assert loss.requires_grad == grad and not alive.left(storages(given, targets, list(net.parameters())), 1000)


def test_whole_objective_in_chunks(chunks_of_16):
    """MTP's head is the same: one backward adds to its gradient twice, here in two micro-batches of 48 tokens."""
    net, (ids, targets) = build(replace(SMALL, mtp=True)).double(), inputs_and_targets(4, 24)
    targets[1, 2:9] = -100
    plain = copy.deepcopy(net)
    plain.cross_entropy = lambda x, norm, labels: F.cross_entropy(
        plain.logits(x, norm), labels.flatten(), ignore_index=-100, reduction="sum")
    assert_close(gradients(net, ids, targets, 89, pieces=2), gradients(plain, ids, targets, 89), 1e-9)


# -----------------------------------------------------------------------------
# recompute

@every_recipe
@pytest.mark.parametrize("scopes, change", [
    *[(s, dict(mtp=True)) for s in (*[(s,) for s in RECOMPUTE_SCOPES], ("attn", "norm", "moe"), RECOMPUTE_SCOPES)],
    *[(RECOMPUTE_SCOPES, c) for c in (dict(q_lora=0), dict(gate="softmax"), dict(n_shared=0), YARN)]], ids=str)
def test_recompute_changes_no_bit(name, scopes, change):
    """With h kept in full, every scope rebuilds what forward computed; so two runs are the same, too."""
    recipe, config = replace(RECIPES[name], save_h="bf16"), replace(SMALL, **change)
    assert_same(*(gradients(build(config, recipe, s), *inputs_and_targets()) for s in ((), scopes)))


@every_recipe
@every_scope
def test_recompute_with_the_recipe_as_it_is(name, scopes):
    """Only a rebuilt h differs: it is what forward had, not its FP8, and so equals that of save_h=bf16."""
    ours = gradients(build(SMALL, name, scopes), *inputs_and_targets())
    full_h = replace(RECIPES[name], save_h="bf16")
    plain, full = (gradients(build(SMALL, recipe), *inputs_and_targets()) for recipe in (name, full_h))
    assert torch.equal(plain["loss"], ours["loss"])
    if not {"mlp", "moe"} & set(scopes):
        assert_same(ours, plain)
    if {"mlp", "moe"} <= set(scopes):
        assert_same(ours, full)


# -----------------------------------------------------------------------------
# multi-token prediction

def plain_mtp_loss(net, ids, targets):
    """Sequence by sequence, from the equations of arXiv 2412.19437, §2.2; the extra layer itself is the model's.

    h is what the head reads, after the final norm: test_hf.py compares with transformers' MTP."""
    total = 0
    for row, after in zip(ids, targets):
        h = norm(net.trunk(row[None])[0], net.norm)
        following = net.embed[after[:-1].clamp(min=0)]
        pairs = torch.cat([norm(h[:-1], net.mtp.h_norm), norm(following, net.mtp.next_norm)], -1)
        x, _ = net.mtp.layer(pairs @ net.mtp.proj.T, one_pass(1, len(row) - 1))
        log_p = (norm(x, net.mtp.out_norm) @ net.head.T).log_softmax(-1)
        for i in range(len(row) - 1):
            if after[i] >= 0 and after[i + 1] >= 0:
                total = total - log_p[i, after[i + 1]]
    return total


@pytest.mark.parametrize("masked", [False, True], ids=["all known", "some unknown"])
def test_mtp_loss_against_a_plain_implementation(masked):
    net, (ids, targets) = build(replace(SMALL, mtp=True)).double(), inputs_and_targets()
    for p in net.parameters():  # a norm of a norm is the same again where weights are 1
        torch.nn.init.normal_(p, float(p.dim() == 1), 0.1)
    if masked:
        targets[0, 5] = targets[1, 0] = targets[1, 15] = -100
    ours, _ = net.mtp(net, net.trunk(ids)[0], targets)
    assert net.mtp.layer.ffn.router.load.sum() == 2 * 15 * SMALL.top_k
    assert ours.item() == pytest.approx(plain_mtp_loss(net, ids, targets).item(), rel=1e-9)
    assert gradients(net, *inputs_and_targets(2, 1))["loss"].isfinite()  # there is no token after the next


# -----------------------------------------------------------------------------
# generation

@pytest.mark.parametrize("change, name, scopes", [
    *[(c, "bf16", ()) for c in (dict(q_lora=0, mtp=True), dict(n_groups=4, top_groups=2), YARN, dict(v_dim=32))],
    *[({}, name, s) for name in RECIPES for s in ((), *[(s,) for s in RECOMPUTE_SCOPES], RECOMPUTE_SCOPES)]], ids=str)
def test_logits_with_the_latent_cache(change, name, scopes):
    """As those of one forward over all tokens; 40 dB leaves room for a code that rounds the other way."""
    net, ids = build(replace(SMALL, **change), name, scopes).eval(), tokens(2, 24)
    caches = [[] for _ in net.layers]
    with torch.no_grad():
        net.trunk(ids[:, :20], caches)
        for i in range(20, 24):
            x, _ = net.trunk(ids[:, i:i + 1], caches)
        assert snr(net.logits(x, net.norm), net(ids)[0][:, -1]) >= (110 if name == "bf16" else 40)


def test_generation():
    net, prompt = build().double().eval(), tokens(3, 5)
    greedy = prompt
    for _ in range(20):
        greedy = torch.cat([greedy, net(greedy)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(net.generate(prompt, 20, 0), greedy) and torch.equal(net.generate(prompt, 20, 1e-5), greedy)
    torch.manual_seed(0)
    first = net.generate(prompt, 8, 1.0)
    torch.manual_seed(0)
    assert torch.equal(first, net.generate(prompt, 8, 1.0)) and not torch.equal(first, net.generate(prompt, 8, 1.0))
    assert first.shape == (3, 13) and first.dtype == torch.int64 and torch.equal(first[:, :5], prompt)
    assert torch.equal(net.generate(prompt, 0, 1.0), prompt) and net.generate(prompt, 59, 0).shape == (3, 64)
    for bad, new in ((prompt, 60), (prompt[:, :0], 2)):
        with pytest.raises(ValueError, match="max_seq_len=64"):
            net.generate(bad, new, 0)


# -----------------------------------------------------------------------------
# dtypes, compilation

@every_recipe
@every_scope
def test_bfloat16_activations(name, scopes):
    """Parameters, their gradients and the logits stay float32. Every expert is chosen, so that no choice can flip.

    BF16 has 8 bits, 0.17 % rms error an element (55 dB); dozens of roundings in a row: 30 dB. It moves values across
    FP8's rounding bounds, so two quantised runs drift apart; but this one may be no further from the exact gradient."""
    config, batch = replace(SMALL, n_experts=4, top_k=4), inputs_and_targets()
    exact, wide = gradients(build(config), *batch), gradients(build(config, name, scopes), *batch)
    net = build(config, name, scopes)
    net.dtype = torch.bfloat16
    assert net(tokens())[0].dtype == torch.float32 and net.trunk(tokens())[0].dtype == torch.bfloat16
    ours = gradients(net, *batch)
    assert ours["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.01)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in ours.values())
    assert snr(ours, exact) >= min(30, snr(wide, exact) - 1)


@every_device
def test_compiled_elementwise_chains(device, monkeypatch):
    """In float32, two batch sizes: other kernels may cost 1e-5 (100 dB). On the CPU only whether they come into use."""
    net = build(recompute=("moe",)).to(device)
    batches = [[t.to(device) for t in inputs_and_targets(batch)] for batch in (2, 3)]
    eager, used = [gradients(net, *batch) for batch in batches], set()
    if device == "cpu":
        spied = lambda f: lambda *args: used.add(f.__name__) or f(*args)
        monkeypatch.setattr(torch, "compile", lambda f, **_: spied(f))
    for module, function in ((model_module, "rotate"), (quant, "swiglu"), (quant, "swiglu_gradients")):
        monkeypatch.setattr(module, function, getattr(module, function))  # so that it is put back afterwards
    model_module.compile_elementwise()
    assert all(snr(gradients(net, *batch), expected) >= 100 for batch, expected in zip(batches, eager))
    assert device != "cpu" or used == {"rotate", "swiglu", "swiglu_gradients"}


# -----------------------------------------------------------------------------
# errors, presets

@pytest.mark.parametrize("change", [
    dict(gate="tanh"), dict(group_score="sum"), dict(n_dense=3), dict(n_dense=-1), dict(top_k=9), dict(top_k=0),
    dict(n_groups=3), dict(n_groups=0), dict(n_groups=4, top_groups=1, top_k=3), dict(top_groups=2), dict(rope_dim=3),
    dict(hidden=0), dict(n_shared=-1), dict(q_lora=-1), dict(yarn_factor=0.5), dict(yarn_factor=math.nan),
    dict(yarn_factor=4.0, yarn_origin=0), dict(init_std=math.inf), dict(top_groups=8, n_groups=8), dict(hidden=128.5),
    dict(n_layers=True), dict(hidden="128"), dict(mtp=1), dict(rope_base=None), dict(gate=1), dict(norm_eps=True),
    dict(mtp_weight=-0.1), dict(balance_alpha=-1e-4), dict(balance_rate=-0.001)], ids=str)
def test_bad_configurations(change):
    """One short line that names the field and its value."""
    with pytest.raises(ValueError) as error:
        replace(SMALL, **change)
    message, (field, value) = str(error.value), list(change.items())[-1]
    assert field in message and str(value) in message and "\n" not in message and len(message) < 300
    with pytest.raises(FrozenInstanceError):  # a change behind the check's back
        SMALL.hidden = 0


@pytest.mark.parametrize("how, message", [
    (dict(id=61), "61"), (dict(id=100257), "100257"), (dict(id=-1), "-1"), (dict(target=61), "61"),
    (dict(target=-1), "-1"), (dict(ids=torch.zeros(1, 0).long()), "max_seq_len=64.* 0"),
    (dict(ids=torch.zeros(1, 65).long()), "max_seq_len=64.* 65"),
    (dict(ids=torch.zeros(16).long()), r"\[B, S\].*\[16\]"), (dict(scopes=("attention",)), "mla_up.*attention"),
    (dict(config=replace(SMALL, hidden=80)), "32")], ids=str)
def test_bad_calls_case_32(how, message):
    """IndexError: torch's own, for targets."""
    ids, targets = inputs_and_targets()
    ids[1, 3], targets[1, 3] = how.get("id", 0), how.get("target", 0)
    net = build(how.get("config", SMALL), "mxfp4", how.get("scopes", ()))
    with pytest.raises((ValueError, IndexError), match=message):
        net(how.get("ids", ids), targets)


@pytest.mark.parametrize("preset, published", [
    ("v3", dict(gate="sigmoid", group_score="top2", n_groups=8, top_groups=4, route_scale=2.5, yarn_mscale=1.0)),
    ("v2", dict(gate="softmax", group_score="max", n_groups=8, top_groups=3, route_scale=16.0, yarn_mscale=0.707)),
    ("v2-lite", dict(gate="softmax", n_groups=1, route_scale=1.0, q_lora=0, yarn_mscale=0.707))])
def test_presets_are_the_published_models(preset, published):
    """What parameter counts do not tell. Long context and MTP are off until asked for."""
    common = dict(norm_eps=1e-6, init_std=0.006, rope_base=1e4, yarn_beta_fast=32, yarn_beta_slow=1, yarn_origin=4096,
                  yarn_factor=1.0, mtp=False)
    assert replace(PRESETS[preset], **common, **published) == PRESETS[preset]


# -----------------------------------------------------------------------------
# on a GPU

@needs_cuda
@every_recipe
@pytest.mark.parametrize("scopes", [(), RECOMPUTE_SCOPES], ids=["kept", "recomputed"])
def test_gpu_against_cpu(name, scopes):
    """BF16 activations; every expert is chosen, so that no choice can flip. Sums come in another order and some codes
    differ: as in test_bfloat16_activations, the GPU may be no further from the exact gradient."""
    config = replace(PRESETS["tiny"], n_experts=4, top_k=4, nope_dim=128, rope_dim=64, v_dim=128, mtp=True)
    batch = inputs_and_targets(2, 128)
    exact, noise = gradients(build(config), *batch), []
    for device in ("cpu", "cuda"):
        net = build(config, name, scopes).to(device)
        net.dtype = torch.bfloat16
        ours = gradients(net, *(t.to(device) for t in batch))
        assert ours["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.01)
        noise.append(snr(ours, exact))
    assert noise[1] >= min(30, noise[0] - 1)
    assert torch.equal(net.generate(batch[0].cuda(), 8, 0)[:, :128].cpu(), batch[0])


@needs_cuda
@pytest.mark.parametrize("gate, group_score", [("sigmoid", "top2"), ("softmax", "max")])
def test_router_on_gpu(gate, group_score):
    """Norm and router on 4096 tokens as wide as V2-Lite's, against float64 with the same choices, of which few may differ from
    its own; x is BF16, and so is its gradient. Evaluation gives the same weights, and counts nothing."""
    config = replace(SMALL, gate=gate, group_score=group_score, hidden=2048, n_experts=160, n_groups=8, top_groups=3, top_k=6,
                     route_scale=2.5, balance_alpha=0.1)
    torch.manual_seed(0)
    wide, x = Router(config).double().cuda(), torch.randn(4096, 2048, device="cuda").bfloat16()
    torch.nn.init.normal_(wide.weight, std=0.02)
    wide.weight.data = wide.weight.data.float().double()
    dweights, dbalance = torch.randn(4096, 6, device="cuda"), torch.randn(2, device="cuda")

    def run(router, x):
        x = x.clone().requires_grad_()
        ids, weights, balance = router(quant.Activation(x, RECIPES["bf16"]), 2)
        loss = (weights * dweights).sum() + (balance * dbalance).sum()
        return ids, weights.detach(), balance.detach(), *torch.autograd.grad(loss, (x, router.weight))

    router = copy.deepcopy(wide).float()
    ids, *got = run(router, x)
    assert (run(wide, x.double())[0] != ids).sum() < 10 and torch.equal(router.load, torch.bincount(ids.flatten(), minlength=160))
    wide.select = lambda scores: ids.long()
    # tensor cores cut sums off 2^-24 below the largest, once in 16 products: of 2048 in a logit, 4096 in dw
    for a, b, bound in zip(got, run(wide, x.double())[1:], (128 * 2.0**-24, 128 * 2.0**-24, 2.0**-8, 256 * 2.0**-24)):
        assert (a - b).norm() <= bound * b.norm()
    router.eval()
    again = router(quant.Activation(x, RECIPES["bf16"]), 1)
    assert torch.equal(again[0], ids) and torch.equal(again[1], got[0]) and again[2] is None and router.load.sum() == 6 * 4096


@needs_cuda
@every_recipe
def test_gpu_repeats_itself_where_algorithms_are_deterministic(name):
    """Two runs, and one that recomputes everything. Without the switch, attention's backward adds in any order."""
    recipe, runs = replace(RECIPES[name], save_h="bf16"), []
    for scopes in ((), (), RECOMPUTE_SCOPES):
        net = build(replace(PRESETS["tiny"], mtp=True), recipe, scopes).cuda()
        net.dtype = torch.bfloat16
        with repeatable():
            runs.append(gradients(net, *inputs_and_targets(2, 128, device="cuda")))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@needs_cuda
@every_recipe
def test_a_layer_as_a_cuda_graph(name):
    """MLA, router and experts, forward and backward, captured once: on other tokens it gives the bits of a plain call."""
    config = replace(PRESETS["tiny"], nope_dim=128, rope_dim=64, v_dim=128)
    net = build(config, name).cuda()
    net.dtype, layer = torch.bfloat16, net.layers[-1]
    x, dy = (torch.randn(256, config.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    run = net.new_pass(1, 256)  # of at most 512 tokens cuDNN's backward repeats itself

    def both():
        y, balance = layer(x, run)
        return y.detach(), *torch.autograd.grad((y, balance.sum()), (x, *layer.parameters()), (dy, None))

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        plain = [t.clone() for t in both()]
        graph.replay()
        assert all(map(torch.equal, captured, plain))


# -----------------------------------------------------------------------------
# the README's example

class PlainMoE(torch.nn.Module):
    """What a PyTorch user has: a loop over experts with grouped weights."""

    def __init__(self, hidden, width, n_experts):
        super().__init__()
        weight = lambda *shape: torch.nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)
        self.gate, self.w13, self.w2 = weight(n_experts, hidden), weight(n_experts, 2 * width, hidden), weight(n_experts, hidden, width)

    def forward(self, x, top_k=2):
        weights, ids = (x @ self.gate.t()).softmax(-1).topk(top_k)
        y = torch.zeros_like(x)
        for e in range(len(self.gate)):
            token, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.w13[e].t()).chunk(2, -1)
            y = y.index_add(0, token, weights[token, slot, None] * (F.silu(gate) * up @ self.w2[e].t()))
        return y


# a rounded operand is off by 2.6 % (FP8) or 11.5 % (MXFP4); a gradient passes six to ten FP8 roundings, 6 to 8 % in all
@pytest.mark.parametrize("recipe, limit", [("bf16", 1e-5), ("fp8", 0.1), ("mxfp4", 0.25)])
def test_readme_example(recipe, limit):
    text = (Path(__file__).parent / "README.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)  # the other one is test_ep.py's
    assert len(code.splitlines()) <= 20
    exec(code, names := {})
    torch.manual_seed(0)
    plain, x, g = PlainMoE(64, 32, 4), torch.randn(50, 64), torch.randn(50, 64)
    mine = names["MoE"](plain, 2, quant.RECIPES[recipe])

    def grads(moe):
        plain.zero_grad()
        inputs = x.clone().requires_grad_()
        y = moe(inputs)
        (y * g).sum().backward()
        return [y.detach(), inputs.grad, *(p.grad.clone() for p in plain.parameters())]

    for got, want in zip(grads(mine), grads(plain)):
        assert (got - want).norm() <= limit * want.norm()
