"""Trains a DeepSeek-style MLA + MoE language model: on a CPU or on GPUs, in one process or many, in bf16, fp8 or mxfp4.

    python train.py                                  the defaults: a small model, the Python sources, mxfp4
    torchrun --nproc_per_node=2 train.py --seed=1    data parallel; every field of Config is a flag, --help lists them
    python train.py --resume=auto                    goes on from the newest complete checkpoint of out_dir

What a step computes
--------------------
A step has ranks x grad_accum micro-batches, and its loss is the mean over all their tokens. So each micro-batch's loss
is divided by the *global* number of valid tokens before backward, and what follows are plain sums: over micro-batches
(.grad accumulates) and over ranks (one all-reduce). A mean of means would let a short batch weigh as much as a full
one. The loss reported is next-token cross entropy in nats; what backward differentiates adds balance and MTP terms.

A step whose loss or gradient norm is not finite is skipped by all ranks: weights, moments and balance bias stay as they
are, bit for bit. Clipping does not save it: a norm of NaN makes every gradient NaN, a norm of Inf makes them all 0.

`val_loss`, the number that counts, is measured with quantisation off, so that precisions are compared by what was
learned and not by how it is read out; `val_loss_quantized` reads the same tokens with the training recipe.

What makes a resume exact
-------------------------
There is little state. The learning rate is a pure function of the step; the data order is one number (data.py); random
draws are seeded by (seed, step, rank), so no generator's state has to be saved. The rest is weights, moments and three
counters. On a CPU a run that was cut goes on bit for bit. A checkpoint is a folder <out_dir>/ckpt/<step>, written under
another name and renamed when all ranks are done: what carries that name is complete, whenever a process was killed. Any
number of ranks can read it. Its metadata, torch.distributed.checkpoint's, is a pickle: load only your own.

Exit codes: 0, after SIGTERM and Ctrl-C too (the step is finished and saved, and the last line says so; torchrun itself
then ends with 1); 2 with one line on stderr for bad settings, files or hardware, and after max_bad_steps; 130 for a
Ctrl-C before the first step.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import typing
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by torch's import; on a busy CPU, spinning threads cost 8x

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

import data
import model
from model import PRESETS, Model
from quant import RECIPES, new_epoch


@dataclass
class Config:
    preset: str = "tiny"  # tiny | small | v2-lite | v2 | v3; --model.FIELD=value changes any field of the model
    dtype: str = ""  # activations: bf16 | fp32; default bf16 on a GPU that has it, else fp32
    precision: str = "mxfp4"  # bf16 | fp8 | mxfp4: the recipe, whose parts the next four change; default as it says
    compute: str = ""  # GEMMs of experts and dense linears: bf16 | fp8
    save: str = ""  # inputs of linears and experts kept for backward: bf16 | fp8 | fp4
    save_h: str = ""  # FC1's output kept for backward: bf16 | fp8 | fp4
    wire: str = ""  # dispatch: bf16 | fp8 | fp4; fp8-fp8 | fp4-fp8 send the combine in FP8 too
    recompute: str = "none"  # what backward computes again: none, or a comma list of norm, mla_up, attn, mlp, moe
    data: str = "python"  # python (the standard library's sources), a folder, a glob, or a file of text
    tokenizer: str = "bytes"  # bytes, a tiktoken name, or the path of a .tiktoken rank file
    seq_len: int = 128  # tokens of a sequence
    batch_size: int = 12  # sequences of a micro-batch on one rank
    grad_accum: int = 1  # micro-batches of a step on one rank
    steps: int = 200  # optimizer steps of the whole run
    lr: float = 2e-3  # peak learning rate
    min_lr: float = -1.0  # learning rate of the last step; below 0: a tenth of lr
    warmup: int = 20  # steps of linear warm-up, cut to the length of the run
    schedule: str = "cosine"  # cosine (down to min_lr) | wsd (constant, then linear to min_lr in the last fifth)
    weight_decay: float = 0.1  # on matrices, embedding, head and experts among them; not on norms
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    max_bad_steps: int = 10  # so many skipped steps in a row end the run
    eval_every: int = 100  # steps between evaluations; 0: only after the last step
    eval_steps: int = 10  # validation batches (batch_size sequences each), over all ranks
    save_every: int = 100  # steps between checkpoints; 0: only after the last step
    log_every: int = 1  # steps between rows of log.jsonl; evaluations and skipped steps always have one
    out_dir: str = "out"  # receives log.jsonl, config.json, ckpt/
    resume: str = ""  # auto (newest checkpoint in out_dir, if any) or a checkpoint folder
    init_from: str = ""  # checkpoint folder whose weights begin a new run
    seed: int = 0  # of weights, data order and random draws
    device: str = ""  # cpu | cuda | cuda:N; default cuda where there is one
    deterministic: bool = False  # bit-identical runs on a GPU too, slower
    compile: bool = False  # torch.compile the model's elementwise chains
    model: dict = field(default_factory=dict)  # what --model.FIELD=value collects


CHOICES = {"dtype": ("", "bf16", "fp32"), "schedule": ("cosine", "wsd"), "preset": PRESETS, "precision": RECIPES}
AT_LEAST = {"seq_len": 1, "batch_size": 1, "grad_accum": 1, "steps": 1, "lr": 0, "warmup": 0, "weight_decay": 0,
            "grad_clip": 0, "max_bad_steps": 1, "eval_every": 0, "eval_steps": 1, "save_every": 0, "log_every": 1}
# what a run that goes on from a checkpoint may change in its model: nothing that shapes a tensor or decides a route
MAY_CHANGE = {"balance_rate", "balance_alpha", "mtp_weight", "max_seq_len", "rope_base", "yarn_factor", "yarn_origin",
              "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "norm_eps", "init_std"}
SAMPLE_TOKENS = 128  # length of the text generated at each evaluation
KEPT_CHECKPOINTS = 2
# dense BF16 TFLOP/s by data sheet; the first key found in the device's name
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "H20": 148, "B200": 2250,
               "A100": 312, "A800": 312, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}


# ---- flags ----


def boolean(text):
    return ("false", "true").index(text.lower()) == 1  # ValueError: neither


def flag_table():
    """(flag, type, default, comment in the source) of each field of Config and, behind `model.`, ModelConfig."""
    for defaults, prefix in (Config(), "--"), (PRESETS["tiny"], "--model."):
        kinds = typing.get_type_hints(type(defaults))
        comments = dict(re.findall(r"^    (\w+):.*?# *(.*)$", inspect.getsource(type(defaults)), re.MULTILINE))
        for f in fields(defaults):
            if kinds[f.name] is not dict:
                yield prefix + f.name, kinds[f.name], getattr(defaults, f.name), comments[f.name]


def parse_flags(words):
    """Config from --field=value, --field value, or --field for a bool. ValueError names the fault; --help exits."""
    def fail(message):
        raise ValueError(message)

    about, layout = __doc__.partition("\n\nWhat a step")[0], argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage="train.py [--FIELD=VALUE ...]", description=about, formatter_class=layout,
                                     allow_abbrev=False)
    parser.error = fail
    table = list(flag_table())
    for flag, kind, default, comment in table:
        takes = {"type": boolean, "nargs": "?", "const": True} if kind is bool else {"type": kind}
        parser.add_argument(flag, **takes, default=argparse.SUPPRESS, metavar=kind.__name__.upper(),
                            help=f"{comment} [{default}]".replace("%", "%%"))
    known, unknown = parser.parse_known_args(words)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], [row[0] for row in table], n=1, cutoff=0)[0]
        raise ValueError(f"There is no flag {unknown[0]}: the nearest is {nearest}; --help lists all.")
    known = vars(known)
    changes = {name[6:]: known.pop(name) for name in list(known) if name.startswith("model.")}
    return Config(model=changes, **known)


# ---- ranks ----


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def say(line):
    if rank() == 0:
        tqdm.write(line)


def total(tensor):
    """The sum of a tensor over the ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def give_up(error):
    """Ends the run on every rank alike: rank 0 raises the error, the others leave with exit code 2, silently."""
    if rank() == 0:
        raise error
    sys.exit(2)


