"""Tests of runs on many ranks: gradients in every layout, norms, checkpoints, faults. [n] as in test_train.py.

Ranks are two or four gloo processes on a CPU, or GPUs where there are two; each test ends within 60 s.
"""

import datetime
import functools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, state_dict_saver
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import data
import quant
import train
from model import Model, ModelConfig, memory
from quant import RECIPES
from test_train import HERE, MICRO, checkpoints, curve, flags, launch, micro, results, small, text  # noqa: F401

CONFIG = ModelConfig(**MICRO | {"vocab_size": 385}, mtp=True, init_std=0.08)  # an odd number of rows
# (ep, fsdp): data parallel, sharded, experts spread, both; on four ranks with copies as well
LAYOUTS = {2: [(1, 1), (1, 2), (2, 1), (2, 2)], 4: [(1, 1), (1, 4), (4, 1), (2, 4)]}
WITH_COPIES = [(1, 2), (2, 1), (2, 2), (4, 2)]
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # train.py's, which pytest undoes


def micro_batches(count, seed=1):
    """Micro-batches of 2 sequences of 16 tokens, some of them ignored."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (count, 2, 17), generator=g)
    targets = tokens[..., 1:].masked_fill(torch.rand(count, 2, 16, generator=g) < 0.2, data.IGNORED)
    return list(zip(tokens[..., :-1], targets))


def build(layout, recipe="bf16", seed=0, device=CPU):
    net = train.build(CONFIG, layout, device, seed)
    net.recipe = RECIPES[recipe]
    return net


def join(backend="gloo"):
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(backend)


def of_this_rank(items):
    n = len(items) // train.world_size()
    return items[train.rank() * n :][:n]


def places(layout, tensors):
    """name -> (this rank's part, the shape of the whole, where the part begins)."""
    found = {}
    for name, t in tensors.items():
        whole = layout.whole(name, t.detach()) if layout else t.detach()
        shape, begins = whole.shape, (0,) * whole.dim()
        if isinstance(whole, DTensor):
            _, begins = compute_local_shape_and_global_offset(shape, whole.device_mesh, whole.placements)
        found[name] = train.local(whole).detach().cpu().clone(), shape, begins
    return found


def put_together(ranks):
    """Whole tensors from what each rank told; NaN where no rank had a part."""
    wholes = {}
    for name, (part, shape, begins) in (item for of_rank in ranks for item in of_rank.items()):
        whole = wholes.setdefault(name, torch.full(shape, math.nan))
        whole[tuple(slice(b, b + n) for b, n in zip(begins, part.shape))] = part
    return wholes


# ---- gradients ----


def trained(layouts, recipe, steps, device=CPU):
    """Of each layout (losses of so many steps, norm and places of the first step's gradients).

    Step 1 takes 16 sequences in any layout, on four ranks in two micro-batches each; the others 8."""
    answers = []
    for ep, fsdp in layouts:
        layout = train.Layout.of(ep, fsdp, device)
        net = build(layout, recipe, device=device)
        config = train.Config(lr=1e-3)
        optimizer = train.make_optimizer(net, config)
        losses = []
        for step in range(steps):
            batches = of_this_rank(micro_batches(8 if step == 0 else 4, seed=step))
            loss, norm, _ = train.gradients(net, batches, device, layout)
            if step == 0:
                first = norm.item(), places(layout, {name: p.grad for name, p in net.named_parameters()})
            train.update(net, optimizer, loss, norm, train.learning_rate(step, config), 1.0)
            optimizer.zero_grad()
            losses.append(loss.item())
        answers.append((losses, *first))
    return answers


def trained_on_ranks(*args, backend="gloo"):
    join(backend)
    return trained(*args)


def assert_alike(one, many):
    """Every parameter's gradient to 1e-5 of its largest element, with ratio 1; norms to 1e-5, losses to 1e-3."""
    (losses, norm, own), wholes = one, put_together([parts for _, _, parts in many])
    for name, expected in put_together([own]).items():
        got, limit = wholes[name], 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=limit, msg=lambda m: f"{name}: {m}")
        assert (got * expected).sum() / expected.square().sum() == pytest.approx(1, abs=1e-5), name
    assert [n for _, n, _ in many] == pytest.approx([norm] * len(many), rel=1e-5) and len({n for _, n, _ in many}) == 1
    assert all(of_rank == pytest.approx(losses, abs=1e-3) for of_rank, _, _ in many)


