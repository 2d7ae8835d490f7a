"""Measures what this project claims. One subcommand a claim, each with --help.

    python bench.py loss --precisions=bf16,fp8,mxfp4 --seeds=0,1 --steps=200    any flag of train.py may follow
    python bench.py error out/loss/bf16-0/ckpt/200                              a checkpoint of train.py
    python bench.py plot out/a out/b --out=curves.png                           runs' losses in one picture
    python bench.py plot results/h200/kernels.csv results/h200/train.csv        a picture beside each table
    python bench.py kernels --shapes=v3,v2,v2-lite                              needs a Hopper GPU
    python bench.py gemm                                                        needs a Hopper GPU
    python bench.py layer --shapes=v3,v2,v2-lite                                needs a Hopper GPU
    python bench.py train --shapes=v3 --recompute='none;attn,norm,moe'          needs a Hopper GPU
    python bench.py profile --shapes=v3                                         needs a Hopper GPU
    python bench.py all --part=1/3                                              the tables of one GPU again
    torchrun --nproc_per_node=2 bench.py comm                                   needs a GPU a process
    python bench.py runs out/a out/b --out=runs.csv                             speed and memory of runs of train.py
    python bench.py kept results/h200/train.csv                                 kept bytes by tensor
    python bench.py plan --gpus=256 --card=h100-80g --ep=32 --pp=8              any flag of train.py may follow

Loss. Does a narrower format cost accuracy? Two seeds of one format end farther apart than two formats do, so formats
are compared in pairs: runs of one seed start from the same weights and read the same text in the same order, and what
is averaged over the seeds is the difference within each pair. The loss compared is `val_loss`, quantisation off: what
was learned. `val_loss_quantized` adds what reading it out in the narrow format costs. The difference is given with its
95 % interval (Student's t over the seeds): one that holds 0 shows nothing.

Error. What does a format do at fixed weights? Nothing is trained, so nothing is left to chance: the same checkpoint, the
same tokens, once in bf16 and once in each setting. The loss tells what forward loses; how far gradients turn away, which
tensor costs most.

A run is a folder that train.py wrote, plus environment.json: on what, with what and when it ran. Tables and plots are
made from such folders alone, so they can be made again, and a command that was cut does only what is missing.

Kernels. How much of the memory's speed do conversions and data movement reach? Each output byte is counted once, each
input byte once for every row that reads it; over the time that is compared with a large device-to-device copy in the
same run. The L2 cache is flushed before every launch. A fused kernel is compared with the pair of our own best kernels
that does the same by way of another tensor, and whole chains of kernels with one another.

Comm. What do the four exchanges of an expert layer between ranks cost in each wire format? All that a format brings is
counted: quantising, packing, counts, the host's read of them, fan-out, sums at home.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import types
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import data
import model
import quant
import train as trainer
from model import PRESETS
from quant import RECIPES

ARMS = {name: name for name in RECIPES} | {"bf16-again": "bf16", "paper": "mxfp4"}  # what `loss` trains: its precision
NOTED = ("device", "driver", "torch", "triton", "commit", "date")  # the last columns of each table: `environment`
COLUMNS = ("precision", "seed", "steps", "fork", "val_loss", "val_loss_quantized", "seconds", *NOTED)
SUMMARY_COLUMNS = ("precision", "against", "steps", "fork", "seeds", "val_loss", "percent", "percent_low", "percent_high",
                   "percent_median", "percent_by_seed", *NOTED)
# 97.5 % points of Student's t for 1, 2, ... degrees of freedom
T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
         2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
         2.0452, 2.0423)
COLOURS = {"bf16": "#333333", "bf16-again": "#999999", "fp8": "#0072b2", "mxfp4": "#d55e00", "paper": "#009e73",
           "mxfp4, h in fp4": "#e69f00"}
MORE_COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442")  # with those above, Okabe and Ito's
RULES = {"font.size": 9, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.alpha": 0.3, "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8}
TASK = ("preset", "model", "data", "tokenizer", "seq_len", "batch_size", "grad_accum", "steps", "lr", "min_lr", "schedule",
        "warmup", "eval_steps")  # what runs have in common that can be compared
FAR = 2  # %, from which on deviations are drawn on a logarithmic scale, where there are larger ones
SMOOTHING = 0.05  # of a run: the window of the running mean of training losses


def environment():
    """On what and with what this process runs: device, its driver, torch, triton, commit, date (UTC)."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    # NANOFP4_COMMIT: where the code runs without its git folder, or with an older one
    commit = os.environ.get("NANOFP4_COMMIT", "") or answer_of(git)
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = answer_of(smi) if torch.cuda.is_available() else ""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return dict(zip(NOTED, (device_name(), driver, torch.__version__, triton, commit, date)))


def answer_of(command):
    """What a command prints, nothing where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


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


def read_arm(folder, config):
    """The name of what a run trained: its precision, unless `loss` noted another."""
    path = folder / "environment.json"
    return json.loads(path.read_text()).get("arm", config["precision"]) if path.exists() else config["precision"]


# ---- loss ----


def loss(args, flags):
    """Trains in each precision from each seed, and compares the validation losses.

    Any flag of train.py may follow. Real text: --data=FOLDER takes every text file below it, --data='src/**/*.c' what a
    pattern finds, --data=SHARDS what `python data.py --data=FOLDER --out=SHARDS` made, once. Of text the validation part is
    drawn by the seed; of shards it is the same for all seeds, so make shards.

    A precision may be followed by settings of its recipe: --precisions="bf16,mxfp4,mxfp4 wire=bf16". `paper` is mxfp4 with
    SwiGLU's output in MXFP4 too, see the function `paper`. `bf16-again` is bf16: how far apart two runs of one kind are, for
    sums on a GPU have no fixed order.

    Small models stay on a plateau for a time that differs from run to run, and that hides the rest. --fork=STEP: bf16 trains
    each seed to that step (folders trunk-SEED), and from there on every precision goes on by itself, bf16 too.

    Leaves in --out a folder a run, loss.csv, loss_summary.csv (mean deviation of each from those before it, paired by seed,
    with its 95 % interval), loss_curves.csv (running means of the training loss) and loss.png. Run again, the same command
    does what is missing: finished runs stay, one that was cut goes on. --slice_minutes cuts it into portions, --runs=1/2 and
    --runs=2/2 share the runs, with --fork the seeds, between two processes, each with a GPU of its own
    (CUDA_VISIBLE_DEVICES). A finished run's ckpt folder may be deleted.
    """
    usual = trainer.parse_flags(flags)
    seeds, arms = args.seeds.split(","), [" ".join(arm.split()) for arm in args.precisions.split(",")]
    if not all(seed.isdigit() for seed in seeds):
        raise ValueError(f"--seeds={args.seeds} is no comma list of whole numbers.")
    for arm in arms:
        arm_settings(arm, usual)
    if not 0 <= args.fork < usual.steps:
        raise ValueError(f"--fork={args.fork} is no step before --steps={usual.steps}.")
    i, n = share_of("--runs", args.runs)
    pyplot()  # rather missing now than after hours
    if taken := {word.partition("=")[0] for word in flags} & {"--precision", "--seed", "--out_dir", "--resume"}:
        raise ValueError(f"bench.py loss sets {min(taken)} itself: use --precisions, --seeds and --out.")
    deadline = time.monotonic() + 60 * args.slice_minutes if args.slice_minutes else math.inf
    seeds = list(map(int, seeds))
    mine = list(itertools.product(seeds[i - 1 :: n], arms)) if args.fork else list(itertools.product(seeds, arms))[i - 1 :: n]
    for done, (seed, arm) in enumerate(mine):
        if not train_until(deadline, args.out, usual, arm, seed, args.fork):
            print(f"the slice of {args.slice_minutes:g} minutes is over, {done} of {len(mine)} runs are finished: the same"
                  f" command goes on")
            break
    rows = table(args.out)
    if rows:
        print(summary(rows, args.out))
        folders = [run_folder(args.out, row["precision"], row["seed"]) for row in rows]
        curves_table(folders, args.out / "loss_curves.csv")
        plot_runs(folders, args.out / "loss.png")


def arm_settings(arm, usual):
    """{setting of a Config: value} of an arm, "mxfp4 wire=bf16" for example. ValueError: it cannot be trained."""
    base, *words = arm.split() or [""]
    settings = dict(word.partition("=")[::2] for word in words)
    if base not in ARMS or set(settings) - {f.name for f in dataclasses.fields(quant.Recipe)}:
        raise ValueError(f"--precisions: there is no {arm!r}; choose among {', '.join(ARMS)}, and settings of a recipe.")
    dataclasses.replace(RECIPES[ARMS[base]], **settings)
    if base == "paper":
        check_paper(settings.get("compute") or usual.compute or "fp8", usual.recompute)
    return {"precision": ARMS[base]} | settings


def run_folder(out, arm, seed):
    return out / f"{arm.replace(' ', '_')}-{seed}"


def share_of(flag, text):
    """(i, n) of i/n, the i-th of n shares. ValueError: it is none."""
    share = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not share or int(share[1]) > int(share[2]):
        raise ValueError(f"{flag}={text}: give i/n, the i-th of n shares, 1/2 for example.")
    return int(share[1]), int(share[2])


def train_until(deadline, out, usual, arm, seed, fork=0):
    """Trains one run, or what is left of it; False if the deadline came first. fork: from where bf16 was at that step.
    KeyboardInterrupt: a signal did."""
    folder = run_folder(out, arm, seed)
    config = dataclasses.replace(usual, **arm_settings(arm, usual), seed=seed, out_dir=str(folder), log_every=1)
    if is_finished(folder, config, fork):
        return True
    begin, trunk = "auto", out / f"trunk-{seed}"
    if fork and not trainer.complete_checkpoints(folder / "ckpt"):
        begin = trunk / "ckpt" / str(fork)
        if not begin.exists():
            trained = dataclasses.replace(usual, precision="bf16", seed=seed, out_dir=str(trunk), log_every=1, resume="auto")
            if not trained_until(deadline, trained, "trunk", fork):
                return False
    return trained_until(deadline, dataclasses.replace(config, resume=str(begin)), arm, usual.steps)


def trained_until(deadline, config, arm, last):
    """Whether a run, which goes on, came to a step before the deadline. KeyboardInterrupt: a signal ended it."""
    if time.monotonic() >= deadline:
        return False
    print(f"---- {arm}, seed {config.seed} ----")
    folder, one_step = Path(config.out_dir), trainer.train_step
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps({"arm": arm} | environment()))

    def train_step(run, config):
        result = one_step(run, config)
        if time.monotonic() >= deadline or run.counts["step"] == last < config.steps:
            signal.raise_signal(signal.SIGTERM)  # the run saves, as it does when its time on a cluster is up
        return result

    with quant.replaced(trainer, train_step=train_step), paper() if arm.split()[0] == "paper" else contextlib.nullcontext():
        found = trainer.main(config)
    if found["step"] < last and time.monotonic() < deadline:
        raise KeyboardInterrupt
    return found["step"] == last


def check_paper(compute, recompute):
    """ValueError where the arm `paper` would have nothing to keep: it is about an FP8 a, kept from forward."""
    if compute != "fp8" or set(recompute.split(",")) & {"mlp", "moe"}:
        raise ValueError("paper keeps SwiGLU's output, which FP8 GEMMs read: it goes neither with --compute=bf16 nor with"
                         " --recompute of mlp or moe.")


@contextlib.contextmanager
def paper():
    """Within it mxfp4 does what the FP4 paper does (arXiv 2603.02731) and this project does not: SwiGLU's output a, too,
    is brought from FP8 to MXFP4; FC2 reads it decoded, and FC2's Wgrad reads those very codes, kept from forward, where
    ours reads an a that is rebuilt from h. Without recomputing; numbers only: memory and time are not the paper's.

    It holds for experts, shared expert and dense FFN. Not emulated: h stays in the format of --save_h (FP8, if not fp4);
    inputs of dense linears and attention's output are our recipe's; the paper's column conversion, which leaves mantissas
    unrounded where exponents underflow, is replaced by ours, exact here."""
    forward, backward = quant._swiglu_forward, quant._swiglu_backward

    def swiglu_forward(*args):
        a, h = forward(*args)
        if not isinstance(a, quant.Fp8):  # an evaluation with quantisation off
            return a, h
        a = quant.fp8_to_fp4(a)
        return quant.fp4_to_fp8_rows(a), (h, a)

    def swiglu_backward(da_M, kept, *args):
        h, a = kept
        dh_rows, dh_cols, _, dweights_TK = backward(da_M, h, *args)
        return dh_rows, dh_cols, quant.fp4_to_fp8_cols(a), dweights_TK

    with quant.replaced(quant, _swiglu_forward=swiglu_forward, _swiglu_backward=swiglu_backward):
        yield


def is_finished(folder, config, fork):
    """Whether the run of this very config, from bf16's step `fork` on, is done. ValueError: the folder holds another one."""
    if not (folder / "log.jsonl").exists():
        return False
    before, rows = read_run(folder)
    before = dataclasses.asdict(trainer.Config()) | before  # which may be older than a setting
    for name, now in dataclasses.asdict(config).items():
        if before[name] != now and name != "resume":  # where it began: below
            raise ValueError(f"{folder} was run with {name}={before[name]}, not {now}: choose another --out.")
    if rows and rows[0]["step"] - 1 != fork:
        raise ValueError(f"{folder} was run with --fork={rows[0]['step'] - 1}, not {fork}: choose another --out.")
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
            where = {name: value for name, value in json.loads(path.read_text()).items() if name != "arm"}
            tokens = config["seq_len"] * config["batch_size"] * config["grad_accum"]
            seconds = round(sum(tokens / row["tokens_per_s"] for row in log), 1)  # training alone, over all resumes
            rows.append({"precision": read_arm(path.parent, config), "seed": config["seed"], "steps": config["steps"],
                         "fork": log[0]["step"] - 1, "seconds": seconds}
                        | {name: log[-1][name] for name in ("val_loss", "val_loss_quantized")} | where)
    write_table(folder / "loss.csv", COLUMNS, rows)
    return rows