def together(make, *args, in_turn=False):
    """make(*args) on every rank. Where it fails on one, all give up, so that none is left waiting in a collective.

    in_turn: rank 0 first, so that the others find in the cache what it downloaded.
    """
    if world_size() == 1:
        return make(*args)
    result, errors = None, [None] * world_size()
    for mine in (rank() == 0, rank() != 0) if in_turn else (True,):
        error = None
        try:
            result = make(*args) if mine else result
        except (ValueError, OSError, ImportError) as caught:
            error = caught
        dist.all_gather_object(errors, error and str(error))
        for failed in (r for r, message in enumerate(errors) if message is not None):
            give_up(ValueError(f"{errors[failed]} (on rank {failed})"))
    return result


def check_ranks_agree(facts):
    """Ends the run where ranks were started differently or find other files: they would train apart, or hang."""
    if world_size() > 1:
        of_ranks = [None] * world_size()
        dist.all_gather_object(of_ranks, facts)
        for name in facts:
            values = [of_rank[name] for of_rank in of_ranks]
            if any(value != values[0] for value in values):
                give_up(ValueError(f"The ranks do not agree on {name}: they have {', '.join(map(str, values))}."))


# ---- checks: whatever can be known before data is opened ----


def check(config):
    """(device, dtype, recipe, recompute, model_config, resume). ValueError or OSError: one line on what to do."""
    check_types(config, "--")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"--{name}={getattr(config, name)}: choose one of {', '.join(filter(None, choices))}.")
    for name, least in AT_LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"--{name}={getattr(config, name)} is less than {least}.")
    recompute = frozenset(config.recompute.replace(" ", "").split(",")) - {"none", ""}
    if unknown := recompute - set(model.RECOMPUTE_SCOPES):
        raise ValueError(f"--recompute={min(unknown)}: choose among {', '.join(model.RECOMPUTE_SCOPES)}, none.")
    parts = {name: getattr(config, name) for name in ("compute", "save", "save_h", "wire") if getattr(config, name)}
    recipe = dataclasses.replace(RECIPES[config.precision], **parts)
    device, dtype = check_device(config, recipe)
    model_config = dataclasses.replace(PRESETS[config.preset], **config.model)
    check_types(model_config, "--model.")
    model.check_recipe(model_config, recipe)
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"--seed={config.seed}: choose one from 0 to 2**32 - 1.")
    if config.min_lr > config.lr:
        raise ValueError(f"--min_lr={config.min_lr} is more than --lr={config.lr}.")
    if config.seq_len > model_config.max_seq_len:
        raise ValueError(f"--seq_len={config.seq_len} is more than --model.max_seq_len={model_config.max_seq_len}.")
    resume = check_out_dir(config)
    if resume and read_notes(resume)["step"] > config.steps:
        raise ValueError(f"{resume} is beyond --steps={config.steps}: nothing is left to do.")
    if source := resume or config.init_from and find_checkpoint(config.init_from):
        check_same_model(source, model_config)
    return device, dtype, recipe, recompute, model_config, resume


