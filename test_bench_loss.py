"""Tests of what is measured of accuracy: bench.py's loss and error, train.py's --diagnose. Micro model, made-up text."""

import csv
import json
import math
import os
import statistics
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

import bench
import quant
import train
from model import Model, ModelConfig
from test_train import small, text  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MICRO = dict(n_layers=2, n_dense=1, hidden=128, dense_width=128, n_heads=1, nope_dim=16, rope_dim=16, v_dim=32,
             q_lora=32, kv_lora=32, n_experts=4, top_k=2, expert_width=64, max_seq_len=64)


@pytest.fixture
def micro(text, tmp_path):
    """Config of a micro run."""
    def make(**changes):
        usual = dict(precision="mxfp4", data=text, seq_len=32, batch_size=2, steps=6, warmup=2, eval_every=0,
                     eval_steps=2, save_every=0, device="cpu", out_dir=str(tmp_path / "run"), model=MICRO)
        return train.Config(**usual | changes)

    return make


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = Model(ModelConfig(**MICRO, init_std=0.08))
    net.eval()
    return net


def words(config, *leave_out):
    """The command line of a Config."""
    named = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("model", *leave_out)}
    return [f"--{name}={value}" for name, value in named.items()] + [f"--model.{k}={v}" for k, v in config.model.items()]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (2, 32), generator=generator) for _ in range(2))


# ---- error: at fixed weights ----


def test_error_of_a_checkpoint(micro, tmp_path, monkeypatch, capsys):
    """bf16 is bf16; what only backward reads leaves the loss alone; a second call repeats nothing."""
    train.main(micro(steps=3))
    table = tmp_path / "error.csv"
    command = ["error", micro().out_dir, "--settings=bf16; mxfp4 save_h=fp8|fp4; bf16 save=fp4; mxfp4 rule=floor",
               "--tokens=200", "--batches=2", f"--out={table}"]
    bench.main(command)
    rows = {row["setting"]: row for row in csv.DictReader(table.open())}
    assert list(rows) == ["bf16", "mxfp4 save_h=fp8", "mxfp4 save_h=fp4", "bf16 save=fp4", "mxfp4 rule=floor"]
    number = lambda setting, column: float(rows[setting][column])
    assert number("bf16", "percent_from_bf16") == 0 and number("bf16", "step") == 3 and number("bf16", "tokens") >= 200
    for kind in ("all", *bench.KINDS):
        assert number("bf16", f"cosine_{kind}") == number("bf16", f"ratio_{kind}") == 1
        assert 0.5 < number("mxfp4 save_h=fp8", f"cosine_{kind}") < 1
    assert number("mxfp4 save_h=fp8", "cosine_all") > 0.95
    assert number("bf16 save=fp4", "percent_from_bf16") == 0 and number("bf16 save=fp4", "cosine_all") < 1
    assert number("mxfp4 save_h=fp8", "val_loss") == number("mxfp4 save_h=fp4", "val_loss")
    assert number("mxfp4 save_h=fp8", "val_loss") != number("mxfp4 rule=floor", "val_loss")
    assert number("mxfp4 save_h=fp8", "cosine_all") > number("mxfp4 save_h=fp4", "cosine_all")
    assert "settings by the cosine" in capsys.readouterr().out

    before = table.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(bench, "batch_losses", lambda *_: pytest.fail("a setting was measured twice"))
        bench.main(command)
    assert table.read_text() == before
    bench.main([*command[:2], "--settings=fp8", *command[3:]])
    assert table.read_text().startswith(before) and len(table.read_text().splitlines()) == 7
    for wrong in ("mxpf4", "mxfp4 rule=up", "mxfp4 wrie=fp4", "paper compute=bf16", "bf16 save=fp5",
                  "mxfp4 recompute=all"):
        with pytest.raises(ValueError):
            bench.main([*command[:2], f"--settings={wrong}", *command[3:]])
    with pytest.raises(ValueError, match="batches"):
        bench.main([*command[:-2], "--batches=1000", command[-1]])


