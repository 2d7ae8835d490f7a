"""
Tests of expert parallelism: gloo processes on one machine, compared with one process that does all ranks' work itself.

Processes are started once for each number of ranks and run every check in turn; each check is a test of its own. One
process takes the ranks' sequences as micro-batches, so that what enters the first expert layer is the same to a bit.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import model as model_module
import quant
import test_model
from model import PRESETS, RECOMPUTE_SCOPES, Layer, Model, ModelConfig, Router
from model import combine, dispatch, fill_from_hf, hf_tensors, message_bytes, save_hf
from quant import RECIPES, Recipe

CONFIG = ModelConfig(
    vocab_size=61, n_layers=2, n_dense=1, hidden=128, dense_width=96, n_heads=2, nope_dim=32, rope_dim=32, v_dim=64,
    q_lora=64, kv_lora=32, n_experts=8, n_shared=1, top_k=3, expert_width=64, n_groups=4, top_groups=2, max_seq_len=64,
    init_std=0.1, mtp=True)
ALL = {**RECIPES, "fp4-fp8": replace(RECIPES["mxfp4"], wire="fp4-fp8"),
       "fp8-fp8": replace(RECIPES["fp8"], wire="fp8-fp8"), "bf16, wire in fp8": Recipe(wire="fp8")}
SEQUENCES, LENGTH = 2, 16  # of each rank


# -----------------------------------------------------------------------------
# in every process

def build(recipe="bf16", ep=None, config=CONFIG, scopes=(), dtype=None):
    torch.manual_seed(0)
    net = Model(config, ep)
    net.recipe, net.recompute, net.dtype = ALL[recipe] if isinstance(recipe, str) else recipe, frozenset(scopes), dtype
    return net


def batches(ranks):
    """Inputs and targets of each rank."""
    ids = torch.randint(CONFIG.vocab_size, (ranks, SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:].clone()) for part in ids]


def step(net, *pairs):
    """{"loss", parameter: gradient}, added up over micro-batches, of a loss for all ranks' tokens."""
    net.zero_grad()
    total = 0
    for ids, targets in pairs:
        loss = net(ids, targets, dist.get_world_size() * SEQUENCES * LENGTH)[1]
        loss.backward()
        total = total + loss.detach()
    return {"loss": total, **{k: p.grad for k, p in net.named_parameters()}}


def summed(net, mine):
    """A rank's gradients -> the whole step's: summed over all ranks, but experts' over those that hold the same."""
    experts, size, ranks = {id(p) for p in net.expert_parameters()}, net.ep.size(), range(dist.get_world_size())
    parameters, mine = dict(net.named_parameters()), {k: g.clone() for k, g in mine.items()}
    same = [dist.new_group([r for r in ranks if r % size == place]) for place in range(size)][dist.get_rank() % size]
    for k, g in mine.items():
        dist.all_reduce(g, group=same if k != "loss" and id(parameters[k]) in experts else None)
    return mine


def whole_vector(tensors):
    return torch.cat([t.flatten() for name, t in tensors.items() if name != "loss"])


def part_of(whole, net):
    """One process's tensors, of experts those that this rank holds."""
    held = model_module._held(net)
    return {k: t[held.start:held.stop] if t.dim() == 3 else t for k, t in whole.items()}


def differences(got, want):
    """{name: relative error}"""
    assert got.keys() == want.keys()
    return {k: ((got[k] - want[k]).norm() / want[k].norm().clamp(min=1e-30)).item() for k in want}