def check_types(config, prefix):
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        fits = type(value) is kind or kind is float and type(value) is int
        if not fits or kind is float and not math.isfinite(value):
            raise ValueError(f"{prefix}{name} takes a value of type {kind.__name__}, a finite one, not {value!r}.")


def check_device(config, recipe):
    """(device, dtype of activations). Asks the driver about the card, and starts nothing on it."""
    check_version("torch", torch.__version__, (2, 11))
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device={name}: choose cpu, cuda or cuda:N.")
    if name == "cpu":
        return torch.device("cpu"), torch.bfloat16 if config.dtype == "bf16" else torch.float32
    device = torch.device(name if ":" in name else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if not (torch.cuda.is_available() and device.index < torch.cuda.device_count()):
        raise ValueError(f"torch {torch.__version__} does not see {device} here: use --device=cpu, or fewer ranks.")
    if recipe != RECIPES["bf16"]:
        import triton  # the kernels need it, nothing else does

        check_version("triton", triton.__version__, (3, 6), (3, 9))
    capability = torch.cuda.get_device_capability(device)
    check_card(torch.cuda.get_device_name(device), capability, recipe, config.dtype)
    wide = config.dtype == "fp32" or tuple(capability) < (8, 0)
    return device, torch.float32 if wide else torch.bfloat16


def check_version(package, version, least, below=(math.inf,)):
    if not least <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < below:
        above = f", < {below[0]}.{below[1]}" if len(below) > 1 else ""
        raise ValueError(f"{package} {version} does not fit: nanofp4 needs {package} >= {least[0]}.{least[1]}{above}.")


def check_card(name, capability, recipe, dtype=""):
    """ValueError if a card of this compute capability, (8, 0) for example, cannot run the recipe or the dtype."""
    has_no = f"{name} (compute capability {capability[0]}.{capability[1]}) has no"
    if recipe != RECIPES["bf16"] and tuple(capability) < (8, 9):
        raise ValueError(f"{has_no} FP8, which needs 8.9 (Ada), 9.0 (Hopper) or newer: use --precision=bf16.")
    if dtype == "bf16" and tuple(capability) < (8, 0):
        raise ValueError(f"{has_no} BF16, which needs 8.0 (Ampere) or newer: use --dtype=fp32.")


def check_out_dir(config):
    """Makes out_dir; returns the checkpoint to go on from, or None. ValueError rather than two runs in one folder."""
    out_dir, ckpt = Path(config.out_dir), Path(config.out_dir, "ckpt")
    newest = (complete_checkpoints(ckpt) or [None])[-1]
    resume = newest if config.resume == "auto" else find_checkpoint(config.resume) if config.resume else None
    log = out_dir / "log.jsonl"
    if config.resume != "auto" and (newest or log.exists() and log.stat().st_size):
        if resume is None or resume.parent.resolve() != ckpt.resolve():
            raise ValueError(f"{out_dir} holds a run: go on with it by --resume=auto, or choose another --out_dir.")
        if int(newest.name) > int(resume.name):
            raise ValueError(f"{out_dir} has the later {newest.name}: branch off {resume} in another --out_dir.")
    ckpt.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=ckpt).close()  # raises where nothing can be written
    return resume


