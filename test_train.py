"""Tests of train.py, and of bench.py's runs and curves: flags, checks, exact resume, ranks, faults.

A micro model (about 20,000 parameters) on a page of made-up text keeps each run near a second. Runs of two ranks are
two gloo processes, forked from a server that has imported torch once, and must end within 60 s. [n] is the number of a
case in a list of faults that other projects shipped.
"""

import base64
import contextlib
import errno
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # for the server of forks below; a fork after threads have run may hang

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import data
import quant
import train
from model import Model, ModelConfig, parameter_count

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # train.py's, which pytest undoes
MICRO = dict(n_layers=2, n_dense=1, hidden=32, dense_width=32, n_heads=1, nope_dim=16, rope_dim=16, v_dim=16, q_lora=32,
             kv_lora=32, n_experts=4, top_k=2, expert_width=32, max_seq_len=64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One thread, short samples, and no trace of torchrun."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(train, "SAMPLE_TOKENS", 4)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of 40 short files."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        lines = (f"def f{i * j % 97}(x): return x * {i} + {j}  # {'abcdefgh'[(i + j) % 8] * 3}\n" for j in range(16))
        (folder / f"{i:02}.py").write_text("".join(lines))
    return str(folder)


@pytest.fixture
def micro(text, tmp_path):
    """Config of a micro run: micro(steps=3, ...)."""
    def make(**changes):
        usual = dict(precision="bf16", data=text, seq_len=16, batch_size=2, steps=6, warmup=2, eval_every=0,
                     eval_steps=2, save_every=0, out_dir=str(tmp_path / "run"), model=MICRO)
        return train.Config(**usual | changes)

    return make


def rows(out_dir):
    """The log's rows; anything but strict JSON fails."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]


def curve(out_dir, *keys):
    return [[row[key] for key in keys] for row in rows(out_dir)]


def checkpoints(out_dir):
    return [int(p.name) for p in train.complete_checkpoints(Path(out_dir) / "ckpt")]


def flags(config):
    """The command line of a Config."""
    words = [f"--{f.name}={getattr(config, f.name)}" for f in fields(config) if f.name != "model"]
    return words + [f"--model.{name}={value}" for name, value in config.model.items()]


# ---- processes ----


def launch(work, *args, ranks=2, gpus=False):
    """Runs work(*args) on gloo ranks; returns (exit code, result, error text) of each. All must end within 60 s.

    gpus: in processes that may use them, which those forked from one that has asked for them may not; within 180 s, for
    kernels compile first."""
    server, patience = multiprocessing.get_context("spawn" if gpus else "forkserver"), 180 if gpus else 60
    server.set_forkserver_preload(["train", "test_train"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder, str(r)) for r in range(ranks)]
        workers = [server.Process(target=worker, args=(r, ranks, port, answers[r], work, args)) for r in range(ranks)]
        for p in workers:
            p.start()
        deadline = time.monotonic() + patience
        for p in workers:
            p.join(max(0.1, deadline - time.monotonic()))
        late = [p for p in workers if p.exitcode is None]
        for p in late:
            p.kill()
        assert not late, f"{work.__name__}: {len(late)} ranks still ran after {patience} s"
        said = [pickle.loads(path.read_bytes()) if path.exists() else (None, "killed") for path in answers]
        return [(p.exitcode, *answer) for p, answer in zip(workers, said)]


def worker(rank, ranks, port, answer, work, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train.SAMPLE_TOKENS = 4
    code, result, error = 0, None, ""
    try:
        result = work(*args)
    except SystemExit as leaving:
        code = leaving.code
    except Exception as caught:
        code, error = 1, f"{type(caught).__name__}: {caught}"
    answer.write_bytes(pickle.dumps((result, error)))
    sys.exit(code)


def results(answers):
    assert [code for code, _, _ in answers] == [0] * len(answers), answers
    return [result for _, result, _ in answers]


def watch(name, see):
    """Calls see(*arguments) before each call of train.<name>."""
    inner = getattr(train, name)

    def seen(*args):
        see(*args)
        return inner(*args)

    setattr(train, name, seen)
    return inner


# ---- flags ----


def test_flags_set_every_field():
    words = "--lr=1e-3 --steps 7 --min_lr -1 --deterministic --compile false --out_dir=a=b --model.hidden=64"
    config = train.parse_flags([*words.split(), "--model.mtp", "--model.rope_base", "500"])
    assert (config.lr, config.steps, config.min_lr, config.out_dir) == (1e-3, 7, -1.0, "a=b")
    assert config.deterministic is True and config.compile is False
    assert config.model == {"hidden": 64, "mtp": True, "rope_base": 500.0}
    assert train.parse_flags([]) == train.Config()
    again = train.Config(seed=3, data="x y", model={"hidden": 64})
    assert train.parse_flags(flags(again)) == again


@pytest.mark.parametrize("words, said", [
    (["--wamup=3"], "--warmup"), (["--model.hiden=3"], "--model.hidden"), (["--batch-size=3"], "--batch_size"),
    (["steps=3"], "--steps"), (["--steps=3.5"], "steps"), (["--lr=fast"], "lr"), (["--steps"], "steps"),
    (["--compile=maybe"], "compile"), (["--model.hidden=wide"], "model.hidden")])
def test_wrong_flags_are_named(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        train.parse_flags(words)


def test_help_shows_every_field_with_its_comment(capsys):
    with pytest.raises(SystemExit) as left:
        train.parse_flags(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    for f in [*fields(train.Config), *fields(ModelConfig)]:
        assert f.name == "model" or f"--{f.name} " in shown or f"--model.{f.name} " in shown
    assert f"tokens of a sequence [{train.Config().seq_len}]" in shown and "attention heads [" in shown


# ---- checks before data is opened ----


@pytest.mark.parametrize("change, said", [
    (dict(precision="mxfp4", model=MICRO | {"hidden": 100}), "hidden is 100"),
    (dict(save_h="fp4", model=MICRO | {"expert_width": 72}), "expert_width is 72"),
    (dict(precision="fp9"), "mxfp4"), (dict(preset="huge"), "v2-lite"), (dict(schedule="step"), "wsd"),
    (dict(dtype="fp16"), "bf16"), (dict(save="int8"), "fp4"), (dict(recompute="attn,all"), "mla_up"),
    (dict(moments="fp8"), "--moments=fp8: choose one of fp32, bf16."),
    (dict(steps=0), "steps"), (dict(lr=math.nan), "lr"), (dict(lr=-1.0), "lr"), (dict(steps="9"), "steps"),
    (dict(seq_len=65), "max_seq_len"), (dict(device="tpu"), "cuda"), (dict(resume="no/such"), "no complete checkpoint"),
    (dict(init_from="no/such"), "no complete checkpoint"), (dict(out_dir="/dev/null/run"), "null"),
    (dict(model=MICRO | {"hidden": 3.5}), "hidden"), (dict(model=MICRO | {"top_k": 9}), "top_k"),
    (dict(model=MICRO | {"vocab_size": 256}), "--model.vocab_size=384"), (dict(tokenizer="gpt-9"), "gpt-9")])
def test_wrong_settings_stop_before_data_is_opened(micro, monkeypatch, change, said):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("data was opened"))
    with pytest.raises((ValueError, OSError), match=re.escape(said)):
        train.main(micro(**change))


def test_card_without_fp8_is_refused(micro, monkeypatch):  # [34]
    a100 = dict(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda _: "NVIDIA A100",
                get_device_capability=lambda _: (8, 0))
    for name, answer in a100.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("data was opened"))
    with pytest.raises(ValueError, match=r"NVIDIA A100 .*8\.9.*--precision=bf16"):
        train.main(micro(precision="mxfp4", device="cuda"))
    fp8, bf16 = quant.RECIPES["fp8"], quant.RECIPES["bf16"]
    train.check_card("H200", (9, 0), fp8)
    train.check_card("A100", (8, 0), bf16, "bf16")
    with pytest.raises(ValueError, match="V100.*--dtype=fp32"):  # [35]
        train.check_card("V100", (7, 0), bf16, "bf16")


def test_versions_are_checked():  # [34]
    train.check_version("torch", "2.11.0a0+cu130", (2, 11))
    with pytest.raises(ValueError, match="torch 2.9.1.*>= 2.11"):
        train.check_version("torch", "2.9.1", (2, 11))
    with pytest.raises(ValueError, match="triton 3.9.0.*>= 3.6, < 3.9"):
        train.check_version("triton", "3.9.0", (3, 6), (3, 9))


def test_a_folder_that_holds_a_run_is_not_reused(micro):
    train.main(micro(steps=2))
    before = curve(micro().out_dir, "loss")
    with pytest.raises(ValueError, match="--resume=auto"):
        train.main(micro(steps=2))
    assert curve(micro().out_dir, "loss") == before
    with pytest.raises(ValueError, match="hidden=32.*hidden=64"):
        train.main(micro(steps=4, resume="auto", model=MICRO | {"hidden": 64}))
    with pytest.raises(ValueError, match="seed"):
        train.main(micro(steps=4, resume="auto", seed=1))
    other = train.main(micro(steps=5, save_every=2, out_dir=micro().out_dir + "-other"))
    with pytest.raises(ValueError, match="holds a run"):  # its log would hold steps of two runs
        train.main(micro(steps=9, resume=other["checkpoint"]))
    with pytest.raises(ValueError, match="later 5"):
        train.main(micro(steps=9, resume=micro().out_dir + "-other/ckpt/4", out_dir=micro().out_dir + "-other"))


# ---- batches read ahead, as on a GPU ----


def read_ahead(monkeypatch, steps, fails_at=math.inf):
    """As on a GPU: each step reads the next one's batches before it ends. Reading those of step `fails_at` fails."""
    begun, real_next, real_update, real_batch = [], train.Ahead.next, train.update, data.Batches.next

    def next_of_a_step(ahead):
        begun.append(ahead)
        return real_next(ahead)

    def update(*args):
        result = real_update(*args)
        if len(begun) < steps:
            begun[-1].read()
        return result

    def next_batch(batches):
        if begun and batches.drawn >= (fails_at - 1) * begun[-1].per_step * batches.batch_size:
            raise OSError("the disk is gone")
        return real_batch(batches)

    monkeypatch.setattr(train.Ahead, "next", next_of_a_step)
    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(data.Batches, "next", next_batch)


def test_reading_ahead_changes_nothing(micro, tmp_path, monkeypatch):
    steps = dict(steps=6, save_every=2, grad_accum=2)
    train.main(micro(**steps))
    read_ahead(monkeypatch, 6)
    train.main(micro(**steps, out_dir=str(tmp_path / "ahead")))
    assert curve(micro().out_dir, "step", "loss") == curve(tmp_path / "ahead", "step", "loss")
    plain, ahead = (train.read_notes(out / "ckpt" / "4")["data"] for out in (tmp_path / "run", tmp_path / "ahead"))
    assert plain == ahead


def test_what_fails_in_reading_ahead_costs_no_step(micro, monkeypatch):
    config = micro(steps=6, save_every=2, grad_accum=2)
    with monkeypatch.context() as patch:
        read_ahead(patch, 6, fails_at=5)
        with pytest.raises(OSError, match="the disk is gone"):
            train.main(config)
    assert len(rows(config.out_dir)) == 4 and checkpoints(config.out_dir) == [2, 4]
    cut = train.main(replace(config, resume="auto"))
    shutil.rmtree(config.out_dir)
    assert cut["loss"] == train.main(config)["loss"]


# ---- the loop in one process ----


def test_log_has_one_row_a_step(micro):
    last = train.main(micro(precision="mxfp4", steps=4, eval_every=2, recompute="attn,moe"))
    log = rows(micro().out_dir)
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "tflops", "mfu", "peak_gib", "balance", "rank_balance"}
    evaluated = keys | {"val_loss", "val_loss_quantized"}
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert [set(row) for row in log] == [keys, evaluated, keys, evaluated]
    assert log[-1]["val_loss"] == last["val_loss"] and log[-1]["val_loss_quantized"] != last["val_loss"]
    assert log[0]["mfu"] == 0 and log[0]["peak_gib"] > 0 and log[0]["balance"] >= 1