@contextlib.contextmanager
def patched(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def seen_by_experts():
    """[(ids, weights, payload or x) of each call of quant.experts]"""
    calls = []

    def experts(x, ids, weights, w13, w2, recipe, payload=None, *rest):
        calls.append((ids, weights.detach(), x.detach() if payload is None else payload))
        return inner(x, ids, weights, w13, w2, recipe, payload, *rest)

    with patched(quant, "experts", experts) as inner:
        yield calls


@contextlib.contextmanager
def collectives():
    """[(name, bytes sent)] of every collective."""
    log = []

    def exchange(out, rows, *args, **options):
        log.append(("all_to_all", rows.numel() * rows.element_size()))
        return inner(out, rows, *args, **options)

    with patched(dist, "all_to_all_single", exchange) as inner:
        yield log


def on_all(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def world():
    return dist.group.WORLD


# -----------------------------------------------------------------------------
# the checks

def check_weights_are_those_of_one_process():
    whole, net = build(), build(ep=world())
    held = model_module._held(net)
    for (name, p), (_, q) in zip(net.named_parameters(), whole.named_parameters()):
        assert torch.equal(p, q[held.start:held.stop] if q.dim() == 3 else q), name
    assert [p.shape[0] for p in net.expert_parameters()] == [8 // dist.get_world_size()] * 4
    assert whole.ep is None and len(whole.expert_parameters()) == 4
    with pytest.raises(ValueError, match="9 experts"):
        Model(replace(CONFIG, n_experts=9, n_groups=1, top_groups=1), world())


def check_experts_read_the_codes_of_one_process(recipe):
    """In the first expert layer, bit for bit: each token once, by rank and place there, with its local experts."""
    pairs, net, mine = batches(dist.get_world_size()), build(recipe, world()), []
    with seen_by_experts() as calls:
        for ids, targets in pairs:
            build(recipe)(ids, targets)
    with seen_by_experts() as mine:
        net(*pairs[dist.get_rank()])
    whole = calls[::2]  # every other call is MTP's
    held, (groups, weights, got) = model_module._held(net), mine[0]
    here = [((i >= held.start) & (i < held.stop)) for i, *_ in whole]
    expected = torch.cat([torch.where(h, i - held.start, -1)[h.any(1)] for (i, *_), h in zip(whole, here)])
    *maps, num_pairs, dense = quant.group_rows(expected, len(held))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(groups, maps))
    assert groups[-2:] == (num_pairs, dense) == (int((expected >= 0).sum()), False)
    assert torch.equal(weights, torch.cat([w[h.any(1)] for (_, w, _), h in zip(whole, here)]))
    parts = lambda q: (q,) if isinstance(q, torch.Tensor) else q
    for got_part, *each in zip(parts(got), *(parts(q) for *_, q in whole)):
        want = torch.cat([t.contiguous().view(torch.uint8)[h.any(1)] for t, h in zip(each, here)])
        assert torch.equal(got_part.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8), want.flatten())


def check_gradients_are_those_of_one_process(recipe, size, dtype=None):
    """Loss and every gradient, with experts over groups of `size` ranks; all are sums, none off by a factor: case 15.

    Sums of partial sums in float32 differ from one process's by float32's rounding, and so does everything behind them:
    all scales are powers of two, so codes do not depend on which tokens share a tile, and none of the codes here is so
    near a tie that it turns. Where partial sums are rounded to FP8 (2.6 % of each) or BF16 (0.2 %), codes behind them
    turn, and now and then the choice of an expert, which may change one weight's gradient much: what holds is the
    gradient as a whole, and every norm."""
    pairs = batches(dist.get_world_size())
    groups = [dist.new_group(list(range(r, r + size))) for r in range(0, dist.get_world_size(), size)]
    net = build(recipe, groups[dist.get_rank() // size], dtype=dtype)
    want = part_of(step(build(recipe, dtype=dtype), *pairs), net)
    first = step(net, pairs[dist.get_rank()])
    got = summed(net, first)
    off, ratio = differences(got, want), {k: (got[k].norm() / want[k].norm()).item() for k in got}
    if ALL[recipe].combine == "bf16" and dtype is None:
        assert max(off.values()) <= 1e-5, off
    else:
        got, want = whole_vector(got), whole_vector(want)
        assert (got - want).norm() <= (0.02 if recipe == "bf16" else 0.1) * want.norm(), off
        assert all(abs(r - 1) <= 0.05 for r in ratio.values()), ratio
    assert all(torch.equal(g, first[k]) for k, g in step(net, pairs[dist.get_rank()]).items())  # a run repeats


def layer(recipe, x, ids, weights, w13, w2, dy, group):
    """Output and gradients of experts behind the wire, for tokens of this rank."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, w13, w2)]
    x, weights, w13, w2 = leaves
    num_experts = len(w13) * (group.size() if group else 1)
    got = dispatch(quant.quantize(x, recipe, wire=recipe.dispatch), ids, weights, group, num_experts)
    y = combine(quant.experts(got.x, got.ids, got.weights, w13, w2, recipe, got.payload, num_pairs=got.num_pairs,
                              depart=got.depart, fanned_out=got.fanned_out), got)
    y.backward(dy)
    return y.detach(), *(t.grad for t in leaves)


def uneven():
    """ids of each rank's tokens [T, 2], for every kind of imbalance; -1: no expert."""
    ranks, g = dist.get_world_size(), torch.Generator().manual_seed(3)
    # two different ones of E for each token
    among = lambda T, E: torch.tensor(E)[torch.rand(T, len(E), generator=g).argsort(1)[:, :2]].int()
    yield [among(20, [0, 1]) for _ in range(ranks)]  # all to rank 0, the others get nothing
    idle = range(0, 8, 8 // ranks)  # one expert of each rank
    yield [among(20, [e for e in range(8) if e not in idle]) for _ in range(ranks)]
    yield [among(int(r == ranks - 1), range(8)) for r in range(ranks)]  # one token in all
    yield [torch.full((5, 2), -1, dtype=torch.int32) for _ in range(ranks)]  # nobody wants anything
    for _ in range(50):
        sizes = torch.randint(0, 9, (ranks,), generator=g) * torch.randint(0, 2, (ranks,), generator=g)
        chosen = torch.randperm(8, generator=g)[:torch.randint(2, 9, (), generator=g)].tolist()
        drop = lambda ids: ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
        yield [drop(among(int(n), chosen)) for n in sizes]


def check_uneven_counts_case_10(recipe, rounds):
    """Output and gradients are one process's, and all ranks call the same collectives: five a layer."""
    rank, local, g = dist.get_rank(), 8 // dist.get_world_size(), torch.Generator().manual_seed(5)
    w13, w2 = torch.randn(8, 64, 64, generator=g) / 8, torch.randn(8, 64, 32, generator=g) / 5
    mine = slice(rank * local, (rank + 1) * local)
    recipe, counts = ALL[recipe], []
    for _, ids in zip(range(rounds), uneven()):
        sizes = [len(i) for i in ids]
        x, dy = torch.randn(2, sum(sizes), 64, generator=g).unbind()
        weights = torch.rand(sum(sizes), 2, generator=g)
        want = layer(recipe, x, torch.cat(ids), weights, w13, w2, dy, None)
        part = lambda t: t.split(sizes)[rank]
        with collectives() as log:
            got = layer(recipe, part(x), ids[rank], part(weights), w13[mine], w2[mine], part(dy), world())
        counts.append(len(log))
        for name, ours, theirs in zip(("y", "x", "weights", "w13", "w2"), got, want):
            theirs = theirs[mine] if theirs.dim() == 3 else part(theirs)
            assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (name, sizes, ids)
            assert torch.equal(ours == 0, theirs == 0) or name != "w13"  # an expert without tokens has zeros
    assert counts == [5] * rounds and on_all(counts) == [counts] * dist.get_world_size()


def check_identity_experts_case_17(wire):
    """x's gradient of sum(y) is the token's sum of weights, exactly; a weight's is the sum of what its expert read."""
    recipe, x = Recipe(wire=wire), torch.randn(16, 256, requires_grad=True)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(16)]).int()
    weights = torch.tensor([[0.75, 0.5]]).repeat(16, 1).requires_grad_()
    got = dispatch(quant.quantize(x, recipe, wire=recipe.dispatch), ids, weights, world(), 8)
    here = (got.weights * (got.ids.row_TK >= 0)).sum(1, keepdim=True)
    y = combine(test_model.Payload.apply(got.x, got.payload) * here, got)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1.25))
    rows = quant.quantize(x.detach(), recipe, wire=recipe.dispatch).format(recipe.dispatch)
    read = rows if isinstance(rows, torch.Tensor) else quant.dequantize(rows)
    assert torch.allclose(weights.grad, read.sum(1, keepdim=True).expand(-1, 2), atol=1e-3)
    assert ((y - 1.25 * read).norm() <= 0.04 * y.norm()) if "-" in wire else torch.allclose(y, 1.25 * read, atol=1e-5)


