"""Measures what this project claims. One subcommand a claim, each with --help.

    python bench.py loss --precisions=bf16,fp8,mxfp4 --seeds=0,1 --steps=200    any flag of train.py may follow
    python bench.py plot out/a out/b --out=curves.png
    python bench.py kernels --shapes=v3,v2,v2-lite                              needs a Hopper GPU

Loss. Does a narrower format cost accuracy? Two seeds of one format end farther apart than two formats do, so formats
are compared in pairs: runs of one seed start from the same weights and read the same text in the same order, and what
is averaged over the seeds is the difference within each pair. The loss compared is `val_loss`, quantisation off: what
was learned. `val_loss_quantized` adds what reading it out in the narrow format costs.

A run is a folder that train.py wrote, plus environment.json: on what, with what and when it ran. Tables and plots are
made from such folders alone, so they can be made again, and a command that was cut does only what is missing.

Kernels. How much of the memory's speed do conversions and data movement reach? Each output byte is counted once, each
input byte once for every row that reads it; over the time that is compared with a large device-to-device copy in the
same run. The L2 cache is flushed before every launch. A fused kernel is compared with the pair of our own best kernels
that does the same by way of another tensor, and whole chains of kernels with one another.
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
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
    commit = os.environ.get("NANOFP4_COMMIT", "")  # where the code runs without its git folder, or with an older one
    try:
        commit = commit or subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
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


# ---- kernels ----

# T tokens received, slots of their ids, E experts here, H hidden, I expert width, token-expert pairs
SHAPES = {"v3": (26400, 8, 8, 7168, 2048, 32768), "v2": (4096, 6, 20, 5120, 1536, 24576),
          "v2-lite": (16384, 6, 64, 2048, 1408, 98304)}
KERNEL_COLUMNS = ("shape", "groups", "kernel", "us", "tb_per_s", "percent_of_copy", "unique_mb", "times_pair", "pair", "host_us",
                  "copy_tb_per_s", "device", "torch", "triton", "commit", "date")


def kernels(args, flags):
    """Times every conversion and data-movement kernel, and the chains of a layer, against the speed of a copy.

    One row a kernel in --out, results/<card>/kernels.csv if not given.
    """
    if flags:
        raise ValueError(f"bench.py kernels has no flag {flags[0]}: see bench.py kernels --help.")
    if unknown := set(args.shapes.split(",")) - set(SHAPES):
        raise ValueError(f"--shapes: there is no {min(unknown)}; choose among {', '.join(SHAPES)}.")
    if not torch.cuda.is_available():
        raise ValueError("bench.py kernels needs a GPU.")
    where = environment()
    card = re.sub(r"^nvidia[ -]*|[^a-z0-9]+", "", where["device"].lower()) or "gpu"
    out = args.out or Path("results", card, "kernels.csv")
    out.parent.mkdir(parents=True, exist_ok=True)
    copy = copy_speed()
    print(f"{where['device']}: a copy moves {copy:.2f} TB/s (read + write)")
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, KERNEL_COLUMNS)
        writer.writeheader()
        for shape in args.shapes.split(","):
            for groups in ("balanced", "jittered"):
                for row in kernel_rows(shape, groups, copy):
                    times = f"  {row['times_pair']:.2f}x {row['pair']}" if row["times_pair"] else ""
                    share = f"{row['tb_per_s']:6.2f} TB/s {row['percent_of_copy']:5.1f} %" if row["tb_per_s"] else " " * 20
                    print(f"{shape:8}{groups:9}{row['kernel']:34}{row['us']:9.1f} us {share}"
                          f" {row['host_us']:6.1f} us host{times}", flush=True)
                    writer.writerow(row | {"copy_tb_per_s": round(copy, 3)} | where)
    print(f"wrote {out}")


def copy_speed():
    """Bytes read and written a second, in TB, of a copy of 2 GiB (1 GiB where memory is short)."""
    size = 2**31 if torch.cuda.mem_get_info()[0] > 2**33 else 2**30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / median_us(lambda: target.copy_(source)) / 1e6


def median_us(work, runs=25):
    """Median time of a call on the GPU in us, the L2 cache flushed before each.

    The GPU sleeps between flush and call for as long as the CPU needs to send the call, whose launches so follow one
    another without a gap."""
    cycles = int(3000 * host_us(work, launches=3))  # at 2 GHz half as long again
    flush, times = torch.empty(2**28, dtype=torch.uint8, device="cuda"), []
    for _ in range(runs):
        flush.zero_()
        torch.cuda._sleep(cycles)
        times.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        times[-1][0].record()
        work()
        times[-1][1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(stop) for start, stop in times)


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
    T, slots, E, _, _, pairs = SHAPES[shape]
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
    import kernels as k

    T, slots, E, H, I, _ = SHAPES[shape]
    ids = route(shape, groups)
    pairs = int((ids >= 0).sum())
    M = int(((torch.bincount(ids[ids >= 0], minlength=E) + 127) // 128 * 128).sum())
    pair, row, offsets, _, shift = k.group_rows(ids, E, M)
    end, index = offsets[-1:], (pair, offsets[-1:], slots)
    x, weight = torch.randn(T, H, device="cuda", dtype=torch.bfloat16), torch.randn(H, device="cuda")
    y, da = torch.randn(M, H, device="cuda", dtype=torch.bfloat16), torch.randn(M, I, device="cuda", dtype=torch.bfloat16)
    h, p = torch.randn(M, 2 * I, device="cuda", dtype=torch.bfloat16), torch.rand(T * slots, device="cuda")
    w13 = torch.randn(min(E, 16), 2 * I, H, device="cuda")
    x8, s8, x4, s4 = k.quantize_fp8_fp4_rows(x)
    h8, h4 = k.swiglu(h, p, pair, shift, end, pairs)[2:], k.swiglu(h, p, pair, shift, end, pairs, "fp4")[2:]
    blocks, wide = k.quantize_fp8_blocks(w13)[0].view(torch.uint8), torch.empty(M, H, device="cuda", dtype=torch.bfloat16)
    through = lambda q, then: lambda: then(dequantize_rows(*q, *index, out=wide))
    fp8, fp4, f = 1 + 4 / 128, 1 / 2 + 1 / 32, {"T": T * H, "M": M * H, "I": M * I, "P": pairs * 2 * I}

    def line(name, work, moved, unique=0.0, pair=None, label=""):
        us = median_us(work)
        return {"shape": shape, "groups": groups, "kernel": name, "us": round(us, 2), "tb_per_s": round(moved / us / 1e6, 3),
                "percent_of_copy": round(100 * moved / us / 1e6 / copy, 1), "unique_mb": round((unique or moved) / 1e6, 1),
                "times_pair": round(median_us(pair) / us, 2) if pair else None, "pair": label, "host_us": round(host_us(work), 1)}

    yield line("group_rows (3 launches)", lambda: k.group_rows(ids, E, M), 12.0 * ids.numel())
    for what, asked, size in (("bf16", (True,), 2), ("bf16, fp8", (True, True), 2 + fp8), ("fp8", (False, True), fp8),
                              ("fp4", (False, False, True), fp4), ("bf16, fp8, fp4", (True, True, True), 2 + fp8 + fp4)):
        both = (lambda: k.quantize_fp8_fp4_rows(k.rms_norm(x, weight, 1e-6)[0])) if len(asked) == 3 and all(asked) else None
        yield line(f"rms_norm -> {what}", lambda: k.rms_norm(x, weight, 1e-6, *asked), f["T"] * (2 + size), 0, both,
                   "norm, then quantise" if both else "")
    yield line("rms_norm_backward", lambda: k.rms_norm_backward(x, x, weight, 1e-6), f["T"] * 6)
    yield line("quantize_fp8_rows", lambda: k.quantize_fp8_rows(x), f["T"] * (2 + fp8))
    yield line("quantize_fp4_rows", lambda: k.quantize_fp4_rows(x), f["T"] * (2 + fp4))
    yield line("quantize_fp8_fp4_rows", lambda: k.quantize_fp8_fp4_rows(x), f["T"] * (2 + fp8 + fp4), 0,
               lambda: (k.quantize_fp8_rows(x), k.quantize_fp4_rows(x)), "one after the other")
    yield line("quantize_fp8_weight", lambda: k.quantize_fp8_weight(w13), w13.numel() * 6, 0,
               lambda: (k.quantize_fp8_blocks(w13), blocks.mT.contiguous()), "quantise, transpose")
    yield line("fp8_to_fp4", lambda: k.fp8_to_fp4(x8, s8), f["T"] * (fp8 + fp4), 0,
               lambda: k.quantize_fp4_rows(dequantize_rows(x8, s8)), "by way of bfloat16")
    for name, q, size in (("fp4", (x4, s4), fp4), ("fp8", (x8, s8), fp8)):
        rows, cols = getattr(k, f"{name}_fan_out_rows"), getattr(k, f"{name}_fan_out_cols")
        yield line(f"{name} fan-out rows", lambda: rows(*q, *index), f["M"] * (size + fp8), f["T"] * size + f["M"] * fp8,
                   through(q, k.quantize_fp8_rows), "by way of bfloat16")
        yield line(f"{name} fan-out cols", lambda: cols(*q, *index), f["M"] * (size + 1), f["T"] * size + f["M"],
                   through(q, quantize_cols), "by way of bfloat16")
    yield line("bf16 fan-out rows", lambda: k.bf16_fan_out_rows(x, *index), f["M"] * 4, f["T"] * 2 + f["M"] * 2)
    yield line("fp8 fan-out rows and cols", lambda: k.fp8_fan_out_cols(x8, s8, *index, True), f["M"] * (2 * fp8 + 1),
               f["T"] * fp8 + f["M"] * (fp8 + 1),
               lambda: (k.fp8_fan_out_rows(x8, s8, *index), k.fp8_fan_out_cols(x8, s8, *index)), "one after the other")
    for save, kept, size in (("fp8", h8, fp8), ("fp4", h4, fp4)):
        yield line(f"swiglu, h in {save}", lambda: k.swiglu(h, p, pair, shift, end, pairs, save),
                   f["I"] * (4 + fp8) + f["P"] * size)
        yield line(f"swiglu_backward, h in {save}", lambda: k.swiglu_backward(da, p, pair, shift, end, *kept),
                   f["I"] * (2 + 5 * fp8) + f["P"] * size)
    yield line("sum_rows", lambda: k.sum_rows(y, row), 2 * H * (pairs + T))

    def chain(convert, gradient=(x8, s8)):
        """The chain of one grouped layer but its GEMMs; `convert` is (quantise x, fan it out, and its columns in backward)."""
        quantise, rows, cols = convert
        q = quantise(x)
        rows(q), k.swiglu(h, p, pair, shift, end, pairs), k.sum_rows(y, row)
        k.quantize_fp8_rows(x), k.fp8_fan_out_cols(*gradient, *index, True)
        k.swiglu_backward(da, p, pair, shift, end, *h8), cols(q), k.sum_rows(y, row)

    in_fp8 = k.quantize_fp8_rows, lambda q: k.fp8_fan_out_rows(*q, *index), lambda q: k.fp8_fan_out_cols(*q, *index)
    in_fp4 = k.quantize_fp4_rows, lambda q: k.fp4_fan_out_rows(*q, *index), lambda q: k.fp4_fan_out_cols(*q, *index)
    by_bf16 = (k.quantize_fp4_rows, lambda q: through(q, k.quantize_fp8_rows)(), lambda q: through(q, quantize_cols)())
    yield line("chain of a grouped layer, mxfp4", lambda: chain(in_fp4), 0, 0, lambda: chain(in_fp8), "the same in fp8")
    yield line("chain of a grouped layer, mxfp4", lambda: chain(in_fp4), 0, 0, lambda: chain(by_bf16), "x by way of bfloat16")

    def dense(quantise, cols):
        """A plain linear: x quantised and kept, its columns in backward; dy as rows, and from them columns."""
        q = quantise(x)
        cols(q), k.fp8_fan_out_cols(*k.quantize_fp8_rows(x))

    plain = lambda: dense(k.quantize_fp8_fp4_rows, lambda q: k.fp4_fan_out_cols(*q[2:]))
    in_fp8 = lambda: dense(k.quantize_fp8_rows, lambda q: k.fp8_fan_out_cols(*q))
    yield line("chain of a plain linear, mxfp4", plain, 0, 0, in_fp8, "the same in fp8")


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
    for work in (loss, plot, kernels):
        command = commands.add_parser(work.__name__, help=work.__doc__.partition("\n")[0], description=work.__doc__,
                                      allow_abbrev=False)
        command.set_defaults(work=work)
        if work is loss:
            command.add_argument("--precisions", default="bf16,fp8,mxfp4", help="comma list [bf16,fp8,mxfp4]")
            command.add_argument("--seeds", default="0,1", help="comma list [0,1]")
            command.add_argument("--out", type=Path, default=Path("out/loss"), help="folder of all runs [out/loss]")
        elif work is kernels:
            command.add_argument("--shapes", default="v3,v2,v2-lite", help="comma list [v3,v2,v2-lite]")
            command.add_argument("--out", type=Path, help="the table [results/<card>/kernels.csv]")
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
