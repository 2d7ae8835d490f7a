"""Tests of bench.py's tables: measured again in parts, of whole runs, of kept bytes, and their pictures."""

import json
import pickle
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import bench
import model
import quant
import train
from model import PRESETS

FOLDER = Path(__file__).parent
H200 = FOLDER / "results" / "h200"
WHERE = {"device": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "triton": "3.6.0", "commit": "12345e6789", "date": "2026-01-01"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---- all ----


@pytest.fixture
def on_a_card(monkeypatch):
    """bench.py as on an H200 that measures what is committed, but for V3's FC1, 10 % slower, and a renamed kernel of
    V2-Lite: (the commands that it was given, its main); after "stop" among them the next one is interrupted."""
    commands = []

    def measured(words):
        if "stop" in commands:
            commands.remove("stop")
            raise KeyboardInterrupt
        commands.append(words)
        flags = dict(word[2:].split("=", 1) for word in words[1:])
        name = "in_flight" if flags.get("in_flight", "1") != "1" else words[0]
        name += "_80gb" * (flags.get("memory_gb") == "80.0")
        rows = [row | WHERE for row in bench.read_table(H200 / f"{name}.csv")
                if (row["shape"], row.get("recompute")) == (flags["shapes"], flags.get("recompute"))]
        if words[0] == "gemm" and flags["shapes"] == "v3":
            rows[0]["us"] = float(rows[0]["us"]) * 1.1
        if words[0] == "kernels" and flags["shapes"] == "v2-lite":
            rows[0]["kernel"] = "a new one"
        bench.write_table(Path(flags["out"]), list(rows[0]), rows)

    command_line = bench.main
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.gc, "collect", lambda: None)
    monkeypatch.setattr(bench, "environment", lambda: dict(WHERE))
    monkeypatch.setattr(bench, "main", measured)
    return commands, command_line


def test_all_tables_in_parts(on_a_card, tmp_path, capsys):
    commands, main = on_a_card
    shapes = {(name, row["shape"]) for name in bench.TABLES for row in bench.read_table(H200 / f"{name}.csv")}
    said = []
    for part in "1/3", "2/3", "3/3":
        main(["all", f"--part={part}", f"--out={tmp_path}"])
        said.append(capsys.readouterr().out)
    done = {(words[0], words[1]) for words in commands}
    assert {name for name, _ in done} == {"kernels", "gemm", "layer", "profile", "train"}
    assert len(commands) == len(set(map(tuple, commands))) and done >= {
        (name, f"--shapes={shape}") for name, shape in shapes if "in_flight" not in name}
    was = float(bench.read_table(H200 / "gemm.csv")[0]["us"])
    assert said[0].startswith("gemm v3, balanced, FC1, 8, 32768, 4096, 7168: us was"
                              f" {was:g}, is {1.1 * was:g} (+10.0 %)\n")
    assert re.fullmatch(r"\d+ numbers agree with results/h200 to 5 %; 1 differ\n", said[0].split("\n", 1)[1])
    assert re.fullmatch(r"\d+ numbers agree with results/h200 to 5 %; 0 differ\n", said[1])
    assert said[2].startswith("kernels v2-lite, balanced, a new one: is not among")
    assert said[2].count("\n") == 2
    for name in {name for name, _ in done}:
        again, before = bench.read_table(tmp_path / f"{name}.csv"), bench.read_table(H200 / f"{name}.csv")
        assert len(again) == len(before) and set(again[0]) == set(before[0])


def test_all_goes_on_where_it_stopped(on_a_card, tmp_path, capsys):
    commands, main = on_a_card
    measure, words = bench.main, ["all", "--part=1/3", f"--out={tmp_path}"]

    def cut(job):
        measure(job)
        if len(commands) == 4:
            commands.append("stop")

    bench.main = cut  # put back by the fixture's monkeypatch
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert len(commands) == 4
    main(words)
    assert len(commands) == len(set(map(tuple, commands))) > 6
    before, first = len(commands), capsys.readouterr().out.splitlines()[-1]
    main(words)
    assert len(commands) == before and capsys.readouterr().out.splitlines()[-1] == first
    WHERE["commit"], old = "another", WHERE["commit"]
    try:
        main(words)
    finally:
        WHERE["commit"] = old
    assert len(commands) == 2 * before
    assert {row["commit"] for row in bench.read_table(tmp_path / "train.csv")} == {"another"}