def test_the_default_settings_fit_together():
    settings = bench.settings_of(bench.SETTINGS)
    assert settings["mxfp4"] == bench.Setting(quant.RECIPES["mxfp4"]) and settings["paper save_h=fp4"].paper
    assert settings["mxfp4 recompute=mlp,moe"].recompute == {"mlp", "moe"} and settings["mxfp4 rule=ceil"].rule == "ceil"
    grid = bench.settings_of("mxfp4 compute=bf16|fp8 save_h=fp8|fp4 wire=bf16|fp4|fp4-fp8 rule=even|floor|ceil")
    assert len(grid) == len(set(grid.values())) == 36


def test_even_is_the_best_rule_for_gaussian_data(net):
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(0))
    rms, through = {}, {}
    for rule in ("even", "floor", "ceil"):
        with bench.mx_rule(rule):
            rows, (_, both) = quant.quantize_fp4_rows(x), quant.quantize_fp8_fp4_rows(x)
        assert torch.equal(rows.data, both.data) and torch.equal(rows.scale, both.scale)
        assert torch.equal(rows.scale, quant.quantize_fp4_rows(x, rule).scale)
        rms[rule] = (quant.dequantize(rows) - x).square().mean().sqrt().item()
        with bench.Setting(quant.RECIPES["mxfp4"], rule).on(net), torch.no_grad():
            through[rule] = net(*batch())[1].item()
    assert rms["even"] < rms["floor"] < rms["ceil"] and rms["even"] == pytest.approx(0.112, abs=0.001)
    assert len(set(through.values())) == 3
    assert quant.quantize_fp4_rows(x).scale.equal(quant.quantize_fp4_rows(x, "even").scale)


# ---- the paper's arm ----


def gradients(net, setting):
    """(loss, {name: gradient})."""
    with setting.on(net):
        loss = net(*batch())[1]
        loss.backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return loss.item(), grads


def test_paper_brings_a_to_mxfp4(net, monkeypatch):
    ours, paper = bench.Setting(quant.RECIPES["mxfp4"]), bench.Setting(quant.RECIPES["mxfp4"], paper=True)
    loss, grads = gradients(net, ours)
    other_loss, other = gradients(net, paper)
    assert loss != other_loss and loss == pytest.approx(other_loss, rel=1e-2)
    cosine = lambda a, b: torch.cosine_similarity(a.flatten(), b.flatten(), 0).item()
    assert all(not torch.equal(grads[name], other[name]) for name in grads)

    # a as it is: forward and all gradients are ours, but that of w2 reads forward's a in FP8, where ours is rebuilt from
    # an h in FP8: noise of 2.6 % each and 3 to 4 %, a cosine of 0.998
    rows, cols = quant.fp4_to_fp8_rows, quant.fp4_to_fp8_cols
    monkeypatch.setattr(quant, "fp8_to_fp4", lambda q: q)
    monkeypatch.setattr(quant, "fp4_to_fp8_rows", lambda q: q if isinstance(q, quant.Fp8) else rows(q))
    monkeypatch.setattr(quant, "fp4_to_fp8_cols", lambda q: (
        quant.fp8_rows_to_cols if isinstance(q, quant.Fp8) else cols)(q))
    same_loss, same = gradients(net, paper)
    assert same_loss == loss
    for name, grad in same.items():
        assert cosine(grad, grads[name]) > 0.995 if name.endswith(".w2") else torch.equal(grad, grads[name]), name