def check_balance_case_14():
    """Loads are summed over all ranks, so that biases stay the same on all, here after 20 steps on own tokens."""
    rank, net = dist.get_rank(), build("mxfp4", world())
    router, *others = (m for m in net.modules() if isinstance(m, Router))
    router.load[:2] = torch.tensor([8, 0] if rank == 0 else [0, 4] if rank == 1 else [0, 0])
    balances = net.update_balance()  # both experts are rank 0's
    assert balances.tolist() == pytest.approx([8 / 1.5 / (1 + len(others)), dist.get_world_size() / (1 + len(others))])
    assert torch.equal(router.bias, torch.tensor([-0.001, -0.001] + [0.001] * 6)) and not router.load.any()
    for i in range(20):
        ids = torch.randint(CONFIG.vocab_size, (1, 8), generator=torch.Generator().manual_seed(100 * i + rank))
        net.layers[1].ffn.router.load += torch.bincount(ids[0] % 8, minlength=8)
        net.update_balance()
    biases = on_all(router.bias)
    assert all(torch.equal(b, biases[0]) for b in biases) and router.bias.unique().numel() > 2
    if dist.get_world_size() == 4:  # two groups, uneven in opposite ways, so that their sum is even
        pair, _ = dist.new_subgroups(2)
        net = build("mxfp4", pair)
        next(m for m in net.modules() if isinstance(m, Router)).load[4 * (rank // 2)] = 3
        assert net.update_balance()[1] == pytest.approx(2 / (1 + len(others)))


def check_recomputing_changes_no_bit(scopes):
    """What was received is kept, so no collective is repeated, whatever is recomputed."""
    recipe, pair = Recipe("fp8", save="fp4", save_h="bf16", wire="fp4"), batches(dist.get_world_size())[dist.get_rank()]
    with collectives() as plain:
        want = step(build(recipe, world()), pair)
    with collectives() as log:
        got = step(build(recipe, world(), scopes=scopes), pair)
    assert log == plain and len(log) == 10
    assert all(torch.equal(got[k], want[k]) for k in want)


def check_message_bytes():
    """What travels is what the formula says, and nothing below BF16 is left out of it."""
    ranks, pair = dist.get_world_size(), batches(dist.get_world_size())[dist.get_rank()]
    for name in ALL:
        net, sizes = build(name, world(), replace(CONFIG, mtp=False)), message_bytes(CONFIG, ALL[name], torch.float32)
        with collectives() as log, seen_by_experts() as calls:
            step(net, pair)
        (_, counted), *exchanges = log
        arrived, sent = len(calls[0][1]), exchanges[0][1] / sizes["dispatch"]
        rows = sent, arrived, sent, arrived  # tokens go out, their results go home, dy goes out, dx comes home
        assert counted == 4 * (ranks + CONFIG.n_experts)
        order = "dispatch", "combine", "combine, backward", "dispatch, backward"
        assert [size for _, size in exchanges] == [sizes[k] * n for k, n in zip(order, rows)], name


def check_what_runs_while_messages_travel():
    """The shared expert while sums go home, its backward while dy goes out; FC1's Wgrad while dx goes home."""
    events, net = [], build("mxfp4", world(), replace(CONFIG, mtp=False))
    shared = net.layers[1].ffn.shared
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.w13.register_post_accumulate_grad_hook(lambda *_: events.append("shared"))

    class Watched(model_module._Exchange):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            events.append("start")

        def wait(self):
            events.append("wait")
            return super().wait()

    def grouped_wgrad(a, b, groups, weight):
        events.extend(["Wgrad"] * (weight.dim() == 3))
        return inner(a, b, groups, weight)

    with patched(model_module, "_Exchange", Watched), patched(quant, "_grouped_wgrad", grouped_wgrad) as inner:
        step(net, batches(dist.get_world_size())[dist.get_rank()])
    assert events == ["start", "wait", "start", "shared", "wait",
                      "start", "shared", "wait", "Wgrad", "start", "Wgrad", "wait"], events


def check_another_reader_is_noticed():
    """Gradients that have departed lack what another reader of x adds: an error, no wrong number."""
    x, ids, weights = torch.randn(16, 64, requires_grad=True), torch.arange(32).view(16, 2).int() % 8, torch.rand(16, 2)
    w13, w2 = torch.randn(8 // dist.get_world_size(), 64, 64), torch.randn(8 // dist.get_world_size(), 64, 32)
    for depart in (True, False):
        got = dispatch(quant.quantize(x, RECIPES["bf16"]), ids, weights, world(), 8)
        y = quant.experts(*got[:3], w13, w2, depart=got.depart if depart else None)
        loss = combine(y, got).sum() + (got.x * 2).sum()
        with pytest.raises(RuntimeError, match="departed") if depart else contextlib.nullcontext():
            loss.backward()
    x0, x1 = x.grad.clone(), x.detach().requires_grad_()
    held = [ids // len(w13) == r for r in range(dist.get_world_size())]
    whole = on_all((w13, w2))
    y = quant.experts(x1, ids, weights, *(torch.cat(t) for t in zip(*whole)))
    (y.sum() + sum(2 * (x1 * h.any(1, keepdim=True)).sum() for h in held)).backward()
    assert torch.allclose(x0, x1.grad, rtol=1e-4, atol=1e-3)


def check_combine_in_fp8():
    """Of one layer, only what comes home is rounded once more, each rank's part to FP8: 2.6 % of it."""
    g, local = torch.Generator().manual_seed(dist.get_rank()), 8 // dist.get_world_size()
    (x, dy), weights = torch.randn(2, 64, 128, generator=g), torch.rand(64, 2, generator=g)
    ids = torch.stack([torch.randperm(8, generator=g)[:2] for _ in range(64)]).int()
    g.manual_seed(9)
    w13, w2 = torch.randn(local, 128, 128, generator=g) / 11, torch.randn(local, 128, 64, generator=g) / 8
    plain, rounded = (layer(ALL[name], x, ids, weights, w13, w2, dy, world()) for name in ("mxfp4", "fp4-fp8"))
    for i in (0, 1):  # y and dx
        assert 0.01 * plain[i].norm() <= (rounded[i] - plain[i]).norm() <= 0.03 * plain[i].norm()
    assert all(torch.equal(a, b) for a, b in zip(plain[2:], rounded[2:]))


def check_the_kernels(recipe, idle):
    """The GPU's kernels in the interpreter, unwritten memory full of NaN: but for rounding the same as without them, with
    choices at random, or with all tokens on rank 0, where there are zeros elsewhere."""
    if torch.cuda.is_available():
        return
    import kernels

    rank, g = dist.get_rank(), torch.Generator().manual_seed(5)
    x, dy = torch.randn(2, 20, 128, generator=g).bfloat16()
    w13, w2, weights = (torch.randn(s, generator=g) / 16 for s in ((1, 256, 128), (1, 128, 128), (20, 2)))
    ids = torch.tensor([[0, -1], [-1, 0]]).repeat(10, 1).int()
    if not idle:
        ids = torch.randint(-1, 2, (20, 2), generator=torch.Generator().manual_seed(rank)).int()
    call = lambda: layer(ALL[recipe], x, ids, weights.abs(), w13, w2, dy, world())
    want = call()
    quant.kernels = kernels
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with patched(quant, "_on_gpu", lambda x: True):
        quant.new_epoch()
        got = call()
    torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want):
        assert (a.float() - b.float()).norm() <= 0.03 * b.float().norm()
    assert rank == 0 or idle != bool(got[3].any()) and idle != bool(got[4].any())


def check_hugging_face_checkpoints():
    """Each rank reads its own experts, from one tensor an expert or from one for all; none writes what it has not."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        return
    whole, net = build(), build(ep=world())
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "hf")
        save_hf(whole, own, torch.float32)
        with pytest.raises(ValueError, match="of 8 experts"):
            save_hf(net, Path(folder, "no"))
        tensors = {k: t for k, t in load_file(own / "model.safetensors").items() if ".mlp.experts." not in k}
        tensors |= {k: t.contiguous() for k, t in hf_tensors(whole, True).items() if ".mlp.experts." in k}
        for fused in (False, True):
            if fused:
                save_file(tensors, own / "model.safetensors")
            for p in net.parameters():
                p.data.fill_(7)
            fill_from_hf(net, own)
            want = part_of(dict(whole.named_parameters()), net)
            assert all(torch.equal(p, want[k]) for k, p in net.named_parameters())


def check_evaluation_and_generation():
    """Without gradients, in the ranks' own words: the same loss and tokens as one process."""
    ids, targets = batches(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        for recipe in ("bf16", "mxfp4"):
            net, whole = build(recipe, world()).eval(), build(recipe).eval()
            assert torch.allclose(net(ids, targets)[1], whole(ids, targets)[1], rtol=1e-5)
    net, whole = build("bf16", world()).eval(), build("bf16").eval()
    assert torch.equal(net.generate(ids[:, :4], 3, 0), whole.generate(ids[:, :4], 3, 0))


class Buffer:
    """DeepEP's interface, as much of it as README.md's example calls, on gloo. A handle here is a route."""

    def get_dispatch_layout(self, ids, num_experts):
        assert ids.dtype == torch.int64
        local = num_experts // dist.get_world_size()
        counts, place = model_module._count(ids, local, dist.get_world_size())
        token_N, row_TR, _ = place()
        dist.all_to_all_single(counts[1], counts[0])
        sent, received = counts[..., -1].tolist()
        return "ranks", None, local, model_module.Route(world(), token_N[:sum(sent)], row_TR, sent, received), None

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None):
        route, local = handle or is_token_in_rank, num_tokens_per_expert
        assert all(t.is_contiguous() for t in x) and x[0].element_size() == 1
        assert x[1].dtype in (torch.int32, torch.float32)
        out = lambda t: model_module._Exchange(t.view(torch.uint8)[route.token_N], route).wait().view(t.dtype)
        if handle is not None:
            return tuple(map(out, x)), None, None, None, None, None
        ids = out(topk_idx) - dist.get_rank() * local
        return tuple(map(out, x)), ids.masked_fill((ids < 0) | (ids >= local), -1), out(topk_weights), [], route, None

    def combine(self, x, handle, topk_weights=None):
        bits = lambda t: t.contiguous().view(torch.uint8)
        back = lambda t: model_module._Exchange(bits(t), handle, home=True).wait().view(t.dtype)
        home = lambda t: quant.sum_rows(back(t), handle.row_TR)
        return home(x), None if topk_weights is None else home(topk_weights), None


def check_the_readme_example():
    """Another transport, DeepEP's interface: the same bits."""
    readme = Path(model_module.__file__).with_name("README.md").read_text()
    code = next(block for block in readme.split("```python\n")[1:] if "buffer.dispatch" in block).partition("```")[0]
    pair = batches(dist.get_world_size())[dist.get_rank()]
    want = step(build("mxfp4", world()), pair)
    with patched(model_module, "dispatch", None), patched(model_module, "combine", None):
        exec(code, dict(torch=torch, quant=quant, model=model_module, buffer=Buffer()))
        got = step(build("mxfp4", world()), pair)
    assert all(torch.equal(got[k], want[k]) for k in want)


def check_fanned_out_rows_end_with_fc1(recipe, copied):
    """copied: as FSDP2 hands on what a module is called with (torch 2.11)."""
    rows, alive, net = [], [], build(recipe, world(), replace(CONFIG, mtp=False))
    if copied:
        net.layers[1].ffn.experts.register_forward_pre_hook(lambda _, args: tree_unflatten(*tree_flatten(args)))

    def fan_out(*args):
        made = inner(*args)
        rows.extend(map(weakref.ref, tree_leaves(made.rows)))
        return made

    watching = lambda *args: alive.append(sum(row() is not None for row in rows)) or swiglu(*args)
    with patched(quant, "fan_out", fan_out) as inner, patched(quant, "_swiglu_forward", watching) as swiglu:
        net(*batches(dist.get_world_size())[dist.get_rank()])
    assert rows and alive == [0, 0, 0], alive  # of the dense layer, the experts, the shared expert


def check_what_is_kept(recipe):
    """To the byte what model.kept_bytes says for the tokens that came, as in test_model.py for one rank: no message."""
    config, T, ranks = test_model.WIDE, 8 * 16, dist.get_world_size()
    layer = test_model.build_part(Layer, config, False, world())
    run = test_model.one_pass(8, 16, ALL[recipe], (), config)
    torch.manual_seed(dist.get_rank())
    x, saved, counts = torch.randn(T, config.hidden, requires_grad=True), {}, []
    layer(x, run)  # from here on the weights' quantised copies exist

    def pack(t):
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    def combine(y, got, beside):
        counts.extend([len(y), got.ids.num_pairs])
        return inner(y, got, beside)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), test_model.Alive() as alive:
        with patched(model_module, "combine", combine) as inner:
            out = layer(x, run)
    known = test_model.storages(list(layer.parameters()), list(layer.buffers()), run.rope)
    ended = time.monotonic() + 5  # gloo's thread lets go of what it sent a moment after it said so
    while len(left := alive.left(saved.keys() | known | test_model.storages(x, out), 512)) > 2 and time.monotonic() < ended:
        time.sleep(0.01)
    assert [dtype for dtype, _ in left.values()] == [torch.int32] * 2  # the route's
    received, pairs = counts
    with patched(model_module, "tokens_received", lambda *_: received / T):
        formula = T * sum(model_module.kept_bytes(config, ALL[recipe], ranks=ranks, element_size=4).values())
    h = quant.bytes_per_row(2 * config.expert_width, ALL[recipe].save_h, 4)
    formula += h * (pairs - T * config.top_k)  # it takes each rank to get as many as it gives
    total = sum(size for key, size in saved.items() if key not in known) + 4 * T * (ranks + min(ranks, config.top_k))
    others = T * (8 * config.top_k + 18) + 12 * (config.n_experts // ranks + 1)  # see test_model.py
    assert abs(total - formula - others) <= 16, (total, formula)


def check_the_bench():
    """bench.py comm's rows: the exchanges of each wire, with the bytes of the messages."""
    import bench

    with patched(bench, "timed", functools.partial(bench.timed, rounds=1)):
        rows = [row for sent in ("once", "pairs") for row in bench.comm_rows("tiny", sent)]
    assert len(rows) == 40 and all(set(row) <= set(bench.COMM_COLUMNS) and row["ms"] > 0 for row in rows)
    tokens, config = bench.COMM_SHAPES["tiny"]
    size = message_bytes(config, bench.WIRES["fp4"])["dispatch"]
    assert tokens <= rows[10]["rows"] < rows[30]["rows"] == tokens * config.top_k
    assert (rows[10]["wire"], rows[10]["exchange"]) == ("fp4", "dispatch")
    assert rows[10]["mb"] == round(rows[10]["rows"] * size / 1e6, 3)


def checks(ranks):
    """{name: (check, arguments)}; on four ranks what two cannot show."""
    four = ranks == 4
    table = {"weights": (check_weights_are_those_of_one_process,), "balance, case 14": (check_balance_case_14,),
             "no gradients": (check_evaluation_and_generation,)}
    for name in ["bf16", "mxfp4", "fp4-fp8"] if four else ALL:
        table[f"codes, {name}"] = check_experts_read_the_codes_of_one_process, name
        table[f"gradients, {name}"] = check_gradients_are_those_of_one_process, name, ranks
    for name, rounds in {"bf16": 54}.items() if four else {"bf16": 54, "mxfp4": 12, "fp8": 12}.items():
        table[f"uneven, case 10, {name}"] = check_uneven_counts_case_10, name, rounds
    if four:
        for name in ("bf16", "mxfp4"):
            table[f"gradients, two groups, {name}"] = check_gradients_are_those_of_one_process, name, 2
        return table
    for name in RECIPES:
        table[f"kept, {name}"] = check_what_is_kept, name
        for copied in (False, True):
            table[f"rows, {name}{', copied' * copied}"] = check_fanned_out_rows_end_with_fc1, name, copied
    for name in ("bf16", "mxfp4"):
        table[f"gradients, bfloat16, {name}"] = check_gradients_are_those_of_one_process, name, 2, torch.bfloat16
        table[f"kernels, {name}"] = check_the_kernels, name, True
    table["kernels, random, mxfp4"] = check_the_kernels, "mxfp4", False
    for wire in ("bf16", "fp8", "fp4", "fp8-fp8", "fp4-fp8"):
        table[f"identity, case 17, {wire}"] = check_identity_experts_case_17, wire
    for scopes in ("moe",), ("norm",), RECOMPUTE_SCOPES:
        table[f"recompute, {' '.join(scopes)}"] = check_recomputing_changes_no_bit, scopes
    return table | {"combine in fp8": (check_combine_in_fp8,), "bytes": (check_message_bytes,),
                    "overlap": (check_what_runs_while_messages_travel,),
                    "another reader": (check_another_reader_is_noticed,),
                    "Hugging Face": (check_hugging_face_checkpoints,), "bench": (check_the_bench,),
                    "README's transport": (check_the_readme_example,)}


# -----------------------------------------------------------------------------
# processes

def worker(rank, ranks, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20))
    said = {}
    for name, (check, *args) in checks(ranks).items():
        try:
            check(*args)
            said[name] = ""
        except BaseException:
            said[name] = traceback.format_exc()
        Path(folder, str(rank)).write_bytes(pickle.dumps(said))
        if said[name]:
            break  # the others wait for what this one has not sent: nothing after this would tell anything
    os._exit(0)  # a group that has failed does not always end in order


@functools.cache
def run(ranks):
    """{check: what went wrong} of each rank."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["test_ep"])
    with tempfile.TemporaryDirectory() as folder:
        workers = [server.Process(target=worker, args=(r, ranks, folder)) for r in range(ranks)]
        for p in workers:
            p.start()
        deadline = time.monotonic() + 59
        for p in workers:
            p.join(max(0.1, deadline - time.monotonic()))
            p.kill()
        files = [Path(folder, str(r)) for r in range(ranks)]
        return [pickle.loads(f.read_bytes()) if f.exists() else {} for f in files]


@pytest.mark.parametrize("ranks, name", [(ranks, name) for ranks in (2, 4) for name in checks(ranks)])
def test_ranks(ranks, name):
    """The first test of so many ranks runs all its checks."""
    for rank, errors in enumerate(run(ranks)):
        assert errors.get(name, "not reached") == "", f"rank {rank}: {errors.get(name, 'not reached')}"


# -----------------------------------------------------------------------------
# without processes

@pytest.mark.parametrize("name, share", [("bf16", 1), ("fp8", 0.76), ("mxfp4", 0.70), ("fp4-fp8", 0.46)])
def test_message_bytes_of_v3(name, share):
    """All four exchanges against BF16's. By hand, for mxfp4: 3584 codes, 224 scales, 8 ids and 8 weights of 4; BF16
    home; dy in FP8 with an exponent byte for 128; BF16 and 8 weights home. All are multiples of 16 but 7224."""
    bf16, ours = (message_bytes(PRESETS["v3"], ALL[n]) for n in ("bf16", name))
    assert sum(ours.values()) <= share * sum(bf16.values())
    if name == "mxfp4":
        assert list(ours.values()) == [3584 + 224 + 64, 14336, 7168 + 64, 14336 + 32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [32, 96, 160, 7168])
def test_messages_hold_what_was_packed(width, dtype):
    """Bit for bit, with zero rows, zeros and NaN among them, at any width; and as long as the formula says."""
    x, ids, p = torch.randn(5, width, dtype=dtype), torch.randint(-1, 9, (5, 3)).int(), torch.rand(5, 3)
    x[1], x[2, 0], x[3] = 0, float("nan"), x[3] * 1e30
    others = (torch.int32, 3), (torch.float32, 3)
    bits = lambda t: t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    for name, q in {"bf16": x, "fp8": quant.quantize_fp8_rows(x), "fp4": quant.quantize_fp4_rows(x)}.items():
        for rows in (5, 0):
            cut = lambda q: q[:rows] if isinstance(q, torch.Tensor) else type(q)(*(t[:rows] for t in q))
            message = quant.pack(cut(q), name, ids[:rows], p[:rows])
            assert message.shape == (rows, quant.message_bytes(name, width, dtype, *others))
            assert message.dtype == torch.uint8
            *got, got_ids, got_p = tree_leaves(quant.unpack(message, name, width, dtype, *others))
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, tree_leaves(cut(q)), strict=True))
            assert torch.equal(got_ids, ids[:rows]) and torch.equal(got_p, p[:rows])


def test_count_example():
    """The example in model.py, and a token that nobody needs."""
    counts, place = model_module._count(torch.tensor([[0, 1], [3, 0], [2, 2], [-1, -1]]), 2, 2)
    token_N, row_TR, place_TK = place()
    assert token_N.tolist() == [0, 1, 1, 2, -1, -1, -1, -1] and row_TR.tolist() == [[0, -1], [1, 2], [-1, 3], [-1, -1]]
    assert place_TK.tolist() == [[0, 1], [3, 4], [2, 6], [-1, -1]] and counts[0].tolist() == [[2, 1, 2], [2, 1, 2]]
    arrivals = quant.Arrivals(*(torch.empty(n, 3, dtype=torch.int32) for n in (3, 2)), range(2, 4), 4)
    arrivals.lay_out(counts[0])  # two ranks that send the second one the same
    assert arrivals.layout.tolist() == [[0, 128, 256], [0, 124, 0], [4, 130, 0]]
    assert arrivals.begin_RE.tolist() == [[0, 128, 0], [2, 129, 2]]
    sent = quant.pack(torch.zeros(2, 8), "bf16", place_TK[1:3], torch.ones(2, 2)).repeat(2, 1)
    _, weights, groups = quant.receive(sent, "bf16", 8, torch.float32, 2, arrivals, 6)
    assert groups.row_TK.tolist() == [[128, -1], [0, 1], [129, -1], [2, 3]] and weights.tolist() == [[1, 1]] * 4
    with pytest.raises(ValueError, match="32-bit"):
        model_module._count(torch.empty(2**20 + 1, 8, device="meta"), 32, 8)