def test_loss_falls(micro):
    train.main(micro(steps=40, lr=1e-2, log_every=20, eval_every=20))
    (first, _), (last, val) = curve(micro().out_dir, "loss", "val_loss")
    assert last < first < math.log(384) and val < 4.5


def test_defaults_learn_in_thirty_steps(tmp_path):
    """The real text and model; bytes drawn by their frequency alone cost 3.1 nats. bench.py loss does the whole run."""
    last = train.main(train.Config(steps=30, eval_steps=4, device="cpu", out_dir=str(tmp_path / "out")))
    assert last["val_loss"] < 2.95 and not last["skipped"]
    assert abs(last["val_loss_quantized"] / last["val_loss"] - 1) < 0.01


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rate(schedule):  # [29]
    config = train.Config(steps=100, warmup=10, lr=1.0, schedule=schedule)
    lr = [train.learning_rate(step, config) for step in range(100)]
    assert lr[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and max(lr) == 1.0
    assert lr[-1] == pytest.approx(0.1) and lr[9:] == sorted(lr[9:], reverse=True)
    assert lr[79] == 1.0 if schedule == "wsd" else lr[54] == pytest.approx(0.55)
    short = train.Config(steps=3, warmup=10, lr=1.0, schedule=schedule)
    assert [train.learning_rate(step, short) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


def test_weight_decay_is_for_matrices_only():
    net = Model(ModelConfig(**MICRO))
    *decayed, kept = train.make_optimizer(net, train.Config(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in (*decayed, kept)] == [0.3, 0.3, 0.0]
    decayed = [p for group in decayed for p in group["params"]]
    assert all(p.ndim >= 2 for p in decayed) and all(p.ndim == 1 for p in kept["params"])
    assert len(decayed) + len(kept["params"]) == len(list(net.parameters()))


# ---- moments in BF16 ----


def made_gradients(shapes, steps, seed=0):
    """For each step a BF16 number for each element, most of them around 1, some rows far from it, every seventh 0."""
    torch.manual_seed(seed)
    drawn = [[torch.randn(shape) * 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1)) for shape in shapes]
             for _ in range(steps)]
    return [[g.masked_fill(torch.arange(g.numel()).view(g.shape) % 7 == i % 7, 0).bfloat16().float() for g in one]
            for i, one in enumerate(drawn)]


def steps_of(optimizer, parameters, gradients):
    """After each step: (weights, first moments, second moments)."""
    for step in gradients:
        for p, g in zip(parameters, step):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        states = [optimizer.state[p] for p in parameters]
        yield [[t.detach().clone() for t in some] for some in (
            parameters, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")))]


def to_float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def to_bf16(x):
    """To nearest, ties to even."""
    (bits,) = struct.unpack("I", struct.pack("f", x))
    return struct.unpack("f", struct.pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]


def test_bf16_moments_against_plain_python():
    """Bit for bit. Betas of a few bits and no decay: every sum of products is rounded once, with FMA or without."""
    beta1, beta2, lr, f = 0.875, 0.9375, 0.01, to_float32
    weights = torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(1)))
    optimizer = train.BF16AdamW([weights], lr, (beta1, beta2), weight_decay=0.0)
    plain = [[w, 0.0, 0.0] for w in weights.tolist()]
    gradients = made_gradients([(256,)], 12)
    for step, ours in enumerate(steps_of(optimizer, [weights], gradients), 1):
        size, root = f(lr / (1 - beta1**step)), f(math.sqrt(1 - beta2**step))
        for i, (g, (w, m, v)) in enumerate(zip(gradients[step - 1][0].tolist(), plain)):
            m, v = f(beta1 * m + (1 - beta1) * g), f(beta2 * v + (1 - beta2) * g * g)
            by = f(f(f(math.sqrt(v)) / root) + f(1e-8))
            plain[i] = [f(w - f(f(size * m) / by)), to_bf16(m), to_bf16(v)]
        assert [t.tolist() for (t,) in ours] == list(map(list, zip(*plain)))
        assert ours[1][0].dtype == ours[2][0].dtype == torch.bfloat16 and optimizer.state[weights]["step"] == step


def test_bf16_moments_stay_near_adamw(micro):
    """20 steps with train.py's own settings. Rounding is off by 2^-8 of a moment at most; an error decays with beta and
    moves weights by no more than the worst case followed here, 5 % of their way. Errors are random: 1 % of it."""
    lr, eps, betas, shape, ulp = 1e-3, 1e-8, (0.9, 0.95), (64, 32), 2.0**-8
    nets = [torch.nn.ParameterList([torch.ones(shape), torch.ones(32)]) for _ in range(2)]
    ours, exact = (train.make_optimizer(net, micro(lr=lr, moments=name)) for net, name in zip(nets, ("bf16", "fp32")))
    assert type(ours) is train.BF16AdamW and type(exact) is torch.optim.AdamW
    assert [g["weight_decay"] for g in ours.param_groups] == [g["weight_decay"] for g in exact.param_groups] == [0.1, 0]
    gradients = made_gradients([shape, (32,)], 20)
    both = zip(*(steps_of(o, list(net), gradients) for o, net in zip((ours, exact), nets)))
    m_off, v_off, m, v, moved = ([torch.zeros(s, dtype=torch.double) for s in (shape, (32,))] for _ in range(5))
    for step, (near, there) in enumerate(both, 1):
        for i in range(2):
            m_off[i] = betas[0] * (m_off[i] + ulp * (m[i].abs() + m_off[i]))
            v_off[i] = betas[1] * (v_off[i] + ulp * (v[i] + v_off[i]))
            m[i], v[i] = there[1][i].double(), there[2][i].double()
            by, least = (t.clamp(min=0).sqrt() / math.sqrt(1 - betas[1]**step) + eps for t in (v[i], v[i] - v_off[i]))
            moved[i] += lr / (1 - betas[0]**step) * (m_off[i] / least + m[i].abs() * (1 / least - 1 / by))
            rounding = step * 2.0**-22  # of the weights, which are around 1
            assert ((near[0][i] - there[0][i]).abs() <= moved[i] + rounding).all()
    for i in range(2):
        way = (there[0][i] - 1).norm()
        assert (near[0][i] - there[0][i]).norm() <= 0.01 * way and moved[i].norm() <= 0.05 * way


class Seen(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        self.counts.update([name] * (name not in ("view", "split", "detach", "empty_like", "alias")))
        return function(*args, **(kwargs or {}))


def test_bf16_moments_in_portions(monkeypatch):
    """Any portion gives the same bits as torch's own step on float32 copies. A parameter without a gradient stays."""
    shapes = [(64, 48), (3,), (), (1024,), (40, 64), (16, 8)]
    start = [torch.randn(shape) for shape in shapes]
    gradients = made_gradients([shape or (1,) for shape in shapes], 4)
    for step in gradients:
        step[2], step[4], step[5] = step[2].view(()), None, step[5].view(8, 16).t()

    def run(portion):
        monkeypatch.setattr(train, "PORTION", portion)
        net = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = train.BF16AdamW(net, 1e-2, (0.9, 0.95), weight_decay=0.1)
        with Seen() as seen:
            *_, last = steps_of(optimizer, net, gradients)
        sizes = [sum(w.numel() for w, *_ in p) for p in optimizer.portions([p for p in net if p.grad is not None])]
        assert max(sizes) <= portion and sum(sizes) == sum(math.prod(s) for s in shapes) - 40 * 64
        assert optimizer.state[net[4]]["step"] == 0 and torch.equal(net[4], start[4])
        steps = {name: n for name, n in seen.counts.items() if name.startswith(("_foreach", "_fused"))}
        assert steps == {"_foreach_add_": 4, "_foreach_copy_": 8 * len(sizes), "_fused_adamw_": 4 * len(sizes)}
        return sum(last, [])

    net, moments = [torch.nn.Parameter(t.clone()) for t in start], ("exp_avg", "exp_avg_sq")
    optimizer = torch.optim.AdamW(net, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer.state[net[4]] = train.zero_state(net[4], torch.float32)
    straight = [[g if g is None else g.contiguous() for g in step] for step in gradients]  # torch misreads others
    for _ in steps_of(optimizer, net, straight):
        for state in optimizer.state.values():
            for name in moments:
                state[name].copy_(state[name].bfloat16())
    plain = [*net, *(optimizer.state[p][name] for name in moments for p in net)]
    for portion in (2**25, 2048, 1024, 64):
        assert all(torch.equal(a.float(), b) for a, b in zip(run(portion), plain, strict=True))


def test_bf16_moments_outdate_quantised_weights(micro):
    net, optimizer = fresh(micro(moments="bf16"))
    before = quant._epoch
    optimizer.step()
    assert quant._epoch == before + 1


def tensors_of(checkpoint, config):
    """Every tensor of a checkpoint, by name, read as a run with this config would."""
    net, optimizer = fresh(config)
    state = train.training_state(net, optimizer)
    train.load_checkpoint(Path(checkpoint), state)
    moments = {f"{name}.{key}": t for name, one in state["optimizer"].items() for key, t in one.items()}
    return state["model"] | moments


@pytest.mark.parametrize("deterministic", [False, True])
def test_resume_with_bf16_moments_is_exact(micro, monkeypatch, deterministic):
    """All of the state bit for bit, though a run that goes on finds its moments as they were kept."""
    usual = dict(moments="bf16", precision="mxfp4", deterministic=deterministic, save_every=3, steps=7)
    monkeypatch.setattr(train, "PORTION", 4096)
    try:
        whole = train.main(micro(**usual, out_dir=micro().out_dir + "-whole"))
        start = str(Path(micro().out_dir + "-whole", "ckpt", "6"))
        cut = train.main(micro(**usual, resume=start))
    finally:
        torch.use_deterministic_algorithms(False)
    a, b = (tensors_of(end["checkpoint"], micro(**usual)) for end in (whole, cut))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert {t.dtype for name, t in a.items() if ".exp_avg" in name} == {torch.bfloat16}
    assert any(t.any() for name, t in a.items() if name.endswith("exp_avg_sq")) and whole["val_loss"] == cut["val_loss"]


def test_a_resume_may_change_the_moments(micro):
    """To BF16 they are rounded, to float32 they stay as they are."""
    whole = train.main(micro(steps=3))
    wide = tensors_of(whole["checkpoint"], micro())
    small = tensors_of(whole["checkpoint"], micro(moments="bf16"))
    assert all(torch.equal(small[name], t.bfloat16() if ".exp_avg" in name else t) for name, t in wide.items())
    for steps, name in (4, "bf16"), (5, "fp32"):
        assert train.main(micro(steps=steps, moments=name, resume="auto"))["finished"]


def test_resume_is_exact(micro, monkeypatch):  # [27] [29]
    """A run of 100 steps, and one cut after steps 5, 37 and 99: data, learning rate, draws and losses are equal."""
    seen = []

    def see(net, micro_batches, *_):
        seen.append((micro_batches[0][0].tolist(), torch.rand(1).item()))

    monkeypatch.setattr(train, "gradients", train.gradients)  # undone after the test
    watch("gradients", see)
    usual = dict(steps=100, warmup=10, batch_size=1, precision="mxfp4", eval_every=33)
    whole = train.main(micro(**usual, out_dir=micro().out_dir + "-whole"))
    whole_seen, seen[:] = list(seen), []

    inner = train.train_step

    def cut(run, config):
        answer = inner(run, config)
        if run.counts["step"] in (5, 37, 99):
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    monkeypatch.setattr(train, "train_step", cut)
    ends = []
    while not ends or not ends[-1]["finished"]:
        ends.append(train.main(micro(**usual, resume="auto")))
    assert [end["step"] for end in ends] == [5, 37, 99, 100]
    assert seen == whole_seen
    keys = ("step", "loss", "lr", "grad_norm", "balance")
    assert curve(micro().out_dir, *keys) == curve(micro().out_dir + "-whole", *keys)
    assert ends[-1]["val_loss"] == whole["val_loss"] and ends[-1]["val_loss_quantized"] == whole["val_loss_quantized"]
    assert checkpoints(micro().out_dir) == [99, 100]


def test_init_from_takes_the_weights_alone(micro):
    still = MICRO | {"balance_rate": 0.0}
    first = train.main(micro(steps=8, lr=1e-2, model=still))
    again = micro(steps=1, lr=0.0, model=still, init_from=first["checkpoint"], out_dir=micro().out_dir + "-next")
    second = train.main(again)
    assert second["val_loss"] == first["val_loss"] and second["step"] == 1


def test_non_finite_steps_end_the_run(micro, monkeypatch):  # [22]
    inner = train.start

    def spoil(run, p):
        p.grad[0, 0] *= math.nan if run.counts["step"] >= 3 else 1

    def start(*args):
        run = inner(*args)
        run.net.head.register_post_accumulate_grad_hook(lambda p: spoil(run, p))
        return run

    monkeypatch.setattr(train, "start", start)
    with pytest.raises(FloatingPointError, match=r"4 steps in a row.*step 7.*gradient norm is nan.*ckpt/3"):
        train.main(micro(steps=20, save_every=3, max_bad_steps=4))
    log = rows(micro().out_dir)
    assert [row["step"] for row in log if "skipped" in row] == [4, 5, 6, 7] and log[-1]["grad_norm"] is None
    state = train.training_state(*fresh(micro()))
    train.load_checkpoint(Path(micro().out_dir, "ckpt", "3"), state)
    assert all(t.isfinite().all() for t in state["model"].values())


def fresh(config):
    net = Model(ModelConfig(**config.model))
    return net, train.make_optimizer(net, config)


# ---- accumulation ----


def batch(sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(t[:, :-1], t[:, 1:]) for t in torch.randint(257, (sequences, 1, 17), generator=generator)]


def grads(net, micro_batches):
    loss, norm, _ = train.gradients(net, micro_batches, torch.device("cpu"))
    answer = [p.grad for p in net.parameters()]
    net.zero_grad()
    return loss.item(), answer


@pytest.mark.parametrize("eval_every", [0, 1])
def test_a_diverged_run_is_no_success(micro, eval_every):
    with pytest.raises(FloatingPointError, match="diverged"):
        train.main(micro(steps=4, lr=1e38, warmup=0, grad_clip=0.0, eval_every=eval_every))


def test_damaged_or_later_checkpoints_are_named(micro, capsys):
    saved = train.main(micro(steps=2))["checkpoint"]
    with pytest.raises(ValueError, match="beyond --steps=1"):
        train.main(micro(steps=1, resume="auto"))
    for damage in ("{}", "[1]", "{half"):
        Path(saved, "train.json").write_text(damage)
        with pytest.raises(ValueError, match="train.json is damaged"):
            train.main(micro(steps=3, resume="auto"))
    Path(saved, "train.json").unlink()
    assert train.main(micro(steps=3, resume="auto"))["finished"] and len(rows(micro().out_dir)) == 3
    assert f"there is no complete checkpoint in {micro().out_dir}: starts at step 0\n" in capsys.readouterr().out
    assert len(Path(micro().out_dir, "log.old").read_text().splitlines()) == 2  # nothing that was logged is lost


def test_loss_bench_checks_before_it_trains(tmp_path):
    for words, said in ((["--precisions=bf16,mxpf4"], "mxpf4"), (["--seeds=0,x"], "--seeds")):
        with pytest.raises(ValueError, match=said):
            bench.main(["loss", f"--out={tmp_path / 'runs'}", *words])
    assert not (tmp_path / "runs").exists()


def test_cutting_into_micro_batches_changes_nothing():  # [18]
    torch.manual_seed(0)
    net = Model(ModelConfig(**MICRO, balance_alpha=0.0))
    singles = batch(8)
    whole_loss, whole = grads(net, [tuple(map(torch.cat, zip(*singles)))])
    for size in (4, 2, 1):
        cuts = [tuple(map(torch.cat, zip(*singles[i : i + size]))) for i in range(0, 8, size)]
        loss, cut = grads(net, cuts)
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        for a, b in zip(whole, cut):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


@pytest.mark.parametrize("j", [0, 1, 2])
def test_every_micro_batch_counts(j):  # [18] [20]
    torch.manual_seed(0)
    net = Model(ModelConfig(**MICRO, balance_alpha=0.0))
    singles = batch(3)
    hidden = torch.full_like(singles[0][1], data.IGNORED)
    loss, together = grads(net, [(x, y if i == j else hidden) for i, (x, y) in enumerate(singles)])
    alone_loss, alone = grads(net, [singles[j]])
    assert loss == pytest.approx(alone_loss, rel=1e-6) and any(g.any() for g in together)
    for a, b in zip(alone, together):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def test_loads_are_counted_once():  # [13]
    for recompute in ((), ("norm", "moe"), ("norm", "mla_up", "attn", "mlp", "moe")):
        torch.manual_seed(0)
        net = Model(ModelConfig(**MICRO))
        net.recompute = frozenset(recompute)
        grads(net, batch(4))  # 64 tokens, top-2, one MoE layer
        assert sum(m.load.sum() for m in net.modules() if hasattr(m, "load")) == 128
        grads(net, batch(12))
        assert sum(m.load.sum() for m in net.modules() if hasattr(m, "load")) == 512
        net.update_balance()
        assert not any(m.load.any() for m in net.modules() if hasattr(m, "load"))


# ---- two ranks ----


class Toy(torch.nn.Module):
    """Its loss at a token is the target times w, w = 1."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets, num_tokens):
        return None, (targets * (targets != data.IGNORED)).sum() * self.w / num_tokens


def toy_loss(cuts):
    """`cuts`: targets of the micro-batches of each rank."""
    if "RANK" in os.environ:
        train.dist.init_process_group("gloo")
    toy, cpu = Toy(), torch.device("cpu")
    targets = cuts[train.rank()] if len(cuts) > 1 else cuts[0]
    loss, _, tokens = train.gradients(toy, [(t, t) for t in targets], cpu, train.Layout.of(1, 1, cpu))
    return loss.item(), toy.w.grad.item(), tokens


def test_loss_is_a_mean_over_tokens():  # [20]
    five, one, none = torch.tensor([[2, 2, 2, 2, 2]]), torch.tensor([[6, -100, -100]]), torch.full((1, 4), -100)
    right = (pytest.approx(16 / 6), pytest.approx(16 / 6), 6)
    assert toy_loss([[five, one]]) == right
    assert toy_loss([[five, none, one]]) == right
    assert toy_loss([[none]])[0] == 0
    assert results(launch(toy_loss, [[five], [one]])) == [right, right]
    assert results(launch(toy_loss, [[five, one], [none, none]])) == [right, right]


def test_ranks_and_micro_batches_train_as_one_process(micro):  # [15] [18] [28]
    """One global batch: in one process, in micro-batches, on two ranks, in one process that goes on from two ranks."""
    name = micro().out_dir
    train.main(micro(batch_size=4, eval_steps=1, out_dir=f"{name}-one"))
    train.main(micro(grad_accum=2, out_dir=f"{name}-accumulated"))
    two = results(launch(train.main, micro(save_every=3, out_dir=f"{name}-two")))
    train.main(micro(batch_size=4, eval_steps=1, out_dir=f"{name}-on", resume=f"{name}-two/ckpt/3"))
    keys = ("step", "loss", "grad_norm", "lr")
    one = curve(f"{name}-one", *keys)
    for other, expected in (("accumulated", one), ("two", one), ("on", one[3:])):
        assert sum(curve(f"{name}-{other}", *keys), []) == pytest.approx(sum(expected, []), rel=1e-4), other
        assert rows(f"{name}-{other}")[-1]["val_loss"] == pytest.approx(rows(f"{name}-one")[-1]["val_loss"], rel=1e-5)
    assert two[0]["val_loss"] == two[1]["val_loss"]


def spoiled(config, value, spoiled_ranks):
    """Trains with gradients spoiled in step 3; tells whether that step changed weights, biases or moments."""
    start, train_step, changed = train.start, train.train_step, []

    def start_spoiled(*args):
        run = start(*args)
        for p in run.net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: spoil(run, p))
        return run

    def spoil(run, p):
        if run.counts["step"] == 2 and train.rank() in spoiled_ranks:
            p.grad.fill_(value)

    def watched(run, config):
        before = pickle.dumps(train.training_state(run.net, run.optimizer))
        answer = train_step(run, config)
        changed.append(before != pickle.dumps(train.training_state(run.net, run.optimizer)))
        return answer

    train.start, train.train_step = start_spoiled, watched
    return train.main(config), changed


@pytest.mark.parametrize("value, ranks, said, change", [
    (math.nan, [1], "nan", {}), (1e20, [0, 1], "inf", dict(moments="bf16")), (math.nan, [1], "nan", dict(ep=2, fsdp=2))])
def test_all_ranks_skip_a_non_finite_step(micro, value, ranks, said, change):  # [22]
    answers = results(launch(spoiled, micro(steps=4, save_every=1, precision="fp8", **change), value, ranks))
    for last, changed in answers:
        assert changed == [True, True, False, True] and last["skipped"] == 1 and math.isfinite(last["val_loss"])
    assert answers[0][0]["grad_norm"] == answers[1][0]["grad_norm"]
    log = rows(micro().out_dir)
    assert [row.get("skipped") for row in log] == [None, None, f"gradient norm is {said}", None]


def killed_in_save(config, when, rank):
    """Trains until a rank dies by kill -9 in the save of step 4: before its part is written, after, or in publishing."""
    save, publish = state_dict_saver.save, train.Saver.publish

    def die(step, now):
        if (step, now) == ("4.tmp", when) and train.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(state, checkpoint_id, **options):
        if when == "before":
            (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        die(checkpoint_id.name, "before")
        answer = save(state, checkpoint_id=checkpoint_id, **options)
        die(checkpoint_id.name, "after")
        return answer

    def deadly_publish(saver):
        die(saver.aside.name, "publishing")
        publish(saver)

    state_dict_saver.save, train.Saver.publish = deadly, deadly_publish  # the first is what the saving thread calls
    return train.main(config)


@pytest.mark.parametrize("when, rank", [("before", 1), ("after", 1), ("publishing", 0)])
def test_kill_in_a_save_costs_no_checkpoint(micro, when, rank):  # [30]
    answers = launch(killed_in_save, micro(steps=6, save_every=2, fsdp=2), when, rank)
    assert answers[rank][0] == -signal.SIGKILL and answers[1 - rank][0] != 0
    assert checkpoints(micro().out_dir) == [2]
    ends = results(launch(train.main, micro(steps=6, save_every=2, resume="auto")))
    assert [end["step"] for end in ends] == [6, 6] and checkpoints(micro().out_dir) == [4, 6]
    assert [row["step"] for row in rows(micro().out_dir)] == [1, 2, 3, 4, 5, 6]
    assert not list(Path(micro().out_dir, "ckpt").glob("*.tmp"))


def unwritable_later(config):
    """Trains with the checkpoint folder replaced by a file after the start."""
    def to_a_file(run, config):
        if train.rank() == 0:
            shutil.rmtree(Path(config.out_dir, "ckpt"))
            Path(config.out_dir, "ckpt").write_text("")

    watch("train", to_a_file)
    return train.main(config)


@pytest.mark.parametrize("work, change, said", [
    (train.main, dict(out_dir="/dev/null/run"), "/dev/null"), (unwritable_later, {}, "ckpt"),
    (train.main, dict(tokenizer="gpt2", model=MICRO | {"vocab_size": 50304}), "TIKTOKEN_CACHE_DIR")])
def test_a_fault_ends_all_ranks(micro, monkeypatch, tmp_path, work, change, said):  # [30] [33]
    answers = launch(offline, str(tmp_path / "empty"), work, micro(**change))
    assert [code != 0 for code, _, _ in answers] == [True, True]
    assert said in answers[0][2] and answers[1][2] == ""


def each_with_its_own_text(config):
    return train.main(replace(config, data=config.data if os.environ["RANK"] == "0" else "data.py"))


def resumed_on_rank_0_alone(config):
    return train.main(replace(config, out_dir=config.out_dir + "-of-rank-1" * (os.environ["RANK"] == "1")))


@pytest.mark.parametrize("work, said", [(each_with_its_own_text, "data"), (resumed_on_rank_0_alone, "out_dir")])
def test_ranks_that_differ_end_at_once(micro, work, said):
    train.main(micro(steps=2))
    answers = launch(work, micro(steps=4, resume="auto" if work is resumed_on_rank_0_alone else "",
                                 out_dir=micro().out_dir + "-2" * (work is not resumed_on_rank_0_alone)))
    assert [code != 0 for code, _, _ in answers] == [True, True] and f"do not agree on {said}" in answers[0][2]


def offline(cache, work, config):
    os.environ.update(TIKTOKEN_CACHE_DIR=cache, https_proxy="http://127.0.0.1:9", HTTPS_PROXY="http://127.0.0.1:9")
    return work(config)


# ---- every source, cut and resumed on other numbers of ranks ----


def drawn(config):
    """Trains; returns each step's sequences of this rank, in the order in which they were drawn."""
    steps, gradients = [], train.gradients

    def see(net, micro_batches, *rest):
        steps.append([pair for x, y in micro_batches for pair in zip(x.tolist(), y.tolist())])
        return gradients(net, micro_batches, *rest)

    train.gradients = see
    try:
        train.main(config)
    finally:
        train.gradients = gradients
    return steps


@pytest.mark.parametrize("source", ["text", "shards", "hf"])
def test_cut_runs_draw_what_the_uncut_run_draws(micro, text, tmp_path, source):  # [27] [28] [31]
    """Steps 1 to 3 on one rank, 4 to 6 on two, 7 to 9 on one: 288 sequences, two epochs, of 10 files or 160 lines."""
    spec, files = f"{text}/0*.py", sorted(Path(text).glob("0*.py"))
    if source == "shards":
        data.make_shards(spec, data.tokenizer("bytes"), str(tmp_path / "shards"))
        spec = str(tmp_path / "shards")
    if source == "hf":
        pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[hf]'")
        (tmp_path / "rows").mkdir()
        lines = [line for path in files for line in path.read_text().splitlines()]
        (tmp_path / "rows" / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        spec = f"hf:{tmp_path / 'rows'}"
    usual = dict(data=spec, seq_len=32, batch_size=16, grad_accum=2)
    whole = drawn(micro(**usual, steps=9, out_dir=micro().out_dir + "-whole"))
    first = drawn(micro(**usual, steps=3))
    two = results(launch(drawn, micro(**usual | {"batch_size": 8}, steps=6, resume="auto")))
    last = drawn(micro(**usual, steps=9, resume="auto"))
    second = [[pair for pairs in zip(*of_ranks) for pair in pairs] for of_ranks in zip(*two)]
    assert first + second + last == whole and len({str(pair) for step in whole for pair in step}) > 99


# ---- Hugging Face checkpoints, in and out ----


@pytest.mark.parametrize("layout", ["v2", "v2-lite", "v3"])
def test_loss_of_a_model_trained_here_is_the_same_there(micro, tmp_path, layout):
    hf = pytest.importorskip("test_hf", reason="needs transformers and safetensors: pip install '.[test]'")
    hf.theirs(layout, vocab_size=320).save_pretrained(tmp_path / "in")
    config = micro(init_from=f"hf:{tmp_path / 'in'}", tokenizer="bytes", steps=20, lr=3e-3, eval_every=19, model={})
    last = train.main(config)
    train.export([config.out_dir, str(tmp_path / "out"), "--dtype=fp32"])
    net = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    _, val_batches = data.open_data(config.data, data.tokenizer("bytes"), 0, config.seq_len, 2, 4)
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(net(x).logits.flatten(0, 1), y.flatten()) for x, y in val_batches]
    there, before = sum(losses).item() / len(losses), rows(config.out_dir)[0]["loss"]
    print(f"{layout}: loss {before:.4f}, after 20 steps val loss {last['val_loss']:.6f} here, {there:.6f} there")
    assert last["val_loss"] < before - 0.5 and abs(there - last["val_loss"]) < 1e-4


def test_nothing_is_saved_where_that_is_asked_for(micro, monkeypatch, capsys):
    """Nor is there room asked for."""
    monkeypatch.setattr(train.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    done = train.main(micro(steps=2, save_every=-1))
    assert done["finished"] and not train.complete_checkpoints(Path(micro().out_dir, "ckpt"))
    assert "weights not saved" in capsys.readouterr().out


def test_export_writes_what_was_asked_for(micro, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[hf]'")
    config = micro(steps=2, save_every=1)
    train.main(config)
    notes = Path(config.out_dir, "ckpt", "2", "train.json")
    made = {}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for run, name, dtype in ((config.out_dir, "last", ()), (f"{config.out_dir}/ckpt/1", "first", ["--dtype=fp32"])):
        train.export([run, str(tmp_path / name), *dtype])
        made[name] = safetensors.load_file(tmp_path / name / "model.safetensors")
    assert "--tokenizer=bytes loads it" in capsys.readouterr().out
    assert made["last"]["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert made["first"]["model.embed_tokens.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "last" / "config.json").read_text())["eos_token_id"] == 256
    notes.write_text(notes.read_text().replace('"tokenizer": "bytes"', f'"tokenizer": "hf:{tmp_path / "tokenizer"}"'))
    train.export([config.out_dir, str(tmp_path / "with")])
    assert (tmp_path / "with" / "tokenizer.json").read_text() == "{}" and "no tokenizer" not in capsys.readouterr().out


def test_tokenizer_and_model_are_the_checkpoints(micro, tmp_path):
    """A run that begins with a checkpoint needs no flags for its model and its tokenizer."""
    ranks = write_ranks(tmp_path / "own.tiktoken")
    first = train.main(micro(steps=2, tokenizer=ranks))
    again = train.main(micro(steps=1, model={}, init_from=first["checkpoint"], out_dir=micro().out_dir + "-again"))
    more = train.main(micro(steps=3, model={}, resume="auto"))
    for end in (again, more):
        notes = train.read_notes(Path(end["checkpoint"]))
        assert notes["tokenizer"] == ranks and notes["end_of_text"] == 257 and notes["model"].hidden == 32


def write_ranks(path):
    """A tokenizer of the 256 bytes and `def `; end-of-text is 257."""
    ranks = [*(bytes([i]) for i in range(256)), b"def "]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(ranks)))
    return str(path)


# ---- bad input: one line, exit code 2, nothing lost ----


@pytest.fixture
def refused(monkeypatch, capfd):
    """refused(*words) runs train.py with them and returns the one line on stderr with which it ended."""
    def run(*words):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(HERE / "train.py"), run_name="__main__")
        err = capfd.readouterr().err
        assert left.value.code == 2 and err.startswith("train.py: ") and err.count("\n") == 1, err
        assert len(err) < 600, err
        return err

    return run


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """A run of two steps, with its checkpoints 1 and 2; copy it."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    train.main(train.Config(precision="bf16", data=text, seq_len=16, batch_size=2, steps=2, warmup=2, eval_every=0,
                            eval_steps=2, save_every=1, out_dir=str(out_dir), model=MICRO))
    return out_dir


def folder_of(tmp_path, **files):
    (tmp_path / "folder").mkdir()
    for name, content in files.items():
        (tmp_path / "folder" / name).write_bytes(content)
    return tmp_path / "folder"


@pytest.mark.parametrize("words, said", [
    (["--preset=huge"], "--preset=huge: choose one of tiny, small, v2-lite"), (["--data=nowhere"], "no file or folder"),
    (["--seq_len=65"], "--seq_len=65 is more than --model.max_seq_len=64"), (["--data=/proc/self/mem"], "1 unreadable"),
    (["--out_dir="], "--out_dir is empty"), (["--out_dir=/dev/null/run"], "Cannot write /dev/null/run (Not a dir"),
    (["--out_dir=/proc/run"], "Cannot write /proc/run"), (["--model.vocab_size=256"], "--model.vocab_size=384"),
    (["--init_from=nowhere"], "nowhere is no complete checkpoint"), (["--init_from=hf:nowhere"], "hf download NAME"),
    (["--data=hf:nowhere/at/all"], "no dataset"), (["--tokenizer=hf:nowhere"], "nowhere"),
    (["--resume=hf:nowhere"], "is no complete checkpoint"), (["--wamup=3"], "--warmup"),
    (["--moments=fp8"], "--moments=fp8: choose one of fp32, bf16."),
    (["exprot", "a"], "no flag exprot"), ([""], "--help"), (["export"], "run, folder"),
    (["export", "nowhere", "x"], "nowhere is no complete checkpoint"), (["--model.foo=1"], "no flag --model.foo")])
def test_bad_settings_are_one_line(micro, refused, words, said):
    assert said in refused(*([] if words[0] == "export" else flags(micro())), *words)
    assert words[0].startswith(("--data", "--tokenizer", "--model.v")) or not Path(micro().out_dir).exists()


@pytest.mark.parametrize("files, said", [
    ({}, "0 files found"), ({"a.txt": b""}, "1 files found"), ({"a": b"\0\1", "b": b"\x7fELF\0"}, "2 binary"),
    ({"train-00000.bin": b"", "val-00000.bin": b"half"}, "is not a token shard")])
def test_data_without_text_is_one_line(micro, refused, tmp_path, files, said):
    assert said in refused(*flags(micro(data=str(folder_of(tmp_path, **files)))))


def test_bad_shards_are_one_line(micro, refused, text, tmp_path):  # [32]
    shards, ranks = tmp_path / "shards", write_ranks(tmp_path / "own.tiktoken")
    data.make_shards(text, data.tokenizer(ranks), str(shards))
    asked = flags(micro(data=str(shards)))
    assert "was made with the tokenizer" in refused(*asked)
    shard = shards / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert "is cut off or damaged" in refused(*asked, f"--tokenizer={ranks}")
    shard.write_bytes(whole[: data.HEADER_BYTES] + b"\xf0\xf1" * ((len(whole) - data.HEADER_BYTES) // 2))
    with pytest.raises(ValueError, match="a token id 61936 .* has 258 ids"):
        train.main(micro(data=str(shards), tokenizer=ranks))


def change(path, to):
    path.write_bytes(to(path.read_bytes()))


@pytest.mark.parametrize("name, to, said", [
    (".metadata", lambda raw: b"garbage", "ckpt/2 is damaged (UnpicklingError"),
    (".metadata", lambda raw: raw[:100], "ckpt/2 is damaged"), (".metadata", lambda raw: b"", "ckpt/2 is damaged"),
    (".metadata", lambda raw: pickle.dumps({"a": 1}), "ckpt/2 is damaged"),
    ("__0_0.distcp", lambda raw: raw[: len(raw) // 2], "__0_0.distcp is cut off"),
    ("__0_0.distcp", lambda raw: b"", "__0_0.distcp is cut off"),
    ("train.json", lambda raw: raw[:200], "train.json is damaged"), ("train.json", lambda raw: b"[1]", "it lacks"),
    ("train.json", lambda raw: raw.replace(b'"hidden"', b'"hiden"'), "train.json is damaged")])
def test_damaged_checkpoints_are_one_line(micro, refused, finished, name, to, said):
    out_dir = shutil.copytree(finished, micro().out_dir)
    change(Path(out_dir, "ckpt", "2", name), to)
    elsewhere = flags(micro(steps=3, out_dir=out_dir + "-2", init_from=f"{out_dir}/ckpt/2", data="nowhere"))
    for words in (flags(micro(steps=3, resume="auto", data="nowhere")), elsewhere, ["export", out_dir, out_dir + "-3"]):
        assert said in refused(*words)  # before data is opened
    shutil.rmtree(Path(out_dir, "ckpt", "2"))  # as the line says
    assert train.main(micro(steps=3, resume="auto"))["step"] == 3 and len(rows(out_dir)) == 3


def test_overwritten_tensors_are_one_line(micro, finished):
    """Damage that only reading shows: of the right size."""
    out_dir = shutil.copytree(finished, micro().out_dir)
    change(Path(out_dir, "ckpt", "2", "__0_0.distcp"), lambda raw: bytes(len(raw)))
    for ranks in (1, 2):
        answers = launch(train.main, micro(steps=3, resume="auto"), ranks=ranks)
        assert [code for code, _, _ in answers] == [1, 2][:ranks] and "ckpt/2 is damaged (" in answers[0][2]
        assert "\n" not in answers[0][2] and len(answers[0][2]) < 500


def test_numbers_that_are_not_finite_are_not_loaded(micro, refused, finished, capfd):
    """Or a run of skipped steps would save them, and make room by removing a good checkpoint."""
    out_dir = shutil.copytree(finished, micro().out_dir)
    state = {"model": Model(train.read_notes(Path(out_dir, "ckpt", "2"))["model"]).state_dict()}
    train.load_checkpoint(Path(out_dir, "ckpt", "2"), state)
    weight = next(iter(state["model"].values())).numpy().tobytes()
    change(Path(out_dir, "ckpt", "2", "__0_0.distcp"), lambda raw: raw.replace(weight, b"\xff" * len(weight)))
    before = sorted(os.listdir(Path(out_dir, "ckpt")))
    for words in flags(micro(steps=3, resume="auto")), ["export", out_dir, out_dir + "-3"]:
        assert "ckpt/2 is damaged (ValueError: numbers in it are not finite)" in refused(*words)
    assert sorted(os.listdir(Path(out_dir, "ckpt"))) == before
    Path(out_dir, "ckpt", "2", "train.json").unlink()
    capfd.readouterr()
    train.main(micro(steps=3, resume="auto"))
    assert "ckpt/1; changed: steps 2 -> 3" in (said := "".join(capfd.readouterr())) and "; incomplete: 2\n" in said


def test_foreign_and_half_written_checkpoints_are_one_line(micro, refused, finished, text, tmp_path):
    out_dir = Path(shutil.copytree(finished, micro().out_dir))
    hf = folder_of(tmp_path, **{"config.json": b"{}", "model.safetensors": b""})
    shutil.copytree(out_dir / "ckpt" / "2", out_dir / "ckpt" / "3.tmp")
    (out_dir / "ckpt" / "1" / "train.json").unlink()
    words = flags(micro(out_dir=str(tmp_path / "new")))
    for path in (text, hf, out_dir / "ckpt" / "3.tmp", out_dir / "ckpt" / "1", out_dir / "log.jsonl"):
        for flag in ("--init_from", "--resume"):
            assert "is no complete checkpoint" in refused(*words, f"{flag}={path}")
    assert f"--init_from=hf:{hf}" in refused(*words, f"--init_from={hf}")
    assert "no Hugging Face checkpoint" in refused(*words, f"--init_from=hf:{text}")


@pytest.mark.parametrize("model", [MICRO | {"hidden": 64}, {"n_experts": 8}])
def test_a_model_that_contradicts_the_checkpoint_is_one_line(micro, refused, finished, tmp_path, model):
    import model as models

    new = str(tmp_path / "new")
    (name, value), = set(model.items()) - set(MICRO.items())
    hf = folder_of(tmp_path, **{"config.json": json.dumps(models._hf_config(ModelConfig(**MICRO))).encode()})
    for source in (finished / "ckpt" / "2", f"hf:{hf}"):
        line = refused(*flags(micro(model=model, init_from=str(source), out_dir=new)))
        assert f"has --model.{name}={MICRO[name]}, this run has --model.{name}={value}" in line
    out_dir = shutil.copytree(finished, micro().out_dir)
    assert f"--model.{name}={value}" in refused(*flags(micro(model=model, steps=3, resume="auto", out_dir=out_dir)))
    assert "leave out --preset" in refused(*flags(micro(model={}, preset="small", steps=3, resume="auto")))


def test_export_refuses_in_one_line(refused, finished, tmp_path):
    full = folder_of(tmp_path, mine=b"")
    assert "is no empty folder" in refused("export", finished, full) and [p.name for p in full.iterdir()] == ["mine"]
    assert "--dtype" in refused("export", finished, tmp_path / "new", "--dtype=fp16")
    assert "unrecognized" in refused("export", finished, tmp_path / "new", "--steps=3")
    assert "/dev/null/new" in refused("export", finished, "/dev/null/new")


# ---- two runs in one folder; a full disk ----


def test_two_runs_in_one_folder_are_refused(micro, refused):
    config = micro(steps=2)
    with train.hold(config.out_dir, ModelConfig(**MICRO), config.moments):
        assert f"A run is writing to {config.out_dir}" in refused(*flags(config))
        answers = launch(train.main, config)
        assert [code for code, _, _ in answers] == [1, 2] and "A run is writing" in answers[0][2]
    assert train.main(config)["finished"]


def test_a_file_system_without_locks_is_none(micro, monkeypatch):
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert train.main(micro(steps=1))["finished"]


def test_too_little_room_at_the_start_is_one_line(micro, refused, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 50_000, 50_000))
    assert "0.000 GB free, a checkpoint takes 0.001 GB: make room" in refused(*flags(micro(data="nowhere")))
    between = 10 * parameter_count(ModelConfig(**MICRO))["total"]  # 12 bytes each are too many, 8 are not
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - between, between))
    small, large = (micro(steps=1, moments=name, out_dir=micro().out_dir + name) for name in ("bf16", "fp32"))
    assert train.main(small)["finished"] and "make room" in refused(*flags(large))


@pytest.fixture
def disk():
    """A file system of 4 MB."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True).returncode:
            pytest.skip("may not mount a file system here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def fills_the_disk(config):
    """Trains, and as step 4 begins nothing is left of the disk."""
    def fill(run, config):
        time.sleep(0.5 if run.counts["step"] == 2 else 0)  # the checkpoint of step 2 is written
        if run.counts["step"] == 3 and train.rank() == 0:
            with contextlib.suppress(OSError), Path(config.out_dir, "..", "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))

    inner = watch("train_step", fill)
    try:
        return train.main(config)
    finally:
        train.train_step = inner


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change, said", [(dict(log_every=99), "Cannot write .*run/ckpt/4 "), ({}, "run/log.jsonl ")])
def test_a_full_disk_costs_no_checkpoint(micro, disk, ranks, change, said):
    config = micro(**{"steps": 60, "save_every": 2 if change else 0, "out_dir": str(disk / "run")} | change)
    if not change:
        train.main(replace(config, steps=2))
        config.resume = "auto"
    answers = launch(fills_the_disk, config, ranks=ranks)
    assert [code for code, _, _ in answers] == [1, 2][:ranks] and "make room" in answers[0][2]
    assert re.search(f"{said}.*No space left on device|{said}.*unexpected pos", answers[0][2])
    assert "\n" not in answers[0][2] and len(answers[0][2]) < 600 and checkpoints(config.out_dir) == [2]
    (disk / "ballast").unlink()
    assert train.main(replace(config, steps=5, resume="auto", log_every=1))["step"] == 5
    assert [row["step"] for row in rows(config.out_dir)][-3:] == [3, 4, 5] and checkpoints(config.out_dir)[-1] == 5


@pytest.mark.parametrize("limit, said", [(100, "run "), (30_000, "run/ckpt/4 ")])
def test_files_that_cannot_grow_are_one_line(micro, monkeypatch, limit, said):
    """As a full disk where none can be mounted: at the start, and in a save."""
    resource = pytest.importorskip("resource")
    train.main(micro(steps=2))
    for stream in ("stdout", "stderr"):  # which pytest sends into files
        monkeypatch.setattr(sys, stream, io.StringIO())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=f"Cannot write .*{said}.File too large.: make room") as caught:
            train.main(micro(steps=4, resume="auto"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value) and checkpoints(micro().out_dir) == [2]
    assert train.main(micro(steps=4, resume="auto"))["step"] == 4 and len(rows(micro().out_dir)) == 4


# ---- from the command line ----


def command(*words):
    return subprocess.Popen([*words], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_imports_start_nothing():  # [34] [35]
    code = "import sys; sys.modules['triton'] = None; import torch, train; print(torch.cuda.is_initialized())"
    out, err = command(sys.executable, "-c", code).communicate(timeout=60)
    assert out == "False\n", err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(micro, number):  # [35]
    config = micro(steps=10_000, warmup=2, precision="mxfp4")
    process = command(sys.executable, "train.py", *flags(config))
    log = Path(config.out_dir, "log.jsonl")
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    step = rows(config.out_dir)[-1]["step"]
    assert process.returncode == 0 and f"stopped by a signal after step {step}" in out.splitlines()[-1], err
    assert checkpoints(config.out_dir) == [step]


def test_plain_python(micro):  # [35]
    run = command(sys.executable, "train.py", *flags(micro(steps=3)))
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert all(math.isfinite(row["loss"]) for row in rows(micro().out_dir)) and "val loss" in out.splitlines()[-1]


def test_torchrun(micro):  # [35]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = command(*torchrun, "train.py", *flags(micro(steps=3)))
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    log = rows(micro().out_dir)
    assert [row["step"] for row in log] == [1, 2, 3] and all(math.isfinite(row["loss"]) for row in log)
    assert "val loss" in out.splitlines()[-1] and out.count("val loss") == 2


def test_a_fault_is_one_line_and_exit_code_2(micro):
    process = command(sys.executable, "train.py", "--wamup=3")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1) and "--warmup" in err


# ---- bench.py ----


def test_loss_bench_runs_once_and_plots(micro, monkeypatch, capsys, tmp_path):
    config = micro(steps=3, eval_every=2)
    set_by_bench = ("--precision", "--seed", "--out_dir", "--resume", "--log_every")
    ours = [word for word in flags(config) if not word.startswith(set_by_bench)]
    words = ["loss", "--precisions=bf16,mxfp4", "--seeds=0,1", f"--out={tmp_path / 'bench'}", *ours]
    bench.main(words)
    first = (tmp_path / "bench" / "loss.csv").read_text().splitlines()
    assert first[0] == ",".join(bench.COLUMNS)
    assert len(first) == 5 and "from bf16: " in capsys.readouterr().out

    monkeypatch.setattr(train, "main", lambda _: pytest.fail("a finished run was repeated"))
    bench.main(words)
    assert (tmp_path / "bench" / "loss.csv").read_text().splitlines() == first
    with pytest.raises(ValueError, match="lr"):
        bench.main([*words, "--lr=0.5"])
    with pytest.raises(ValueError, match="--seeds"):
        bench.main([*words, "--seed=3"])
    png = tmp_path / "curves.png"
    bench.main(["plot", str(tmp_path / "bench" / "bf16-0"), str(tmp_path / "bench" / "mxfp4-1"), f"--out={png}"])
    for path in (png, tmp_path / "bench" / "loss.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    with pytest.raises(FileNotFoundError, match="no run"):
        bench.main(["plot", str(tmp_path)])


def test_plot_names_the_extra_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        bench.plot_runs([], tmp_path / "x.png")


@pytest.mark.parametrize("name", ("kernels", "gemm", "layer", "train"))
def test_a_table_has_its_picture(name, tmp_path):
    """Whole tables as committed, and those of one shape; rows of what did not fit are empty."""
    pytest.importorskip("matplotlib")
    lines = (Path(bench.__file__).parent / f"results/h200/{name}.csv").read_text().splitlines()
    some = [line for line in lines if line.startswith(("shape", "v2-lite"))]
    if name == "train":
        cells = some[1].split(",")
        cells[6:23] = [""] * 17
        some.append(",".join(cells))
    paths = [tmp_path / "whole.csv", tmp_path / "some.csv"]
    for path, table in zip(paths, (lines, some)):
        path.write_text("\n".join(table))
    bench.main(["plot", *map(str, paths)])
    pictures = [path.with_suffix(".png").read_bytes() for path in paths]
    assert all(picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 200_000 for picture in pictures)
    assert pictures[0] != pictures[1]


def test_exchanges_have_their_picture(tmp_path):
    pytest.importorskip("matplotlib")
    where = "NVIDIA H200,2.11.0,3.6.0,12345e6789,2026-01-01"  # a commit that reads as a number
    lines = [f"v3,8,4096,{sent},9,{wire},{exchange},1.5,1,1,1,1,{where}" for sent in ("once", "pairs")
             for wire in bench.WIRES for exchange in ("dispatch", "combine", "sum")]
    (tmp_path / "comm.csv").write_text("\n".join([",".join(bench.COMM_COLUMNS), *lines]))
    bench.main(["plot", str(tmp_path / "comm.csv"), f"--out={tmp_path / 'x.png'}"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_plot_refuses_other_tables(tmp_path):
    table, empty = tmp_path / "t.csv", tmp_path / "empty.csv"
    table.write_text("a,b\n1,2\n")
    empty.write_text(",".join(bench.GEMM_COLUMNS))
    refused = {(table,): "is no table", (empty,): "with rows", (tmp_path / "none.csv",): "No such file",
               (table, table, "--out=x.png"): "one picture"}
    for words, message in refused.items():
        with pytest.raises((ValueError, OSError), match=message):
            bench.main(["plot", *map(str, words)])
    assert list(tmp_path.glob("*.png")) == []


def test_resume_takes_the_settings_of_its_run(micro):
    """What flags do not say comes from the run, its model with it; what they say counts."""
    config = micro(steps=2, lr=1e-4, batch_size=3)
    train.main(config)
    flags = ["--resume=auto", f"--out_dir={config.out_dir}"]
    again = train.parse_flags(flags)
    assert again == replace(config, resume="auto")
    assert train.parse_flags([*flags, "--steps=4", "--model.mtp_weight=0.1"]) == replace(
        again, steps=4, model=MICRO | {"mtp_weight": 0.1})
    assert train.parse_flags(["--resume=auto", f"--out_dir={config.out_dir}-none"]).lr == train.Config().lr
    train.main(train.parse_flags([*flags, "--steps=3"]))
    assert [row["lr"] < 1e-3 for row in rows(config.out_dir)] == [True] * 3