def check_same_model(checkpoint, model_config):
    saved = asdict(model.ModelConfig()) | read_notes(checkpoint)["model"]  # it may be older than a field
    for name, now in asdict(model_config).items():
        if saved[name] != now and name not in MAY_CHANGE:
            raise ValueError(f"{checkpoint} has --model.{name}={saved[name]}, this run has --model.{name}={now}:"
                             f" pass the checkpoint's --preset and --model flags, or begin a new run.")


# ---- checkpoints ----


def complete_checkpoints(folder):
    """The complete checkpoints <folder>/<step>, the latest step last."""
    found = [p.parent for p in folder.glob("*/train.json") if p.parent.name.isdigit()]
    return sorted((p for p in found if (p / ".metadata").exists()), key=lambda p: int(p.name))


def find_checkpoint(path):
    """The checkpoint meant by its own folder, or by its run's out_dir. FileNotFoundError: there is none."""
    path = Path(path)
    found = [p for p in complete_checkpoints(path.parent) if p == path] or complete_checkpoints(path / "ckpt")
    if not found:
        raise FileNotFoundError(f"{path} is no complete checkpoint: give <out_dir>/ckpt/<step>, or an <out_dir>.")
    return found[-1]


def read_notes(checkpoint):
    """A checkpoint's train.json. ValueError: it is damaged."""
    path = checkpoint / "train.json"
    try:
        notes = json.loads(path.read_text())
        missing = {"model", "config", "data", "step", "skipped", "bad_in_a_row"} - set(notes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another checkpoint, by its folder.") from None
    if missing:
        raise ValueError(f"{path} is damaged, it lacks {', '.join(sorted(missing))}: resume from another checkpoint.")
    return notes


def training_state(net, optimizer):
    """What is saved, and filled in place by a load: weights, router bias, and AdamW's moments by parameter name."""
    for p in net.parameters():
        if not optimizer.state[p]:  # before the first step; AdamW starts from these zeros as well
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return {"model": net.state_dict(), "optimizer": {name: optimizer.state[p] for name, p in net.named_parameters()}}


def save_checkpoint(folder, state, notes):
    """Writes <folder>/<step> aside and renames it, all ranks together. `notes`, with "step" in it, become train.json.

    OSError, raised on all ranks: it could not be written; earlier checkpoints are as they were.
    """
    final, aside = folder / str(notes["step"]), folder / f"{notes['step']}.tmp"

    def prepare():
        for left_by_a_kill in folder.glob("*.tmp"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        aside.mkdir(parents=True)

    def publish():
        (aside / "train.json").write_text(json.dumps(notes, indent=1))
        shutil.rmtree(final, ignore_errors=True)  # incomplete, if it exists: no run comes to a saved step twice
        aside.rename(final)
        for old in complete_checkpoints(folder)[:-KEPT_CHECKPOINTS]:
            (old / "train.json").unlink()  # from here on it does not count as complete
            shutil.rmtree(old, ignore_errors=True)

    together(prepare if rank() == 0 else lambda: None)
    with dcp_errors(f"save {final}"):
        dcp.save(state, checkpoint_id=aside, no_dist=world_size() == 1)
    together(publish if rank() == 0 else lambda: None)


def load_checkpoint(path, state):
    """Fills the tensors of `state`. OSError, raised on all ranks: the files cannot be read."""
    with dcp_errors(f"read {path}"):
        dcp.load(state, checkpoint_id=path, no_dist=world_size() == 1)
    new_epoch()  # quantised copies of the old weights are stale


@contextlib.contextmanager
def dcp_errors(what):
    """DCP's errors in one line, and no warning that there is but one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # on all ranks, whichever failed
        failed, (cause, _) = next(iter(error.failures.items()))
        give_up(OSError(f"Could not {what}: {type(cause).__name__}: {cause} (on rank {failed})"))


# ---- one step ----


def make_optimizer(net, config):
    """AdamW; weight decay on matrices alone, embedding, head and experts among them (as in nanoGPT)."""
    groups = [{"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step, config):
    """The learning rate of step 0, 1, ... steps - 1: a pure function, so that a resume cannot shift it."""
    lowest = config.lr / 10 if config.min_lr < 0 else config.min_lr
    warmup = min(config.warmup, config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    cosine = config.schedule == "cosine"
    start = warmup if cosine else max(warmup, config.steps - config.steps // 5)
    if step < start:
        return config.lr
    progress = (step + 1 - start) / (config.steps - start)  # 1 in the last step
    share = 0.5 + 0.5 * math.cos(math.pi * progress) if cosine else 1 - progress
    return lowest + share * (config.lr - lowest)


def gradients(net, micro_batches, device):
    """Fills .grad with the gradient of the mean over all tokens of all ranks; returns (loss, gradient norm, tokens)."""
    num_tokens = sum((targets_BS != data.IGNORED).sum() for _, targets_BS in micro_batches)
    num_tokens = max(1, total(num_tokens).item())
    loss_sum = torch.zeros((), device=device)
    for tokens_BS, targets_BS in micro_batches:
        _, loss = net(tokens_BS.to(device), targets_BS.to(device), num_tokens)
        loss.backward()
        loss_sum += loss.detach()
    parameters = list(net.parameters())
    for p in parameters:
        if p.grad is None:  # not reached on this rank, but the others wait for it
            p.grad = torch.zeros_like(p)
    if world_size() > 1:
        for work in [dist.all_reduce(p.grad, async_op=True) for p in parameters]:
            work.wait()
    norm = get_total_norm([p.grad for p in parameters])
    loss, norm = torch.stack([total(loss_sum), norm]).tolist()  # the same bits on every rank; waits for the GPU
    return loss, norm, num_tokens


def update(net, optimizer, norm, lr, grad_clip):
    """Clips, steps, moves the balance bias; returns the step's expert balance (max / mean load)."""
    if grad_clip:
        clip_grads_with_norm_(net.parameters(), grad_clip, torch.tensor(norm))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return float(net.update_balance())


def train_step(run, config):
    """One optimizer step of all ranks, taken or skipped; returns the row of the log and the number of tokens."""
    counts, step = run.counts, run.counts["step"]
    torch.manual_seed(((config.seed * 2**24 + step) * 2**12 + rank()) % 2**63)  # whatever was drawn before
    micro_batches = [run.batches.next() for _ in range(config.grad_accum)]
    loss, norm, tokens = gradients(run.net, micro_batches, run.device)
    row = {"step": step + 1, "loss": loss, "lr": learning_rate(step, config), "grad_norm": norm}
    if math.isfinite(loss) and math.isfinite(norm):
        row["balance"] = update(run.net, run.optimizer, norm, row["lr"], config.grad_clip)
        counts["bad_in_a_row"] = 0
    else:
        row["balance"] = float(run.net.update_balance(move=False))
        row["skipped"] = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
        counts["bad_in_a_row"] += 1
        counts["skipped"] += 1
        say(f"step {step + 1} skipped: {row['skipped']}; {counts['bad_in_a_row']} in a row, {counts['skipped']} in all")
    run.optimizer.zero_grad()
    counts["step"] += 1
    return row, tokens


# ---- evaluation ----


@torch.no_grad()
def evaluate(run, config):
    """Validation losses in nats a token, quantisation off and on; prints them and a sample of generated text."""
    net, trained_with, losses = run.net, run.net.recipe, {}
    net.eval()
    for recipe in dict.fromkeys((trained_with, RECIPES["bf16"])):  # one, if they are the same
        net.recipe, sums = recipe, torch.zeros(2, dtype=torch.float64)
        for tokens_BS, targets_BS in run.val_batches:
            _, loss = net(tokens_BS.to(run.device), targets_BS.to(run.device), 1)  # divided by 1: a sum
            sums += torch.stack([loss.double().cpu(), (targets_BS != data.IGNORED).sum()])
        loss, tokens = total(sums).tolist()
        losses[recipe] = loss / tokens
    prompt_BS = torch.tensor([[run.encoding.eot_token]], device=run.device)
    try:
        ids = net.generate(prompt_BS, min(SAMPLE_TOKENS, net.config.max_seq_len - 1), 0.8)[0, 1:].tolist()
        text = to_text(run.encoding, ids)
    except FloatingPointError as error:
        text = f"none, {error}"
    net.train()
    net.recipe = trained_with
    say(f"step {run.counts['step']}: val loss {losses[RECIPES['bf16']]:.4f}, in {config.precision}"
        f" {losses[trained_with]:.4f}; a sample:\n{text}\n")
    return {"val_loss": losses[RECIPES["bf16"]], "val_loss_quantized": losses[trained_with]}


def to_text(encoding, ids):
    def token(i):
        try:
            return encoding.decode_single_token_bytes(i)
        except KeyError:  # a row of the embedding that no token uses
            return "\ufffd".encode()

    return b"".join(map(token, ids)).decode("utf-8", errors="replace")


# ---- what a run writes down ----


def peak_flops(device):
    """Dense BF16 FLOP/s; infinite where unknown, so that MFU reads 0 and not a lie."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tera * 1e12 for key, tera in PEAK_TFLOPS.items() if re.search(rf"{key}\b", name)), math.inf)


def peak_gib(device):
    """Peak memory until now: allocated on a GPU, else resident in the process (0 where the system does not count)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if os.name != "posix":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def open_log(path, step):
    """log.jsonl for appending, less the rows past `step`: a killed run logged steps that will now be done again."""
    def is_past(line):
        try:
            return json.loads(line)["step"] > step
        except (ValueError, TypeError, KeyError):  # torn by a kill
            return True

    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if step == 0 and lines:
        path.rename(path.with_suffix(".old"))
        say(f"no complete checkpoint was found: starts at step 0; the log of before is now {path.with_suffix('.old')}")
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(f"{line}\n" for line in lines if not is_past(line)))
    shorter.rename(path)
    return path.open("a", buffering=1)  # every line at once


def to_json(row):
    """A row as one line of strict JSON: what is not finite becomes null."""
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})