@functools.cache
def trained_alone(recipe):
    return trained([(1, 1)], recipe, 10)[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_and_losses_in_every_layout(ranks, recipe):  # [15] [18] [20]
    for of_ranks in zip(*results(launch(trained_on_ranks, LAYOUTS[ranks], recipe, 10, ranks=ranks))):
        assert_alike(trained_alone(recipe), of_ranks)


def test_gradients_where_parts_have_copies():  # [15] [18]
    losses, *first = trained_alone("fp8")
    for of_ranks in zip(*results(launch(trained_on_ranks, WITH_COPIES, "fp8", 3, ranks=4))):
        assert_alike((losses[:3], *first), of_ranks)


def reduced_late(layouts):
    """Whether gradients are the same where FSDP2 reduces after the last micro-batch only: Wgrad adds to whole ones."""
    join()
    alike = []
    for ep, fsdp in layouts:
        layout, batches = train.Layout.of(ep, fsdp, CPU), of_this_rank(micro_batches(6))
        net = build(layout, "mxfp4")
        _, norm, num_tokens = train.gradients(net, batches, CPU, layout)
        usual = [train.local(p.grad) for p in net.parameters()]
        net.zero_grad()
        for i, (tokens, targets) in enumerate(batches, 1):
            net.set_requires_gradient_sync(i == len(batches))
            net(tokens, targets, num_tokens)[1].backward()
        train.add_up_gradients(net, layout)
        for p, expected in zip(net.parameters(), usual):
            torch.testing.assert_close(train.local(p.grad), expected, rtol=0, atol=1e-6 * norm.item())
        alike.append(any(g.any() for g in usual))
    return alike


def test_gradients_may_be_reduced_after_the_last_micro_batch():  # [18]
    assert results(launch(reduced_late, [(1, 2), (2, 2)])) == [[True] * 2] * 2


# ---- what is kept of weights ----


def weights_read(layouts):
    """Whether, after each way of changing weights, a forward pass in FP8 is that of a new model with them, bitwise."""
    join()
    equal = []
    for ep, fsdp in layouts:
        layout = train.Layout.of(ep, fsdp, CPU)
        net, (tokens, targets) = build(layout, "fp8"), of_this_rank(micro_batches(2))[0]
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

        def loss_of(net, tokens=tokens, targets=targets):
            with torch.no_grad():
                return net(tokens, targets)[1].item()

        def is_fresh(net=net, layout=layout):
            fresh = Model(CONFIG, net.ep)
            fresh.recipe = net.recipe
            full = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in net.state_dict().items()}
            fresh.load_state_dict(full)
            answer = loss_of(net) == loss_of(fresh.train(net.training))
            net.reshard()
            return answer

        def step():
            train.gradients(net, [(tokens, targets)], CPU, layout)
            optimizer.step()

        @torch.no_grad()
        def copy():
            for p in net.parameters():
                p.copy_(p * 1.25)

        before = loss_of(net)
        for change in (step, lambda: net.load_state_dict({k: t * 0.5 for k, t in net.state_dict().items()}), copy,
                       net.eval, step):
            net.reshard()
            change()
            equal.append(is_fresh())
        equal.append(before != loss_of(net))
        copies = {id(p) for p in quant._copies}
        equal.append(not any(p.sharded and id(p) in copies for p in [*net.parameters()] if hasattr(p, "sharded")))
    return equal


def test_no_stale_copy_of_a_sharded_weight():  # [19]
    for answer in results(launch(weights_read, [(1, 2), (2, 2)])):
        assert answer == [True] * 14


# ---- norms ----