def write_table(path, columns, rows):
    """A whole csv at once: another process may write the same one."""
    part = path.with_suffix(f".{os.getpid()}")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def curves_table(folders, path):
    """The running mean of each run's training loss at some 200 steps, a column a run."""
    logs = {folder.name: read_run(folder)[1] for folder in folders}
    curves = {name: running_mean(rows, len(rows)) for name, rows in logs.items()}
    steps = sorted(set().union(*curves.values()))
    every = max(1, len(steps) // 200)
    rows = [{"step": step} | {name: round(curve[step], 5) for name, curve in curves.items() if step in curve}
            for step in steps[::-every][::-1]]
    write_table(path, ("step", *curves), rows)


def summary(rows, folder):
    """Lines, and rows of <folder>/loss_summary.csv: of each precision the mean validation loss over its seeds, then how far it
    lies from each precision before it, bf16 first, paired by seed, with the mean's 95 % interval."""
    losses, lines, summaries = {}, [], []
    for arm in sorted({row["precision"] for row in rows}, key=lambda arm: (list(ARMS).index(arm.split()[0]), arm)):
        runs = sorted((row for row in rows if row["precision"] == arm), key=lambda row: row["seed"])
        mine = {row["seed"]: row["val_loss"] for row in runs}
        row = runs[0] | {"val_loss": statistics.mean(mine.values()), "seeds": " ".join(map(str, mine))}
        lines.append(f"{arm:6} val loss {row['val_loss']:.4f}, mean of seeds {', '.join(map(str, mine))}")
        summaries.append(row)
        for other, theirs in losses.items():
            if off := {seed: 100 * (loss / theirs[seed] - 1) for seed, loss in mine.items() if seed in theirs}:
                found, text = deviation(list(off.values()))
                lines.append(f"       from {other}: {text}")
                summaries.append(row | {"against": other, "seeds": " ".join(map(str, off))} | found)
        losses[arm] = mine
    write_table(folder / "loss_summary.csv", SUMMARY_COLUMNS,
                [{name: row.get(name, "") for name in SUMMARY_COLUMNS} for row in summaries])
    return "\n".join(lines)


def deviation(percents):
    """(columns of a summary, the same in words) of deviations, one a seed."""
    mean, half = interval(percents)
    found = {"percent": round(mean, 4), "percent_by_seed": " ".join(f"{x:.4f}" for x in percents)}
    by_seed = f"(by seed: {', '.join(f'{x:+.2f}' for x in percents)})"
    if half == math.inf:
        return found, f"{mean:+.2f} % {by_seed}"
    low, high, median = mean - half, mean + half, statistics.median(percents)
    return (found | {"percent_low": round(low, 4), "percent_high": round(high, 4), "percent_median": round(median, 4)},
            f"{mean:+.2f} %, 95 % interval {low:+.2f} to {high:+.2f}, median {median:+.2f} {by_seed}")


def interval(values):
    """(mean, half the width of its 95 % interval) by Student's t; infinite for a single value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return mean, math.inf
    df, z = n - 1, 1.959964
    t = T_975[df - 1] if df <= len(T_975) else z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return mean, t * statistics.stdev(values) / math.sqrt(n)


# ---- error ----

# A setting: a precision or `paper`, then what differs from it; | between values makes a setting of each
SETTINGS = ("bf16; bf16 compute=fp8; bf16 save=fp8|fp4; bf16 save_h=fp8|fp4; bf16 wire=fp8|fp4|fp4-fp8; fp8; mxfp4;"
            " mxfp4 compute=bf16; mxfp4 save=bf16|fp8; mxfp4 save_h=bf16|fp4; mxfp4 recompute=mlp,moe;"
            " mxfp4 wire=bf16|fp8|fp4-fp8; mxfp4 rule=floor|ceil; paper; paper save_h=fp4")
KINDS = {"router": r"\.router\.", "experts_fc1": r"\.experts\.w13", "experts_fc2": r"\.experts\.w2", "mla": r"\.attn\.w",
         "dense": r"\.ffn\.(shared\.)?w", "other": ""}  # of weights, by name: the first that fits
ERROR_COLUMNS = ("checkpoint", "precision", "seed", "step", "setting", "tokens", "val_loss", "percent_from_bf16",
                 "percent_interval", "batches", *(f"{what}_{kind}" for kind in ("all", *KINDS) for what in ("cosine", "ratio")),
                 *NOTED)


@dataclasses.dataclass(frozen=True)
class Setting:
    recipe: quant.Recipe
    rule: str = "even"
    recompute: frozenset = frozenset()
    paper: bool = False

    @classmethod
    def of(cls, text):
        """From its words, "mxfp4 save_h=fp4 rule=ceil" for example. ValueError: they mean nothing."""
        base, *words = text.split()
        changes = dict(word.partition("=")[::2] for word in words)
        recompute = frozenset(changes.pop("recompute", "none").split(",")) - {"none"}
        rule = changes.pop("rule", "even")
        known = {f.name for f in dataclasses.fields(quant.Recipe)}
        if (base not in ARMS or set(changes) - known or rule not in ("even", "floor", "ceil")
                or recompute - set(model.RECOMPUTE_SCOPES)):
            raise ValueError(f"--settings: {text!r} is none: give one of {', '.join(ARMS)}, then any of"
                             f" {', '.join(sorted(known))}, rule=even|floor|ceil and recompute=SCOPE,SCOPE.")
        recipe = dataclasses.replace(RECIPES[ARMS[base]], **changes)
        if base == "paper":
            check_paper(recipe.compute, ",".join(recompute))
        return cls(recipe, rule, recompute, base == "paper")

    @property
    def forward(self):
        """What of it the forward pass depends on."""
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, save="bf16", save_h="bf16"),
                                   recompute=frozenset())

    @contextlib.contextmanager
    def on(self, net):
        """The model computes so for a while."""
        before = net.recipe, net.recompute
        net.recipe, net.recompute = self.recipe, self.recompute
        try:
            with mx_rule(self.rule), paper() if self.paper else contextlib.nullcontext():
                yield
        finally:
            net.recipe, net.recompute = before


def settings_of(text):
    """{its words: Setting} of a list with ; between settings and | between values."""
    listed = {}
    for one in filter(None, map(str.strip, text.split(";"))):
        choices = [[f"{name}={value}" for value in values.split("|")] if values else [name]
                   for name, _, values in (word.partition("=") for word in one.split())]
        for words in itertools.product(*choices):
            listed[" ".join(words)] = Setting.of(" ".join(words))
    return listed


@contextlib.contextmanager
def mx_rule(rule):
    """Within it what becomes MXFP4 from BF16 gets its block scales by this rule. On a GPU the kernels that know `even` only
    leave MXFP4 to one that knows all rules. FP8 -> MXFP4 (wire=fp8 with save=fp4, and a in `paper`) stays `even`."""
    if rule == "even":
        yield
        return
    rows, forward = functools.partial(quant.quantize_fp4_rows, rule=rule), quant._swiglu_forward

    def both(x):
        return quant.quantize_fp8_rows(x), rows(x)

    def swiglu_forward(h_M, weights_TK, groups, recipe):
        if recipe.save_h != "fp4" or not quant._fuses(h_M, recipe):
            return forward(h_M, weights_TK, groups, recipe)
        a, _ = forward(h_M, weights_TK, groups, dataclasses.replace(recipe, save_h="bf16"))
        h_P = groups.take(h_M)
        return a, rows(F.pad(h_P, (0, 0, 0, groups.num_pairs - len(h_P))))

    with contextlib.ExitStack() as stack:
        stack.enter_context(quant.replaced(quant, quantize_fp4_rows=rows, quantize_fp8_fp4_rows=both,
                                           _swiglu_forward=swiglu_forward))
        if getattr(quant, "kernels", None) is not None:
            norm = quant.kernels.rms_norm

            def rms_norm(x, weight, eps, bf16=True, fp8=False, fp4=False):
                y, *codes = norm(x, weight, eps, bf16, fp8)
                return y, *codes[:2], *(rows(y) if fp4 else (None, None))

            stack.enter_context(quant.replaced(quant.kernels, rms_norm=rms_norm))
        yield


def error(args, flags):
    """At the weights of checkpoints: what each setting does to the validation loss and to gradients, against bf16.

    The loss is that of the same --tokens validation tokens (all, where there are fewer), its deviation with the 95 % interval
    over batches; gradients are those of --batches validation batches: cosine with bf16's and ratio of norms, mean over the
    batches, for all weights and by kind. Flags of train.py (--data, --batch_size, --device ...) change the checkpoint's own
    settings. A setting is a precision and what differs, values with | between them, settings with ; between them:
    --settings='mxfp4 compute=bf16|fp8 save_h=fp8|fp4 wire=bf16|fp4|fp4-fp8 rule=even|floor|ceil' is a whole grid.

    One row a setting in --out, results/<card>/error.csv if not given. Run again, it does what is missing: a row of the same
    checkpoint, setting, tokens, batches and commit stays.
    """
    settings, where = settings_of(args.settings), environment()
    out = args.out or Path("results", card_name(where), "error.csv")
    out.parent.mkdir(parents=True, exist_ok=True)
    key = ("checkpoint", "setting", "tokens", "batches", "commit")
    rows = list(csv.DictReader(out.open(newline=""))) if out.exists() else []
    if rows and tuple(rows[0]) != ERROR_COLUMNS:
        raise ValueError(f"{out} has other columns: choose another --out.")
    ready = {tuple(row[name] for name in key) for row in rows}
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, ERROR_COLUMNS)
        if not rows:
            writer.writeheader()
        for checkpoint in args.checkpoint:
            net, batches, facts = fixed_weights(checkpoint, flags, args.tokens)
            for setting in settings.values():
                model.check_recipe(net.config, setting.recipe)
            facts |= {"tokens": sum(int((targets != -100).sum()) for _, targets in batches), "batches": args.batches}
            if facts["tokens"] < args.tokens:
                print(f"{checkpoint}: the validation text has {facts['tokens']} tokens, fewer than {args.tokens}")
            if len(batches) < args.batches:
                raise ValueError(f"{checkpoint}: the validation text makes {len(batches)} batches, --batches={args.batches} are"
                                 f" wanted.")
            known = lambda name: tuple(str((facts | where | {"setting": name})[column]) for column in key) in ready
            missing = {name: setting for name, setting in settings.items() if not known(name)}
            for row in error_rows(net, batches, missing, args.batches, str(checkpoint)):
                tqdm.write(error_line(row))
                writer.writerow(facts | row | where)
                file.flush()
            print(f"{facts['checkpoint']}: settings by the cosine of their gradients")
            same = {name: str((facts | where)[name]) for name in key if name != "setting"}
            for row in sorted(csv.DictReader(out.open(newline="")), key=lambda row: -float(row["cosine_all"])):
                if row["setting"] in settings and same.items() <= row.items():
                    print(error_line(row))
    print(f"wrote {out}")


def fixed_weights(checkpoint, flags, tokens):
    """(model with the checkpoint's weights, validation batches of at least so many tokens if there are, what a row says)."""
    checkpoint = trainer.find_checkpoint(checkpoint)
    notes = trainer.read_notes(checkpoint)
    known = {f.name for f in dataclasses.fields(trainer.Config)} - {"model", "resume", "init_from", "out_dir"}
    words = [f"--{name}={value}" for name, value in notes["config"].items() if name in known]
    config = trainer.parse_flags(words + flags)
    device, dtype = trainer.check_device(config, RECIPES["mxfp4"])
    net = model.Model(notes["model"]).to(device)
    trainer.load_checkpoint(checkpoint, {"model": net.state_dict()})
    net.dtype = dtype
    encoding = data.tokenizer(notes["tokenizer"])
    _, batches = data.open_data(config.data, encoding, config.seed, config.seq_len, config.batch_size,
                                -(-tokens // config.seq_len))
    facts = {"checkpoint": checkpoint.as_posix(), "precision": config.precision, "seed": config.seed, "step": notes["step"]}
    return net, [tuple(t.to(device) for t in batch) for batch in batches], facts


def error_rows(net, batches, settings, num_batches, title):
    """A row a setting; what of forward is the same in two settings is computed once."""
    losses, counts = {}, [int((targets != -100).sum()) for _, targets in batches]
    bf16 = Setting(RECIPES["bf16"])
    steps = (len({bf16, *(setting.forward for setting in settings.values())}) * len(batches) + len(settings) * num_batches)
    with tqdm(total=steps * bool(settings), desc=title, unit="batch", mininterval=0.1 if sys.stderr.isatty() else 10) as bar:
        for name, setting in settings.items():
            for each in (bf16, setting.forward):
                if each not in losses:
                    losses[each] = batch_losses(net, batches, each, bar)
            mine, theirs = losses[setting.forward], losses[bf16]
            mean = sum(theirs) / sum(counts)
            row = {"setting": name, "val_loss": sum(mine) / sum(counts),
                   "percent_from_bf16": 100 * (sum(mine) / sum(theirs) - 1),
                   "percent_interval": interval([100 * (a - b) / n / mean for a, b, n in zip(mine, theirs, counts)])[1]}
            yield row | gradient_errors(net, batches[:num_batches], setting, bar)


@torch.no_grad()
def batch_losses(net, batches, setting, bar):
    """The summed cross entropy of each batch."""
    net.eval()
    with setting.on(net):
        sums = []
        for tokens_BS, targets_BS in batches:
            sums.append(net(tokens_BS, targets_BS, 1)[1].double())
            bar.update()
    return torch.stack(sums).tolist()


def gradient_errors(net, batches, setting, bar):
    """Cosine with bf16's gradient and ratio of norms, by kind of weight and for all, mean over batches."""
    sums = {}
    for batch in batches:
        wanted, got = gradients_of(net, batch, Setting(RECIPES["bf16"])), gradients_of(net, batch, setting)
        products = {}  # by kind: <wanted, got>, |wanted|^2, |got|^2
        for name, g in wanted.items():
            parts = torch.stack([(a.double() * b.double()).sum() for a, b in ((g, got[name]), (g, g), (got[name], got[name]))])
            for kind in (next(kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "all"):
                products[kind] = products.get(kind, 0) + parts
        for kind, parts in products.items():
            product, theirs, ours = parts.tolist()
            sums.setdefault(f"cosine_{kind}", []).append(product / math.sqrt(theirs * ours) if theirs * ours else math.nan)
            sums.setdefault(f"ratio_{kind}", []).append(math.sqrt(ours / theirs) if theirs else math.nan)
        bar.update()
    return {name: round(statistics.fmean(values), 7) for name, values in sums.items()}


def gradients_of(net, batch, setting):
    """{name: gradient} of the training loss of one batch."""
    net.train()
    with setting.on(net):
        trainer.backward(net(*batch)[1])
    net.update_balance(False)  # clears the loads that were counted
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return grads


def error_line(row):
    """A row in words; of kinds the one whose gradient turns farthest."""
    cosines = {kind: float(row[f"cosine_{kind}"]) for kind in KINDS if row.get(f"cosine_{kind}")}
    worst = min(cosines, key=cosines.get)
    return (f"{row['setting']:34} loss {float(row['percent_from_bf16']):+.4f} % ± {float(row['percent_interval']):.4f}, gradient"
            f" cosine {float(row['cosine_all']):.5f}, norm x {float(row['ratio_all']):.4f}; worst {worst} {cosines[worst]:.5f}")


# ---- plot ----


def plot(args, flags):
    """Draws tables into a PNG beside each, and the losses of runs, given by their out_dir, into one PNG.

    A table is a csv that kernels, gemm, layer, train, comm or error wrote; which of them is read off its columns, and whether
    rows of train are of several micro-batches in flight. Or one of curves, as loss writes: a column of losses for each run,
    NAME-SEED, by step; how far they lie from the first name's is drawn beside them."""
    if flags:
        raise ValueError(f"bench.py plot has no flag {flags[0]}: see bench.py plot --help.")
    tables = [path for path in args.given if path.suffix == ".csv"]
    runs = [path for path in args.given if path.suffix != ".csv"]
    if args.out and len(tables) + bool(runs) > 1:
        raise ValueError("bench.py plot --out names one picture; without it each table has its own, beside it.")
    for path in tables:
        plot_table(path, args.out or path.with_suffix(".png"))
    if runs:
        plot_runs(runs, args.out or Path("curves.png"))


def plot_runs(folders, path):
    """Three panels: training loss (running mean; marks: validation), then how far it, and in the end the validation loss, lies
    from bf16's of the same seed. Runs are thin lines or dots; bold, of several seeds, the median with the middle half of them,
    and in the end the mean, from three on with its 95 % interval."""
    plt, (arms, others) = pyplot(), arms_of(folders)
    longest = max(len(rows) for runs in arms.values() for rows in runs.values())  # one window for all: their ratio is drawn
    with plt.rc_context(RULES):
        bf16 = arms.get("bf16", {})
        curves = {name: {seed: running_mean(rows, longest) for seed, rows in runs.items()} for name, runs in arms.items()}
        wide = (4, 4, max(4, 1.4 * len(others))) if others else (4,)  # inches: names and means stand below the last
        figure, (panels,) = plt.subplots(1, len(wide), figsize=(sum(wide), 3.6), layout="constrained", width_ratios=wide,
                                         squeeze=False)
        free = [colour for colour in MORE_COLOURS if colour not in map(COLOURS.get, curves)]
        more, ends = itertools.cycle(free), {}
        for name, runs in curves.items():
            colour = COLOURS.get(name) or next(more)
            draw_seeds(panels[0], runs, colour, name, False)
            for seed, rows in arms[name].items():
                at = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
                panels[0].plot(*(zip(*at) if at else ((), ())), "o", ms=3, color=colour)
            if name in others:
                off = {seed: {step: 100 * (loss / curves["bf16"][seed][step] - 1) for step, loss in curve.items()
                              if step in curves["bf16"][seed]} for seed, curve in runs.items() if seed in bf16}
                draw_seeds(panels[1], off, colour, name, True)
                ends[name] = name + draw_ends(panels[2], others.index(name), arms[name], bf16, colour)
        for panel in panels[1:]:
            panel.axhline(0, color=COLOURS["bf16"], lw=0.8)
            if max(map(abs, panel.get_ylim())) > 2 * FAR:  # one run far off would hide the others
                panel.set_yscale("symlog", linthresh=FAR, linscale=2)
                panel.yaxis.set_major_formatter("{x:g}")
                panel.autoscale_view()
        titles = "training loss", "training loss against bf16, by seed", "validation loss in the end, quantisation off"
        for panel, title, unit in zip(panels, titles, ("nats a token", "%", "% from bf16")):
            panel.set(title=title, xlabel="optimizer step", ylabel=unit)
        if others:
            panels[2].set(xlabel="", xticks=range(len(others)), xticklabels=map(ends.get, others), xlim=(-0.6, len(others) - 0.4))
            panels[2].tick_params("x", labelsize=8)
        panels[0].legend()
        figure.savefig(path, dpi=160)
        plt.close(figure)
    print(f"wrote {path}")


def plot_curves(names, rows, out):
    """Two panels of a table of curves: running means of losses, and how far they lie from the first name's of the same seed."""
    plt, curves = pyplot(), {}
    for run in names:
        name, _, seed = run.rpartition("-")
        log = [{"step": row["step"], "loss": row[run]} for row in rows if row[run] is not None]
        curves.setdefault(name, {})[seed] = running_mean(log, len(rows))
    reference, more = next(iter(curves.values())), itertools.cycle(map(COLOURS.get, ("bf16", "fp8", "mxfp4", "paper")))
    with plt.rc_context(RULES):
        figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
        for name, runs in curves.items():
            colour = COLOURS.get(name) or next(more)
            draw_seeds(panels[0], runs, colour, name, False)
            off = {seed: {step: 100 * (loss / reference[seed][step] - 1) for step, loss in curve.items()
                          if step in reference[seed]} for seed, curve in runs.items() if seed in reference}
            draw_seeds(panels[1], off, colour, name, runs is not reference)
        for panel, title, unit in zip(panels, ("training loss", f"against {next(iter(curves))}, by seed"), ("nats a token", "%")):
            panel.set(title=title, xlabel="optimizer step", ylabel=unit)
        panels[0].legend()
        figure.savefig(out, dpi=160)
        plt.close(figure)
    print(f"wrote {out}")


def arms_of(folders):
    """({name: {seed: rows}}, names of those that bf16 can be compared with) of runs. A run is an arm of its own where another has
    its precision and seed, or other settings of TASK."""
    arms, tasks = {}, {}
    for folder in folders:
        config, rows = read_run(folder)
        name, task = read_arm(Path(folder), config), [config.get(setting) for setting in TASK]
        name += f" ({folder})" * (config["seed"] in arms.get(name, {}) or tasks.get(name, task) != task)
        arms.setdefault(name, {})[config["seed"]], tasks[name] = rows, task
    alike = [name for name in arms if tasks[name] == tasks.get("bf16") and set(arms[name]) & set(arms["bf16"])]
    if apart := set(arms) - {*alike, "bf16"}:
        print(f"not compared with bf16: {', '.join(sorted(apart))}; there is no bf16 run of the same seed and"
              f" {', '.join(TASK)}")
    return arms, [name for name in alike if name != "bf16"]


def draw_seeds(panel, curves, colour, label, shade):
    """Curves {seed: {step: value}}, thin, and where there are several their median; shade: and the middle half."""
    curves = [curve for curve in curves.values() if curve] or [{}]  # what has only begun has no steps
    alone = len(curves) == 1
    for curve in curves:
        panel.plot(curve.keys(), curve.values(), color=colour, lw=1.3 if alone else 0.5, alpha=1 if alone else 0.4,
                   label=label if alone else None)
    if not alone:
        steps = sorted(set.intersection(*map(set, curves)))
        quarters = [statistics.quantiles([curve[step] for curve in curves], method="inclusive") for step in steps]
        low, middle, high = zip(*quarters) if quarters else ((), (), ())
        panel.plot(steps, middle, color=colour, lw=1.6, label=f"{label}, {len(curves)} seeds")
        if shade:
            panel.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)


def draw_ends(panel, x, runs, bf16, colour):
    """The last validation loss of each run against that of bf16's at the same step, and the mean, from three runs on with its
    95 % interval. Returns mean and median as text."""
    last = lambda rows: {row["step"]: row["val_loss"] for row in rows[-1:] if row.get("val_loss")}
    off = [100 * (loss / last(bf16[seed])[step] - 1) for seed, rows in runs.items() if seed in bf16
           for step, loss in last(rows).items() if step in last(bf16[seed])]
    if not off:
        return ""
    mean, half = interval(off)
    panel.errorbar(x + 0.1, mean, half if len(off) > 2 else None, fmt="o", ms=6, capsize=4, color=colour)
    if len(off) == 1:
        return f"\n{mean:+.2f} %"
    panel.plot([x - 0.15] * len(off), off, "o", ms=3.5, color=colour, alpha=0.5)
    return f"\nmean {mean:+.2f} %\nmedian {statistics.median(off):+.2f} %"


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("Plots need matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def running_mean(rows, length):
    """{step: mean training loss of the last 5 % of so many rows}, skipped steps left out."""
    rows, window = [row for row in rows if row["loss"] is not None], max(1, round(SMOOTHING * length))
    means = (statistics.fmean(row["loss"] for row in rows[max(0, i + 1 - window) : i + 1]) for i in range(len(rows)))
    return dict(zip((row["step"] for row in rows), means))


def plot_table(path, out):
    """One PNG of one table. ValueError: its columns are those of none."""
    kinds = {draw_kernels: KERNEL_COLUMNS, draw_gemm: GEMM_COLUMNS, draw_layer: LAYER_COLUMNS, draw_train: TRAIN_COLUMNS,
             draw_comm: COMM_COLUMNS, draw_error: ERROR_COLUMNS}
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        rows = list(map(numbers, table))
        names = table.fieldnames or ()
        draw = next((draw for draw, columns in kinds.items() if set(columns) <= set(names)), None)
    if rows and names[1:] and names[0] == "step" and all(re.fullmatch(r".+-\d+", name) for name in names[1:]):
        return plot_curves(names[1:], rows, out)
    if not draw or not rows:
        raise ValueError(f"{path} is no table of bench.py kernels, gemm, layer, train, comm or error, or of curves"
                         f"{', with rows' * bool(draw)}.")
    plt = pyplot()
    from PIL import Image  # matplotlib needs it too

    with plt.rc_context(RULES):
        figure = plt.figure(layout="constrained")
        title = draw(figure, rows)
        each = lambda name: ", ".join(dict.fromkeys(row[name] for row in rows))
        figure.suptitle(f"{title}\n{each('device')}, torch {each('torch')}, triton {each('triton')}, commit {each('commit')}",
                        fontsize=10)
        figure.savefig(buffer := io.BytesIO(), dpi=150)
        plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(128).save(out, "PNG", optimize=True)  # a third of the bytes
    print(f"wrote {out}")


def number(cell):
    """A table's cell: a number, text, or None where it is empty."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell or None


def numbers(row):
    """A row of a table, what are no facts of its environment as numbers."""
    return {name: cell if name in NOTED else number(cell) for name, cell in row.items()}


def read_table(path):
    """The rows of a table, as texts; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shape_title(name):
    return name.replace("v", "V").replace("lite", "Lite").replace("-all", ", every token on every expert")


def values(rows, *names):
    """The different values of one column of a table in their order, or tuples of those of several."""
    return list(dict.fromkeys(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows))


def draw_kernels(figure, rows):
    """Left: the share of a copy's speed, a bar for the first shape, marks for others. Right: how many times as long the pair of
    kernels takes that a fused one replaces, and another chain of a layer's kernels."""
    rows = [row for row in rows if row["groups"] == "balanced"]
    lines = values(rows, "kernel", "pair")
    figure.set_size_inches(10, 1.5 + 0.19 * len(lines))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for shape, mark in zip(values(rows, "shape"), (None, "d", "o", "s")):
        here = [row for row in rows if row["shape"] == shape]
        for panel, column in ((left, "percent_of_copy"), (right, "times_pair")):
            points = [(lines.index((row["kernel"], row["pair"])), row[column]) for row in here if row[column] is not None]
            if mark is None:
                panel.barh(*zip(*points), color=MORE_COLOURS[2], label=shape_title(shape))
                for y, value in points:
                    panel.annotate(f"{value:.0f}" if panel is left else f"{value:.2f}x", (0, y), (3, 0), va="center", fontsize=8,
                                   textcoords="offset points")
            else:
                panel.plot(*zip(*[point[::-1] for point in points]), mark, ms=4.5, label=shape_title(shape),
                           color=COLOURS["mxfp4" if mark == "o" else "bf16"])
    left.set(title="speed of conversions and data movement", xlabel="% of a copy's bytes a second", ylim=(len(lines) - 0.4, -0.6),
             yticks=range(len(lines)), yticklabels=[kernel for kernel, _ in lines])
    right.set(title="the other way's time over ours", xlabel="times ours")
    names = right.secondary_yaxis("right")
    names.set_yticks(range(len(lines)), [pair or "" for _, pair in lines], fontsize=8)
    names.tick_params(length=0)
    names.spines[:].set_visible(False)
    for panel, one in ((left, 100), (right, 1)):
        panel.axvline(one, color="k", lw=0.8)
        panel.tick_params(axis="y", length=0)
    left.legend(loc="lower left", reverse=True)
    return f"bench.py kernels: balanced groups; a copy moves {rows[0]['copy_tb_per_s']:.2f} TB/s"


def draw_gemm(figure, rows):
    """A panel a shape: TFLOP/s of our GEMMs and of BF16 grouped_mm (matmul for one expert) as bars, others as marks."""
    rows = [row for row in rows if row["groups"] == "balanced"]
    shapes, gemms = values(rows, "shape"), values(rows, "gemm")
    figure.set_size_inches(10, 1.9 + 0.28 * len(gemms))
    panels = figure.subplots(1, len(shapes), sharey=True, sharex=True, squeeze=False)[0]
    marks = {"scaled_mm, one scale a tensor (the roof)": (None, "|", 11), "loop of F.scaled_mm": ("times_scaled_mm_loop", "o", 4),
             "DeepGEMM": ("times_deep_gemm", "d", 4)}
    for panel, shape in zip(panels, shapes):
        here = [row for row in rows if row["shape"] == shape]
        at = [gemms.index(row["gemm"]) for row in here]
        panel.barh([y - 0.2 for y in at], [row["tflops"] for row in here], 0.44, color=MORE_COLOURS[2], label="ours, FP8")
        for row, y in zip(here, at):
            panel.text(40, y - 0.2, f"{row['tflops']:.0f}", va="center_baseline", fontsize=8)
        panel.barh([y + 0.2 for y in at], [row["tflops"] / row["times_bf16_grouped"] for row in here], 0.3,
                   color=MORE_COLOURS[0], label="F.grouped_mm or matmul, BF16")
        for label, (column, mark, size) in marks.items():
            points = [(row["tflops"] / row[column] if column else row["roof_tflops"], y - 0.2) for row, y in zip(here, at)
                      if not column or row[column]]
            if points:
                panel.plot(*zip(*points), mark, ms=size, mew=1.5, color=COLOURS["bf16" if size > 9 else "mxfp4"], label=label)
        panel.set(title=f"{shape_title(shape)}\n{here[0]['E']:.0f} x {here[0]['M'] / here[0]['E']:.0f} rows", xlabel="TFLOP/s")
    panels[0].set(yticks=range(len(gemms)), yticklabels=gemms, ylim=(len(gemms) - 0.4, -0.6))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return "bench.py gemm: GEMMs of expert layers, balanced groups"


def draw_layer(figure, rows):
    """Above: ms of forward and of backward, with the speed over plain PyTorch. Below: bytes kept a token-expert pair."""
    rows = [row for row in rows if row["groups"] == "balanced"]
    shapes, layers = values(rows, "shape"), values(rows, "layer")
    names = {"grouped_mm": "plain PyTorch, BF16 F.grouped_mm", "bf16": "our bf16"}
    colours = {"grouped_mm": MORE_COLOURS[0]} | COLOURS
    figure.set_size_inches(10, 6)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    width = 0.85 / len(layers)
    for i, name in enumerate(layers):
        here = [row for row in rows if row["layer"] == name]
        at = [shapes.index(row["shape"]) + (i - (len(layers) - 1) / 2) * width for row in here]
        forward, both = ([row[column] / 1e3 for row in here] for column in ("forward_us", "us"))
        style = {"width": 0.92 * width, "color": colours[name]}
        upper.bar(at, forward, **style, label=names.get(name, name))
        bars = upper.bar(at, [b - f for b, f in zip(both, forward)], bottom=forward, alpha=0.6, **style)
        upper.bar_label(bars, [f"{row['times_grouped_mm']:.2f}x" for row in here], padding=1, fontsize=8)
        bars = lower.bar(at, [row["kept_bytes_a_row"] / 1e3 for row in here], **style)
        lower.bar_label(bars, fmt="%.1f", padding=1, fontsize=8)
    upper.set(title="forward (dark) and backward (light); on the bars, plain PyTorch's time over this one's", ylabel="ms")
    lower.set(title="kept between forward and backward", ylabel="KB a token-expert pair", xticks=range(len(shapes)),
              xticklabels=[shape_title(shape) for shape in shapes])
    for panel in (upper, lower):
        panel.grid(axis="x", visible=False)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return "bench.py layer: a layer's experts, balanced groups, BF16 weight gradients"


def draw_train(figure, rows):
    """Two panels a shape. First: speed of a slice's layers against what they keep, a line a precision, a point a scope. Second:
    which tensors a MoE layer keeps, by formula, and the speed over bf16 in the same scope. They stand below one another where
    their bars leave room for all shapes, else side by side."""
    if rows[0]["in_flight"] > 1:
        return draw_in_flight(figure, rows)
    shapes = {shape: [row for row in rows if row["shape"] == shape] for shape in values(rows, "shape")}
    if len(rows) <= 24:
        figure.set_size_inches(10, 8)
        widths = [3 + len(here) for here in shapes.values()]
        panels = figure.subplots(2, len(shapes), squeeze=False, height_ratios=(1.1, 1), width_ratios=widths)
    else:
        figure.set_size_inches(14, 1 + 3.4 * len(shapes))
        panels = figure.subplots(len(shapes), 2, squeeze=False, width_ratios=(2, 3)).T
    for (shape, here), speeds, bars in zip(shapes.items(), *panels):
        ran = [row for row in here if row["layers_tokens_per_s"]]
        named = {row["recompute"]: row for row in reversed(ran)}  # a scope's name stands at its first precision that fits
        for name in values(ran, "precision"):
            points = [row for row in ran if row["precision"] == name]
            x, y = [row["kept_bytes"] / 1e3 for row in points], [row["layers_tokens_per_s"] / 1e3 for row in points]
            against = name not in ("bf16", "fp8")  # whose speed over fp8 is in question
            half = [against * speed * (row["layers_half_width"] or 0) / (row["layers_times_fp8"] or 1)
                    for row, speed in zip(points, y)]
            speeds.errorbar(x, y, half, color=COLOURS[name], marker="o", ms=5, lw=1.3, elinewidth=0.9, capsize=2, label=name)
            for i, (row, *at) in enumerate(zip(points, x, y)):
                if row is named[row["recompute"]]:  # one lower than the other, where points are close
                    speeds.annotate(row["recompute"], at, (3, -6 - 11 * (i % 3)), textcoords="offset points", ha="left", va="top",
                                    fontsize=8)
        speeds.set(title=f"{shape_title(shape)}, {here[0]['layers']:.0f} layers", xlabel="kept, KB a token and layer", ylim=0)
        speeds.set_xlim(0, 1.15 * speeds.get_xlim()[1])
        speeds.set_ylabel("thousand tokens/s through the layers")
        draw_kept(bars, shape, here)
    panels[0, 0].legend(loc="lower left")
    figure.legend(*panels[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return ("bench.py train: one rank's part, layers forward and backward; factors: speed over bf16; "
            "error bars: 95 % interval of mxfp4's speed over fp8")


def draw_in_flight(figure, rows):
    """A panel a shape: the speed of the fastest of the scopes that fit into so much memory, a line a precision. Marks: scopes."""
    shapes, low, high = values(rows, "shape"), 40, 140
    figure.set_size_inches(10, 1 + 3.4 * len(shapes))
    panels = figure.subplots(len(shapes), 1, squeeze=False)[:, 0]
    for panel, shape in zip(panels, shapes):
        here = [row for row in rows if row["shape"] == shape]
        for name in values(here, "precision"):
            ran = sorted((row["peak_gib"] * 2**30 / 1e9, row["tokens_per_s"] / 1e3, row["recompute"]) for row in here
                         if row["precision"] == name and row["tokens_per_s"])
            best = [one for i, one in enumerate(ran) if all(one[1] > other[1] for other in ran[:i])]
            if not best:
                continue
            x, y = ([one[i] for one in best] for i in (0, 1))
            end = (here[0]["limit_gib"] or 0) * 2**30 / 1e9 or high  # what was allowed
            panel.step(x + [max([end, *x])], y + y[-1:], where="post", color=COLOURS[name], lw=1.5, label=name)
            panel.plot([one[0] for one in ran], [one[1] for one in ran], "o", ms=3.5, alpha=0.5, color=COLOURS[name])
            for gb, speed, scope in best:
                if gb <= high:
                    panel.annotate(scope, (max(gb, low), speed), (3, 3 if name == "mxfp4" else -10), textcoords="offset points",
                                   fontsize=8, color=COLOURS[name])
        what = f"{here[0]['layers']:.0f} layers, {here[0]['in_flight']:.0f} micro-batches in flight"
        panel.set(title=f"{shape_title(shape)}, {what}", xlabel="memory limit, GB", ylabel="thousand tokens/s", xlim=(low, high))
        panel.margins(y=0.12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return ("bench.py train: one rank's part, whole steps. Lines: the fastest recompute scope whose peak is below a limit;\n"
            "marks: each scope at its peak")


def draw_error(figure, rows):
    """Left: the loss of each setting against bf16's at the same weights, by checkpoint. Right: how far gradients turn away, by
    kind of weight, the mean over checkpoints."""
    checkpoints, settings, kinds = values(rows, "checkpoint"), values(rows, "setting"), [*KINDS, "all"]
    figure.set_size_inches(10, 1.8 + 0.24 * len(settings))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    for i, checkpoint in enumerate(checkpoints):
        here = {row["setting"]: row for row in rows if row["checkpoint"] == checkpoint}
        at = [y + (i + 0.5) / len(checkpoints) / 2 - 0.25 for y, setting in enumerate(settings) if setting in here]
        row, here = next(iter(here.values())), [here[setting] for setting in settings if setting in here]
        left.errorbar([r["percent_from_bf16"] for r in here], at, xerr=[r["percent_interval"] for r in here], fmt="o", ms=3.5,
                      lw=1, label=f"{row['step']:.0f}, {row['seed']:.0f}", color=(COLOURS["bf16"], *MORE_COLOURS)[i % 7])
    aside = lambda cosine: math.nan if cosine is None else 100 * math.sqrt(max(0, 1 - cosine**2))
    turned = [[statistics.fmean(aside(row[f"cosine_{kind}"]) for row in rows if row["setting"] == setting) for kind in kinds]
              for setting in settings]
    most = max((value for line in turned for value in line if value == value), default=0)
    right.imshow(turned, cmap="Oranges", aspect="auto", vmin=0)
    for y, x in itertools.product(range(len(settings)), range(len(kinds))):
        right.text(x, y, f"{turned[y][x]:.1f}", ha="center", va="center", fontsize=7.5, color="wk"[turned[y][x] <= 0.6 * most])
    left.axvline(0, color="k", lw=0.8)
    left.set(title="validation loss of the quantised forward", xlabel="% from bf16", yticks=range(len(settings)),
             yticklabels=settings, ylim=(len(settings) - 0.5, -0.5))
    left.locator_params(axis="x", nbins=6)
    left.legend(title="step, seed", title_fontsize=8)
    right.set(title="gradient: part at right angles to bf16's, % of its norm", xticks=range(len(kinds)),
              xticklabels=[re.sub("mla|fc", lambda found: found[0].upper(), kind).replace("_", "\n") for kind in kinds])
    right.grid(visible=False)
    right.tick_params(length=0)
    return (f"bench.py error: {len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}, {rows[0]['tokens']:.0f} tokens,"
            f" gradients of {rows[0]['batches']:.0f} batches; bars: 95 % interval over batches")


def draw_kept(panel, shape, rows):
    """Stacked bars of model.kept_bytes of a MoE layer, by precision and recompute scope."""
    ranks, _, cut = SLICES[shape]
    config, scopes = dataclasses.replace(PRESETS[shape], **cut), values(rows, "recompute")
    kept = [model.kept_bytes(config, LAYERS[row["precision"]], frozenset(row["recompute"].split(",")) - {"none"}, ranks)
            for row in rows]
    at, bottom = [i + 0.8 * scopes.index(row["recompute"]) for i, row in enumerate(rows)], [0.0] * len(rows)
    parts = ("residual", "attention output", "q, k, v", "normed input", "received", "h", "rest")
    for part, colour in zip(parts, (*MORE_COLOURS, COLOURS["bf16"])):  # a part is all tensors whose names begin so
        heights = [sum(size for name, size in t.items() if part == "rest" or name.startswith(part)) / 1e3 for t in kept]
        heights = [h - b * (part == "rest") for h, b in zip(heights, bottom)]
        drawn = panel.bar(at, heights, 0.88, bottom, color=colour, label=part)
        bottom = [h + b for h, b in zip(heights, bottom)]
    panel.bar_label(drawn, [f"{total:.0f}" for total in bottom], padding=1, fontsize=8)
    fits = lambda row: "fits" if row["tokens_per_s"] else "no fit"
    bf16 = {row["recompute"]: row["layers_tokens_per_s"] for row in rows if row["precision"] == "bf16"}
    times = lambda row: (f"{row['layers_tokens_per_s'] / bf16[row['recompute']]:.2f}x"
                         if row["layers_tokens_per_s"] and bf16.get(row["recompute"]) else fits(row))
    against_fp8 = [row["layers_times_fp8"] if row["precision"] not in ("bf16", "fp8") else None for row in rows]
    panel.set(title=f"{shape_title(shape)}, one of {ranks} ranks", xlabel="recomputed in backward",
              ylabel="kept by a MoE layer, KB a token", xticks=at,
              xticklabels=[f"{row['precision']}\n{times(row)}" + (f"\n{fp8:.3f}x fp8" if fp8 else "")
                           for row, fp8 in zip(rows, against_fp8)])
    panel.tick_params(axis="x", labelsize=7, length=0)
    for label, fp8 in zip(panel.get_xticklabels(), against_fp8):
        label.set_color("#c00000" if fp8 and fp8 < 1 else "black")  # where we lose
    panel.grid(axis="x", visible=False)
    panel.xaxis.labelpad = 20
    for scope in scopes:
        middle = statistics.fmean(x for x, row in zip(at, rows) if row["recompute"] == scope)
        panel.annotate(scope, (middle, 0), (0, -36), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center",
                       va="top", fontsize=8.5)


def draw_comm(figure, rows):
    """A panel a shape: ms of a layer's four exchanges on top of one another, by wire; each token sent once, and once a pair."""
    rows = [row for row in rows if row["exchange"] != "sum"]
    shapes, bars, exchanges = values(rows, "shape"), values(rows, "sent", "wire"), values(rows, "exchange")
    figure.set_size_inches(10, 1.8 + 0.28 * len(bars))
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for panel, shape in zip(panels, shapes):
        left = [0.0] * len(bars)
        for exchange, colour in zip(exchanges, MORE_COLOURS[1:]):
            ms = {(row["sent"], row["wire"]): row["ms"] for row in rows if (row["shape"], row["exchange"]) == (shape, exchange)}
            lengths = [ms.get(bar, 0.0) for bar in bars]
            drawn = panel.barh(range(len(bars)), lengths, 0.8, left, color=colour, label=exchange)
            left = [a + b for a, b in zip(left, lengths)]
        panel.bar_label(drawn, [f"{total:.3g}" for total in left], padding=2, fontsize=8)
        panel.margins(x=0.12)
        panel.set(title=f"{shape_title(shape)}, {rows[0]['ranks']:.0f} ranks", xlabel="ms, the slowest rank's")
    panels[0].set(yticks=range(len(bars)), yticklabels=[f"{wire}, {sent}" for sent, wire in bars], ylim=(len(bars) - 0.5, -0.5))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return "bench.py comm: the exchanges of an expert layer, tokens sent once a rank or once a pair"


# ---- kernels ----

# T tokens received, slots of their ids, E experts here, H hidden, I expert width, token-expert pairs
SHAPES = {"v3": (26400, 8, 8, 7168, 2048, 32768), "v2": (4096, 6, 20, 5120, 1536, 24576),
          "v2-lite": (16384, 6, 64, 2048, 1408, 98304)}
KERNEL_COLUMNS = ("shape", "groups", "kernel", "us", "tb_per_s", "percent_of_copy", "unique_mb", "times_pair", "pair", "host_us",
                  "copy_tb_per_s", *NOTED)


def kernels(args, flags):
    """Times every conversion and data-movement kernel, and the chains of a layer, against the speed of a copy.

    One row a kernel in --out, results/<card>/kernels.csv if not given.
    """
    names = shape_names(args, flags, SHAPES)
    with results_file(args.out, "kernels", KERNEL_COLUMNS) as (where, write):
        copy = copy_speed()
        print(f"{where['device']}: a copy moves {copy:.2f} TB/s (read + write)")
        for shape in names:
            for groups in ("balanced", "jittered"):
                for row in kernel_rows(shape, groups, copy):
                    times = f"  {row['times_pair']:.2f}x {row['pair']}" if row["times_pair"] else ""
                    share = f"{row['tb_per_s']:6.2f} TB/s {row['percent_of_copy']:5.1f} %" if row["tb_per_s"] else " " * 20
                    print(f"{shape:8}{groups:9}{row['kernel']:34}{row['us']:9.1f} us {share}"
                          f" {row['host_us']:6.1f} us host{times}", flush=True)
                    write(row | {"copy_tb_per_s": round(copy, 3)} | where)


def shape_names(args, flags, known):
    """The names of --shapes. ValueError for one that is not known, and for any flag left over."""
    names = args.shapes.split(",")
    if flags:
        raise ValueError(f"bench.py {args.work.__name__} has no flag {flags[0]}: see bench.py {args.work.__name__} --help.")
    if unknown := set(names) - set(known):
        raise ValueError(f"--shapes: there is no {min(unknown)}; choose among {', '.join(known)}.")
    return names


@contextlib.contextmanager
def results_file(out, name, columns, on_cpu=False):
    """(environment, a function that writes a row) of a table in `out` or results/<card>/<name>.csv. ValueError without a GPU,
    unless on_cpu."""
    if not torch.cuda.is_available() and not on_cpu:
        raise ValueError(f"bench.py {name} needs a GPU.")
    where = environment()
    out = out or Path("results", card_name(where), f"{name}.csv")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")  # a run that is cut leaves the last table as it was
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()

        def write(row):
            writer.writerow(row)
            file.flush()

        yield where, write
    part.replace(out)
    print(f"wrote {out}")


def card_name(where):
    """The folder of results on this device."""
    return re.sub(r"^nvidia[ -]*|[^a-z0-9]+", "", where["device"].lower()) or "gpu" if torch.cuda.is_available() else "cpu"


def copy_speed():
    """Bytes read and written a second, in TB, of a copy of 2 GiB (1 GiB where memory is short)."""
    size = 2**31 if torch.cuda.mem_get_info()[0] > 2**33 else 2**30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / median_us(lambda: target.copy_(source)) / 1e6


def median_us(work):
    """Median time of a call on the GPU in us, the L2 cache flushed before each."""
    return take_turns([work], 25)[0]


def take_turns(works, rounds):
    """median_us of each call, one after the other in every round, so that all run equally hot.

    The GPU sleeps between flush and call for as long as the CPU needs to send the call, whose launches so follow one
    another without a gap."""
    cycles = [int(3000 * host_us(work, launches=3)) for work in works]  # at 2 GHz half as long again
    flush, times = torch.empty(2**28, dtype=torch.uint8, device="cuda"), [[] for _ in works]
    for _ in range(rounds):
        for work, sleep, events in zip(works, cycles, times):
            flush.zero_()
            torch.cuda._sleep(sleep)
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            work()
            events[-1][1].record()
    torch.cuda.synchronize()
    return [1e3 * statistics.median(start.elapsed_time(stop) for start, stop in events) for events in times]


def sustained_us(work, seconds=0.25):
    """Mean time of a call on the GPU in us where one follows the other for so long, after as long a time to get hot."""
    calls = max(1, int(1e6 * seconds / median_us(work)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        for _ in range(calls):
            work()
        event.record()
    torch.cuda.synchronize()
    return 1e3 * events[0].elapsed_time(events[1]) / calls


def host_us(work, launches=20):
    """What a call costs the CPU, in us; the first, which may compile, is not counted."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(launches):
        work()
    spent = (time.perf_counter() - began) / launches
    torch.cuda.synchronize()
    return 1e6 * spent


def route(shape, groups):
    """ids [T, slots] on the GPU: in V3's case most slots are empty, as where experts are spread over 32 ranks."""
    T, slots, E, _, _, pairs = LAYER_SHAPES[shape]
    g = torch.Generator().manual_seed(0)
    wanted = torch.ones(E) if groups == "balanced" else 0.7 + 0.6 * torch.rand(E, generator=g)
    # the largest of E exponential races: without replacement, experts wanted more come first more often
    order = (torch.rand(T, E, generator=g).log() / wanted).argsort(1, descending=True)[:, :slots]
    filled = torch.full((T,), pairs // T)
    extra, lucky = pairs - int(filled.sum()), torch.randperm(T, generator=g)
    filled[lucky[: extra - extra // 4]] += 1
    filled[lucky[: extra // 4]] += 1
    return torch.where(torch.arange(slots) < filled[:, None], order, -1).int().cuda()


def kernel_rows(shape, groups, copy):
    """The rows of the table for one shape, without what is the same in all."""
    t = layer_tensors(shape, groups)
    for name, work, moved, unique, pair, label in itertools.chain(conversions(t), data_movement(t), chains(t)):
        us = median_us(work)
        speed = moved / us / 1e6  # 0: a chain, for which no bytes are counted
        yield {"shape": shape, "groups": groups, "kernel": name, "us": round(us, 2), "tb_per_s": round(speed, 3) or None,
               "percent_of_copy": round(100 * speed / copy, 1) or None, "unique_mb": round((unique or moved) / 1e6, 1) or None,
               "times_pair": round(median_us(pair) / us, 2) if pair else None, "pair": label, "host_us": round(host_us(work), 1)}


FP8, FP4 = 1 + 4 / 128, 1 / 2 + 1 / 32  # bytes an element of rows, scales included


def layer_tensors(shape, groups):
    """What the kernels of one MoE layer read, random, by name."""
    import kernels as k

    T, slots, E, H, I, _ = SHAPES[shape]
    ids = route(shape, groups)
    pairs = int((ids >= 0).sum())
    M = int(((torch.bincount(ids[ids >= 0], minlength=E) + 127) // 128 * 128).sum())
    pair, row, layout, _, shift = k.group_rows(ids, E, M)
    new = lambda *size, dtype=torch.bfloat16: torch.randn(*size, device="cuda", dtype=dtype)
    x, h, p, end = new(T, H), new(M, 2 * I), torch.rand(T * slots, device="cuda"), layout[0, -1:]
    x8, x4 = (lambda q: (q[:2], q[2:]))(k.quantize_fp8_fp4_rows(x))
    h8, h4 = (k.swiglu(h, p, pair, shift, end, pairs, save)[2:] for save in ("fp8", "fp4"))
    return types.SimpleNamespace(
        T=T, H=H, I=I, E=E, M=M, pairs=pairs, ids=ids, pair=pair, row=row, layout=layout, shift=shift, end=end,
        index=(pair, end, slots), p=p, x=x, weight=new(H, dtype=torch.float32), x8=x8, x4=x4, h=h, h8=h8, h4=h4,
        da=new(M, I), y=new(M, H),
        w13=new(min(E, 16), 2 * I, H, dtype=torch.float32), wide=new(M, H))


def case(name, work, moved=0, unique=0, pair=None, label=""):
    """A row to measure: the call, the bytes it moves, how many of them are unique, the unfused pair and what that is."""
    return name, work, moved, unique, pair, label


def conversions(t):
    import kernels as k

    n, x = t.T * t.H, t.x
    for what, asked, size in (("bf16", (True,), 2), ("bf16, fp8", (True, True), 2 + FP8), ("fp8", (False, True), FP8),
                              ("fp4", (False, False, True), FP4)):
        yield case(f"rms_norm -> {what}", lambda: k.rms_norm(x, t.weight, 1e-6, *asked), n * (2 + size))
    yield case("rms_norm -> bf16, fp8, fp4", lambda: k.rms_norm(x, t.weight, 1e-6, True, True, True), n * (2 + 2 + FP8 + FP4), 0,
               lambda: k.quantize_fp8_fp4_rows(k.rms_norm(x, t.weight, 1e-6)[0]), "norm, then quantise")
    yield case("rms_norm_backward", lambda: k.rms_norm_backward(x, x, t.weight, 1e-6), n * 6)
    yield case("quantize_fp8_rows", lambda: k.quantize_fp8_rows(x), n * (2 + FP8))
    yield case("quantize_fp4_rows", lambda: k.quantize_fp4_rows(x), n * (2 + FP4))
    yield case("quantize_fp8_fp4_rows", lambda: k.quantize_fp8_fp4_rows(x), n * (2 + FP8 + FP4), 0,
           lambda: (k.quantize_fp8_rows(x), k.quantize_fp4_rows(x)), "one after the other")
    yield case("quantize_fp8_rows_and_cols", lambda: k.quantize_fp8_rows_and_cols(x), n * (2 + 2 * FP8))
    blocks = k.quantize_fp8_blocks(t.w13)[0].view(torch.uint8)
    yield case("quantize_fp8_weight", lambda: k.quantize_fp8_weight(t.w13), t.w13.numel() * 6, 0,
           lambda: (k.quantize_fp8_blocks(t.w13), blocks.mT.contiguous()), "quantise, transpose")
    yield case("fp8_to_fp4", lambda: k.fp8_to_fp4(*t.x8), n * (FP8 + FP4), 0,
           lambda: k.quantize_fp4_rows(dequantize_rows(*t.x8)), "by way of bfloat16")


def data_movement(t):
    import kernels as k

    T, M, I, P = t.T * t.H, t.M * t.H, t.M * t.I, t.pairs * t.I  # padding is written, not read
    place = t.p, t.pair, t.shift, t.end
    yield case("group_rows (3 launches)", lambda: k.group_rows(t.ids, t.E, t.M), 12.0 * t.ids.numel())
    yield case("regroup_rows", lambda: k.regroup_rows(t.row, t.layout, t.M), 8.0 * t.ids.numel())
    sent = t.ids.new_empty(2, t.E // 2 + 1)  # as if half of these experts were another rank's
    yield case("messages' places (3 launches)", lambda: k.place_messages(
        t.ids, t.E // 2, k.count_messages(t.ids, t.E // 2, sent), sent), 8.0 * t.ids.numel() + 16 * t.T)
    for name, q, size in (("fp4", t.x4, FP4), ("fp8", t.x8, FP8)):
        rows, cols = getattr(k, f"{name}_fan_out_rows"), getattr(k, f"{name}_fan_out_cols")
        yield case(f"{name} fan-out rows", lambda: rows(*q, *t.index), M * (size + FP8), T * size + M * FP8,
               lambda: k.quantize_fp8_rows(dequantize_rows(*q, *t.index, out=t.wide)), "by way of bfloat16")
        yield case(f"{name} fan-out cols", lambda: cols(*q, *t.index), M * (size + 1), T * size + M,
               lambda: quantize_cols(dequantize_rows(*q, *t.index, out=t.wide)), "by way of bfloat16")
    yield case("fp8 fan-out rows and cols", lambda: k.fp8_fan_out_cols(*t.x8, *t.index, True), M * (2 * FP8 + 1),
           T * FP8 + M * (FP8 + 1), lambda: (k.fp8_fan_out_rows(*t.x8, *t.index), k.fp8_fan_out_cols(*t.x8, *t.index)),
           "one after the other")
    yield case("bf16 fan-out rows", lambda: k.fan_out_rows(t.x, *t.index), M * 4, T * 2 + M * 2)
    for save, kept, size in (("fp8", t.h8, FP8), ("fp4", t.h4, FP4)):
        yield case(f"swiglu, h in {save}", lambda: k.swiglu(t.h, *place, t.pairs, save), I * FP8 + P * (4 + 2 * size), 0,
               lambda: unfused_swiglu(t, save), "then quantise a and h")
        yield case(f"swiglu_backward, h in {save}", lambda: k.swiglu_backward(t.da, *place, *kept),
                   I * 5 * FP8 + P * (2 + 2 * size), 0, lambda: unfused_swiglu_backward(t, kept), "dequantise, then quantise")
    yield case("swiglu_bf16", lambda: k.swiglu_bf16(t.h, t.p, t.pair, t.end), I * 2 + P * 4)
    yield case("swiglu_backward_bf16", lambda: k.swiglu_backward_bf16(t.da, t.h, t.p, t.pair, t.end),
               I * 6 + P * 6)
    yield case("sum_rows", lambda: k.sum_rows(t.y, t.row), 2 * t.H * (t.pairs + t.T))
    yield from messages(t)


def messages(t):
    """What a wire makes and reads: of two ranks' where sums are home."""
    import kernels as k

    beside = t.ids, t.p.view(t.ids.shape)  # as large as places and weights
    size = lambda name, *others: quant.message_bytes(name, t.H, torch.bfloat16, *((x.dtype, x.shape[1]) for x in others))
    sent, home = size("fp4", *beside), size("fp8")
    yield case("fp4 rows to messages", lambda: k.pack_rows(*t.x4, beside, None, sent), 2 * t.T * sent)
    yield case("quantize to fp8 messages", lambda: k.quantize_to_messages(t.x, (), None, home), t.T * (2 * t.H + home))
    came, row = k.quantize_to_messages(t.x, (), None, home), torch.arange(t.T, device=t.x.device, dtype=torch.int32)
    codes, byte = came[:, :t.H].view(torch.float8_e4m3fn), came[:, t.H:t.H + t.H // 128]
    yield case("sum of fp8 messages", lambda: k.sum_rows(codes, row.view(-1, 2), byte, torch.bfloat16),
               t.T * (t.H + t.H // 128 + t.H))


def unfused_swiglu(t, save="fp8"):
    """swiglu by way of bfloat16: a in bfloat16, then two quantisers."""
    import kernels as k

    quantise = k.quantize_fp8_rows if save == "fp8" else k.quantize_fp4_rows
    return k.quantize_fp8_rows(k.swiglu_bf16(t.h, t.p, t.pair, t.end)), quantise(t.h)


def unfused_swiglu_backward(t, kept):
    """swiglu_backward by way of bfloat16: h dequantised, dh and a in bfloat16, then quantisers of rows and of columns."""
    import kernels as k

    dh, a, _ = k.swiglu_backward_bf16(t.da, dequantize_rows(*kept, out=t.h), t.p, t.pair, t.end)
    return k.quantize_fp8_rows(dh), quantize_cols(dh), quantize_cols(a)


def chains(t):
    """Everything of a layer but its GEMMs: quantise x, fan it out, SwiGLU, sum; dy, SwiGLU backward, the columns of x, sum."""
    import kernels as k

    place = t.p, t.pair, t.shift, t.end

    def grouped(quantise, rows, cols):
        q = quantise(t.x)
        rows(*q, *t.index), k.swiglu(t.h, *place, t.pairs), k.sum_rows(t.y, t.row)
        k.fp8_fan_out_cols(*k.quantize_fp8_rows(t.x), *t.index, True)
        k.swiglu_backward(t.da, *place, *t.h8), cols(*q, *t.index), k.sum_rows(t.y, t.row)

    def by_bfloat16():
        q = k.quantize_fp4_rows(t.x)
        k.quantize_fp8_rows(dequantize_rows(*q, *t.index, out=t.wide)), unfused_swiglu(t), k.sum_rows(t.y, t.row)
        dy = dequantize_rows(*k.quantize_fp8_rows(t.x), *t.index, out=t.wide)
        k.quantize_fp8_rows(dy), quantize_cols(dy), unfused_swiglu_backward(t, t.h8)
        quantize_cols(dequantize_rows(*q, *t.index, out=t.wide)), k.sum_rows(t.y, t.row)

    mxfp4 = lambda: grouped(k.quantize_fp4_rows, k.fp4_fan_out_rows, k.fp4_fan_out_cols)
    yield case("chain of a grouped layer, mxfp4", mxfp4, 0, 0,
           lambda: grouped(k.quantize_fp8_rows, k.fp8_fan_out_rows, k.fp8_fan_out_cols), "the same in fp8")
    yield case("chain of a grouped layer, mxfp4", mxfp4, 0, 0, by_bfloat16, "every step by way of bfloat16")

    def plain(kept):
        """x for the GEMM and as it is kept, its columns in backward; dy as rows and columns."""
        q = k.quantize_fp8_fp4_rows(t.x)[2:] if kept == "fp4" else k.quantize_fp8_rows(t.x)
        (k.fp4_fan_out_cols if kept == "fp4" else k.fp8_fan_out_cols)(*q), k.quantize_fp8_rows_and_cols(t.x)

    def plain_by_bfloat16():
        k.quantize_fp8_rows(t.x), quantize_cols(dequantize_rows(*k.quantize_fp4_rows(t.x)))
        k.quantize_fp8_rows(t.x), quantize_cols(t.x)

    yield case("chain of a plain linear, mxfp4", lambda: plain("fp4"), 0, 0, lambda: plain("fp8"), "the same in fp8")
    yield case("chain of a plain linear, mxfp4", lambda: plain("fp4"), 0, 0, plain_by_bfloat16, "every step by way of bfloat16")


# ---- gemm ----

# E experts, M rows in all, H hidden, I expert width; the four GEMMs of a layer read and write these. small-shared: one for all
GEMM_SHAPES = {"v3": (8, 32768, 7168, 2048), "v3-32": (32, 32768, 2048, 2048), "v2": (20, 24576, 5120, 1536),
               "v2-lite": (64, 98304, 2048, 1408), "small": (64, 786432, 768, 256), "small-shared": (1, 131072, 768, 256)}
GEMM_COLUMNS = ("shape", "groups", "gemm", "E", "M", "N", "K", "us", "tflops", "percent_of_roof", "times_bf16_grouped",
                "times_scaled_mm_loop", "times_deep_gemm", "roof_tflops", "sustained_tflops", *NOTED)


def gemm(args, flags):
    """Times the FP8 GEMMs of expert layers beside BF16 grouped_mm, a loop of scaled_mm, and DeepGEMM where it is installed.

    A single expert's GEMMs, as those of dense layers, are beside matmul for grouped_mm. All of a shape take turns, so that they
    run equally hot: an H200 at work is held to 700 W, not to a clock. The roof is scaled_mm with one scale a tensor, 8192 x 7168
    x 2048, in the same turns. sustained_tflops: ours back to back for a quarter of a second, as in a step that hardly pauses.
    One row a GEMM in --out, results/<card>/gemm.csv if not given."""
    names = shape_names(args, flags, GEMM_SHAPES)
    with results_file(args.out, "gemm", GEMM_COLUMNS) as (where, write):
        for name in names:
            for groups in ("balanced", "jittered") if GEMM_SHAPES[name][0] > 1 else ("balanced",):
                rows = []
                for row in itertools.chain(gemm_rows(name, groups), whole_layer(rows)):
                    rows.append(row)
                    others = "".join(f"  {row[key]:.2f}x {label}" for key, label in (
                        ("times_bf16_grouped", "bf16 grouped"), ("times_scaled_mm_loop", "scaled_mm"),
                        ("times_deep_gemm", "DeepGEMM")) if row[key])
                    print(f"{name:8}{groups:9}{row['gemm']:28}{row['us']:8.0f} us {row['tflops']:6.0f} TFLOP/s "
                          f"{row['percent_of_roof']:5.1f} % of {row['roof_tflops']:.0f}{others}", flush=True)
                    write(row | where)


def group_sizes(E, M, groups):
    """Rows an expert, multiples of 128 with a sum near M: equal, or jittered 0.7 to 1.3 with one expert empty."""
    if groups == "balanced":
        return [-(-M // E // 128) * 128] * E
    wanted = 0.7 + 0.6 * torch.rand(E, generator=torch.Generator().manual_seed(0))
    wanted[1] = 0
    return (wanted / wanted.sum() * M // 128 * 128).int().tolist()


def gemm_rows(name, groups):
    """The rows of the table for one shape: two forward, two Dgrad, two Wgrad GEMMs."""
    import kernels as k

    E, M, H, I = GEMM_SHAPES[name]
    sizes = group_sizes(E, M, groups)
    M = sum(sizes)
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")
    experts = torch.arange(E, device="cuda", dtype=torch.int32).repeat_interleave(offsets.diff() // 128)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x = [new(n, 2048).to(torch.float8_e4m3fn) for n in (8192, 7168)]
    one = torch.ones((), device="cuda")
    roof = lambda: torch._scaled_mm(x[0], x[1].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def row(what, N, K, works):
        us = take_turns([roof, *(work for work in works if work)], 14)
        roof_tflops, ours = 2 * 8192 * 7168 * 2048 / us[0] / 1e6, us[1]
        others = iter(us[2:])
        times = [round(next(others) / ours, 3) if work else None for work in works[1:]]
        tflops = 2 * M * N * K / ours / 1e6
        return dict(zip(GEMM_COLUMNS, (name, groups, what, E, M, N, K, round(ours, 1), round(tflops, 1),
                                       round(100 * tflops / roof_tflops, 1), *times, round(roof_tflops, 1),
                                       round(2 * M * N * K / sustained_us(works[0]) / 1e6, 1))))

    in_bf16 = (lambda a, b: a @ (b[0] if b.dim() == 3 else b)) if E == 1 else functools.partial(F.grouped_mm, offs=offsets[1:])
    for what, N, K in (("FC1", 2 * I, H), ("FC2", H, I), ("Dgrad of FC2", I, H), ("Dgrad of FC1", H, 2 * I)):
        a, b, out = new(M, K), new(E, N, K), new(M, N)
        a8, b8 = k.quantize_fp8_rows(a), k.quantize_fp8_blocks(b)
        yield row(what, N, K, (
            lambda: k.grouped_gemm(*a8, *b8, experts, out), lambda: in_bf16(a, b.mT),
            scaled_mm_loop(a8, b8, sizes), deep_gemm_grouped(a8, b8, sizes, out)))
    for what, N, K in (("Wgrad of FC1", 2 * I, H), ("Wgrad of FC2", H, I)):
        a, b = new(M, N), new(M, K)
        a8, b8 = k.quantize_fp8_rows_and_cols(a)[2:], k.fp8_fan_out_cols(*k.quantize_fp8_rows(b))[:2]
        for kind, dtype, add in (("bf16", torch.bfloat16, False), ("float32, added", torch.float32, True)):
            dw = torch.zeros(E, N, K, device="cuda", dtype=dtype)
            yield row(f"{what}, {kind}", N, K, (
                lambda: k.grouped_wgrad(*a8, *b8, None if E == 1 else offsets, dw, add),
                lambda: dw.add_(in_bf16(a.t(), b)) if add else in_bf16(a.t(), b), None, None))


def whole_layer(rows):
    """One more row: the sum of the six GEMMs of a layer's forward and backward, weight gradients in bfloat16."""
    six = [row for row in rows if not row["gemm"].endswith("added")]
    us = sum(row["us"] for row in six)
    tflops = sum(row["us"] * row["tflops"] for row in six) / us
    roof = sum(row["us"] for row in six) / sum(row["us"] / row["roof_tflops"] for row in six)
    bf16 = sum(row["us"] * row["times_bf16_grouped"] for row in six) / us
    hot = us * tflops / sum(row["us"] * row["tflops"] / row["sustained_tflops"] for row in six)
    yield six[0] | {"gemm": "sum of six", "N": None, "K": None, "us": round(us, 1), "tflops": round(tflops, 1),
                    "percent_of_roof": round(100 * tflops / roof, 1), "times_bf16_grouped": round(bf16, 3),
                    "times_scaled_mm_loop": None, "times_deep_gemm": None, "roof_tflops": round(roof, 1),
                    "sustained_tflops": round(hot, 1)}


def scaled_mm_loop(a8, b8, sizes):
    """A call of one F.scaled_mm (cuBLASLt) an expert, 1x128 by 128x128: what torch offers today. Scales are laid out before:
    stride 1 along M for A; stride 1 along K for B, of whose blocks it wants a multiple of four."""
    from torch.nn.functional import ScalingType

    (a, a_scale), (b, b_scale), bounds = a8, b8, [0, *itertools.accumulate(sizes)]
    padded = F.pad(b_scale, (0, -b_scale.shape[2] % 4))
    args = [(a[s:t], b[e].t(), a_scale[s:t].t().contiguous().t(), ScalingType.BlockWise1x128, padded[e].t(),
             ScalingType.BlockWise128x128) for e, (s, t) in enumerate(itertools.pairwise(bounds)) if t > s]
    return lambda: [F.scaled_mm(*six, output_dtype=torch.bfloat16) for six in args]


def deep_gemm_grouped(a8, b8, sizes, out):
    """A call of DeepGEMM's m-grouped kernel on the same operands, or None where it is not installed or does not run."""
    try:
        import deep_gemm
    except ImportError:
        return None
    layout = torch.arange(len(sizes), device="cuda", dtype=torch.int32).repeat_interleave(torch.tensor(sizes, device="cuda"))
    work = lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a8, b8, out, layout)
    try:
        work()
    except Exception as error:  # whatever a library of its own does
        print(f"DeepGEMM is left out: {' '.join(str(error).split())[:200]}")
        return None
    return work


# ---- layer ----

# as SHAPES; v3-all: every token on all 8 experts; tiny: for tests
LAYER_SHAPES = {**SHAPES, "v3-all": (4096, 8, 8, 7168, 2048, 32768), "tiny": (256, 2, 4, 256, 128, 512)}
LAYER_COLUMNS = ("shape", "groups", "layer", "forward_us", "us", "tflops", "times_grouped_mm", "times_bf16", "times_fp8",
                 "float32_us", "float32_times_grouped_mm", "weights_us", "kept_bytes_a_row", *NOTED)
LAYERS = {"bf16": RECIPES["bf16"], "fp8": RECIPES["fp8"], "mxfp4": RECIPES["mxfp4"],
          "mxfp4, h in fp4": dataclasses.replace(RECIPES["mxfp4"], save_h="fp4")}


def layer(args, flags):
    """Times routed experts, forward and backward, in each recipe beside a plain PyTorch layer on BF16 F.grouped_mm.

    Weights are quantised before (weights_us says in what time); their gradients are BF16 and not added to anything, or, in the
    columns float32, added to float32 ones. Quantising x and dy is counted. The plain layer compiles its elementwise parts and is
    given its permutation, which ours makes in forward and again in backward. Bytes kept are what the allocator holds between
    forward and backward, but for the output, over the token-expert pairs. One row a layer in --out, results/<card>/layer.csv if
    not given."""
    names = shape_names(args, flags, LAYER_SHAPES)
    with results_file(args.out, "layer", LAYER_COLUMNS) as (where, write):
        for name in names:
            for groups in ("balanced", "jittered"):
                for row in layer_rows(name, groups):
                    print(f"{name:8}{groups:9}{row['layer']:18}{row['us']:8.0f} us {row['tflops']:5.0f} TFLOP/s"
                          f"  {row['times_grouped_mm']:.2f}x grouped_mm  {row['times_bf16']:.2f}x bf16"
                          f"  {row['times_fp8']:.3f}x fp8  float32 {row['float32_us']:.0f} us"
                          f" {row['float32_times_grouped_mm']:.2f}x  kept {row['kept_bytes_a_row']:.0f} B a row", flush=True)
                    write(row | where)


def layer_rows(shape, groups):
    T, slots, E, H, I, pairs = LAYER_SHAPES[shape]
    ids = route(shape, groups)
    new = lambda *size, scale=1.0, dtype=torch.bfloat16: torch.randn(*size, device="cuda", dtype=dtype).mul_(scale)
    weights_like = lambda dtype: [new(*size, scale=size[-1] ** -0.5, dtype=dtype).requires_grad_()
                                  for size in ((E, 2 * I, H), (E, H, I))]
    x, dy, p = new(T, H).requires_grad_(), new(T, H), torch.rand(T, slots, device="cuda").requires_grad_()
    forwards = {"grouped_mm": plain_layer(ids, E)} | {
        name: functools.partial(recipe_layer, ids, pairs, recipe) for name, recipe in LAYERS.items()}
    narrow, wide = weights_like(torch.bfloat16), {}
    for compute in ("bf16", "fp8"):  # apart, since a weight's last copy alone is remembered
        wide[compute] = weights_like(torch.float32)
        for weight in wide[compute]:
            weight.grad = torch.zeros_like(weight)
    works = []
    for name, forward in forwards.items():
        works += [functools.partial(forward, x, p, *narrow), functools.partial(there_and_back, forward, x, p, narrow, dy)]
        master = wide["fp8" if name in LAYERS and LAYERS[name].compute == "fp8" else "bf16"]
        works += [functools.partial(there_and_back, forward, x, p, narrow if name == "grouped_mm" else master, dy,
                                    [weight.grad for weight in master])]
    us = take_turns(works, 12)
    us = {name: us[3 * i : 3 * i + 3] for i, name in enumerate(forwards)}
    for name, (forward_us, both_us, float32_us) in us.items():
        compute = LAYERS[name].compute if name in LAYERS else "bf16"
        yield {"shape": shape, "groups": groups, "layer": name, "forward_us": round(forward_us, 1), "us": round(both_us, 1),
               "tflops": round(18 * pairs * H * I / both_us / 1e6, 1),
               "times_grouped_mm": round(us["grouped_mm"][1] / both_us, 3), "times_bf16": round(us["bf16"][1] / both_us, 3),
               "times_fp8": round(us["fp8"][1] / both_us, 3), "float32_us": round(float32_us, 1),
               "float32_times_grouped_mm": round(us["grouped_mm"][2] / float32_us, 3),
               "weights_us": round(median_us(lambda: [quant._weight_copies(w.detach(), compute, torch.bfloat16, None)
                                                      for w in wide[compute]]), 1),
               "kept_bytes_a_row": round(kept_between(forwards[name], x, p, narrow) / pairs)}


def recipe_layer(ids, pairs, recipe, x, p, w13, w2):
    return quant.experts(x, ids, p, w13, w2, recipe, num_pairs=pairs)


def plain_layer(ids, E):
    """What one would write in plain PyTorch: gather, grouped_mm, SwiGLU times the gate weight, grouped_mm, add up.

    Experts' rows are padded to 8, as grouped_mm's backward wants; where each pair goes is worked out here, once."""
    pair_P = (ids.flatten() >= 0).nonzero().squeeze(1)
    expert_P, order_P = ids.flatten()[pair_P].sort(stable=True)
    counts = torch.bincount(expert_P, minlength=E)
    ends = ((counts + 7) // 8 * 8).cumsum(0)
    row_P = torch.arange(len(pair_P), device=ids.device) + (ends - counts.cumsum(0) - (-counts % 8))[expert_P]
    pair_M = torch.full((int(ends[-1]),), -1, device=ids.device).index_copy_(0, row_P, pair_P[order_P])
    token_M, real_M, ends = pair_M.clamp(min=0) // ids.shape[1], (pair_M >= 0)[:, None], ends.int()

    @functools.partial(torch.compile, dynamic=True)
    def swiglu(h, p):
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up * p

    def forward(x, p, w13, w2):
        p_M = (p.flatten()[pair_M.clamp(min=0)][:, None] * real_M).bfloat16()
        a = swiglu(F.grouped_mm(x[token_M], w13.mT, offs=ends), p_M)
        return torch.zeros_like(x).index_add_(0, token_M, F.grouped_mm(a, w2.mT, offs=ends))

    return forward


def there_and_back(forward, x, p, weights, dy, added_to=None):
    """Forward and backward; gradients of the weights are dropped, or end in `added_to`, what .grad is, or is added to it."""
    forward(x, p, *weights).backward(dy)
    x.grad = p.grad = None
    if added_to is None or weights[0].dtype != torch.float32:
        for weight, total in zip(weights, added_to or weights):
            if added_to is not None:
                total.add_(weight.grad)
            weight.grad = None


def kept_between(forward, x, p, weights):
    """Bytes that the allocator holds after forward, beyond the output and what was there before."""
    for _ in range(2):  # the first call may leave something for all later ones
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        mine = x * 1  # autograd refers to no leaf, so what it does not keep is freed
        y = forward(mine, p, *weights)
        del mine
        held = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        del y
    return held


# ---- train ----

# What one rank does of models whose experts are spread over many: (ranks, sequences of a micro-batch, what is cut). Cut are
# layers, and of V3's and V2's vocabulary all but the share of one of eight ranks. Sequences: so many that the GPU is what
# takes the time, and not the host.
SLICES = {"v3": (32, 2, dict(n_layers=6, n_dense=0, vocab_size=129280 // 8)),
          "v2": (8, 2, dict(n_layers=6, n_dense=0, vocab_size=102400 // 8)), "v2-lite": (4, 6, {})}
SEQ_LEN = 4096
SCOPES = "none;norm;norm,mla_up;attn,norm,mlp;attn,norm,moe"
TRAIN_COLUMNS = ("shape", "layers", "precision", "recompute", "in_flight", "tokens", "layers_tokens_per_s", "tokens_per_s",
                 "layers_times_bf16", "layers_times_fp8", "layers_half_width", "times_bf16", "times_fp8", "half_width",
                 "layers_ms", "head_ms", "weights_ms", "optimizer_ms", "step_ms", "step_share_of_parts", "peak_gib", "kept_bytes",
                 "kept_bytes_formula", "limit_gib", "rounds", *NOTED)
PRECISIONS = ("bf16", "fp8", "mxfp4")


def train(args, flags):
    """Times slices of V3, V2 and V2-Lite in each precision and recompute scope: layers alone, and whole optimizer steps.

    A slice does what one expert-parallel rank does, with that rank's experts: as many tokens arrive as would from all ranks (they
    are copies of its own), a fixed plan sends each expert as many, and the partial sums of all ranks are added up at home. Only
    the network is missing. A step is --in_flight forwards, as many backwards, clipping, AdamW with BF16 moments, the balance
    update and quantising the weights. The precisions take turns; ratios are means over the turns, with half of their 95 %
    interval. Bytes kept are a token's and a layer's. One row a precision and scope in --out, results/<card>/train.csv if not
    given.
    """
    names = shape_names(args, flags, SLICES)
    for scope in args.recompute.split(";"):
        if unknown := set(scope.split(",")) - {"none", *model.RECOMPUTE_SCOPES}:
            raise ValueError(f"--recompute: there is no {min(unknown)}; scopes are lists like {SCOPES}.")
    precisions = args.precisions.split(";") if args.precisions else PRECISIONS if args.in_flight == 1 else [*LAYERS]
    if unknown := set(precisions) - LAYERS.keys():
        raise ValueError(f"--precisions: there is no {min(unknown)}; there are {'; '.join(LAYERS)}, with ; between them.")
    if min(args.in_flight, args.rounds) < 1:
        raise ValueError(f"--in_flight={args.in_flight} --rounds={args.rounds}: both are at least 1.")
    with results_file(args.out, "train", TRAIN_COLUMNS) as (where, write):
        share = args.memory_gb * 1e9 / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(share or 1.0, 1.0))  # all again where a call before set less
        for name in names:
            part = Slice(name, args.layers, args.in_flight)
            gc.collect()
            gc.freeze()  # as train.py does
            for scope in args.recompute.split(";"):
                for row in slice_rows(part, scope, args.rounds, precisions):
                    row |= {"shape": name, "limit_gib": args.memory_gb and round(args.memory_gb * 1e9 / 2**30, 1)}
                    print(slice_line(row), flush=True)
                    write(row | where)
            del part
            gc.collect()
            torch.cuda.empty_cache()


def slice_line(row):
    line = f"{row['shape']:8}{row['recompute']:15}{row['precision']:6}"
    if row["tokens_per_s"] is None:
        return line + " does not fit"
    times = lambda prefix: " ".join(f"{row[prefix + 'times_' + other] or math.nan:.3f}x {other}" for other in ("bf16", "fp8"))
    return (f"{line} layers {row['layers_tokens_per_s']:8.0f} tok/s {times('layers_')}  step {row['tokens_per_s']:8.0f} tok/s"
            f" {times('')}, {row['step_share_of_parts']:.3f} of its parts  {row['peak_gib']:6.1f} GiB"
            f"  kept {row['kept_bytes']:.0f} B, by formula {row['kept_bytes_formula']:.0f}")


class Slice:
    """One rank's part of a model, its optimizer, and --in_flight micro-batches of random tokens."""

    def __init__(self, name, layers, in_flight):
        self.ranks, sequences, cut = SLICES[name]
        self.config = dataclasses.replace(PRESETS[name], **cut | ({"n_layers": layers} if layers else {}))
        self.net = one_ranks_model(self.config, self.ranks)
        self.optimizer = trainer.make_optimizer(self.net, trainer.Config(moments="bf16"))
        tokens = torch.randint(self.config.vocab_size, (in_flight, sequences, SEQ_LEN + 1), device="cuda")
        self.micro_batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        self.tokens = self.micro_batches[0][0].numel()
        self.gradient = 1e-4 * torch.randn(self.tokens, self.config.hidden, device="cuda", dtype=torch.bfloat16)
        plan = Plan(self.config, self.ranks, self.tokens)
        model.dispatch, model.combine = plan.dispatch, plan.combine

    def layers(self):
        """Forward and backward of all micro-batches through the layers; nothing is left of it."""
        outputs = [self.net.trunk(tokens)[0] for tokens, _ in self.micro_batches]
        while outputs:
            trainer.backward(outputs.pop(0), self.gradient)
        self.optimizer.zero_grad()

    def head(self):
        x = torch.randn(self.tokens, self.config.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _, targets in self.micro_batches:
            trainer.backward(self.net.cross_entropy(x, self.net.norm, targets))
        self.optimizer.zero_grad()

    def quantise_weights(self):
        quant.new_epoch()
        for p in self.net.parameters():
            if p in quant._copies:
                quant.weight_operands(p, *quant._copies[p][0][-3:])  # as what they were last time

    def update(self):
        """What follows on the gradients of a step."""
        self.norm = trainer.square_sum(self.net, None).sqrt().float()
        trainer.update(self.net, self.optimizer, self.norm, self.norm, 1e-6, 1.0)

    def step(self):
        losses = [self.net(*batch, self.tokens * len(self.micro_batches))[1] for batch in self.micro_batches]
        while losses:
            trainer.backward(losses.pop(0))
        self.update()
        self.optimizer.zero_grad()

    def kept(self):
        """Bytes that one micro-batch keeps between forward and backward, a token and layer."""
        before = torch.cuda.memory_allocated()
        x, balance = self.net.trunk(self.micro_batches[0][0])
        held = torch.cuda.memory_allocated() - before - x.untyped_storage().nbytes()
        return held / self.tokens / self.config.n_layers


def one_ranks_model(config, ranks):
    """A Model on the GPU that holds the experts of one of so many ranks, with random weights."""
    with torch.device("meta"):
        net = model.Model(config)
        for part in net.modules():
            if isinstance(part, model.Experts):
                for name in ("w13", "w2"):
                    setattr(part, name, torch.nn.Parameter(getattr(part, name)[: config.n_experts // ranks]))
    net.to_empty(device="cuda")
    for p in net.parameters():
        torch.nn.init.normal_(p, std=config.init_std) if p.dim() > 1 else torch.nn.init.ones_(p)
    for b in net.buffers():
        b.zero_()
    net.dtype = torch.bfloat16
    return net


class Plan:
    """Where a rank's tokens go, the same in every layer and step, in the place of model.dispatch and model.combine.

    Each of T tokens is sent to m or m + 1 ranks, as many in all as `tokens_received` says. All its top_k experts are spread over
    those; each of a rank's experts gets as many. The messages a rank sends stand for those it receives: there are as many."""

    def __init__(self, config, ranks, T):
        E, K, g = config.n_experts // ranks, config.top_k, torch.Generator().manual_seed(0)
        received = round(T * model.tokens_received(config, ranks))
        self.messages_T = torch.full((T,), received // T)
        self.messages_T[torch.randperm(T, generator=g)[: received % T]] += 1
        token_N = torch.arange(T).repeat_interleave(self.messages_T)
        slot_N = torch.arange(received) - (self.messages_T.cumsum(0) - self.messages_T)[token_N]
        row_TK = torch.full((T, K), -1)
        row_TK[token_N, slot_N] = torch.arange(received)
        message_TK = torch.arange(K) % self.messages_T[:, None]  # choice i goes with message i, the rest with the first ones
        row_P = row_TK.gather(1, message_TK).flatten()  # [T * K] message of each choice
        ids_NK, pair_NK = torch.full((received, K), -1), torch.full((received, K), -1)
        place_P = torch.arange(K).repeat(T) // self.messages_T.repeat_interleave(K)  # its place in the message
        first_N = torch.arange(received) % E  # places of one message take neighbouring experts: each gets as many
        ids_NK[row_P, place_P] = (first_N[row_P] + place_P) % E
        pair_NK[row_P, place_P] = torch.arange(T * K)
        self.num_pairs, self.token_N, self.ids_NK = T * K, token_N.cuda(), ids_NK.int().cuda()
        self.row_TK, self.pair_NK = row_TK.int().cuda(), pair_NK.cuda()
        self.place_TK = (row_P * K + place_P).view(T, K).cuda()  # of each choice among [N, K]

    def dispatch(self, x, ids, weights, *_):
        weights_NK = Weigh.apply(weights, self)
        payload = x.format(x.recipe.dispatch) if x.recipe.dispatch != "bf16" else None
        x_NH = Arrive.apply(x.x, self, payload is None)
        return model.Received(x_NH, self.ids_NK, weights_NK, payload and rows_of(payload, self.token_N), x.recipe, self.num_pairs)

    def combine(self, y, received, beside=None):
        y = Return.apply(y, self, received.payload is None)
        return y + beside() if beside is not None else y


def rows_of(q, index):
    """Rows of Fp8 or Fp4; FP8 codes as bytes, which torch can index."""
    return type(q)(q.data.view(torch.uint8)[index].view(q.data.dtype), q.scale[index])


class Weigh(torch.autograd.Function):
    """Gate weights of each message's experts [N, K]."""

    @staticmethod
    def forward(ctx, weights, plan):
        ctx.plan = plan
        return weights.flatten()[plan.pair_NK.clamp(min=0)].masked_fill_(plan.pair_NK < 0, 0)

    @staticmethod
    def backward(ctx, dweights):
        return dweights.flatten()[ctx.plan.place_TK], None


class Arrive(torch.autograd.Function):
    """x of each message, or where its bits are the payload, what carries the gradient; backward adds up what comes home."""

    @staticmethod
    def forward(ctx, x, plan, in_full):
        ctx.plan = plan
        return x[plan.token_N] if in_full else quant.carrier(x[:1].expand(len(plan.token_N), -1))

    @staticmethod
    def backward(ctx, dx):
        return quant.sum_rows(dx, ctx.plan.row_TK), None, None


class Return(torch.autograd.Function):
    """Experts' sums added up at home; backward sends dy to each, in FP8 unless in_full."""

    @staticmethod
    def forward(ctx, y, plan, in_full):
        ctx.plan, ctx.in_full = plan, in_full
        return quant.sum_rows(y, plan.row_TK)

    @staticmethod
    def backward(ctx, dy):
        token_N = ctx.plan.token_N
        if ctx.in_full:
            return dy[token_N], None, None
        wire = rows_of(quant.quantize_fp8_rows(dy), token_N)
        return quant.carrier(dy[:1].expand(len(token_N), -1), wire), None, None


def slice_rows(part, scope, rounds, precisions=PRECISIONS):
    """The rows of one scope: all precisions that fit, by turns."""
    net, found = part.net, {name: [] for name in precisions}
    net.recompute = frozenset(scope.split(",")) - {"none"}
    works = {"layers": part.layers, "head": part.head, "weights": part.quantise_weights, "step": part.step}
    kept, peak = {}, {}
    for _ in range(rounds):
        for name in list(found):
            net.recipe = LAYERS[name]
            try:
                part.step()  # kernels are compiled, memory is found
                if not found[name]:  # once more for the first turn: what the driver is asked for, it gives slowly
                    part.layers()
                part.quantise_weights()
                kept[name] = part.kept()
                torch.cuda.reset_peak_memory_stats()
                ms = {what: gpu_ms(work) for what, work in works.items()}
                if not torch.isfinite(part.norm):  # then AdamW did nothing
                    raise FloatingPointError(f"the gradients of {scope} in {name} are not finite")
                peak[name] = torch.cuda.max_memory_allocated() / 2**30
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
                ms["optimizer"] = gpu_ms(part.update)
                found[name].append(ms)
            except torch.OutOfMemoryError:
                found.pop(name)
                torch.cuda.empty_cache()
            part.optimizer.zero_grad()
    for name in precisions:
        yield slice_row(part, scope, name, found, kept.get(name), peak.get(name))


def slice_row(part, scope, name, found, kept, peak):
    config, tokens = part.config, part.tokens * len(part.micro_batches)
    row = dict.fromkeys(TRAIN_COLUMNS[:-5]) | {"layers": config.n_layers, "precision": name, "recompute": scope,
                                               "in_flight": len(part.micro_batches), "tokens": tokens}
    if name not in found:
        return row
    row["rounds"] = len(found[name])
    ms = {what: statistics.median(turn[what] for turn in found[name]) for what in found[name][0]}
    for what, prefix in (("layers", "layers_"), ("step", "")):
        for other in {"bf16", "fp8"} & set(found):
            ratios = [theirs[what] / ours[what] for theirs, ours in zip(found[other], found[name])]
            row[f"{prefix}times_{other}"] = round(statistics.fmean(ratios), 4)
            if other == "fp8" and len(ratios) > 1:
                row[f"{prefix}half_width"] = round(interval(ratios)[1], 4)
    parts = sum(ms[what] for what in ("layers", "head", "weights", "optimizer"))
    return row | {f"{what}_ms": round(ms[what], 2) for what in ms} | {
        "layers_tokens_per_s": round(1e3 * tokens / ms["layers"], 1), "tokens_per_s": round(1e3 * tokens / ms["step"], 1),
        "step_share_of_parts": round(parts / ms["step"], 4), "peak_gib": round(peak, 2), "kept_bytes": round(kept),
        "kept_bytes_formula": round(sum(kept_by_tensor(config, name, scope, part.ranks).values()))}


def kept_by_tensor(config, precision, scope, ranks):
    """model.kept_bytes of a token and layer, the mean over a slice's layers."""
    recompute = frozenset(scope.split(",")) - {"none"}
    layers = [model.kept_bytes(config, LAYERS[precision], recompute, ranks, i < config.n_dense) for i in range(config.n_layers)]
    return {name: statistics.fmean(layer.get(name, 0) for layer in layers) for name in layers[-1]}


def gpu_ms(work):
    """Milliseconds from the first to the last kernel of a call, the host's delays included; work before it has ended."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


# ---- profile ----

# kinds of kernels by what is in their names, the first that matches; what matches none is PyTorch's
KERNEL_KINDS = {"GEMM": "gemm|nvjet|cutlass|xmma", "attention": "sdpa|fmha|flash", "optimizer": "_adamw|lpnorm|multi_tensor",
         "data movement": r"^_[a-z]|mem(cpy|set)"}
PROFILE_COLUMNS = ("shape", "layers", "precision", "recompute", "kind", "ms", "percent", "launches", *NOTED)


def profile(args, flags):
    """Where the time of one optimizer step of a slice goes, from the first kernel to the end of the last.

    By kind of kernel: GEMM, attention, optimizer (gradient norm and AdamW), data movement (all other kernels of ours, norms,
    SwiGLU and cross entropy among them, and copies), PyTorch's own, and idle, when none runs. One row a kind in --out,
    results/<card>/profile.csv if not given; --kernels prints each kernel, too."""
    names = shape_names(args, flags, SLICES)
    with results_file(args.out, "profile", PROFILE_COLUMNS) as (where, write):
        for name in names:
            part = Slice(name, args.layers, 1)
            part.net.recompute = frozenset(args.recompute.split(",")) - {"none"}
            for precision in PRECISIONS:
                part.net.recipe = RECIPES[precision]
                spans = kernel_spans(part.step)
                for row in profile_rows(spans):
                    row |= {"shape": name, "layers": part.config.n_layers, "precision": precision, "recompute": args.recompute}
                    print(f"{name:8}{precision:6}{row['kind']:15}{row['ms']:8.2f} ms {row['percent']:5.1f} %"
                          f"{row['launches'] or 0:6} launches", flush=True)
                    write(row | where)
                if args.kernels:
                    print_kernels(spans)
            del part
            gc.collect()
            torch.cuda.empty_cache()


def kernel_spans(step):
    """[(start, end, kernel's name)] in us of the third call of step, by start."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events()
                  if e.device_type == torch.autograd.DeviceType.CUDA)


def profile_rows(spans):
    """Sums by kind; what overlaps counts for the kernel that began first."""
    sums = {kind: [0.0, 0] for kind in (*KERNEL_KINDS, "PyTorch's own", "idle")}
    begin = now = spans[0][0]
    for start, end, name in spans:
        kind = next((kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, name, re.I)), "PyTorch's own")
        sums["idle"][0] += max(0, start - now)
        sums[kind][0] += max(0, end - max(now, start))
        sums[kind][1] += 1
        now = max(now, end)
    for kind, (us, launches) in sums.items():
        yield {"kind": kind, "ms": round(us / 1e3, 3), "percent": round(100 * us / (now - begin), 2),
               "launches": launches if kind != "idle" else None}


def print_kernels(spans):
    kernels = {}
    for start, end, name in spans:
        kernels.setdefault(name[:80], []).append(end - start)
    for name, us in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:60]:
        print(f"{sum(us) / 1e3:10.3f} ms {len(us):5} {name}")


def kept(args, flags):
    """Kept bytes by tensor, from a table of `train`, beside what the allocator held there.

    Bytes a token and layer between forward and backward, the mean over a slice's layers: each tensor by formula
    (model.kept_bytes), then their sum, what the allocator held, and how many percent that is more. --out: also as a csv.
    """
    if flags:
        raise ValueError(f"bench.py kept has no flag {flags[0]}: see bench.py kept --help.")
    rows, found = [row for row in read_table(args.table) if row.get("kept_bytes")], []
    if not rows or not set(TRAIN_COLUMNS) <= set(rows[0]):
        raise ValueError(f"{args.table} is no table of bench.py train with rows.")
    for row in rows:
        ranks, _, cut = SLICES[row["shape"]]
        config = dataclasses.replace(PRESETS[row["shape"]], **cut | {"n_layers": int(row["layers"])})
        tensors = kept_by_tensor(config, row["precision"], row["recompute"], ranks)
        total, held = sum(tensors.values()), float(row["kept_bytes"])
        found.append({name: row[name] for name in ("shape", "layers", "precision", "recompute")}
                     | {name: round(size) for name, size in tensors.items()}
                     | {"sum": round(total), "allocator": round(held), "percent_more": round(100 * (held / total - 1), 2)}
                     | {name: row[name] for name in NOTED})
        print("{shape}, {layers} layers, {precision}, recompute {recompute}: ".format(**row)
              + " + ".join(f"{size:.0f} {name}" for name, size in tensors.items() if size)
              + f" = {total:.0f} B, the allocator held {held:.0f}, {100 * (held / total - 1):+.2f} %")
    if args.out:
        write_table(args.out, list(found[0]), found)
        print(f"wrote {args.out}")


# ---- all ----

TABLES = ("kernels", "gemm", "layer", "profile", "train", "in_flight", "in_flight_80gb")  # of one GPU; the last three: `train`
PARTS = {"v3": 0, "v2": 1, "v3-32": 1, "v2-lite": 2, "v3-all": 2,  # of three, which has a table, all of it or of a shape
         "in_flight": 1, "in_flight_80gb": 1, "train v2": 0}
KEYS = ("shape", "groups", "kernel", "pair", "gemm", "E", "M", "N", "K", "layer", "layers", "precision", "recompute", "kind",
        "in_flight", "tokens", "limit_gib")


def all_(args, flags):
    """Measures every committed table of one GPU again, in parts, and lists what differs by more than 5 %.

    What is measured is what results/h200 has rows of: kernels.csv, gemm.csv, layer.csv, profile.csv, train.csv (three rounds),
    in_flight.csv and in_flight_80gb.csv (one round). --part=i/3 is one of three parts, each meant to take less than 9 minutes.
    Tables grow in --out, a shape or a slice's recompute scope at a time: what has rows there of this commit, card, driver, torch
    and triton is not measured again, so the same command goes on where one was cut. Compared is with results/<card>.
    """
    if flags:
        raise ValueError(f"bench.py all has no flag {flags[0]}: see bench.py all --help.")
    i, n = share_of("--part", args.part)
    if n > 3:
        raise ValueError(f"--part={args.part}: there are three parts at most.")
    if not torch.cuda.is_available():
        raise ValueError("bench.py all needs a GPU.")
    results, where = Path(__file__).parent / "results", environment()
    args.out.mkdir(parents=True, exist_ok=True)
    todo = {}  # (table, command): what tells its rows
    for name in TABLES:
        for row in map(numbers, read_table(results / "h200" / f"{name}.csv")):
            part = next((PARTS[which] for which in (name, f"{name} {row['shape']}", row["shape"]) if which in PARTS), 1)
            if part % n == i - 1:
                command, same = job(name, row)
                todo[(name, *command)] = same
    lines, agree = [], 0
    for (name, *command), same in tqdm(todo.items(), desc=f"part {args.part}", unit="job"):
        measured = measure(args.out / f"{name}.csv", command, same, where)
        listed, alike = differences(name, read_table(results / card_name(where) / f"{name}.csv"), measured)
        lines, agree = lines + listed, agree + alike
    print("\n".join([*lines, f"{agree} numbers agree with results/{card_name(where)} to 5 %; {len(lines)} differ"]))


def job(name, row):
    """(the command that measures a row of a table and what belongs to it, {column: value} that all these have)."""
    if name in ("kernels", "gemm", "layer"):
        return (name, f"--shapes={row['shape']}"), {"shape": row["shape"]}
    if name == "profile":
        same = {column: row[column] for column in ("shape", "layers", "recompute")}
        return (name, f"--shapes={row['shape']}", f"--layers={row['layers']:.0f}", f"--recompute={row['recompute']}"), same
    same = {column: row[column] for column in ("shape", "layers", "recompute", "in_flight", "limit_gib")}
    return ("train", f"--shapes={row['shape']}", f"--layers={row['layers']:.0f}", f"--recompute={row['recompute']}",
            f"--in_flight={row['in_flight']:.0f}", f"--memory_gb={row['limit_gib'] * 2**30 / 1e9:.1f}",
            f"--rounds={3 if row['in_flight'] == 1 else 1}"), same


def measure(path, command, same, where):
    """The rows of one job in the table `path`; they are measured unless they are there."""
    belongs = lambda row: same.items() <= numbers(row).items()
    is_new = lambda row: all(row.get(name) == where[name] for name in NOTED[:-1])
    rows = read_table(path)
    if found := [row for row in rows if belongs(row) and is_new(row)]:
        return found
    part = path.with_suffix(".job.csv")
    main([*command, f"--out={part}"])
    gc.collect()  # what comes next may need all of the memory
    torch.cuda.empty_cache()
    found = read_table(part)
    write_table(path, list(found[0]), [row for row in rows if not belongs(row)] + found)
    part.unlink()
    return found


def differences(name, before, now, limit=0.05):
    """(a line for each number of the rows `now` that is further from that of the same row `before`, how many are as near).

    Widths of intervals are left out."""
    key = lambda row: tuple(row[column] for column in KEYS if row.get(column) not in (None, ""))
    known, lines, alike = {key(row): row for row in map(numbers, before)}, [], 0
    for row in map(numbers, now):
        title = f"{name} {', '.join(f'{part:g}' if isinstance(part, float) else part for part in key(row))}"
        if key(row) not in known:
            lines.append(f"{title}: is not among what was measured before")
            continue
        for column, value in row.items():
            was = known[key(row)].get(column)
            if column in (*KEYS, "rounds", *NOTED) or column.endswith("half_width") or value is None is was:
                continue
            if None in (was, value):
                lines.append(f"{title}: {column} was {was or 'nothing'}, is {value or 'nothing'}")
            elif abs(value - was) > limit * abs(was):
                percent = 100 * (value / was - 1) if was else math.inf
                lines.append(f"{title}: {column} was {was:g}, is {value:g} ({percent:+.1f} %)")
            else:
                alike += 1
    return lines, alike


# ---- runs ----

RUN_FLAGS = ("precision", "compute", "save", "save_h", "wire", "recompute", "ep", "fsdp", "batch_size", "seq_len", "grad_accum",
             "moments")
RUN_COLUMNS = ("preset", "changes", "ranks", *RUN_FLAGS, "steps", "tokens_per_s", "peak_gib", "rank_balance", *NOTED)


def runs(args, flags):
    """A table of whole training runs, from the folders that train.py wrote: settings, speed, memory.

    changes: what of the model differs from the preset. tokens_per_s: of all ranks, and rank_balance, the most that a rank's
    experts have to do over the mean: medians over the second half of the steps, from the sixth on; peak_gib: of rank 0.
    Start it where the runs ran: but for runs of `loss`, card, versions and commit are taken from here.
    """
    if flags:
        raise ValueError(f"bench.py runs has no flag {flags[0]}: see bench.py runs --help.")
    rows = []
    for folder in args.given:
        config, log = read_run(folder)
        notes, noted = (json.loads(path.read_text()) if path.exists() else {}
                        for path in (folder / "config.json", folder / "environment.json"))
        timed = [row for row in log if row["step"] > max(5, log[-1]["step"] // 2) and "skipped" not in row]
        if not timed:
            raise ValueError(f"{folder} has no step behind the fifth: train for longer.")
        if "ranks" not in notes or not all("rank_balance" in row for row in timed):
            raise ValueError(f"{folder} is of an older train.py, which did not note how many ranks it had and what they did.")
        median = lambda name: statistics.median(row[name] for row in timed)
        usual = dataclasses.asdict(PRESETS[config["preset"] or "tiny"])
        row = {"preset": config["preset"] or "tiny", "steps": log[-1]["step"], "ranks": notes["ranks"],
               "changes": " ".join(f"{name}={value}" for name, value in notes["model"].items() if value != usual.get(name)),
               "tokens_per_s": round(median("tokens_per_s"), 1), "rank_balance": round(median("rank_balance"), 4),
               "peak_gib": round(max(row["peak_gib"] for row in log), 2)}
        row |= {name: config[name] for name in RUN_FLAGS}
        where = noted or environment()
        rows.append(row | {name: where.get(name, "") for name in NOTED})
        print("{preset} {changes} on {ranks}, {precision}, recompute {recompute}, ep {ep}, fsdp {fsdp}: {tokens_per_s:.0f}"
              " tokens/s, {peak_gib} GiB".format(**row))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_table(args.out, RUN_COLUMNS, rows)
    print(f"wrote {args.out}")


def config_of(row):
    """The train.Config that a row of `runs` tells of."""
    return trainer.parse_flags([f"--preset={row['preset']}", *(f"--model.{change}" for change in row["changes"].split()),
                                *(f"--{name}={row[name]}" for name in RUN_FLAGS)])


# ---- comm ----

# T tokens of each rank, and whose widths, experts and routing
COMM_SHAPES = {name: (T, PRESETS[name]) for name, T in (("v3", 4096), ("v2-lite", 4096), ("tiny", 64))}
WIRES = {"bf16": RECIPES["bf16"], "fp8": RECIPES["fp8"], "fp4": RECIPES["mxfp4"],
         "fp4-fp8": dataclasses.replace(RECIPES["mxfp4"], wire="fp4-fp8")}
COMM_COLUMNS = ("shape", "ranks", "tokens", "sent", "rows", "wire", "exchange", "ms", "mb", "mb_to_others", "gb_per_s",
                "times_bf16", *NOTED)


def comm(args, flags):
    """Times the four exchanges of an expert layer between ranks, in each wire format. Start it with torchrun.

    sent=once: each token once to each rank that holds experts of its top k; sent=pairs: once for each expert, all summed at
    home, as a wire without that does. ms: the slowest rank's, median of 40, wires in turns. dispatch is quantising, counting,
    the host's read, sending and fan-out to experts; combine is sending home and the sum there; combine's backward quantises dy
    and fans it out as rows and columns; dispatch's backward brings dx and the weights' gradients home. mb: what a rank sends;
    gb_per_s: of what goes to others. One row an exchange in --out, results/<card>/comm.csv if not given. Without GPUs it runs
    on gloo, for tests.
    """
    names = shape_names(args, flags, COMM_SHAPES)
    if "RANK" not in os.environ:
        raise ValueError("bench.py comm measures what goes between ranks: start it with torchrun --nproc_per_node=2 or more.")
    gpu = torch.cuda.is_available()
    device = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(device)
    first = os.environ["RANK"] == "0"
    table = results_file(args.out, "comm", COMM_COLUMNS, True) if first else contextlib.nullcontext((None, None))
    with table as (where, write):  # opened before ranks join: where that fails, nobody else has anything to say
        dist.init_process_group("nccl" if gpu else "gloo", device_id=torch.device("cuda", device) if gpu else None)
        try:
            for name, sent in itertools.product(names, ("once", "pairs")):
                for row in comm_rows(name, sent):
                    if first:
                        print(f"{name:8}{row['sent']:6}{row['wire']:8}{row['exchange']:20}{row['ms']:9.3f} ms"
                              f"{row['mb']:9.1f} MB {row['gb_per_s']:7.1f} GB/s  {row['times_bf16']:.2f}x bf16", flush=True)
                        write(row | where)
        finally:
            dist.destroy_process_group()


def comm_rows(name, sent):
    """The rows of the table for one shape, every wire's exchanges and their sum."""
    (T, config), ranks, bf16 = COMM_SHAPES[name], dist.get_world_size(), {}
    layers = [exchanges_of(T, config, recipe, sent == "pairs") for recipe in WIRES.values()]
    times = timed([next(layer) for layer in layers])
    for wire, layer, ms in zip(WIRES, layers, times):
        ms, (route, size) = slowest(ms), next(layer)
        out, home = sum(route.sent), sum(route.received)
        others = [n - rows[dist.get_rank()] for n, rows in ((out, route.sent), (home, route.received))]
        bytes_of = {what: (size[what] * (out, home)[i % 2], size[what] * others[i % 2]) for i, what in enumerate(size)}
        bytes_of["sum"] = tuple(map(sum, zip(*bytes_of.values())))
        for (what, (mb, away)), time_ms in zip(bytes_of.items(), [*ms, sum(ms)]):
            bf16.setdefault(what, time_ms)
            yield {"shape": name, "ranks": ranks, "tokens": T, "sent": sent, "rows": out, "wire": wire, "exchange": what,
                   "ms": round(time_ms, 4), "mb": round(mb / 1e6, 3), "mb_to_others": round(away / 1e6, 3),
                   "gb_per_s": round(away / time_ms / 1e6, 2), "times_bf16": round(bf16[what] / time_ms, 3)}


class ToExperts(torch.autograd.Function):
    """The experts' end of combine: what they do first with the gradient that arrives there."""

    @staticmethod
    def forward(ctx, y, groups, recipe):
        ctx.groups, ctx.recipe = groups, recipe
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        quant._fan_out_both(quant._received_gradient(dy, ctx.recipe), ctx.groups, ctx.recipe.compute)
        return None, None, None


def exchanges_of(T, config, recipe, pairs):
    """First yields the four exchanges of a layer, calls in their order, each using what the last left; then the route that
    tokens took, and the bytes of a message in each."""
    device, dtype, group = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    router = model.Router(config).to(device)
    ids = router.select(torch.sigmoid(torch.randn(T, config.n_experts, device=device))).int()
    x, weights = torch.randn(T, config.hidden, device=device).to(dtype), torch.rand(ids.shape, device=device)
    x, weights, state = x.requires_grad_(), weights.requires_grad_(), types.SimpleNamespace()
    per, top_k = (config.top_k, 1) if pairs else (1, config.top_k)

    def dispatch():
        sent = quant.Activation(x, recipe, *quant._quantize_rows(x.detach(), {recipe.dispatch}))
        state.got = model._send(sent, ids.view(-1, top_k), weights.view(-1, top_k), group, config.n_experts, per)
        state.got.fanned_out.take()

    def combine():
        y = ToExperts.apply(state.y, state.got.ids, recipe)
        route, way = state.got.route, []
        state.out = model._Home.apply(model._Leave.apply(y, route, recipe, way, False), route, recipe, way)

    def dispatch_backward():
        torch.autograd.backward([state.got.x, state.got.weights], [state.dx, state.dweights])

    def prepare():
        """Experts' sums and gradients of the right shapes; not timed."""
        like = torch.randn(len(state.got.weights), config.hidden, device=device).to(dtype)
        state.y, state.dx, state.dy = like.requires_grad_(), like.detach(), torch.randn_like(x)
        state.dweights, x.grad, weights.grad = torch.rand_like(state.got.weights), None, None

    yield dispatch, combine, lambda: state.out.backward(state.dy), dispatch_backward, prepare
    yield state.got.route, model.message_bytes(dataclasses.replace(config, top_k=top_k), recipe, dtype)


def timed(layers, rounds=40):
    """Median ms of each layer's first four calls, made one after the other; its last prepares what they need. Layers take turns,
    so that a slow while of the host meets all of them."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() else None
    times = [[[] for _ in works] for *works, _ in layers]
    for _ in range(rounds + 3):  # three to warm up
        for (*works, prepare), of_layer in zip(layers, times):
            for i, work in enumerate(works):
                if i == 1:
                    prepare()
                of_layer[i].append(once_ms(work, flush))
    return [[statistics.median(t[3:]) for t in of_layer] for of_layer in times]


def once_ms(work, flush):
    """One call in ms. All ranks begin together, the L2 cache flushed; the GPU sleeps for as long as the CPU needs to send the
    call."""
    if flush is None:
        dist.barrier()
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    flush.zero_()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000)  # 3 ms
    events[0].record()
    work()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def slowest(ms):
    """Each number's maximum over the ranks."""
    ms = torch.tensor(ms, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.tolist()


# ---- plan ----


class Card(NamedTuple):
    """What a plan knows of a GPU. GEMMs and kernels have the speeds of an H200's tables, in proportion to `tflops` and `copy`."""
    gib: float       # memory that torch finds
    tflops: float    # dense BF16, by data sheet
    copy: float      # TB/s, read + write: measured on the H200, elsewhere as large a share (0.89) of the data sheet's
    nvlink: float = 1  # speed of an all_to_all inside a host, as a share of the H200's; the H800 has fewer links


CARDS = {"h200": Card(139.8, 989, 4.27), "h100-80g": Card(79.1, 989, 2.98), "h800-80g": Card(79.1, 989, 2.98, 4 / 9),
         "h20-96g": Card(95.2, 148, 3.56)}
BETWEEN_HOSTS = 50  # GB/s a direction and GPU, with a 400 Gbit/s adapter each
# FLOP/s of cuDNN on an H200, causal, 4096 tokens, heads of 192 and 128: forward; forward and backward, seven products
ATTENTION = 538e12, 417e12
LAUNCHES = 150  # of a MoE layer, forward and backward, as profiles of slices count them (133 to 161)
ONCE = "optimizer", "weights", "gradients of copies"  # a step, not a micro-batch
PLAN_DEFAULTS = "--preset=v3", "--seq_len=4096", "--batch_size=1", "--moments=bf16"
ASSUMED = """\
Assumed, and no more than a guess, for we know neither layouts nor schedules: 256 H100, pp = 256 / ep, 1F1B with layers
spread evenly, micro-batches of 4096 tokens, 2048 sequences a step, 50 GB/s a GPU between hosts, nothing hidden but what
our code hides, weights and moments of what is dense sharded over a stage at no cost, BF16 moments, and which of our scopes
theirs are. ours: mxfp4 with the fewest scopes that stay below 95 % of 80 GB.
"""
PLAN_COLUMNS = ("preset", "gpus", "card", "ep", "pp", "fsdp", "precision", "recompute", "micro_batches", "tokens",
                "rank_balance", "stage", "memory_gib", "card_gib", "wire_mb", "step_ms", "tokens_per_s_gpu", "bound_by")
# Published for V3 on GPUs of 80 GB: whose, EP, our recipe and scopes that come nearest, tokens/GPU/s, share of 80 GB
PUBLISHED = (("FP8-Flow, EP8", 8, "fp8", "attn,norm,moe", 1176, None),
             ("FP8-Flow, EP32", 32, "fp8", "attn,norm,mlp", 912, None),
             ("FP4 paper, its FP8", 32, "fp8", "attn,norm,moe", 1157, 0.742),
             ("FP4 paper, same scopes", 32, "mxfp4", "attn,norm,moe", 1156, 0.594),
             ("FP4 paper, fewer scopes", 32, "mxfp4", "attn,norm,mlp", 1302, None))


def plan(args, flags):
    """Predicts memory and speed of training a model on so many GPUs. Needs no GPU.

    Any flag of train.py may follow; --preset=v3 --seq_len=4096 --batch_size=1 --moments=bf16 unless given. Formulas are those of
    model.py, speeds those of results/h200/gemm.csv, kernels.csv and comm.csv, in proportion to the card's; nothing is fitted to
    whole steps. A pipeline, which train.py has not, is 1F1B with layers spread evenly and, unless --grad_accum is given, four
    micro-batches a stage; what goes between stages is taken as hidden. --published: published numbers of V3 beside predictions.
    """
    if args.card not in CARDS:
        raise ValueError(f"--card={args.card}: choose one of {', '.join(CARDS)}.")
    config = trainer.parse_flags([*PLAN_DEFAULTS, *flags])
    if args.pp > 1 and not any(flag.startswith("--grad_accum") for flag in flags):
        config = dataclasses.replace(config, grad_accum=4 * args.pp)
    if args.published:
        return print(published())
    if not 1 <= args.rank_balance <= config.ep:
        raise ValueError(f"--rank_balance={args.rank_balance}: from 1 to --ep={config.ep}, where one rank does everything.")
    found = predict(config, args.gpus, args.pp, args.card, args.wire_gb_s, args.rank_balance)
    print(plan_text(found, config, args))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, PLAN_COLUMNS)
            writer.writeheader()
            writer.writerow(found["row"])
        print(f"wrote {args.csv}")


def predict(config, gpus, pp, card, wire_gb_s=0, rank_balance=1):
    """What `plan` prints: {row, memory of the fullest stage by what, kept by tensor, ms of a step by what}. ValueError for a
    layout that cannot be."""
    trainer.check_values(config)
    c, ranks, wide = trainer.choose_model(config, None), gpus // max(pp, 1), max(config.ep, config.fsdp)
    if not 0 < pp <= min(gpus, c.n_layers) or gpus % pp or ranks % wide or wide % min(config.ep, config.fsdp):
        raise ValueError(f"--gpus={gpus} do not lay out as --pp={pp} stages (of {c.n_layers} layers at most) with"
                         f" --ep={config.ep} and --fsdp={config.fsdp}, of which one is a multiple of the other.")
    m, cuts = config.grad_accum, [c.n_layers * i // pp for i in range(pp + 1)]
    stages = [trainer.share(config, c, 2, first=cuts[i], last=cuts[i + 1], in_flight=min(pp - i, m), balance=rank_balance)
              for i in range(pp)]
    model.check_recipe(c, stages[0].recipe)
    memories = [model.memory(s) for s in stages]
    fullest = max(range(pp), key=lambda i: sum(memories[i].values()))
    times = [step_ms(s, CARDS[card], ranks, wire_gb_s) for s in stages]
    slowest = max(times, key=lambda t: sum(t.values()))
    ms = {name: t * (1 if name in ONCE else m) for name, t in slowest.items()}
    ms["pipeline's bubble"] = (pp - 1) * sum(t for name, t in slowest.items() if name not in ONCE)
    step, s, kept = sum(ms.values()), stages[fullest], {}
    for dense in s.layers:
        for name, size in model.kept_here(s, dense).items():
            kept[name] = kept.get(name, 0) + size * s.tokens * s.in_flight
    row = dict(zip(PLAN_COLUMNS, (config.preset, gpus, card, config.ep, pp, config.fsdp, config.precision, config.recompute, m,
                                  s.tokens, rank_balance, fullest, round(sum(memories[fullest].values()) / 2**30, 2),
                                  CARDS[card].gib,
                                  round(sum(model.wire_bytes(s).values()) / 1e6, 1), round(step, 1),
                                  round(1e3 * m * s.tokens / pp / step, 1), max(ms, key=ms.get))))
    return {"row": row, "memory": memories[fullest], "kept": kept, "ms": ms, "share": s}


def plan_text(found, config, args):
    row, s = found["row"], found["share"]

    def listed(title, sizes, unit):
        """A line for each size of some weight."""
        return [title] + [f"  {name:28}{size / unit:10.2f}" for name, size in sizes.items() if size > unit / 200]

    lines = [f"{row['preset']} on {row['gpus']} {row['card']}: ep {row['ep']}, pp {row['pp']}, fsdp {row['fsdp']},"
             f" {row['precision']}, recompute {row['recompute']}, {row['micro_batches']} micro-batches of {row['tokens']} tokens"
             + f", the busiest rank at {row['rank_balance']} times the mean" * (row["rank_balance"] > 1)]
    where = f"stage {row['stage']}, layers {s.first} to {s.first + len(s.layers) - 1}, {s.in_flight} in flight"
    lines += listed(f"memory of a rank where it is fullest ({where}), GiB", found["memory"], 2**30)
    share = sum(found["memory"].values()) / 2**30 / CARDS[args.card].gib
    fits = "does not fit" if share > 1 else "fits" + ", with less than 10 % to spare" * (share > 0.9)
    lines += [f"  {'sum, of ' + str(row['card_gib']):28}{row['memory_gib']:10.2f}  {fits}"]
    lines += listed("kept activations by tensor, before backward, GiB", found["kept"], 2**30)
    lines += listed("wire, a micro-batch and layer, MB", model.wire_bytes(s), 1e6)
    lines += listed("time of a step on the slowest stage, ms", found["ms"], 1)
    lines += [f"  {'sum':28}{row['step_ms']:10.2f}", f"{row['tokens_per_s_gpu']:.0f} tokens/GPU/s; most of it: {row['bound_by']}"]
    if share > 1:
        helps = []
        for flag, changed in trainer.remedies(config, args.gpus // args.pp).items():
            with contextlib.suppress(ValueError):  # a layout that cannot be
                gib = predict(changed, args.gpus, args.pp, args.card, args.wire_gb_s, args.rank_balance)["row"]["memory_gib"]
                helps += [f"{flag} ({gib:.1f} GiB)"] if gib < row["memory_gib"] else []
        lines.append(f"does not fit. What helps: {', '.join(helps + ['more ranks'])}")
    return "\n".join(lines)


def step_ms(s, card, ranks=1, wire_gb_s=0):
    """Milliseconds by what: of one micro-batch (forward, backward, what the wire adds), and of what comes once a step.

    ranks: of a stage, over which gradients are added up. The wire is inside a host up to 8 ranks, unless wire_gb_s says."""
    work, launches, busy = model.micro_batch_work(s), LAUNCHES * len(s.layers), 1
    for _ in range(2):  # how busy GEMMs keep the card is known afterwards; a third time would change nothing that counts
        ms = dict.fromkeys(("GEMMs", "attention", "data movement"), 0.0)
        for op in work["layers"] + work["ends"]:
            what = "GEMMs" if op.shape else "attention" if op.kind.startswith("attention") else "data movement"
            ms[what] += 1e3 * seconds(op, card, busy)
        ms["small launches"] = 1e-3 * max(launches - len(work["layers"]), 0) * shortest_us()
        busy = ms["GEMMs"] / sum(ms.values())
    ms["waiting for the host"] = max(1e-3 * launches * host_cost() - sum(ms.values()), 0)
    computing = sum(ms.values())
    speed = lambda n: 1e6 * (wire_gb_s or (card.nvlink * wire_rate() if n <= 8 else BETWEEN_HOSTS))  # bytes a ms
    reads = s.layers.count(False) * shortest_dispatch_ms() if s.ep > 1 else 0  # of counts, one a layer; the GPU runs dry
    ms["wire, not hidden"] = bare_wire(s, card, speed(s.ep), busy) + reads
    counts, cut = model.parameters_here(s), max(s.fsdp // s.ep, 1)
    experts, dense = sum(counts["experts"]), sum(sum(n) for name, n in counts.items() if name != "experts")
    gathered = 12 * (dense * (s.fsdp > 1) + experts * (cut > 1)) / speed(s.fsdp)  # weights twice, gradients once, in float32
    ms["sharding, not hidden"] = max(gathered - computing, 0)
    ms["gradients of copies"] = 8 * (dense / s.fsdp * (ranks > s.fsdp) + experts / cut * (ranks > s.ep * cut)) / speed(ranks)
    moved, matrices = model.step_bytes(s), sum(len(model.linears(s.config)) + (2 if dense else 4) for dense in s.layers)
    host = 1e-3 * host_cost("quantize_fp8_weight") * matrices if s.recipe.compute == "fp8" else 0
    return ms | {"optimizer": moved["optimizer"] / card.copy / 1e9, "weights": max(moved["weights"] / card.copy / 1e9, host)}


def bare_wire(s, card, speed, busy):
    """Milliseconds that a micro-batch's exchanges add: tokens on their way to experts; of sums on their way home, and of dy,
    what the shared expert does not hide, and of dx what FC1's weight gradient does not (see model.combine, quant.experts)."""
    c, width, beside = s.config, s.config.n_shared * s.config.expert_width, []
    for name, *args in (("mlp", "shared", width), ("mlp_backward", "shared", width),
                        ("wgrad", "experts", s.rows, 2 * c.expert_width, c.hidden, c.n_experts // s.ep)):
        work = model.Work(s)
        if c.n_shared or name == "wgrad":
            getattr(work, name)(*args)
        beside.append(1e3 * sum(seconds(op, card, busy) for op in work.ops))
    bytes_of = model.wire_bytes(s)
    hidden = dict(zip(("combine", "combine, backward", "dispatch, backward"), beside))
    return s.layers.count(False) * sum(max(size / speed - hidden.get(name, 0), 0) for name, size in bytes_of.items())


@functools.cache
def measured(name):
    """The rows of a table of the H200 that a plan reads: balanced groups, where there are others."""
    path = Path(__file__).parent / "results" / "h200" / f"{name}.csv"
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("groups", "balanced") == "balanced"]


def wire_rate():
    """GB/s a direction of an exchange inside a host: from V3's combine in BF16, with each token sent once and once a pair."""
    few, many = ([float(row[name]) for row in measured("comm") if (row["shape"], row["wire"], row["exchange"], row["sent"])
                  == ("v3", "bf16", "combine", sent) for name in ("mb_to_others", "ms")] for sent in ("once", "pairs"))
    return (many[0] - few[0]) / (many[1] - few[1])


def shortest_dispatch_ms():
    """The shortest dispatch that was measured: nearly all of it is launches and the host's read."""
    return min(float(row["ms"]) for row in measured("comm") if row["exchange"] == "dispatch")


def host_cost(kernel=""):
    """Microseconds that the host takes to launch a kernel, or in the median over all."""
    return statistics.median(float(row["host_us"]) for row in measured("kernels")
                             if row["host_us"] and kernel in ("", row["kernel"]))


def shortest_us():
    """Of one launch: the three of the smallest group_rows, which moves next to nothing."""
    return min(float(row["us"]) for row in measured("kernels") if row["kernel"].startswith("group_rows")) / 3


@functools.cache
def seconds(op, card, busy=1):
    """Of a model.Op on a card that computes GEMMs for a share `busy` of the time in which it computes: their power is what slows
    them. A GEMM takes as long as the measured one that is nearest in rows an expert, N and K, between one after a pause and one
    back to back; a kernel has the speed of its nearest in bytes; what no table has moves at the speed of a copy."""
    faster, moves = card.tflops / CARDS["h200"].tflops, 1e12 * card.copy / CARDS["h200"].copy
    if op.shape:
        paused, back_to_back = (op.amount / faster / gemm_rate(op.kind, op.shape, op.wgrad, op.part != "experts", column)
                                for column in ("tflops", "sustained_tflops"))
        return paused + busy * (back_to_back - paused)
    if op.kind.startswith("attention"):
        return op.amount / faster / attention_rate(op.kind)
    rows = [row for row in measured("kernels") if row["kernel"] == op.kind]
    if not rows:
        return op.amount / card.copy / 1e12
    row = min(rows, key=lambda row: abs(math.log(float(row["us"]) * float(row["tb_per_s"]) * 1e6 / op.amount)))
    return op.amount / moves / float(row["tb_per_s"])


def attention_rate(kind):
    """FLOP/s on an H200; backward without what cuDNN moves around it, which model.Work counts by itself."""
    (forward, both), product, moved = ATTENTION, 4096 * (192 + 128) / 2, 4 * 128 + 6 * 192  # of a head and token: FLOPs, bytes
    if kind == "attention":
        return forward
    return 5 * product / (7 * product / both - 2 * product / forward - moved / CARDS["h200"].copy / 1e12)


@functools.cache
def gemm_rate(kind, shape, wgrad, dense, column):
    """FLOP/s on an H200: of the nearest measured GEMM, times how much fuller or emptier the last wave of tiles is. column: of
    gemm.csv; BF16 is taken to slow down as FP8 does."""
    def full(E, M, N, K, dense):
        tiles = E * math.ceil((N if wgrad else M / E) / 128) * math.ceil((K if wgrad else N) / 256)
        if wgrad and dense:  # tokens are cut into parts: see kernels.grouped_wgrad; cuBLAS does so, too
            tiles *= max(min(132 // tiles, int(M) // 1024), 1)
        return tiles / (132 * math.ceil(tiles / 132))

    away = lambda a, b: abs(math.log(a[1] / a[0] / b[1] * b[0])) + abs(math.log(a[2] / b[2])) + abs(math.log(a[3] / b[3]))
    nearest, rate = None, 0
    for row in measured("gemm"):
        if row["N"] and row["gemm"].startswith("Wgrad") == wgrad and "float32" not in row["gemm"]:
            have = tuple(float(row[name]) for name in "EMNK")
            if nearest is None or away(shape, have) < away(shape, nearest):
                nearest, rate = have, 1e12 * float(row[column]) / (1 if kind == "fp8" else float(row["times_bf16_grouped"]))
    return rate * full(*shape, dense) / full(*nearest, nearest[0] == 1)


def published():
    """The published numbers beside predictions."""
    titles = "published", "its recipe, predicted", "ours, predicted"
    heads = "".join(f"{title:>{24 if i else 20}}" for i, title in enumerate(titles))
    lines = [ASSUMED, f"{'':26}{heads}", f"{'':26}{'tok/GPU/s':>12}{'80 GB':>8}" + f"{'tok/GPU/s':>16}{'80 GB':>8}" * 2]
    for name, ep, precision, scopes, speed, share in PUBLISHED:
        theirs = published_layout(ep, precision, scopes)
        ours = ((*published_layout(ep, "mxfp4", fewer), fewer) for fewer in SCOPES.split(";"))
        ours = next((found for found in ours if found[1] < 0.95), (math.nan, math.nan, "none fits"))
        lines.append(f"{name:26}{speed:12}{f'{share:.1%}' if share else '':>8}"
                     f"{theirs[0]:16.0f}{theirs[1]:8.1%}{ours[0]:16.0f}{ours[1]:8.1%}  {ours[2]}")
    return "\n".join(lines)


def published_layout(ep, precision, scopes):
    """(tokens/GPU/s, share of 80 GB) as `published` assumes."""
    pp = 256 // ep
    config = trainer.parse_flags([*PLAN_DEFAULTS, f"--ep={ep}", f"--precision={precision}", f"--recompute={scopes}",
                                  f"--grad_accum={2048 // ep}"])
    found = predict(config, 256, pp, "h100-80g")
    counts = model.parameters_here(found["share"])
    dense = sum(sum(n) for name, n in counts.items() if name != "experts")
    saved = (4 + 2 * found["share"].moment) * dense * (1 - 1 / ep)
    return found["row"]["tokens_per_s_gpu"], (sum(found["memory"].values()) - saved) / 80e9


# ---- what the fused kernels do without ----

def dequantize_rows(data, scale, index=None, end=None, per=1, out=None):
    """FP8 or MXFP4 rows -> bfloat16, through an index as in kernels.fp4_fan_out_rows: what the fused kernels do without."""
    import kernels as k

    packed = data.dtype == torch.uint8
    K, M = data.shape[1] * (2 if packed else 1), len(data) if index is None else len(index)
    out = torch.empty(M, K, device=data.device, dtype=torch.bfloat16) if out is None else out
    R, C = 32, k._columns(K, 256)
    k._launch(bench_kernels()["dequantize"], -(-M // R) * -(-K // C), data.view(torch.uint8), scale, *scale.stride(), index, end,
              out, M, K, per, packed, R, C)
    return out


def quantize_cols(x):
    """bfloat16 [M, K] -> FP8 cols [K, M], a scale a 128x128 tile."""
    import kernels as k

    M, K = x.shape
    data, scale = k._new_fp8_cols(x, K, M)
    k._launch(bench_kernels()["cols"], M // 128 * -(-K // 128), x, k._words(data), scale, *scale.stride(), M, K)
    return data, scale


@functools.cache
def bench_kernels():
    """Two conversions that training never needs, made of the helpers of kernels.py."""
    import triton
    import triton.language as tl

    import kernels as k

    globals().update(tl=tl, k=k)  # a kernel's names are looked up here

    @triton.jit(do_not_specialize=["M"])
    def dequantize(data, scale, s_row, s_col, index, end, out, M, K: tl.constexpr, PER: tl.constexpr, PACKED: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr):
        tile_m, tile_k = k._tile(K, C)
        row0, r = k._origin(tile_m, R), tl.arange(0, R)
        if k._past_end(end, row0):
            return
        rows = k._source(index, row0, r, M, PER)
        if PACKED:
            pairs = k._gather(data, rows, k._origin(tile_k, C // 2), tl.arange(0, C // 2), K // 2, 1, K // 2, 0).to(tl.int32)
            n: tl.constexpr = C // 32
            byte = k._gather(scale, rows, k._origin(tile_k, n), tl.arange(0, n), s_row, s_col, K // 32, 0).to(tl.int32)
            codes = tl.interleave(pairs & 15, pairs >> 4)
            small = codes & 7
            value = tl.where(small < 2, small.to(tl.float32) * 0.5, k._from_bits((small << 22) + (126 << 23)))
            value = k._from_bits(k._bits(value) | ((codes & 8) << 28)) * k._spread(k._power(byte - 127), 32)
        else:
            codes = k._gather(data, rows, k._origin(tile_k, C), tl.arange(0, C), K, 1, K, 0)
            m: tl.constexpr = C // 128
            scales = k._gather(scale, rows, k._origin(tile_k, m), tl.arange(0, m), s_row, s_col, tl.cdiv(K, 128), 0.0)
            value = k._decode_e4m3(codes) * k._spread(scales, 128)
        k._store(out, value.to(tl.bfloat16), row0, r, k._origin(tile_k, C), tl.arange(0, C), K, 1, M, K)

    @triton.jit
    def cols(x, data, scale, s_row, s_col, M, K: tl.constexpr):
        tile_m, tile_k = k._tile_down(M)
        row0, col0, c = k._origin(tile_m, 128), k._origin(tile_k, 128), tl.arange(0, 128)
        v0 = k._float(k._load(x, row0, k._quad(0), col0, c, K, 1, M, K))
        v1 = k._float(k._load(x, row0, k._quad(1), col0, c, K, 1, M, K))
        v2 = k._float(k._load(x, row0, k._quad(2), col0, c, K, 1, M, K))
        v3 = k._float(k._load(x, row0, k._quad(3), col0, c, K, 1, M, K))
        top = tl.maximum(tl.maximum(k._amax(v0, 1), k._amax(v1, 1)), tl.maximum(k._amax(v2, 1), k._amax(v3, 1)))
        tile_scale, inverse = k._fp8_scales(tl.max(top, 0))
        words = k._encode_columns(v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse)
        k._store_cols(data, words, tile_m, tile_k, 128, M // 4, K)
        tl.store(scale + tile_k * s_row + tile_m * s_col, tile_scale)

    return {"dequantize": dequantize, "cols": cols}


# ---- command line ----


def main(words):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.partition("\n\nLoss.")[0], allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tables = {kernels: SHAPES, gemm: GEMM_SHAPES, layer: LAYER_SHAPES, train: SLICES, profile: SLICES, comm: COMM_SHAPES}
    for work in (loss, error, plot, kernels, gemm, layer, train, profile, all_, comm, runs, kept, plan):
        command = commands.add_parser(work.__name__.rstrip("_"), help=work.__doc__.partition("\n")[0].replace("%", "%%"),
                                      description=work.__doc__, allow_abbrev=False)
        command.set_defaults(work=work)
        if work is loss:
            command.add_argument("--precisions", default="bf16,fp8,mxfp4", help=f"comma list of {', '.join(ARMS)}, each with"
                                 " settings of its recipe, if any [bf16,fp8,mxfp4]")
            command.add_argument("--seeds", default="0,1", help="comma list [0,1]")
            command.add_argument("--out", type=Path, default=Path("out/loss"), help="folder of all runs [out/loss]")
            command.add_argument("--slice_minutes", type=float, default=0, help="stop, saved, after so many; 0: never [0]")
            command.add_argument("--fork", type=int, default=0, help="step to which all are bf16; 0: none [0]")
            command.add_argument("--runs", default="1/1", help="i/n: the i-th of n shares of the runs [1/1]")
        elif work is error:
            command.add_argument("checkpoint", type=Path, nargs="+", help="<out_dir>/ckpt/<step>, or an <out_dir>")
            command.add_argument("--settings", default=SETTINGS, help=f"[{SETTINGS}]".replace("%", "%%"))
            command.add_argument("--tokens", type=int, default=4_000_000, help="of validation [4000000]")
            command.add_argument("--batches", type=int, default=16, help="whose gradients are compared [16]")
            command.add_argument("--out", type=Path, help="the table [results/<card>/error.csv]")
        elif work in tables:
            shapes = ",".join(name for name in tables[work] if name != "tiny")  # that is for tests
            command.add_argument("--shapes", default=shapes, help=f"comma list [{shapes}]")
            command.add_argument("--out", type=Path, help=f"the table [results/<card>/{work.__name__}.csv]")
            if work is profile:
                command.add_argument("--recompute", default="none", help="what backward computes again [none]")
                command.add_argument("--layers", type=int, default=0, help="layers; 0: 6 of V3 and V2, all of V2-Lite [0]")
                command.add_argument("--kernels", action="store_true", help="print each kernel, too")
            if work is train:
                command.add_argument("--recompute", default=SCOPES, help=f"scopes, with ; between them [{SCOPES}]")
                command.add_argument("--precisions", default="", help=f"of {'; '.join(LAYERS)}, with ; between them [the first"
                                     " three; with several micro-batches in flight all]")
                command.add_argument("--in_flight", type=int, default=1, help="micro-batches forward before one backward [1]")
                command.add_argument("--layers", type=int, default=0, help="layers; 0: 6 of V3 and V2, all of V2-Lite [0]")
                command.add_argument("--memory_gb", type=float, default=0, help="use no more of the GPU, 80 for an H100 [all]")
                command.add_argument("--rounds", type=int, default=6, help="turns of each precision [6]")
        elif work is all_:
            command.add_argument("--part", default="1/1", help="i/n: the i-th of n parts, three at most [1/1]")
            command.add_argument("--out", type=Path, default=Path("out/all"), help="folder of the new tables [out/all]")
        elif work is runs:
            command.add_argument("given", type=Path, nargs="+", help="the folder of a run of train.py")
            command.add_argument("--out", type=Path, default=Path("out/runs.csv"), help="the table [out/runs.csv]")
        elif work is kept:
            command.add_argument("table", type=Path, help="what `bench.py train` wrote")
            command.add_argument("--out", type=Path, help="also write it as a table")
        elif work is plan:
            command.add_argument("--gpus", type=int, default=1, help="of all stages [1]")
            command.add_argument("--card", default="h200", help=f"{', '.join(CARDS)} [h200]")
            command.add_argument("--pp", type=int, default=1, help="stages of a pipeline [1]")
            command.add_argument("--wire_gb_s", type=float, default=0, help="GB/s a direction and GPU [by card and ranks]")
            command.add_argument("--rank_balance", type=float, default=1,
                                 help="what the busiest rank's experts have to do, over the mean; train.py logs it [1]")
            command.add_argument("--csv", type=Path, help="also write the prediction as a table of one row")
            command.add_argument("--published", action="store_true", help="published numbers of V3 beside predictions")
        else:
            command.add_argument("given", type=Path, nargs="+", help="a table (csv), or the folder of a run of train.py")
            command.add_argument("--out", type=Path, help="the PNG to write [beside the table; of runs curves.png]")
    args, flags = parser.parse_known_args(words)
    args.work(args, flags)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print("bench.py:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bench.py: stopped; `loss`, `error` and `all` go on where they were, the others begin again", file=sys.stderr)
        sys.exit(130)