def test_differences_by_hand():
    row = {"shape": "v3", "precision": "fp8", "in_flight": "1", "step_ms": "100", "peak_gib": "50",
           "half_width": "0.01", "times_bf16": "", "kept_bytes": "0", "commit": "1"}
    changed = row | {"step_ms": "104", "peak_gib": "40", "half_width": "9", "times_bf16": "1.5", "kept_bytes": "3",
                     "commit": "2"}
    lines, alike = bench.differences("train", [row], [changed, changed | {"in_flight": "2"}])
    assert alike == 1 and lines == [
        "train v3, fp8, 1: peak_gib was 50, is 40 (-20.0 %)", "train v3, fp8, 1: times_bf16 was nothing, is 1.5",
        "train v3, fp8, 1: kept_bytes was 0, is 3 (+inf %)", "train v3, fp8, 2: is not among what was measured before"]


def test_a_slice_is_measured_as_it_was():
    row = {"shape": "v3", "layers": 3.0, "recompute": "attn,norm", "in_flight": 16.0, "limit_gib": 74.5,
           "precision": "fp8"}
    command, same = bench.job("in_flight", row)
    assert command == ("train", "--shapes=v3", "--layers=3", "--recompute=attn,norm", "--in_flight=16",
                       "--memory_gb=80.0", "--rounds=1")
    assert round(80.0 * 1e9 / 2**30, 1) == same["limit_gib"] and "precision" not in same