def norms_of_ones(layouts):
    join()
    norms = []
    for ep, fsdp in layouts:
        layout = train.Layout.of(ep, fsdp, CPU)
        net = build(layout)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        norms.append(math.sqrt(train.total(train.square_sum(net, layout)).item()))
        plan = memory(train.share(train.Config(ep=ep, fsdp=fsdp), CONFIG, 4))
        here = sum(4 * train.local(p).numel() for p in net.parameters())
        assert plan["weights"] == pytest.approx(here, rel=1e-2 if fsdp > 1 else 0)  # rows do not divide evenly
        assert plan["gradients"] <= plan["weights"]
        assert (plan["gathered"] > 0) == (fsdp > 1)
    return norms


def test_a_norm_counts_each_element_once():  # [21]
    whole = math.sqrt(sum(p.numel() for p in Model(CONFIG).parameters()))
    for ranks, layouts in (2, LAYOUTS[2]), (4, LAYOUTS[4] + WITH_COPIES):
        answers = results(launch(norms_of_ones, layouts, ranks=ranks))
        assert answers[0] == pytest.approx([whole] * len(layouts), rel=1e-5) and answers == answers[:1] * ranks


# ---- checkpoints ----


def state_of(ep, fsdp, seed):
    join()
    layout = train.Layout.of(ep, fsdp, CPU)
    net = build(layout, seed=seed)
    return layout, net, train.make_optimizer(net, train.Config())


@torch.no_grad()
def saved(folder, ep, fsdp):
    """A checkpoint whose moments are 2 and 3 times the weights; expert e has the balance bias e + 1."""
    layout, net, optimizer = state_of(ep, fsdp, 0)
    state = train.training_state(net, optimizer, layout)
    for p in net.parameters():
        for name, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            train.local(optimizer.state[p][name]).copy_(train.local(p) * factor)
    for name, buffer in net.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(torch.arange(1, CONFIG.n_experts + 1))
    with train.Saver(folder) as saver:
        saver.begin(state, {"step": ep * 10 + fsdp})


@torch.no_grad()
def loaded(folder, ep, fsdp):
    """Weights, moments, biases."""
    layout, net, optimizer = state_of(ep, fsdp, 1)
    train.load_checkpoint(folder, train.training_state(net, optimizer, layout))
    names = dict(net.named_parameters())
    tensors = [names, *({name: optimizer.state[p][m] for name, p in names.items()} for m in ("exp_avg", "exp_avg_sq"))]
    return [places(layout, t) for t in tensors], {name: b for name, b in net.named_buffers() if name.endswith("bias")}


def loads_of(folders, layouts):
    return [loaded(folder, *layout) for folder in folders for layout in layouts]


def saves_of(folder, layouts):
    train.KEPT_CHECKPOINTS = 9
    join()
    for layout in layouts:
        saved(folder, *layout)


def test_checkpoints_are_of_any_layout(tmp_path):  # [26] [28]
    """Each layout's, read by each: every expert, every row of 385, both moments. The files list all experts."""
    expected = {name: p.detach() for name, p in build(None).named_parameters()}
    steps = {2: [(2, 1), (2, 2)], 4: [(2, 4)]}
    for ranks, layouts in steps.items():
        results(launch(saves_of, tmp_path, layouts, ranks=ranks))
    folders = [tmp_path / str(ep * 10 + fsdp) for layouts in steps.values() for ep, fsdp in layouts]
    assert all((folder / "train.json").exists() for folder in folders)
    for folder in folders:
        listed = FileSystemReader(folder).read_metadata().state_dict_metadata
        experts = {tuple(t.size) for name, t in listed.items() if ".experts." in name and not name.endswith(".step")}
        assert experts == {(4, 64, 32), (4, 32, 32)}
    answers = [[answer] for answer in loads_of(folders, [(1, 1)])]
    answers += zip(*results(launch(loads_of, folders, [(1, 2), (2, 1)])))
    answers += zip(*results(launch(loads_of, folders[1:], [(4, 1), (2, 4)], ranks=4)))
    for of_ranks in answers:
        for factor, parts in zip((1, 2, 3), zip(*(tensors for tensors, _ in of_ranks))):
            wholes = put_together(parts)
            assert wholes.keys() == expected.keys()
            assert all(torch.equal(wholes[name], w * factor) for name, w in expected.items())
        assert all(bias.tolist() == [1, 2, 3, 4] for _, biases in of_ranks for bias in biases.values())