def test_paper_reads_one_a_in_forward_and_in_wgrad(monkeypatch):
    """Both operands decode to the same numbers, which lie on MXFP4's grid."""
    read, x = [], torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    mm, wgrad = quant._grouped_mm, quant._grouped_wgrad
    monkeypatch.setattr(quant, "_grouped_mm", lambda a, *args: (read.append(a), mm(a, *args))[1])
    monkeypatch.setattr(quant, "_grouped_wgrad", lambda a, b, *args: (read.append(b), wgrad(a, b, *args))[1])
    w13, w2 = (torch.randn(*shape, requires_grad=True) for shape in ((128, 64), (64, 64)))
    dy = torch.randn(256, 64)
    with bench.paper():
        quant.mlp(quant.quantize(x.requires_grad_(), quant.RECIPES["mxfp4"]), w13, w2).backward(dy)
    paper, w2.grad = w2.grad, None
    quant.mlp(quant.quantize(x, quant.RECIPES["mxfp4"]), w13, w2).backward(dy)
    forward, wgrad, usual = (quant.dequantize(read[i]) for i in (1, 3, 9))
    noise = ((wgrad - usual).norm() / usual.norm()).item()  # which a random dy carries into the gradient
    cosine = torch.cosine_similarity(paper.flatten(), w2.grad.flatten(), 0).item()
    assert 0.1 < noise < 0.16 and cosine == pytest.approx((1 + noise**2) ** -0.5, abs=1e-3)
    assert torch.equal(forward, wgrad.t()) and not torch.equal(forward, torch.zeros_like(forward))
    assert torch.equal(forward, quant.dequantize(quant.quantize_fp4_rows(forward)))


def test_paper_needs_what_it_keeps(tmp_path):
    for flag in ("--compute=bf16", "--recompute=moe"):
        with pytest.raises(ValueError, match="paper"):
            bench.main(["loss", "--precisions=bf16,paper", f"--out={tmp_path / 'runs'}", flag])


# ---- loss: intervals, slices, shares ----


