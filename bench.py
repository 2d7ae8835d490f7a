"""Measures what this project claims. One subcommand a claim, each with --help.

    python bench.py loss --precisions=bf16,fp8,mxfp4 --seeds=0,1 --steps=200    any flag of train.py may follow
    python bench.py plot out/a out/b --out=curves.png

Loss. Does a narrower format cost accuracy? Two seeds of one format end farther apart than two formats do, so formats
are compared in pairs: runs of one seed start from the same weights and read the same text in the same order, and what
is averaged over the seeds is the difference within each pair. The loss compared is `val_loss`, quantisation off: what
was learned. `val_loss_quantized` adds what reading it out in the narrow format costs.

A run is a folder that train.py wrote, plus environment.json: on what, with what and when it ran. Tables and plots are
made from such folders alone, so they can be made again, and a command that was cut does only what is missing.
"""

import argparse
import csv
import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import train

COLUMNS = ("precision", "seed", "steps", "val_loss", "val_loss_quantized", "seconds", "device", "torch", "triton",
           "commit", "date")
COLOURS = {"bf16": "#333333", "fp8": "#0072b2", "mxfp4": "#d55e00"}
DASHES = ("-", "--", ":", "-.")  # by seed
SMOOTHING = 0.05  # of a run: the window of the running mean of training losses


def environment():
    """On what and with what this process runs: device, torch, triton, commit, date (UTC)."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    commit = commit or os.environ.get("NANOFP4_COMMIT", "")  # where the code runs without its git folder
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"device": device_name(), "torch": torch.__version__, "triton": triton, "commit": commit, "date": date}


def device_name():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def read_run(folder):
    """(config, rows of the log) of a folder that train.py wrote. FileNotFoundError: it is none."""
    if not (folder / "config.json").exists() or not (folder / "log.jsonl").exists():
        raise FileNotFoundError(f"{folder} is no run of train.py: it lacks config.json or log.jsonl.")
    try:
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{folder / 'log.jsonl'} is damaged: {error}; train.py --resume=auto mends it.") from None
    return json.loads((folder / "config.json").read_text())["config"], rows


# ---- loss ----


def loss(args, flags):
    """Trains in each precision from each seed, and compares the validation losses.

    Any flag of train.py may follow. Leaves a folder a run, loss.csv and loss.png in --out. Run again, it does what is
    missing: finished runs stay, one that was cut goes on.
    """
    usual = train.parse_flags(flags)
    seeds, precisions = args.seeds.split(","), args.precisions.split(",")
    if not all(seed.isdigit() for seed in seeds):
        raise ValueError(f"--seeds={args.seeds} is no comma list of whole numbers.")
    if unknown := set(precisions) - set(train.RECIPES):
        raise ValueError(f"--precisions: there is no {min(unknown)}; choose among {', '.join(train.RECIPES)}.")
    pyplot()  # rather missing now than after hours
    if taken := {word.partition("=")[0] for word in flags} & {"--precision", "--seed", "--out_dir", "--resume"}:
        raise ValueError(f"bench.py loss sets {min(taken)} itself: use --precisions, --seeds and --out.")
    for seed in map(int, seeds):
        for precision in precisions:
            folder = args.out / f"{precision}-{seed}"
            config = dataclasses.replace(usual, precision=precision, seed=seed, out_dir=str(folder), log_every=1,
                                         resume="auto")
            if not is_finished(folder, config):
                print(f"---- {precision}, seed {seed} ----")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "environment.json").write_text(json.dumps(environment()))
                if not train.main(config)["finished"]:
                    raise KeyboardInterrupt
    rows = table(args.out)
    print(summary(rows))
    plot_runs([args.out / f"{row['precision']}-{row['seed']}" for row in rows], args.out / "loss.png")


def is_finished(folder, config):
    """Whether the run of this very config is done. ValueError: the folder holds another one."""
    if not (folder / "log.jsonl").exists():
        return False
    before, rows = read_run(folder)
    for name, now in dataclasses.asdict(config).items():
        if before.get(name) != now:
            raise ValueError(f"{folder} was run with {name}={before.get(name)}, not {now}: choose another --out.")
    return is_done(before, rows)


def is_done(config, rows):
    return bool(rows) and rows[-1]["step"] == config["steps"] and rows[-1].get("val_loss") is not None


def table(folder):
    """Writes <folder>/loss.csv, a row for each finished run in the folder, and returns the rows."""
    rows = []
    for path in sorted(folder.glob("*/environment.json")):
        if not (path.parent / "log.jsonl").exists():  # cut before its first step
            continue
        config, log = read_run(path.parent)
        if is_done(config, log):
            tokens = config["seq_len"] * config["batch_size"] * config["grad_accum"]
            seconds = round(sum(tokens / row["tokens_per_s"] for row in log), 1)  # training alone, over all resumes
            rows.append({name: config[name] for name in ("precision", "seed", "steps")} | {"seconds": seconds}
                        | {name: log[-1][name] for name in ("val_loss", "val_loss_quantized")}
                        | json.loads(path.read_text()))
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def summary(rows):
    """A line a precision: mean validation loss over the seeds, and how far it lies from bf16's, seed by seed."""
    reference = {row["seed"]: row["val_loss"] for row in rows if row["precision"] == "bf16"}
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        runs = [row for row in rows if row["precision"] == precision]
        mean = statistics.mean(row["val_loss"] for row in runs)
        line = f"{precision:6} val loss {mean:.4f}, mean of seeds {', '.join(str(row['seed']) for row in runs)}"
        off = [100 * (row["val_loss"] / reference[row["seed"]] - 1) for row in runs if row["seed"] in reference]
        if off and precision != "bf16":
            line += f"; {statistics.mean(off):+.2f} % from bf16 (by seed: {', '.join(f'{x:+.2f}' for x in off)})"
        lines.append(line)
    return "\n".join(lines)