def test_a_save_is_of_the_moment_it_began(tmp_path, monkeypatch):
    """The thread gets to write only when the weights have changed; a second save waits for the first."""
    net, changed, save = build(None), threading.Event(), state_dict_saver.save
    monkeypatch.setattr(state_dict_saver, "save", lambda *args, **options: changed.wait(30) and save(*args, **options))
    optimizer = train.make_optimizer(net, train.Config())
    was = net.embed.detach().clone()
    with train.Saver(tmp_path) as saver, torch.no_grad():
        saver.begin(train.training_state(net, optimizer), {"step": 1})
        assert saver.busy() and not (tmp_path / "1").exists()
        net.embed.zero_()
        changed.set()
        saver.begin(train.training_state(net, optimizer), {"step": 2})
        assert (tmp_path / "1").exists()
    for step, expected in (1, was), (2, torch.zeros_like(was)):
        train.load_checkpoint(tmp_path / str(step), train.training_state(net, optimizer))
        assert torch.equal(net.embed, expected)


def test_a_sharded_run_begins_with_weights_of_hugging_face(micro, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed: pip install '.[hf]'")
    first = train.main(micro(steps=2))
    train.export([first["checkpoint"], str(tmp_path / "hf"), "--dtype=fp32"])
    config = micro(steps=1, lr=0.0, init_from=f"hf:{tmp_path / 'hf'}", model={"balance_rate": 0.0}, tokenizer="bytes",
                   ep=2, fsdp=2, out_dir=micro().out_dir + "-on")
    assert results(launch(train.main, config))[0]["val_loss"] == pytest.approx(first["val_loss"], rel=1e-6)


def test_a_run_goes_on_in_another_layout(micro):  # [28]
    """Two steps on two ranks, two on four, two on one, as six on one; then one more on two."""
    usual = dict(precision="fp8", moments="fp32", eval_steps=4)
    one = micro(**usual, batch_size=4, out_dir=micro().out_dir + "-one")
    train.main(one)
    results(launch(train.main, micro(**usual, steps=6, save_every=2, batch_size=2, ep=2), ranks=2))
    ends = []
    for ranks, steps, layout in (2, 2, dict(ep=2)), (4, 4, dict(ep=2, fsdp=4)), (1, 6, dict(ep=1, fsdp=1)):
        config = micro(**usual, **layout, steps=6, save_every=0, batch_size=4 // ranks, resume="auto" * (ranks != 2),
                       out_dir=micro().out_dir + "-cut")
        ends += [results(launch(stopped_after, config, steps, ranks=ranks))[0]]
    assert [end["step"] for end in ends] == [2, 4, 6] and ends[-1]["finished"]
    keys = ("step", "loss", "grad_norm", "lr", "balance")
    whole = sum(curve(one.out_dir, *keys), [])
    assert sum(curve(micro().out_dir + "-cut", *keys), []) == pytest.approx(whole, rel=1e-3)
    assert sum(curve(micro().out_dir, *keys), []) == pytest.approx(whole, rel=1e-3)


def stopped_after(config, steps):
    """Trains until SIGTERM comes after so many steps: twice, to one rank; the others learn it from that one."""
    inner, begin, begun = train.train_step, train.Saver.begin, []

    def stop(run, config):
        answer = inner(run, config)
        if run.counts["step"] == steps and train.rank() == train.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    def count(*args):
        begun.append(1)
        begin(*args)

    train.train_step, train.Saver.begin = stop, count
    end = train.main(config)
    assert len(begun) == 1
    return end


# ---- faults ----


def out_of_memory(config):
    """Rank 1's allocator has nothing left in the second step."""
    inner = train.train_step

    def full(run, config):
        if run.counts["step"] == 1 and train.rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ...")
        return inner(run, config)

    train.train_step = full
    return train.main(config)


def test_out_of_memory_names_what_helps(micro):
    began = time.monotonic()
    answers = launch(out_of_memory, micro(ep=2, recompute="norm"))
    assert [code != 0 for code, _, _ in answers] == [True, True] and time.monotonic() - began < 60
    said = answers[1][2]
    assert re.match(r"MemoryError: Out of memory on rank 1: 2.50 GiB .* 32 tokens .* up to [1-9]\d* received", said)
    helps = "--batch_size=1", "--recompute=norm,mla_up,attn,mlp,moe", "--save_h=fp4", "--moments=bf16", "--fsdp=2"
    assert all(flag in said for flag in helps)
    assert "\n" not in said


@pytest.mark.parametrize("change, said", [
    (dict(ep=3), "a multiple of 3 ranks, not 2"), (dict(ep=2, fsdp=3), "a multiple of the other"),
    (dict(ep=2, model=MICRO | {"n_experts": 5}), "5 experts"),
    (dict(fsdp=2, model=MICRO | {"n_experts": 5, "hidden": 31}), "be cut into 2")])
def test_layouts_that_do_not_fit_are_one_line(micro, monkeypatch, change, said):
    monkeypatch.setattr(train, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=said):
        train.check(micro(**change))


RAISES = """
import os, runpy, sys, model
def fail(*_, **__):
    raise RuntimeError("a fault that nobody foresaw")
if os.environ["RANK"] == "1":
    model.Model.update_balance = fail
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_rank_that_raises_ends_the_job_with_its_error_first(micro, tmp_path):
    """Started by hand, so that no torchrun ends the others: rank 0 waits for rank 1, which fails in its first step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", RAISES, *flags(micro(fsdp=2))]
    with open(tmp_path / "stderr", "wb") as log:
        ranks = [subprocess.Popen(words, cwd=HERE, stdout=subprocess.DEVNULL, stderr=log,
                                  env=os.environ | where | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
        assert [p.wait(60) != 0 for p in ranks] == [True, True]
    errors = [line for line in (tmp_path / "stderr").read_text(errors="replace").splitlines() if "Error" in line]
    assert "a fault that nobody foresaw" in errors[0], errors


def hangs(config):
    """Rank 1 sleeps in its second step, longer than others wait."""
    train.PATIENCE = datetime.timedelta(seconds=3)
    inner, began = train.train_step, time.monotonic()

    def late(run, config):
        time.sleep(8 if run.counts["step"] == 1 and train.rank() == 1 else 0)
        return inner(run, config)

    train.train_step = late
    try:
        return train.main(config)
    except RuntimeError as error:
        assert train.rank() == 1 or time.monotonic() - began < 7
        raise error


def test_nobody_waits_for_ever(micro):
    answers = launch(hangs, micro(ep=2, fsdp=2))
    assert [code for code, _, _ in answers] == [1, 1] and "imed out" in answers[0][2]


def test_the_start_tells_layout_and_memory(micro, capsys):
    train.main(micro(steps=1))
    line, = re.findall("layout: .*", capsys.readouterr().out)
    assert re.search(r"1 copies x 1 parts x 1 ranks; a rank plans for [\d.]+ GiB: weights [\d.]+, gradients", line)


# ---- GPUs ----


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus(recipe):
    """Sums come in another order there, and tokens at an expert, so ratios of gradients are 1 to 1 %."""
    answers = results(launch(trained_on_gpus, recipe, gpus=True))
    (losses, _, own), *_ = answers[0]
    for many in zip(*answers):
        wholes = put_together([parts for _, _, parts in many])
        for name, (expected, *_) in own.items():
            assert (wholes[name] * expected).sum() / expected.square().sum() == pytest.approx(1, abs=0.01), name
        assert all(of_rank == pytest.approx(losses, abs=1e-3) for of_rank, _, _ in many)


def trained_on_gpus(recipe):
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    return trained_on_ranks(LAYOUTS[2], recipe, 3, device, backend="cpu:gloo,cuda:nccl")