def test_interval_by_hand(tmp_path):
    """Values 1, 2, 3, 4: mean 2.5, standard deviation 1.290994, t(3) = 3.182446."""
    mean, half = bench.interval([1, 2, 3, 4])
    assert mean == 2.5 and half == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-4)
    assert bench.interval([7])[1] == math.inf

    def at(n):
        values = [0, 1] * (n // 2) + [0.5] * (n % 2)
        return bench.interval(values)[1] * math.sqrt(n) / statistics.stdev(values)

    assert at(31) == pytest.approx(2.0423, abs=1e-4) and at(32) == pytest.approx(2.0395, abs=1e-4)
    assert at(121) == pytest.approx(1.9799, abs=1e-4)

    losses = {"paper": (2.02, 2.05, 1.0), "bf16": (2.0, 2.0), "fp8": (2.02,)}
    rows = [{"precision": p, "seed": s, "steps": 9, "val_loss": v, "device": "x", "torch": "y", "commit": "z"}
            for p in losses for s, v in enumerate(losses[p])]
    said = bench.summary(rows, tmp_path)
    table = {(row["precision"], row["against"]): row for row in csv.DictReader((tmp_path / "loss_summary.csv").open())}
    assert list(table) == [("bf16", ""), ("fp8", ""), ("fp8", "bf16"), ("paper", ""), ("paper", "bf16"), ("paper", "fp8")]
    assert table["bf16", ""]["percent"] == table["fp8", "bf16"]["percent_low"] == ""
    assert table["paper", "fp8"]["percent"] == "0.0" and table["paper", "fp8"]["seeds"] == "0"
    off = table["paper", "bf16"]  # seed 2 has no partner: 1 % and 2.5 % -> 1.75 +- 12.7062 * 1.06066 / sqrt(2)
    assert float(off["percent"]) == float(off["percent_median"]) == 1.75
    assert float(off["percent_low"]) == pytest.approx(1.75 - 9.5297, abs=1e-3)
    assert (off["seeds"], off["percent_by_seed"]) == ("0 1", "1.0000 2.5000")
    assert "95 % interval -7.78 to +11.28" in said


def test_curves_and_their_picture(tmp_path, capsys):
    """Three seeds of two precisions, one of which lacks the last step's validation; and a second run of a seed."""
    runs = {f"{precision}-{seed}": (precision, seed) for precision in ("bf16", "fp8") for seed in range(3)}
    runs["b"] = "fp8", 0
    for name, (precision, seed) in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"config": {"precision": precision, "seed": seed}}))
        rows = [{"step": step, "loss": 2 / step + seed, "val_loss": None} for step in range(1, 41)]
        rows[-1]["val_loss"] = None if name == "fp8-2" else 1.0 + seed
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench.plot_runs(sorted(tmp_path.glob("*")), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "not compared" not in capsys.readouterr().out
    (tmp_path / "b" / "config.json").write_text(json.dumps({"config": {"precision": "fp8", "seed": 0, "steps": 9}}))
    bench.plot_runs([tmp_path / "bf16-0", tmp_path / "b"], tmp_path / "two.png")
    said = capsys.readouterr().out
    assert "not compared with bf16: fp8; there is no bf16 run of the same seed and preset, model," in said
    bench.curves_table([tmp_path / "bf16-0", tmp_path / "fp8-2"], tmp_path / "curves.csv")
    table = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert list(table[0]) == ["step", "bf16-0", "fp8-2"] and len(table) == 40
    assert table[3] == {"step": "4", "bf16-0": f"{(2 / 3 + 2 / 4) / 2:.5f}", "fp8-2": f"{2 + (2 / 3 + 2 / 4) / 2:.5f}"}


def test_a_run_is_compared_at_the_same_step():
    """A run cut at step 10 of 40 is no better or worse than the whole one that it began as."""
    whole = [{"step": step, "loss": 2 / step, "val_loss": 2 / step if step % 10 == 0 else None} for step in range(1, 41)]
    shown = []
    panel = SimpleNamespace(errorbar=lambda x, y, *_, **__: shown.append(y))
    said = bench.draw_ends(panel, 0, {0: whole[:10], 1: whole}, {0: whole, 1: whole}, "k")
    assert shown == [0.0] and said == "\n+0.00 %"  # of seed 1 alone
    means = bench.running_mean(whole, 40)
    assert bench.running_mean(whole[:10], 40) == {step: means[step] for step in range(1, 11)}


def test_slices_go_on_bit_for_bit(micro, tmp_path, monkeypatch, capsys):
    """Runs cut after every second step, and runs shared between two calls, end where uncut ones do."""
    flags = words(micro(steps=4), "precision", "seed", "out_dir", "resume", "log_every")
    command = lambda out, *more: ["loss", "--precisions=bf16,paper", "--seeds=0", f"--out={tmp_path / out}", *more,
                                  *flags]
    bench.main(command("whole"))
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(bench, "plot_runs", lambda *_: None)
    capsys.readouterr()

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def one_step(*args, f=train.train_step):
        clock[0] += 30
        return f(*args)

    monkeypatch.setattr(train, "train_step", one_step)
    saved = []
    for _ in range(4):
        bench.main(command("cut", "--slice_minutes=1"))
        saved.append([sorted(int(p.name) for p in (tmp_path / "cut" / f"{arm}-0" / "ckpt").glob("[0-9]*"))
                      for arm in ("bf16", "paper")])
    said = capsys.readouterr().out
    assert saved == [[[2], []], [[2, 4], []], [[2, 4], [2]], [[2, 4], [2, 4]]]
    assert "0 of 2 runs" in said and "1 of 2 runs" in said
    bench.main(command("shared", "--runs=2/2"))
    assert [p.name for p in (tmp_path / "shared").glob("*-0")] == ["paper-0"]
    bench.main(command("shared", "--runs=1/2"))

    tables = [{row["precision"]: row for row in csv.DictReader((tmp_path / out / "loss.csv").open())}
              for out in ("whole", "cut", "shared")]
    for arm in ("bf16", "paper"):
        assert len({table[arm]["val_loss"] for table in tables}) == 1
        logs = [lines(tmp_path / out / f"{arm}-0" / "log.jsonl") for out in ("whole", "cut", "shared")]
        curves = [[(row["step"], row["loss"], row["grad_norm"]) for row in log] for log in logs]
        assert len(curves[0]) == 4 and curves[0] == curves[1] == curves[2]
    assert tables[0]["paper"]["val_loss"] != tables[0]["bf16"]["val_loss"]
    for wrong in ("3/2", "0/2", "2"):
        with pytest.raises(ValueError, match="--runs"):
            bench.main(command("wrong", f"--runs={wrong}"))


def test_a_fork_goes_on_from_bf16(micro, tmp_path, monkeypatch):
    """On a CPU a run that forks off itself ends as if it never had; what differs has forked where it should."""
    flags = words(micro(steps=4), "precision", "seed", "out_dir", "resume", "log_every")
    monkeypatch.setattr(bench, "plot_runs", lambda *_: None)
    bench.main(["loss", "--precisions=bf16", "--seeds=3", f"--out={tmp_path / 'whole'}", *flags])
    command = lambda *more: ["loss", "--seeds=3,4", "--fork=2", f"--out={tmp_path / 'fork'}", *more, *flags]
    bench.main(command("--precisions=bf16,bf16-again,mxfp4 save=bf16", "--runs=1/2"))
    whole, = csv.DictReader((tmp_path / "whole" / "loss.csv").open())
    rows = {row["precision"]: row for row in csv.DictReader((tmp_path / "fork" / "loss.csv").open())}
    assert [(row["fork"], row["seed"]) for row in rows.values()] == 3 * [("2", "3")] and whole["fork"] == "0"
    assert rows["bf16"]["val_loss"] == rows["bf16-again"]["val_loss"] == whole["val_loss"]
    assert rows["mxfp4 save=bf16"]["val_loss"] != whole["val_loss"]
    assert json.loads((tmp_path / "fork" / "mxfp4_save=bf16-3" / "config.json").read_text())["config"]["save"] == "bf16"
    assert [row["step"] for row in lines(tmp_path / "fork" / "trunk-3" / "log.jsonl")] == [1, 2]

    clock, one_step = [0.0], train.train_step
    with monkeypatch.context() as patch:  # cut after every step, in the trunk, too
        patch.setattr(time, "monotonic", lambda: clock[0])
        patch.setattr(train, "train_step", lambda *args: (clock.__setitem__(0, clock[0] + 60), one_step(*args))[1])
        for _ in range(4):
            bench.main(command("--precisions=bf16", f"--out={tmp_path / 'cut'}", "--slice_minutes=1", "--runs=1/2"))
    cut, = csv.DictReader((tmp_path / "cut" / "loss.csv").open())
    assert (cut["fork"], cut["val_loss"]) == ("2", whole["val_loss"])

    monkeypatch.setattr(train, "train_step", lambda *_: pytest.fail("a finished run was trained again"))
    bench.main(command("--precisions=bf16-again,bf16", "--runs=1/2"))
    for wrong, said in (("--precisions=bf17", "there is no"), ("--precisions=mxfp4 wire=fp5", "fp5"),
                        ("--precisions=mxfp4 wire", "wire"), ("--precisions=bf16,", "there is no"), ("--fork=4", "--fork"),
                        ("--fork=1", "was run with --fork=2, not 1"), ("--fork=0", "not 0")):
        with pytest.raises(ValueError, match=said):
            bench.main(command(wrong))


# ---- diagnose ----


def test_diagnose_changes_nothing_and_writes_numbers(micro, tmp_path, capsys):
    plain = train.main(micro(steps=3, eval_every=1))
    config = micro(steps=3, eval_every=1, diagnose=True, out_dir=str(tmp_path / "diagnosed"))
    diagnosed = train.main(config)
    assert all(diagnosed[name] == plain[name] for name in ("loss", "grad_norm", "val_loss", "balance"))
    rows = lines(tmp_path / "diagnosed" / "diagnose.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and "lowest signal-to-noise" in capsys.readouterr().out
    tensors = rows[-1]["tensors"]
    assert all(math.isfinite(value) for row in tensors.values() for value in row.values())
    assert all(0 <= value <= 1 for row in tensors.values() for name, value in row.items() if name != "snr_db")
    for name, low, high in (("attn_norm x, fp4", 15, 22), ("ffn.experts.w13 weight, fp8", 29, 34),
                            ("ffn h, fp8", 29, 34), ("ffn.experts dh cols, fp8", 28, 34), ("attn.wo dy, fp8", 28, 34)):
        assert low < tensors[name]["snr_db"] < high, name
    assert set(tensors["ffn.experts x cols, fp4"]) == {"wide_tiles"}
    assert set(tensors["ffn.experts dy cols, fp8"]) == {"shifted_to_zero"}
    train.main(replace(config, steps=4, resume="auto"))
    assert [row["step"] for row in lines(tmp_path / "diagnosed" / "diagnose.jsonl")] == [1, 2, 3, 4]


def test_diagnose_of_bf16_finds_nothing(micro, capsys):
    train.main(micro(steps=1, precision="bf16", diagnose=True))
    assert lines(Path(micro().out_dir, "diagnose.jsonl"))[0]["tensors"] == {}
    assert "nothing is quantised" in capsys.readouterr().out


def test_diagnosis_turns_up_what_was_planted():
    """Block exponents 16 apart; of 128 values, one too large for the even rule, and one that rounds to zero."""
    x = torch.ones(128, 256)
    x[5, 128:160] = 2.0 ** 16
    x[9, 7] = x[9, 8] = 2.0 ** -4
    x[9, 40] = 6.9  # its block's scale is 1
    with quant.Diagnosis().watching() as diagnosis:
        quant.quantize_fp4_rows(x)
    row = diagnosis.report()["wire, fp4"]
    assert row["wide_row_tiles"] == 1 / 256
    assert row["saturated"] == pytest.approx(1 / x.numel()) and row["zero"] == pytest.approx(2 / x.numel())

    dy = torch.ones(128, 128)
    dy[:64] *= 2.0 ** -30  # far below the other rows of their tile
    diagnosis.turn("dy", quant.quantize_fp8_rows(dy))
    diagnosis.turn("x", quant.quantize_fp4_rows(x))
    assert diagnosis.report()["dy, fp8"]["shifted_to_zero"] == 0.5 and diagnosis.report()["x, fp4"]["wide_tiles"] == 0.5
    cols = quant.dequantize(quant.fp8_rows_to_cols(quant.quantize_fp8_rows(dy)))
    assert (cols == 0).float().mean() == 0.5


def test_diagnosis_of_a_model_with_a_planted_tile(net):
    weight = net.layers[1].ffn_norm
    before = weight.detach().clone()
    with torch.no_grad():
        weight[:32] *= 2.0 ** 20
    names = {p.data_ptr(): name for name, p in net.named_parameters()}
    functions = {name: getattr(quant, name) for name in vars(quant)}
    try:
        with bench.Setting(quant.RECIPES["mxfp4"]).on(net), quant.Diagnosis(names).watching() as diagnosis:
            net(*batch())[1].backward()
    finally:
        net.zero_grad()
        with torch.no_grad():
            weight.copy_(before)
    report = diagnosis.report()
    assert [report[f"layers.{i}.ffn_norm x, fp4"]["wide_row_tiles"] for i in (0, 1)] == [0, 1]
    assert report["layers.1.ffn.experts x cols, fp4"]["wide_tiles"] == 1
    assert report["layers.0.ffn x cols, fp4"]["wide_tiles"] == 0
    assert all(getattr(quant, name) is f for name, f in functions.items() if name not in ("_epoch",))