@pytest.mark.parametrize("name", bench.TABLES)
def test_the_command_line_knows_what_all_asks_for(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in {bench.job(name, bench.numbers(row))[0] for row in bench.read_table(H200 / f"{name}.csv")}:
        with pytest.raises(ValueError, match="needs a GPU"):
            bench.main([*words, f"--out={tmp_path / 'x.csv'}"])


@pytest.mark.parametrize("words, fault", [
    (["all", "--part=4/3"], "--part=4/3"), (["all", "--part=1/4"], "three parts"), (["all", "--shapes=v3"], "--shapes"),
    (["all"], "needs a GPU"), (["kept", "none.csv"], "none.csv"), (["kept", "x.csv", "--y"], "--y"),
    (["runs", "a", "--y"], "--y")])
def test_bad_flags(words, fault, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(fault)):
        bench.main(words)


# ---- kept ----


def test_kept_tensors_add_up_to_what_the_allocator_held(tmp_path, capsys):
    """Of every measured row, to 2 %; where rows did not fit there is nothing to compare."""
    lines = (H200 / "train.csv").read_text().splitlines()
    cells = lines[1].split(",")
    cells[6:23] = [""] * 17
    (tmp_path / "train.csv").write_text("\n".join([*lines, ",".join(cells)]))
    bench.main(["kept", str(tmp_path / "train.csv"), f"--out={tmp_path / 'kept.csv'}"])
    rows = bench.read_table(tmp_path / "kept.csv")
    assert len(rows) == len(lines) - 1 == capsys.readouterr().out.count(" B, the allocator held ")
    for row in rows:
        ranks, _, cut = bench.SLICES[row["shape"]]
        layer = model.kept_bytes(PRESETS[row["shape"]], bench.RECIPES[row["precision"]], ranks=ranks)
        assert sum(float(row[name]) for name in layer) == pytest.approx(float(row["sum"]), abs=len(layer))
        assert abs(float(row["percent_more"])) < 2, row


@needs_cuda
@pytest.mark.parametrize("precision", bench.PRECISIONS)
def test_a_slice_keeps_what_the_formula_says(precision, monkeypatch):
    """Two layers of V2-Lite, one of four ranks, 4096 tokens: each scope's tensors add up to the allocator's bytes."""
    monkeypatch.setitem(bench.SLICES, "v2-lite", (4, 1, dict(n_layers=2, n_dense=0, vocab_size=1024)))
    for name in "dispatch", "combine":  # which a slice replaces
        monkeypatch.setattr(model, name, getattr(model, name))
    part = bench.Slice("v2-lite", 0, 1)
    part.net.recipe = bench.RECIPES[precision]
    for scope in bench.SCOPES.split(";"):
        part.net.recompute = frozenset(scope.split(",")) - {"none"}
        part.kept()  # kernels are compiled, weights quantised
        formula = sum(bench.kept_by_tensor(part.config, precision, scope, part.ranks).values())
        if precision == "bf16" and "moe" not in scope:  # with so few tokens what model.kept_bytes leaves out shows: h's padding
            pairs, width = part.tokens * part.config.top_k, 2 * 2 * part.config.expert_width
            padding = quant._room(pairs, part.config.n_experts // part.ranks) - pairs
            formula += padding * width / part.tokens
        assert part.kept() == pytest.approx(formula, rel=0.02), scope


# ---- runs ----


def a_run(folder, speeds, ranks=2, changes={}, **settings):
    """A folder such as train.py leaves."""
    config = train.Config(preset="v2-lite", **settings)
    folder.mkdir()
    notes = {"config": asdict(config), "model": asdict(replace(PRESETS["v2-lite"], **changes)), "ranks": ranks}
    (folder / "config.json").write_text(json.dumps(notes))
    rows = [{"step": i, "tokens_per_s": speed, "peak_gib": 30 + min(i, 3), "rank_balance": 1 + 1 / i}
            for i, speed in enumerate(speeds, 1)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return config


def test_a_table_of_whole_runs(tmp_path):
    """The second half's speeds count, from the sixth step on; a row brings back the settings of its run."""
    a_run(tmp_path / "a", [1, 2, 3, 4, 5, 9, 9, 9, 700, 500, 600, 500, 800, 700, 600], ep=2, moments="bf16", seq_len=4096,
          batch_size=1)
    b = a_run(tmp_path / "b", range(1, 8), 4, dict(n_layers=4), ep=2, fsdp=4, wire="fp4-fp8", recompute="norm,mla_up",
              grad_accum=2)
    (tmp_path / "b" / "environment.json").write_text(json.dumps({"arm": "mxfp4"} | WHERE))
    bench.main(["runs", str(tmp_path / "a"), str(tmp_path / "b"), f"--out={tmp_path / 'ep.csv'}"])
    rows = bench.read_table(tmp_path / "ep.csv")
    assert [tuple(row) for row in rows] == [bench.RUN_COLUMNS] * 2
    assert [(row["tokens_per_s"], row["peak_gib"], row["ranks"], row["changes"], row["steps"]) for row in rows] == [
        ("600.0", "33", "2", "", "15"), ("6.5", "33", "4", "n_layers=4", "7")]
    assert float(rows[1]["rank_balance"]) == pytest.approx(1 + (1 / 6 + 1 / 7) / 2, abs=1e-4)
    assert rows[1]["device"] == "NVIDIA H200" and rows[0]["device"] != "NVIDIA H200"
    config = bench.config_of(rows[1])
    assert config.model == {"n_layers": 4}
    assert all(getattr(config, name) == getattr(b, name) for name in bench.RUN_FLAGS)
    assert train.choose_model(config, None) == replace(PRESETS["v2-lite"], n_layers=4)
    a_run(tmp_path / "short", [1] * 5)
    with pytest.raises(ValueError, match="fifth"):
        bench.main(["runs", str(tmp_path / "short")])


# ---- pictures ----


def test_pictures_of_errors_and_of_runs_in_flight(tmp_path):
    """Some rows are empty: a precision that never fits, one that fits only above 140 GB, a kind without gradients."""
    pytest.importorskip("matplotlib")
    blank = dict.fromkeys((*bench.TRAIN_COLUMNS, *bench.ERROR_COLUMNS), "") | WHERE
    flying = [blank | {"shape": shape, "layers": 3, "precision": precision, "recompute": scope, "in_flight": 16}
              | ({"tokens_per_s": 1000 * (i + j), "peak_gib": 60 + 40 * i - 20 * j + 70 * (shape == "v2")} if i else {})
              for shape in ("v3", "v2") for i, precision in enumerate(("bf16", "fp8", "mxfp4"))
              for j, scope in enumerate(("none", "norm"))]
    errors = [blank | {"checkpoint": f"{seed}/{step}", "seed": seed, "step": step, "setting": setting, "tokens": 99, "batches": 2,
                       "percent_from_bf16": 0.1 * seed, "percent_interval": 0.2}
              | {f"cosine_{kind}": "" if kind == "dense" else 0.9 for kind in ("all", *bench.KINDS)}
              for seed, step in ((0, 10), (1, 10), (1, 20)) for setting in ("fp8", "mxfp4 save_h=fp4")]
    for name, columns, rows in ("in_flight", bench.TRAIN_COLUMNS, flying), ("error", bench.ERROR_COLUMNS, errors):
        bench.write_table(tmp_path / f"{name}.csv", columns, [{key: row[key] for key in columns} for row in rows])
        bench.main(["plot", str(tmp_path / f"{name}.csv")])
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 200_000


def test_picture_of_curves(tmp_path, capsys):
    """Two seeds of two names, one of which ended early; then a column that is no run's."""
    pytest.importorskip("matplotlib")
    path, columns = tmp_path / "curves.csv", ("step", "one GPU-0", "one GPU-1", "two-0", "two-1")
    rows = [dict(zip(columns, (step, 2 / step, 3 / step, 2.1 / step, 3.1 / step if step < 20 else ""))) for step in range(1, 41)]
    bench.write_table(path, columns, rows)
    bench.main(["plot", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and "wrote" in capsys.readouterr().out
    for row in {"step": 1, "loss": 2}, {"step": 1}:
        bench.write_table(path, tuple(row), [row])
        with pytest.raises(ValueError, match="or of curves"):
            bench.main(["plot", str(path)])


def test_pictures_of_the_readme_are_there():
    """And of each the table that it draws."""
    linked = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (FOLDER / "README.md").read_text())
    assert len(linked) >= 5
    for picture in linked:
        assert (FOLDER / picture).is_file() and (FOLDER / picture).with_suffix(".csv").is_file(), picture


@needs_cuda
def test_layer_on_gpu(tmp_path):
    """Each layer in both loads; what is kept of a pair is half of x and h, or less, in the narrow formats."""
    bench.main(["layer", "--shapes=tiny", f"--out={tmp_path / 'layer.csv'}"])
    rows = bench.read_table(tmp_path / "layer.csv")
    kept = {row["layer"]: float(row["kept_bytes_a_row"]) for row in rows if row["groups"] == "balanced"}
    assert len(rows) == 10 and kept["mxfp4, h in fp4"] < kept["mxfp4"] < kept["fp8"] < 0.7 * kept["bf16"]


# ---- train.py --memory_snapshot ----


def test_a_memory_snapshot_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="--memory_snapshot shows the memory of a GPU"):
        train.main(train.Config(memory_snapshot=True, device="cpu", out_dir=str(tmp_path)))


def test_a_memory_snapshot_is_written_where_a_step_fails_too(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    with pytest.raises(MemoryError), train.memory_snapshot(train.Config(out_dir=str(tmp_path))):
        raise MemoryError
    assert calls == [{"stacks": "python"}, str(tmp_path / "memory.pickle"), {"enabled": None}]


@needs_cuda
def test_a_memory_snapshot_of_a_run(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(4000)))
    train.main(train.Config(precision="bf16", data=str(tmp_path / "text.txt"), seq_len=64, batch_size=2, steps=4,
                            eval_steps=1, memory_snapshot=True, out_dir=str(tmp_path / "run")))
    snapshot = pickle.loads((tmp_path / "run" / "memory.pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)


def test_profile_adds_up():
    """Gaps are idle, what overlaps counts once, and each kernel has its kind."""
    spans = [(0, 10, "_gemm"), (12, 20, "_rms_norm"), (18, 30, "nvjet_sm90_tst"), (31, 32, "void at::native::elementwise"),
             (32, 36, "_adamw_bf16"), (36, 40, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop")]
    rows = {row["kind"]: row for row in bench.profile_rows(spans)}
    us = {kind: round(1e3 * row["ms"]) for kind, row in rows.items()}
    assert us == {"GEMM": 20, "attention": 4, "optimizer": 4, "data movement": 8, "PyTorch's own": 1, "idle": 3}
    assert rows["GEMM"]["launches"] == 2 and rows["idle"]["percent"] == 7.5


def test_help_of_all_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0 and "more than 5 %" in " ".join(capsys.readouterr().out.split())