# ---- plot ----


def plot(args, flags):
    """Draws the training and validation losses of runs, given by their out_dir, into one PNG."""
    if flags:
        raise ValueError(f"bench.py plot has no flag {flags[0]}: see bench.py plot --help.")
    plot_runs(args.out_dir, args.out)


def plot_runs(folders, path):
    """Three panels: training loss (running mean), validation loss, and training loss against bf16 of the same seed."""
    plt = pyplot()
    runs = [(str(folder), *read_run(folder)) for folder in folders]
    curves = {name: running_mean(rows) for name, _, rows in runs}
    reference = {config["seed"]: curves[name] for name, config, _ in runs if config["precision"] == "bf16"}
    rules = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
    with plt.rc_context(rules):
        figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
        for name, config, rows in runs:
            same = [c for _, c, _ in runs if (c["precision"], c["seed"]) == (config["precision"], config["seed"])]
            label = f"{config['precision']}, seed {config['seed']}" + f" ({name})" * (len(same) > 1)
            line = {"color": COLOURS[config["precision"]], "linestyle": DASHES[config["seed"] % len(DASHES)], "lw": 1.3}
            panels[0].plot(*zip(*curves[name].items()), label=label, **line)
            evaluated = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
            if evaluated:
                panels[1].plot(*zip(*evaluated), label=label, marker="o", ms=3, **line)
            base = reference.get(config["seed"], {})
            off = [(step, 100 * (loss / base[step] - 1)) for step, loss in curves[name].items() if step in base]
            if off and config["precision"] != "bf16":
                panels[2].plot(*zip(*off), label=label, **line)
        panels[2].axhline(0, color=COLOURS["bf16"], lw=0.8)
        titles = ("training loss, running mean", "validation loss, quantisation off", "training loss against bf16")
        for panel, title, unit in zip(panels, titles, ("nats a token", "nats a token", "%")):
            panel.set(title=title, xlabel="optimizer step", ylabel=unit)
        panels[0].legend(frameon=False)
        figure.savefig(path, dpi=160)
        plt.close(figure)
    print(f"wrote {path}")


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("Plots need matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def running_mean(rows):
    """{step: mean training loss of the last 5 % of the run}, skipped steps left out."""
    rows = [row for row in rows if row["loss"] is not None]
    window = max(1, round(SMOOTHING * len(rows)))
    means = (statistics.fmean(row["loss"] for row in rows[max(0, i + 1 - window) : i + 1]) for i in range(len(rows)))
    return dict(zip((row["step"] for row in rows), means))


# ---- command line ----


def main(words):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.partition("\n\nLoss.")[0], allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for work in (loss, plot):
        command = commands.add_parser(work.__name__, help=work.__doc__.partition("\n")[0], description=work.__doc__,
                                      allow_abbrev=False)
        command.set_defaults(work=work)
        if work is loss:
            command.add_argument("--precisions", default="bf16,fp8,mxfp4", help="comma list [bf16,fp8,mxfp4]")
            command.add_argument("--seeds", default="0,1", help="comma list [0,1]")
            command.add_argument("--out", type=Path, default=Path("out/loss"), help="folder of all runs [out/loss]")
        else:
            command.add_argument("out_dir", type=Path, nargs="+", help="folder of a run of train.py")
            command.add_argument("--out", type=Path, default=Path("curves.png"), help="the PNG to write [curves.png]")
    args, flags = parser.parse_known_args(words)
    args.work(args, flags)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print("bench.py:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bench.py: stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