@contextlib.contextmanager
def catch_signals():
    """Yields a list to which SIGTERM and Ctrl-C add their names, instead of what they do otherwise."""
    names = []
    before = {number: signal.signal(number, lambda number, frame: names.append(signal.Signals(number).name))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run ----


class Run(typing.NamedTuple):
    device: torch.device
    net: Model
    optimizer: torch.optim.Optimizer
    encoding: typing.Any  # tiktoken.Encoding
    batches: data.Batches
    val_batches: list
    counts: dict  # step: steps done; skipped: how many of them; bad_in_a_row: how many just now
    origin: dict  # the settings in JSON: config, model


def start(config):
    """The Run that a Config asks for, new or resumed: first what can be checked, then the text, then the model."""
    device, dtype, recipe, recompute, model_config, resume = together(check, config)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts; deterministic needs it
    torch.use_deterministic_algorithms(config.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    encoding = together(open_tokenizer, config, model_config, in_turn=True)
    batches, val_batches = together(open_data, config, encoding, resume)
    check_ranks_agree(asdict(config) | batches.identity | {"checkpoint to resume": resume and resume.name})

    torch.manual_seed(config.seed)  # the same weights on every rank
    with device:
        net = Model(model_config)
    net.recipe, net.dtype, net.recompute = recipe, dtype, recompute
    if config.compile:
        model.compile_elementwise()
    optimizer = make_optimizer(net, config)
    state = training_state(net, optimizer)

    counts = {"step": 0, "skipped": 0, "bad_in_a_row": 0}
    origin = {"config": asdict(config), "model": asdict(model_config)}
    if resume:
        load_checkpoint(resume, state)
        notes = read_notes(resume)
        counts = {name: notes[name] for name in counts}
        before = notes["config"] | {"resume": config.resume}
        changed = [f"{k} {before.get(k)} -> {now}" for k, now in origin["config"].items() if now != before.get(k)]
        say(f"goes on from {resume}" + "; changed: " * bool(changed) + ", ".join(changed))
    elif config.init_from:
        load_checkpoint(find_checkpoint(config.init_from), {"model": state["model"]})
    return Run(device, net, optimizer, encoding, batches, val_batches, counts, origin)


def open_tokenizer(config, model_config):
    encoding = data.tokenizer(config.tokenizer)
    if encoding.n_vocab > model_config.vocab_size:
        enough = math.ceil(encoding.n_vocab / 128) * 128
        raise ValueError(f"The tokenizer {config.tokenizer} has {encoding.n_vocab} ids, more than the model's"
                         f" vocab_size {model_config.vocab_size}: pass --model.vocab_size={enough}.")
    return encoding


def open_data(config, encoding, resume):
    """(training batches, set to where `resume` was saved; list of validation batches)."""
    text = data.load(config.data, encoding, config.seed)
    batches = data.Batches(text.train, config.seq_len, config.batch_size, config.seed, rank(), world_size())
    if resume:
        batches.load_state_dict(read_notes(resume)["data"])
    limit = config.eval_steps * config.batch_size
    return batches, data.validation_batches(text.val, config.seq_len, config.batch_size, limit, rank(), world_size())


def train(run, config):
    """The loop. Each step gives a row of the log, some an evaluation or a checkpoint; returns what `main` does."""
    counts, out_dir, row, stopped = run.counts, Path(config.out_dir), {}, False
    flops = model.flops_per_token(run.net.config, config.seq_len) / world_size()
    peak, size = peak_flops(run.device), model.parameter_count(run.net.config)
    known = f"is of {peak / 1e12:.0f} TFLOP/s dense BF16 each" if peak < math.inf else "reads 0: the peak is unknown"
    say(f"{size['total'] / 1e6:.2f} M parameters, {size['active'] / 1e6:.2f} M active; {run.net.recipe};"
        f" {world_size()} x {run.device.type}, {run.net.dtype}; MFU {known}")
    if rank() == 0:
        (out_dir / "config.json").write_text(json.dumps(run.origin, indent=1))
    log = open_log(out_dir / "log.jsonl", counts["step"]) if rank() == 0 else open(os.devnull, "w")
    every = 0.1 if sys.stderr.isatty() else 10  # seconds between redraws
    bar = tqdm(total=config.steps, initial=counts["step"], disable=rank() != 0, mininterval=every)
    with log, bar, catch_signals() as signals:
        while counts["step"] < config.steps and not stopped:
            began = time.perf_counter()
            row, tokens = train_step(run, config)
            speed = tokens / (time.perf_counter() - began)  # tokens of all ranks, FLOP of one
            row |= {"tokens_per_s": speed, "tflops": speed * flops / 1e12, "mfu": speed * flops / peak}
            row["peak_gib"] = peak_gib(run.device)
            due = {name for name in ("eval", "save", "log") if is_due(getattr(config, f"{name}_every"), counts, config)}
            if "eval" in due:
                row |= evaluate(run, config)
            if due & {"log", "eval"} or "skipped" in row:
                log.write(to_json(row) + "\n")
            bar.set_postfix_str(status(row, counts), refresh=False)
            bar.update()
            if counts["bad_in_a_row"] >= config.max_bad_steps:
                good = ", ".join(map(str, complete_checkpoints(out_dir / "ckpt"))) or "none"
                give_up(FloatingPointError(f"{counts['bad_in_a_row']} steps in a row were skipped; of the last, step"
                                           f" {row['step']}, the {row['skipped']}. Good checkpoints: {good}."))
            stopped = total(torch.tensor(len(signals))).item() > 0  # a signal may have come to one rank only
            last = stopped or counts["step"] == config.steps
            if last or "save" in due and not counts["bad_in_a_row"]:  # in a bad streak older checkpoints are worth more
                notes = counts | {"data": run.batches.state_dict()} | run.origin
                save_checkpoint(out_dir / "ckpt", training_state(run.net, run.optimizer), notes)
    finished, saved = counts["step"] == config.steps, (complete_checkpoints(out_dir / "ckpt") or [None])[-1]
    if finished and "val_loss" not in row:  # it was finished before: nothing was left to do
        row |= evaluate(run, config)
    if finished and not math.isfinite(row["val_loss"]):
        give_up(FloatingPointError(f"The run diverged: val loss {row['val_loss']} after {config.steps} steps,"
                                   f" {counts['skipped']} of them skipped. Try a lower --lr or a longer --warmup."))
    if finished:
        say(f"val loss {row['val_loss']:.4f} after {config.steps} steps, {counts['skipped']} of them skipped;"
            f" weights in {saved}, curves in {out_dir / 'log.jsonl'}")
    else:
        say(f"stopped by a signal after step {counts['step']}, saved in {saved}; --resume=auto goes on")
    return row | counts | {"finished": finished, "checkpoint": str(saved)}


def is_due(every, counts, config):
    return counts["step"] == config.steps or every > 0 and counts["step"] % every == 0


def status(row, counts):
    """The bar's text; tqdm itself adds steps and ETA."""
    text = (f"loss {row['loss']:.3f} lr {row['lr']:.1e} norm {row['grad_norm']:.2f} {row['tokens_per_s']:.0f} tok/s"
            f" {row['tflops']:.2f} TFLOP/s MFU {row['mfu']:.1%} {row['peak_gib']:.2f} GiB balance {row['balance']:.2f}")
    return text + f" skipped {counts['skipped']}" * (counts["skipped"] > 0)


def main(config):
    """Trains as `config` says, alone or, where torchrun set WORLD_SIZE, as one rank of many.

    Returns the last row of the log with, over it, the counts step, skipped and bad_in_a_row; finished (False: a signal
    came) and checkpoint, a path. ValueError, OSError and FloatingPointError carry one line for the user.
    """
    joins = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if joins:  # what lies on the host goes through gloo, what lies on GPUs through NCCL
        gpus = config.device != "cpu" and torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        return train(start(config), config)
    finally:
        if joins:
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(parse_flags(sys.argv[1:]))
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print("train.py:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before the first step
        sys.exit(130)
