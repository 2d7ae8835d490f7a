"""Trains a DeepSeek-style MLA + MoE language model: on a CPU or on GPUs, in one process or many, in bf16, fp8 or mxfp4.

    python train.py                                  the defaults: a small model, the Python sources, mxfp4
    torchrun --nproc_per_node=2 train.py --seed=1    data parallel; every field of Config is a flag, --help lists them
    python train.py --resume=auto                    goes on from out_dir's newest checkpoint; flags change its settings
    python train.py export out hf_folder             writes out's weights as a Hugging Face DeepSeek checkpoint

What a step computes
--------------------
A step has ranks x grad_accum micro-batches, and its loss is the mean over all their tokens. So each micro-batch's loss
is divided by the *global* number of valid tokens before backward, and what follows are plain sums: over micro-batches
(.grad accumulates) and over ranks (see Many ranks). A mean of means would let a short batch weigh as much as a full
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
another name while training goes on, and renamed when all ranks are done: what carries that name is complete, whenever a
process was killed. Any number of ranks, in any layout, can read it. Its metadata, torch.distributed.checkpoint's, is a
pickle: load only your own.

Many ranks
----------
Each rank reads its own sequences. With --ep, a layer's experts are spread over ranks and tokens go to them (model.py);
with --fsdp, FSDP2 shards weights, gradients and moments, and gathers a layer's weights while it computes. What is
not sharded is a plain tensor whose gradients one all-reduce adds up, over all ranks or those with the same experts.
Sums stay sums in every layout, and the norm counts each element once, however many ranks hold it. `Layout` says who
holds what; checkpoints do not depend on it. Ranks decide alike, on numbers that all have; where one fails alone it says
so first and leaves, which breaks the others' connections.

Exit codes: 0, after SIGTERM and Ctrl-C too (the step is finished and saved, and the last line says so; torchrun itself
then ends with 1); 2 with one line on stderr for bad settings, files, hardware or too little memory, and after
max_bad_steps; 1 with a traceback for what nobody foresaw; 130 for a Ctrl-C before the first step.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import gc
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
import typing
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by torch's import; on a busy CPU, spinning threads cost 8x
# read when a GPU's first memory is taken: gradients and activations, which come and go in turns, share what they free
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# read when ranks join: what goes between GPUs goes before kernels that wait for room, so that counts arrive during packing
os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tqdm import tqdm

import data
import model
import quant
from model import PRESETS, Model
from quant import RECIPES, new_epoch

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said at each checkpoint of one process


@dataclass
class Config:
    preset: str = ""  # tiny | small | v2-lite | v2 | v3, --model.FIELD changes it; default the checkpoint's, else tiny
    dtype: str = ""  # activations: bf16 | fp32; default bf16 on a GPU that has it, else fp32
    precision: str = "mxfp4"  # bf16 | fp8 | mxfp4: the recipe, whose parts the next four change; default as it says
    compute: str = ""  # GEMMs of experts and dense linears: bf16 | fp8
    save: str = ""  # inputs of linears and experts kept for backward: bf16 | fp8 | fp4
    save_h: str = ""  # FC1's output kept for backward: bf16 | fp8 | fp4
    wire: str = ""  # dispatch: bf16 | fp8 | fp4; fp8-fp8 | fp4-fp8 send the combine in FP8 too
    recompute: str = "none"  # what backward computes again: none, or a comma list of norm, mla_up, attn, mlp, moe
    data: str = "python"  # python (its own sources); folder, glob or file of text; token shards; hf:NAME:CONFIG:SPLIT
    tokenizer: str = ""  # bytes, a tiktoken name, a .tiktoken file, hf:DIR; default the checkpoint's, else bytes
    seq_len: int = 128  # tokens of a sequence
    batch_size: int = 12  # sequences of a micro-batch on one rank
    grad_accum: int = 1  # micro-batches of a step on one rank
    ep: int = 1  # ranks over which experts are spread, neighbours of one host
    fsdp: int = 1  # ranks over which weights, gradients and moments are sharded (experts: over fsdp / ep of them)
    steps: int = 200  # optimizer steps of the whole run
    lr: float = 2e-3  # peak learning rate
    min_lr: float = -1.0  # learning rate of the last step; below 0: a tenth of lr
    warmup: int = 20  # steps of linear warm-up, cut to the length of the run
    schedule: str = "cosine"  # cosine (down to min_lr) | wsd (constant, then linear to min_lr in the last fifth)
    weight_decay: float = 0.1  # on matrices, embedding, head and experts among them; not on norms
    moments: str = "fp32"  # AdamW's moments are kept in: fp32 | bf16 (half their memory, as DeepSeek-V3)
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    max_bad_steps: int = 10  # so many skipped steps in a row end the run
    eval_every: int = 100  # steps between evaluations; 0: only after the last step
    eval_steps: int = 10  # validation batches (batch_size sequences each), over all ranks
    save_every: int = 100  # steps between checkpoints; 0: only after the last step; -1: never, to measure speed
    diagnose: bool = False  # at each evaluation, what quantisation does to each tensor, into out_dir/diagnose.jsonl
    memory_snapshot: bool = False  # of an early step, out_dir/memory.pickle to be looked at on pytorch.org/memory_viz
    log_every: int = 1  # steps between rows of log.jsonl; evaluations and skipped steps always have one
    out_dir: str = "out"  # receives log.jsonl, config.json, ckpt/
    resume: str = ""  # auto (newest checkpoint in out_dir, if any) or a checkpoint folder
    init_from: str = ""  # weights that begin a new run: a checkpoint folder, or hf:DIR, DeepSeek's of Hugging Face
    seed: int = 0  # of weights, data order and random draws
    device: str = ""  # cpu | cuda | cuda:N; default cuda where there is one
    deterministic: bool = False  # bit-identical runs on a GPU too, slower
    compile: bool = False  # torch.compile the model's elementwise chains
    model: dict = field(default_factory=dict)  # what --model.FIELD=value collects


MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHOICES = {"dtype": ("", "bf16", "fp32"), "schedule": ("cosine", "wsd"), "preset": ("", *PRESETS), "precision": RECIPES,
           "moments": MOMENTS}
AT_LEAST = {"seq_len": 1, "batch_size": 1, "grad_accum": 1, "ep": 1, "fsdp": 1, "steps": 1, "lr": 0, "warmup": 0,
            "weight_decay": 0, "grad_clip": 0, "max_bad_steps": 1, "eval_every": 0, "eval_steps": 1, "save_every": -1,
            "log_every": 1}
# what a run that goes on from a checkpoint may change in its model: nothing that shapes a tensor or decides a route
MAY_CHANGE = {"balance_rate", "balance_alpha", "mtp_weight", "max_seq_len", "rope_base", "yarn_factor", "yarn_origin",
              "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "norm_eps", "init_std"}
SAMPLE_TOKENS = 128  # length of the text generated at each evaluation
KEPT_CHECKPOINTS = 2
PATIENCE = datetime.timedelta(minutes=10)  # of a rank that waits for others, which may be reading data or compiling
PORTION = 2**25  # so many elements of moments kept in BF16 are in float32 at once: two moments, 0.27 GB
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


def fail(message):
    raise ValueError(message)


def parse_flags(words):
    """Config from --field=value, --field value, or --field for a bool; with --resume over the settings of that run.

    ValueError names the fault; --help exits."""
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
        near = difflib.get_close_matches(unknown[0].partition("=")[0], [row[0] for row in table], n=1) or ["--help"]
        fail(f"There is no flag {unknown[0]}: try {near[0]}; --help lists all.")
    known = vars(known)
    changes = {name[6:]: known.pop(name) for name in list(known) if name.startswith("model.")}
    saved = settings_of_run(known) if known.get("resume") else {}
    return Config(**saved | known | {"model": saved.get("model", {}) | changes})


def settings_of_run(known):
    """The settings, by name, of the run that flags want to go on with: they need not be repeated. {}: there is none."""
    resume = find_resume(Config(**{name: known[name] for name in ("resume", "out_dir") if name in known}))
    settings = read_notes(resume)["config"] if resume else {}
    return {f.name: settings[f.name] for f in fields(Config) if f.name in settings}


# ---- ranks ----


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def say(line):
    if rank() == 0:
        tqdm.write(line)


def of_ranks(value):
    """Every rank's value, in a list."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def total(tensor):
    """The sum of a tensor over the ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def give_up(error):
    """Ends the run on every rank alike: rank 0 raises the error, the others leave with exit code 2, silently."""
    error.of_all_ranks = True
    if rank() == 0:
        raise error
    sys.exit(2)


def is_shared(error):
    """Whether all ranks leave by this error, or by its like: then they may still talk to one another."""
    return world_size() == 1 or isinstance(error, SystemExit) or getattr(error, "of_all_ranks", False)


def together(make, *args, here=True, **options):
    """make(*args) where `here` is true, else None. Where it fails on one rank, all give up and none is left waiting."""
    if world_size() == 1:
        return make(*args, **options) if here else None
    result = error = None
    try:
        result = make(*args, **options) if here else None
    except (ValueError, OSError, ImportError) as caught:
        error = f"{caught} (on rank {rank()})"
    if total(torch.tensor(int(error is not None))):
        give_up(ValueError(next(filter(None, of_ranks(error)))))
    return result


def check_ranks_agree(facts):
    """Ends the run where ranks were started differently or find other files: they would train apart, or hang."""
    everyone = of_ranks(facts)
    for name in facts:
        values = [one[name] for one in everyone]
        if any(value != values[0] for value in values):
            give_up(ValueError(f"The ranks do not agree on {name}: they have {', '.join(map(str, values))}."))


# ---- checks: whatever can be known before data is opened ----


def check(config):
    """(device, dtype, recipe, recompute, model_config, resume). ValueError or OSError: one line on what to do."""
    check_values(config)
    if not config.out_dir:
        raise ValueError("--out_dir is empty: name the folder for logs and checkpoints.")
    recipe, recompute = formats(config)
    device, dtype = check_device(config, recipe)
    if config.memory_snapshot and device.type != "cuda":
        raise ValueError(f"--memory_snapshot shows the memory of a GPU; this run would be on {device}: leave it out.")
    resume = find_resume(config)
    model_config = choose_model(config, resume)
    model.check_recipe(model_config, recipe)
    check_layout(config.ep, config.fsdp, model_config)
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"--seed={config.seed}: choose one from 0 to 2**32 - 1.")
    if config.min_lr > config.lr:
        raise ValueError(f"--min_lr={config.min_lr} is more than --lr={config.lr}.")
    if config.seq_len > model_config.max_seq_len:
        raise ValueError(f"--seq_len={config.seq_len} is more than --model.max_seq_len={model_config.max_seq_len}.")
    if resume and read_notes(resume)["step"] > config.steps:
        raise ValueError(f"{resume} is beyond --steps={config.steps}: nothing is left to do.")
    return device, dtype, recipe, recompute, model_config, resume


def formats(config):
    """(recipe, recompute scopes) that the flags name. ValueError: there is none of that name."""
    recompute = frozenset(config.recompute.replace(" ", "").split(",")) - {"none", ""}
    if unknown := recompute - set(model.RECOMPUTE_SCOPES):
        raise ValueError(f"--recompute={min(unknown)}: choose among {', '.join(model.RECOMPUTE_SCOPES)}, none.")
    parts = {name: getattr(config, name) for name in ("compute", "save", "save_h", "wire") if getattr(config, name)}
    return dataclasses.replace(RECIPES[config.precision], **parts), recompute


def check_values(config):
    """ValueError for what needs no look at anything else: types, choices, least values."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        fits = type(value) is kind or kind is float and type(value) is int
        if not fits or kind is float and not math.isfinite(value):
            raise ValueError(f"--{name} takes a value of type {kind.__name__}, a finite one, not {value!r}.")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"--{name}={getattr(config, name)}: choose one of {', '.join(filter(None, choices))}.")
    for name, least in AT_LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"--{name}={getattr(config, name)} is less than {least}.")


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
    import triton  # the kernels need it, in every recipe: experts are routed by them

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


def find_resume(config):
    """The checkpoint to go on from, or None. ValueError rather than two runs in one folder."""
    out_dir, ckpt = Path(config.out_dir), Path(config.out_dir, "ckpt")
    newest = (complete_checkpoints(ckpt) or [None])[-1]
    resume = newest if config.resume == "auto" else find_checkpoint(config.resume) if config.resume else None
    log = out_dir / "log.jsonl"
    if config.resume != "auto" and (newest or log.exists() and log.stat().st_size):
        if resume is None or resume.parent.resolve() != ckpt.resolve():
            raise ValueError(f"{out_dir} holds a run: go on with it by --resume=auto, or choose another --out_dir.")
        if int(newest.name) > int(resume.name):
            raise ValueError(f"{out_dir} has the later {newest.name}: branch off {resume} in another --out_dir.")
    return resume


def choose_model(config, resume):
    """The ModelConfig of --preset and --model.*, or, where a run begins with a checkpoint, that one's with --model.*.

    ValueError: flags contradict the checkpoint in what shapes a tensor or decides a route.
    """
    if unknown := set(config.model) - {f.name for f in fields(model.ModelConfig)}:
        raise ValueError(f"There is no --model.{min(unknown)}: --help lists the model's fields.")
    source, free = resume or config.init_from, MAY_CHANGE
    if not source:
        return dataclasses.replace(PRESETS[config.preset or "tiny"], **config.model)
    if folder := hf_folder(source):
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"There is no folder {folder}: --init_from=hf:DIR takes a checkpoint on this disk,"
                                    f" such as `hf download NAME --local-dir DIR` makes.")
        brought, free = model.config_from_hf(folder), MAY_CHANGE | {"mtp"}  # its tensors may be there or not
    else:
        source = find_checkpoint(source)
        brought = read_notes(source)["model"]
    asked = dataclasses.replace(PRESETS[config.preset] if config.preset else brought, **config.model)
    for name, now in asdict(asked).items():
        if getattr(brought, name) != now and name not in free:
            raise ValueError(f"{source} has --model.{name}={getattr(brought, name)}, this run has --model.{name}={now}:"
                             f" leave out --preset and this flag{', or begin a new run' * bool(resume)}.")
    return dataclasses.replace(brought, **config.model)


def hf_folder(name):
    """DIR of hf:DIR, wherever this process will be later, else nothing."""
    return os.path.abspath(os.path.expanduser(str(name)[3:])) if str(name).startswith("hf:") else ""


def hold(out_dir, model_config, moments, saves=True):
    """Makes out_dir and keeps it for this run: the open file returned holds a lock, freed however the run ends.

    OSError: nothing can be written there. ValueError: not one checkpoint fits, or another run is writing there.
    """
    ckpt = Path(out_dir, "ckpt")
    with writing(out_dir):
        ckpt.mkdir(parents=True, exist_ok=True)
        lock = open(ckpt / "lock", "w")
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"A run is writing to {out_dir}: wait for its end, or choose another --out_dir.") from None
    except (ImportError, OSError):  # no such locks on this system, or on this file system
        pass
    for left_by_a_kill in ckpt.glob("*.tmp"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    each = 4 + 2 * MOMENTS[moments].itemsize  # bytes: float32 weights and two moments
    needed, free = each * model.parameter_count(model_config)["total"], shutil.disk_usage(ckpt).free
    if saves and free < needed:
        raise ValueError(f"{ckpt} has {free / 1e9:.3f} GB free, a checkpoint takes {needed / 1e9:.3f} GB: make room,"
                         f" choose another --out_dir, or pass --save_every=-1 to save nothing.")
    return lock


# ---- layouts: which rank holds what ----


class Layout(typing.NamedTuple):
    """How parameters lie on ranks. Rank numbers run over (copies, parts, ep) of experts, ep fastest: one host's NVLink.

    Of dense parameters there are `copies` of fsdp parts each; a rank's E/ep experts have max(fsdp / ep, 1) parts.
    What has one part only is a plain tensor; of what has more, FSDP2 makes DTensors.
    """
    dense: DeviceMesh  # copies x parts
    experts: DeviceMesh  # copies x parts x ep

    @classmethod
    def of(cls, ep, fsdp, device):
        """None for one process. The numbers are as `check_layout` wants them."""
        if world_size() == 1:
            return None
        parts, names = max(fsdp // ep, 1), ("copies", "parts", "ep")
        made = cls(init_device_mesh(device.type, (world_size() // fsdp, fsdp), mesh_dim_names=names[:2]),
                   init_device_mesh(device.type, (world_size() // (parts * ep), parts, ep), mesh_dim_names=names))
        for group in (group for mesh in made for group in mesh.get_all_groups()):
            dist.distributed_c10d._set_pg_timeout(PATIENCE, group)  # which a mesh does not hand on
        return made

    def mesh(self, name):
        """Of the parameter of this name."""
        return self.experts if is_expert(name) else self.dense

    def whole(self, name, tensor):
        """A weight or moment as a checkpoint must see it: the experts of all ranks, or just what `tensor` is.

        FSDP2 has sharded the experts of one rank, in a mesh without ep. A DTensor whose ep comes first has the same
        local part at the right place among all experts; its mesh only tells places, nothing is sent through it."""
        copies, parts, ep = self.experts.shape
        if not is_expert(name) or parts * ep == 1:
            return tensor
        cut = tensor.placements[-1] if isinstance(tensor, DTensor) else Replicate()  # parts == 1
        ranks = self.experts.mesh[self.experts.get_coordinate()[0]].t()
        mesh = DeviceMesh(self.experts.device_type, ranks, mesh_dim_names=("ep", "parts"), _init_backend=False)
        shape = torch.Size([tensor.shape[0] * ep, *tensor.shape[1:]])
        return DTensor.from_local(local(tensor), mesh, (Shard(0), cut), run_check=False, shape=shape,
                                  stride=torch.empty(shape, device="meta").stride())


def is_expert(name):
    return ".experts." in name


def local(tensor):
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_layout(ep, fsdp, c):
    """ValueError if this number of ranks, or a model of ModelConfig c, cannot be laid out so."""
    wide, narrow, flags = max(ep, fsdp), min(ep, fsdp), f"--ep={ep} --fsdp={fsdp}"
    if wide % narrow:
        raise ValueError(f"{flags}: one must be a multiple of the other.")
    if world_size() % wide:
        raise ValueError(f"{flags} needs a multiple of {wide} ranks, not {world_size()}: start them by torchrun"
                         f" --nproc_per_node, or change these flags.")
    model.tokens_received(c, ep)  # ValueError: experts do not spread so
    parts = max(fsdp // ep, 1)
    if c.n_experts // ep % parts and (2 * c.expert_width % parts or c.hidden % parts):
        raise ValueError(f"{flags}: neither a rank's {c.n_experts // ep} experts nor their widths {2 * c.expert_width}"
                         f" and {c.hidden} can be cut into {parts}.")


def shard(net, layout):
    """Lets FSDP2 shard what has several parts. Gradients are sums over ranks, as everything here, not its means."""
    parts = {"dense": layout.dense.size(1), "experts": layout.experts.size(1)} if layout else {"dense": 1}
    if parts["dense"] == 1:
        return
    mesh = lambda mesh: mesh["copies", "parts"] if mesh.size(0) > 1 else mesh["parts"]
    apart = {p for name, p in net.named_parameters() if is_expert(name)}

    def wrap(module, mesh, **options):
        fully_shard(module, mesh=mesh, **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a scaled sum, which gloo does not know
        module.register_forward_pre_hook(mark)  # behind FSDP's own

    def mark(module, _):
        for name, p in module.named_parameters():
            if not is_expert(name):  # experts are marked as a module of their own
                p.sharded = True  # see quant.weight_operands

    def cut(p):
        """Whole experts if they come out even, else a slice of each."""
        return Shard(0 if len(p) % parts["experts"] == 0 else 1)

    for layer in (m for m in net.modules() if isinstance(m, model.Layer)):
        experts = getattr(layer.ffn, "experts", None)
        if experts is not None and parts["experts"] > 1:
            wrap(experts, mesh(layout.experts), shard_placement_fn=cut)
        wrap(layer, mesh(layout.dense), ignored_params=apart)
        if experts is not None and parts["experts"] > 1:
            layer.set_modules_to_forward_prefetch([experts])  # gathered while attention computes
    wrap(net, mesh(layout.dense), ignored_params=apart)
    register_fsdp_forward_method(net, "generate")


def share(config, model_config, element, **stage):
    """What one rank holds and does, as the formulas of model.py take it; element: bytes of an activation."""
    recipe, recompute = formats(config)
    return model.Share(model_config, recipe, recompute, config.batch_size * config.seq_len, config.seq_len, config.ep,
                       config.fsdp, MOMENTS[config.moments].itemsize, config.grad_accum, element=element, **stage)


def layout_line(run, config):
    """What the run's start says of its layout and memory."""
    copies = [world_size() // config.fsdp, world_size() // max(config.ep, config.fsdp)]
    plan = model.memory(share(config, run.net.config, run.net.dtype.itemsize))
    listed = ", ".join(f"{what} {size / 2**30:.3g}" for what, size in plan.items() if size)
    return (f"layout: dense parameters {copies[0]} copies x {config.fsdp} parts, experts {copies[1]} copies x"
            f" {max(config.fsdp // config.ep, 1)} parts x {config.ep} ranks; a rank plans for"
            f" {sum(plan.values()) / 2**30:.3g} GiB: {listed}")


def remedies(config, ranks):
    """{flag: the same Config with it} for each flag that makes a rank of so many hold less."""
    flags = {f"batch_size={config.batch_size // 2}": config.batch_size > 1,
             f"recompute={','.join(model.RECOMPUTE_SCOPES)}": set(model.RECOMPUTE_SCOPES) - formats(config)[1],
             "save_h=fp4": (config.save_h or RECIPES[config.precision].save_h) != "fp4",
             "moments=bf16": config.moments != "bf16", f"fsdp={ranks}": config.fsdp < ranks,
             f"ep={min(ranks, 8)}": config.ep == 1 < ranks and ranks % min(ranks, 8) == 0}
    kinds = typing.get_type_hints(Config)
    changes = {flag: flag.partition("=")[::2] for flag, open in flags.items() if open}
    return {f"--{flag}": dataclasses.replace(config, **{name: kinds[name](value)})
            for flag, (name, value) in changes.items()}


def check_memory(config, model_config, device, dtype):
    """Says so where a GPU will be nearly full. ValueError where it cannot hold the plan, with what helps how much.

    Plans were up to 3 % too high where that was measured, and for the busiest rank, whose load they do not know, up to 5 % too low
    (README); what is 5 % over is refused."""
    if device.type != "cuda":
        return
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator, for what comes
    free = torch.cuda.mem_get_info(device)[0] + held
    planned = lambda config: sum(model.memory(share(config, model_config, dtype.itemsize)).values())
    needs = f"A rank plans for {planned(config) / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} free"
    if planned(config) > 1.05 * free:
        helps = {}
        for flag, changed in remedies(config, world_size()).items():
            with contextlib.suppress(ValueError):  # a layout that this model does not take
                helps[flag] = planned(changed)
        listed = ", ".join(f"{flag} ({size / 2**30:.1f})" for flag, size in sorted(helps.items(), key=lambda kv: kv[1])
                           if size < planned(config))
        raise ValueError(f"{needs}. What helps: {listed}{', ' * bool(listed)}more ranks.")
    if planned(config) > 0.9 * free:
        say(f"warning: {needs}, which leaves little to the allocator.")


@contextlib.contextmanager
def explained_memory(config, net=None):
    """Where memory runs out, one MemoryError that says how much was asked for, for how many tokens, and what helps."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        if not asked:
            raise
        tokens = config.batch_size * config.seq_len
        most = max((m.received for m in net.modules() if isinstance(m, model.Experts)), default=0) if net else 0
        helps = [*remedies(config, world_size())] + ["more ranks"] * (config.fsdp == world_size())
        raise MemoryError(f"Out of memory on rank {rank()}: {asked[1]} more were asked for, with {tokens} tokens a"
                          f" micro-batch and up to {most} received by a layer's experts. What helps:"
                          f" {', '.join(helps)}.") from None


# ---- checkpoints ----


def complete_checkpoints(folder):
    """The complete checkpoints <folder>/<step>, the latest step last."""
    found = [p.parent for p in folder.glob("*/train.json") if p.parent.name.isdigit()]
    return sorted((p for p in found if (p / ".metadata").exists()), key=lambda p: int(p.name))


def find_checkpoint(path):
    """The checkpoint meant by its own folder, or by its run's out_dir. FileNotFoundError: none; ValueError: damaged."""
    path = Path(path)
    found = [p for p in complete_checkpoints(path.parent) if p == path] or complete_checkpoints(path / "ckpt")
    if not found:
        of_hub = any(path.glob("*.safetensors"))
        raise FileNotFoundError(f"{path} is no complete checkpoint: give <out_dir>/ckpt/<step>, or an <out_dir>"
                                + f"; it is one of Hugging Face, --init_from=hf:{path}" * of_hub + ".")
    try:
        for part in dcp.FileSystemReader(found[-1]).read_metadata().storage_data.values():
            if (found[-1] / part.relative_path).stat().st_size < part.offset + part.length:
                raise ValueError(f"{part.relative_path} is cut off")
    except Exception as error:  # a damaged pickle raises anything
        raise damaged(found[-1], error) from None
    return found[-1]


def damaged(path, error):
    return ValueError(f"{path} is damaged ({in_short(error)}): name another checkpoint, or remove this one, then"
                      f" --resume=auto takes the one before it.")


def in_short(error):
    """A few words of an error; of DCP's, whose text is a page, the words of what first failed."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error.__context__, OSError):  # what became an internal error of torch's writer
        error = error.__context__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".split("\n")[0][:200]


@contextlib.contextmanager
def writing(path):
    """Where what it encloses cannot be written, one OSError that says what to do."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise OSError(f"Cannot write {path} ({in_short(error)}): make room, or choose another --out_dir; what was saved"
                      f" before is whole, and --resume=auto goes on from it.") from None


def read_notes(checkpoint):
    """A checkpoint's train.json, "model" in it as a ModelConfig: it may be older than a field. ValueError: damaged."""
    try:
        notes = json.loads((checkpoint / "train.json").read_text())
        needed = {"model", "config", "tokenizer", "end_of_text", "data", "step", "skipped", "bad_in_a_row"}
        if missing := needed - set(notes):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return notes | {"model": model.ModelConfig(**notes["model"])}
    except (ValueError, TypeError) as error:
        raise damaged(checkpoint / "train.json", error) from None


def training_state(net, optimizer, layout=None):
    """What is saved, and filled in place by a load: weights, router bias, and AdamW's moments by parameter name."""
    for p in net.parameters():
        if not optimizer.state[p]:  # before the first step; AdamW starts from these zeros as well
            optimizer.state[p] = zero_state(p, p.dtype)
    moments = {name: optimizer.state[p] for name, p in net.named_parameters()}
    if layout is None:
        return {"model": net.state_dict(), "optimizer": moments}
    whole = lambda name, tensors: {k: t if k == "step" else layout.whole(name, t) for k, t in tensors.items()}
    return {"model": {name: layout.whole(name, t) for name, t in net.state_dict().items()},
            "optimizer": {name: whole(name, tensors) for name, tensors in moments.items()}}


class Saver:
    """Writes checkpoints <folder>/<step> beside the training, one at a time; `with` waits for the last one.

    `begin` copies the state, a thread of each rank writes its part to <step>.tmp, and `finish`, when all have, renames
    that. So what has the name is complete, and a kill at any time leaves the checkpoints before. All ranks call these
    together, and where a file cannot be written all get the same error: from `finish`, for what the thread met.
    """

    def __init__(self, folder):
        self.folder, self.writing = folder, None  # a Future
        # ranks talk about their files in a thread, which must not come between what the main thread sends
        self.group = dist.new_group(backend="gloo") if world_size() > 1 else None

    def begin(self, state, notes):
        """`notes`, with "step" in it, become train.json."""
        self.finish()
        self.notes, self.final = notes, self.folder / str(notes["step"])
        self.aside = self.final.with_suffix(".tmp")
        together(writing(self.final)(self.aside.mkdir), here=rank() == 0)
        self.writing = together(writing(self.final)(dcp.async_save), state, checkpoint_id=self.aside,
                                process_group=self.group, no_dist=world_size() == 1)

    def busy(self):
        return self.writing is not None and not self.writing.done()

    def finish(self):
        """Waits for the ranks' files, if any are being written, and makes them a checkpoint."""
        if self.writing is not None:
            written, self.writing = self.writing, None
            together(writing(self.final)(written.result))
            together(writing(self.final)(self.publish), here=rank() == 0)

    def publish(self):
        (self.aside / "train.json").write_text(json.dumps(self.notes, indent=1))
        shutil.rmtree(self.final, ignore_errors=True)  # incomplete, if it exists: no run comes to a saved step twice
        self.aside.rename(self.final)
        for old in complete_checkpoints(self.folder)[:-KEPT_CHECKPOINTS]:
            (old / "train.json").unlink()  # from here on it does not count as complete
            shutil.rmtree(old, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None or is_shared(error):  # else the other ranks are elsewhere, and none may wait for them
            self.finish()


def load_checkpoint(path, state):
    """Fills the tensors of `state`. ValueError, raised on all ranks: the files cannot be read."""
    try:
        dcp.load(state, checkpoint_id=path, no_dist=world_size() == 1)
    except CheckpointException as error:  # on all ranks, whichever failed
        give_up(damaged(path, error))
    wrong = total(torch.stack([(~local(t).isfinite()).any() for t in state["model"].values()]).sum())
    if wrong:  # files of the right size with other bytes; the next save would make room by removing a good checkpoint
        give_up(damaged(path, ValueError("numbers in it are not finite")))
    new_epoch()  # quantised copies of the old weights are stale


# ---- one step ----


def make_optimizer(net, config):
    """AdamW; weight decay on matrices alone, embedding, head and experts among them (as in nanoGPT).

    Experts are a group of their own: they may lie on other ranks, and a fused step takes tensors that lie alike."""
    decayed, kept = {False: [], True: []}, []
    for name, p in net.named_parameters():
        (decayed[is_expert(name)] if p.ndim >= 2 else kept).append(p)
    groups = [{"params": params, "weight_decay": config.weight_decay} for params in decayed.values() if params]
    groups += [{"params": kept, "weight_decay": 0.0}] if kept else []
    if config.moments == "bf16":
        return BF16AdamW(groups, config.lr, (0.9, 0.95))
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def zero_state(p, dtype):
    """AdamW's state of a parameter before its first step, with moments of this dtype."""
    moments = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=p.device), **moments}


class BF16AdamW(torch.optim.Optimizer):
    """AdamW with BF16 moments and float32 weights, as DeepSeek-V3 (arXiv 2412.19437, §3.3.3); torch's own refuses that.

    Moments become float32, AdamW takes its step, and they are rounded to nearest even: all arithmetic is float32, and
    weights move by the new moments before they are rounded. On a GPU one kernel for a group does all that; elsewhere
    torch's fused AdamW, a portion at a time. `grad_scale` and `found_inf` are those of torch's: see `update`."""

    def __init__(self, groups, lr, betas, eps=1e-8, weight_decay=0.01):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.grad_scale = self.found_inf = None
        for group in self.param_groups:
            self.state.update({p: zero_state(p, torch.bfloat16) for p in group["params"]})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            steps = [self.state[p]["step"] for p in params]
            torch._foreach_add_(steps, 1)
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= dict(zip(("beta1", "beta2"), group["betas"]))
            if params[0].is_cuda and quant.kernels is not None:
                tensors = list(map(list, zip(*map(self.tensors, params))))
                one, zero = steps[0].new_ones(()), steps[0].new_zeros(())
                quant.kernels.adamw_bf16(*tensors, one if self.grad_scale is None else self.grad_scale,
                                         zero if self.found_inf is None else self.found_inf, **options)
            else:
                options |= dict(amsgrad=False, maximize=False, grad_scale=self.grad_scale, found_inf=self.found_inf)
                for portion in self.portions(params):
                    self.advance(*map(list, zip(*portion)), options)
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))

    def tensors(self, p):
        """This rank's part of a weight, its gradient and its moments; the step."""
        state = self.state[p]
        return local(p), local(p.grad).contiguous(), local(state["exp_avg"]), local(state["exp_avg_sq"]), state["step"]

    @staticmethod
    def advance(weights, grads, first, second, steps, options):
        kept = first + second
        wide = [torch.empty_like(t, dtype=torch.float32) for t in kept]
        torch._foreach_copy_(wide, kept)
        torch._fused_adamw_(weights, grads, wide[: len(first)], wide[len(first) :], [], steps, **options)
        torch._foreach_copy_(kept, wide)

    def portions(self, params):
        """Lists of (weight, gradient, both moments, step): PORTION elements at most, large tensors in flat pieces."""
        portion, room = [], PORTION
        for p in params:
            *tensors, step = self.tensors(p)
            for piece in zip(*(t.view(-1).split(PORTION) for t in tensors)):
                if piece[0].numel() > room:
                    yield portion
                    portion, room = [], PORTION
                portion.append((*piece, step))
                room -= piece[0].numel()
        if portion:
            yield portion


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


def gradients(net, micro_batches, device, layout=None):
    """Fills .grad with the gradient of the mean over all tokens of all ranks; returns (loss, gradient norm, tokens).

    The first two are tensors [], the same bits on all ranks; nothing here waits for a GPU."""
    def to_device(t):  # from pinned memory a copy need not be waited for
        return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t

    num_tokens = sum((targets_BS != data.IGNORED).sum() for _, targets_BS in micro_batches)
    num_tokens = max(1, total(num_tokens).item())
    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    for i, (tokens_BS, targets_BS) in enumerate(micro_batches, 1):
        if isinstance(net, FSDPModule):
            net.set_requires_all_reduce(i == len(micro_batches))  # copies of a part are added up once a step
        _, loss = net(to_device(tokens_BS), to_device(targets_BS), num_tokens)
        backward(loss)
        loss_sum += loss.detach()
    add_up_gradients(net, layout)
    loss, square = total(torch.stack([loss_sum, square_sum(net, layout)])).float()
    return loss, square.sqrt(), num_tokens  # a square that float32 cannot hold is infinite


def backward(y, dy=None):
    """y.backward(dy) in this thread, not one of autograd's: the host then launches as much in two thirds of the time."""
    with torch.autograd.set_multithreading_enabled(False):
        y.backward(dy)


def add_up_gradients(net, layout):
    """Of what FSDP2 does not reduce, that is what has one part only: over all ranks, or those with the same experts."""
    grads = {}  # by the ranks to add up over, and type
    for name, p in net.named_parameters():
        if p.grad is None:  # not reached on this rank, but the others wait for it
            p.grad = torch.zeros_like(p)
        if layout and not isinstance(p, DTensor) and layout.mesh(name).size(0) > 1:
            grads.setdefault((layout.mesh(name).get_group("copies"), p.dtype), []).append(p.grad)
    for work in [group.allreduce_coalesced(same) for (group, _), same in grads.items()]:  # a call each costs 0.1 ms
        work.wait()


def square_sum(net, layout):
    """This rank's share of the squared gradient norm, whose sum over ranks is the whole: what n ranks hold counts 1/n.

    In float64, so that it hardly depends on how gradients are cut."""
    grads = {}  # by the number of ranks that hold them
    for name, p in net.named_parameters():
        grads.setdefault(layout.mesh(name).size(0) if layout else 1, []).append(local(p.grad))
    return sum(torch.stack(torch._foreach_norm(same, 2, torch.float64)).square().sum() / n for n, same in grads.items())


@torch.no_grad()
def update(net, optimizer, loss, norm, lr, largest):
    """AdamW's step on gradients of this norm, brought down to `largest` (0: as they are), and the balance bias's.

    Neither is taken where loss or norm is not finite: weights, moments and bias stay. What decides are tensors, so that
    the host need not wait for a GPU. Returns max / mean load of experts and of ranks, a tensor [2]."""
    fine = torch.isfinite(loss) & torch.isfinite(norm)
    optimizer.grad_scale = (norm / largest).clamp(min=1) if largest else None
    optimizer.found_inf = (~fine).float()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return net.update_balance(fine).to(norm)


def train_step(run, config):
    """One optimizer step of all ranks, taken or skipped; returns the row of the log and the number of tokens."""
    counts, step = run.counts, run.counts["step"]
    torch.manual_seed(((config.seed * 2**24 + step) * 2**12 + rank()) % 2**63)  # whatever was drawn before
    lr = learning_rate(step, config)
    loss, norm, tokens = gradients(run.net, run.batches.next(), run.device, run.layout)
    balances = update(run.net, run.optimizer, loss, norm, lr, config.grad_clip)
    run.optimizer.zero_grad()
    if run.device.type == "cuda" and step + 1 < config.steps:
        run.batches.read()
    loss, norm, balance, rank_balance = torch.cat([torch.stack([loss, norm]), balances]).tolist()  # waits for the GPU
    row = {"step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm, "balance": balance, "rank_balance": rank_balance}
    if math.isfinite(loss) and math.isfinite(norm):
        counts["bad_in_a_row"] = 0
    else:
        row["skipped"] = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
        counts["bad_in_a_row"] += 1
        counts["skipped"] += 1
        say(f"step {step + 1} skipped: {row['skipped']}; {counts['bad_in_a_row']} in a row, {counts['skipped']} in all")
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
    torch.manual_seed(run.counts["step"])  # all ranks draw the same: layers may need them all
    try:
        ids = net.generate(prompt_BS, min(SAMPLE_TOKENS, net.config.max_seq_len - 1), 0.8)[0, 1:].tolist()
        text = to_text(run.encoding, ids)
    except FloatingPointError as error:
        text = f"none, {error}"
    net.train()
    net.recipe = trained_with
    if isinstance(net, FSDPModule):
        net.reshard()  # what no backward has freed
    say(f"step {run.counts['step']}: val loss {losses[RECIPES['bf16']]:.4f}, in {config.precision}"
        f" {losses[trained_with]:.4f}; a sample:\n{text}\n")
    return {"val_loss": losses[RECIPES["bf16"]], "val_loss_quantized": losses[trained_with]}


def diagnose(run, config):
    """What quantisation does to each tensor (quant.Diagnosis) in a forward and backward of the first validation batch,
    as rank 0 sees it: a row of diagnose.jsonl and a line. Weights, moments, biases and the order of data stay."""
    names = {local(p).data_ptr(): re.sub(r"layers\.\d+\.", "", name) for name, p in run.net.named_parameters()}
    tokens_BS, targets_BS = run.val_batches[0]
    with quant.Diagnosis(names).watching() as diagnosis:
        run.net(tokens_BS.to(run.device), targets_BS.to(run.device))[1].backward()
    run.optimizer.zero_grad()
    run.net.update_balance(False)  # clears the loads that were counted
    report = diagnosis.report()
    row = {"step": run.counts["step"], "tensors": report}
    together(add_to_log, Path(config.out_dir, "diagnose.jsonl"), row, here=rank() == 0)
    say(f"diagnosis of step {run.counts['step']}: {in_a_line(report) or 'nothing is quantised'}")


def in_a_line(report):
    """Of each measure the worst tensor."""
    words = {"snr_db": "lowest signal-to-noise {:.1f} dB", "zero": "most zeros {:.2%}",
             "saturated": "most saturated {:.2%}", "wide_row_tiles": "1x128 tiles with spread > 14 {:.2%}",
             "wide_tiles": "128x128 tiles with spread > 14 {:.2%}", "shifted_to_zero": "codes shifted to zero {:.2%}"}
    parts = []
    for key, text in words.items():
        values = {name: row[key] for name, row in report.items() if row.get(key) is not None}
        if values:
            worst = (min if key == "snr_db" else max)(values, key=values.get)
            parts.append(text.format(values[worst]) + f" ({worst})" * (values[worst] != 0))
    return "; ".join(parts)


@contextlib.contextmanager
def memory_snapshot(config):
    """Writes what the allocator did meanwhile, and for which lines: torch's own snapshot, <out_dir>/memory.pickle, also
    where memory runs out. To see it, drop the file onto https://pytorch.org/memory_viz; it stays in your browser."""
    path = Path(config.out_dir, "memory.pickle")
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield
    finally:
        with writing(path):
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
    say(f"memory of this step: {path}; drop it onto https://pytorch.org/memory_viz")


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


def begin_log(path, run):
    """config.json, and the logs less the rows past the run's step: a killed run logged what is now done again."""
    def is_past(line):
        try:
            return json.loads(line)["step"] > run.counts["step"]
        except (ValueError, TypeError, KeyError):  # torn by a kill
            return True

    def cut_off(path):
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if run.counts["step"] == 0 and lines:
            path.rename(path.with_suffix(".old"))
            say(f"the log of before is {path.with_suffix('.old')}")
        shorter = path.with_suffix(".tmp")
        shorter.write_text("".join(f"{line}\n" for line in lines if not is_past(line)))
        shorter.rename(path)

    with writing(path.parent):
        path.with_name("config.json").write_text(json.dumps(run.origin | {"ranks": world_size()}, indent=1))
        cut_off(path)
        if (diagnoses := path.with_name("diagnose.jsonl")).exists():
            cut_off(diagnoses)


def add_to_log(path, row):
    """Adds a row as one line of strict JSON: what is not finite becomes null."""
    strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with writing(path), path.open("a") as log:
        log.write(json.dumps(strict) + "\n")


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


class Ahead:
    """The micro-batches of each step; the next ones are read while a GPU computes."""

    def __init__(self, batches, per_step):
        self.batches, self.per_step, self.ready, self.state, self.error = batches, per_step, None, None, None
        self.identity, self.load_state_dict = batches.identity, batches.load_state_dict

    def read(self):
        """What fails here is raised by `next`, alike on all ranks: the step before is still to be logged and saved."""
        if self.state is None:
            self.state = self.batches.state_dict()
            try:
                self.ready = together(lambda: [self.batches.next() for _ in range(self.per_step)])
            except (ValueError, OSError, ImportError, SystemExit) as error:  # what `together` raises
                self.error = error

    def next(self):
        self.read()
        if self.error is not None:
            raise self.error
        self.state = None
        return self.ready

    def state_dict(self):
        """Where the batches begin that `next` will give."""
        return self.state or self.batches.state_dict()


class Run(typing.NamedTuple):
    device: torch.device
    net: Model
    layout: Layout | None  # None: one process
    optimizer: torch.optim.Optimizer
    encoding: typing.Any  # tiktoken.Encoding
    batches: Ahead
    val_batches: list
    counts: dict  # step: steps done; skipped: how many of them; bad_in_a_row: how many just now
    origin: dict  # what the run began with, in JSON: config, model, tokenizer, end_of_text


def start(config, device, dtype, recipe, recompute, model_config, resume):
    """The Run that a Config asks for, new or resumed, the text, which takes longest, last. `check` gave the rest."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts; deterministic needs it
    torch.use_deterministic_algorithms(config.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    together(check_memory, config, model_config, device, dtype)
    if world_size() > 1:
        together(open_tokenizer, config, model_config, resume, here=rank() == 0)  # what it downloads, all find
    name, encoding = together(open_tokenizer, config, model_config, resume)
    check_ranks_agree(asdict(config) | {"checkpoint to resume": resume and resume.name})

    layout = Layout.of(config.ep, config.fsdp, device)
    net = build(model_config, layout, device, config.seed)
    net.recipe, net.dtype, net.recompute = recipe, dtype, recompute
    if config.compile:
        model.compile_elementwise()
    optimizer = make_optimizer(net, config)
    state = training_state(net, optimizer, layout)

    counts = {"step": 0, "skipped": 0, "bad_in_a_row": 0}
    origin = {"config": asdict(config), "model": asdict(model_config), "tokenizer": name}
    origin["end_of_text"] = encoding.eot_token
    if resume:
        load_checkpoint(resume, state)
        notes = read_notes(resume)
        counts = {name: notes[name] for name in counts}
        before = notes["config"] | {"resume": config.resume}
        changed = [f"{k} {before.get(k)} -> {now}" for k, now in origin["config"].items() if now != before.get(k)]
        passed = [p.name for p in resume.parent.iterdir() if p.name.isdigit() and int(p.name) > int(resume.name)]
        say(f"goes on from {resume}" + "; changed: " * bool(changed) + ", ".join(changed)
            + f"; incomplete: {', '.join(passed)}" * bool(passed and config.resume == "auto"))
    elif folder := hf_folder(config.init_from):
        fill_from_hf(net, folder)
    elif config.init_from:
        load_checkpoint(find_checkpoint(config.init_from), {"model": state["model"]})
    if config.resume and not resume:
        say(f"there is no complete checkpoint in {config.out_dir}: starts at step 0")
    batches, val_batches = together(open_data, config, encoding, resume)
    check_ranks_agree(batches.identity)
    return Run(device, net, layout, optimizer, encoding, batches, val_batches, counts, origin)


def build(model_config, layout, device, seed):
    """A model with the weights of this seed, which no rank ever holds whole: it is cut before it gets memory."""
    with torch.device("meta"):
        net = Model(model_config, layout and layout.experts.get_group("ep"))
    shard(net, layout)
    net.to_empty(device=device)
    torch.manual_seed(seed)  # the same weights on every rank
    net.init_weights(copy_part)
    return net


@torch.no_grad()
def copy_part(p, values):
    """Into a parameter, what this rank holds of its values."""
    if isinstance(p, DTensor):
        values = distribute_tensor(values, p.device_mesh, p.placements, src_data_rank=None)  # nothing is sent
    local(p).copy_(local(values))


def fill_from_hf(net, folder):
    """A checkpoint of Hugging Face; for a sharded model by way of a whole one on the host, but for others' experts."""
    if not isinstance(net, FSDPModule):
        return together(model.fill_from_hf, net, folder)
    with torch.device("meta"):
        whole = Model(net.config, net.ep)
    together(model.fill_from_hf, whole.to_empty(device="cpu"), folder)
    for ours, theirs in zip(net.parameters(), whole.parameters()):
        copy_part(ours, theirs.detach().to(local(ours).device))
    for ours, theirs in zip(net.buffers(), whole.buffers()):
        ours.copy_(theirs)


def open_tokenizer(config, model_config, resume):
    """(name, tiktoken.Encoding) of --tokenizer, else of the checkpoint that the run begins with."""
    name, source = config.tokenizer, resume or config.init_from
    if not name and source:
        name = source if hf_folder(source) else read_notes(find_checkpoint(source))["tokenizer"]
        if hf_folder(source) and not Path(hf_folder(source), "tokenizer.json").exists():
            raise FileNotFoundError(f"{hf_folder(source)} has no tokenizer.json: name the tokenizer that its weights"
                                    f" learned with, --tokenizer=bytes for example.")
    name = f"hf:{hf_folder(name)}" if hf_folder(name) else name or "bytes"
    encoding = data.tokenizer(name)
    if encoding.n_vocab > model_config.vocab_size:
        enough = f"pass --model.vocab_size={math.ceil(encoding.n_vocab / 128) * 128}"
        raise ValueError(f"The tokenizer {name} has {encoding.n_vocab} ids, more than the model's vocab_size"
                         f" {model_config.vocab_size}: {'use that of the checkpoint' if source else enough}.")
    return name, encoding


def open_data(config, encoding, resume):
    """(training batches, set to where `resume` was saved; list of validation batches)."""
    batches, val_batches = data.open_data(config.data, encoding, config.seed, config.seq_len, config.batch_size,
                                          config.eval_steps * config.batch_size, rank(), world_size())
    batches = Ahead(batches, config.grad_accum)
    if resume:
        batches.load_state_dict(read_notes(resume)["data"])
    return batches, val_batches


def train(run, config):
    """The loop. Each step gives a row of the log, some an evaluation or a checkpoint; returns what `main` does."""
    counts, row, stopped = run.counts, {}, False
    ckpt, log = Path(config.out_dir, "ckpt"), Path(config.out_dir, "log.jsonl")
    flops = model.flops_per_token(run.net.config, config.seq_len) / world_size()
    peak, size = peak_flops(run.device), model.parameter_count(run.net.config)
    known = f"is of {peak / 1e12:.0f} TFLOP/s dense BF16 each" if peak < math.inf else "reads 0: the peak is unknown"
    say(f"{size['total'] / 1e6:.2f} M parameters, {size['active'] / 1e6:.2f} M active; {run.net.recipe};"
        f" {world_size()} x {run.device.type}, {run.net.dtype}; MFU {known}")
    say(layout_line(run, config))
    together(begin_log, log, run, here=rank() == 0)
    shown = min(counts["step"] + 2, config.steps - 1) if config.memory_snapshot and rank() == 0 else None
    every = {"eval": config.eval_every, "save": config.save_every, "log": config.log_every}
    seconds = 0.1 if sys.stderr.isatty() else 10  # between redraws
    bar = tqdm(total=config.steps, initial=counts["step"], disable=rank() != 0, mininterval=seconds)
    gc.collect()
    gc.freeze()  # of what is there now nothing becomes garbage; to look through all of it would stall a step
    with bar, catch_signals() as signals, Saver(ckpt) as saver, explained_memory(config, run.net):
        while counts["step"] < config.steps and not stopped:
            began = time.perf_counter()
            with memory_snapshot(config) if counts["step"] == shown else contextlib.nullcontext():
                row, tokens = train_step(run, config)
            speed = tokens / (time.perf_counter() - began)  # tokens of all ranks, FLOP of one
            row |= {"tokens_per_s": speed, "tflops": speed * flops / 1e12, "mfu": speed * flops / peak}
            row["peak_gib"] = peak_gib(run.device)
            last = counts["step"] == config.steps
            due = {name for name, n in every.items() if last or n > 0 and counts["step"] % n == 0}
            if "eval" in due:
                row |= evaluate(run, config)
                if config.diagnose:
                    diagnose(run, config)
            if due & {"log", "eval"} or "skipped" in row:
                together(add_to_log, log, row, here=rank() == 0)
            bar.set_postfix_str(status(row, counts), refresh=False)
            bar.update()
            if counts["bad_in_a_row"] >= config.max_bad_steps:
                saver.finish()
                good = ", ".join(map(str, complete_checkpoints(ckpt))) or "none"
                give_up(FloatingPointError(f"{counts['bad_in_a_row']} steps in a row were skipped; of the last, step"
                                           f" {row['step']}, the {row['skipped']}. Good checkpoints: {good}."))
            # a signal may have come to one rank only, and one may have written its part of a checkpoint before another
            stopped, busy = total(torch.tensor([len(signals), saver.busy()])).tolist()
            if not busy:
                saver.finish()
            saves = last or stopped or "save" in due and not counts["bad_in_a_row"]  # in a bad streak old ones are better
            if saves and config.save_every >= 0:
                notes = counts | {"data": data.merge_states(of_ranks(run.batches.state_dict()))} | run.origin
                saver.begin(training_state(run.net, run.optimizer, run.layout), notes)
    finished, saved = counts["step"] == config.steps, (complete_checkpoints(ckpt) or [None])[-1]
    if finished and "val_loss" not in row:  # it was finished before: nothing was left to do
        row |= evaluate(run, config)
    if finished and not math.isfinite(row["val_loss"]):
        give_up(FloatingPointError(f"The run diverged: val loss {row['val_loss']} after {config.steps} steps,"
                                   f" {counts['skipped']} of them skipped. Try a lower --lr or a longer --warmup."))
    if finished:
        say(f"val loss {row['val_loss']:.4f} after {config.steps} steps, {counts['skipped']} of them skipped;"
            f" weights {f'in {saved}' if saved else 'not saved'}, curves in {log}")
    else:
        where = f"saved in {saved}; --resume=auto goes on" if saved else "not saved"
        say(f"stopped by a signal after step {counts['step']}, {where}")
    return row | counts | {"finished": finished, "checkpoint": str(saved)}


def status(row, counts):
    """The bar's text; tqdm itself adds steps and ETA."""
    text = (f"loss {row['loss']:.3f} lr {row['lr']:.1e} norm {row['grad_norm']:.2f} {row['tokens_per_s']:.0f} tok/s"
            f" {row['tflops']:.2f} TFLOP/s MFU {row['mfu']:.1%} {row['peak_gib']:.2f} GiB balance {row['balance']:.2f}")
    return text + f" skipped {counts['skipped']}" * (counts["skipped"] > 0)


def main(config):
    """Trains as `config` says, alone or, where torchrun set WORLD_SIZE, as one rank of many.

    Returns the last row of the log with, over it, the counts step, skipped and bad_in_a_row; finished (False: a signal
    came) and checkpoint, a path. ValueError, OSError, FloatingPointError and MemoryError carry one line for the user.
    """
    with joined_ranks(config):
        *checked, model_config, resume = together(check, config)
        holding = together(hold, config.out_dir, model_config, config.moments, config.save_every >= 0, here=rank() == 0)
        with holding or contextlib.nullcontext():
            with explained_memory(config):
                run = start(config, *checked, model_config, resume)
            return train(run, config)


@contextlib.contextmanager
def joined_ranks(config):
    """The process group of all ranks, where torchrun started several. It stays open after an error of one rank alone:
    to close it takes them all. That rank's exit is what ends the others."""
    joins = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if joins:  # what lies on the host goes through gloo, what lies on GPUs through NCCL
        gpus = config.device != "cpu" and torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    try:
        yield
    except BaseException as error:
        joins &= is_shared(error)
        raise
    finally:
        if joins:
            dist.destroy_process_group()


# ---- the other command ----


def export(words):
    """train.py export RUN FOLDER: the weights of a checkpoint, or of a run's newest, as a Hugging Face checkpoint."""
    parser = argparse.ArgumentParser("train.py export", description=export.__doc__)
    parser.error = fail
    parser.add_argument("run", help="an --out_dir, or one of its checkpoints <out_dir>/ckpt/<step>")
    parser.add_argument("folder", help="to be made: config.json, *.safetensors and, if there is one, tokenizer.json")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights [bf16]")
    parser.add_argument("--tokenizer", help="hf:DIR, where its files are now [the run's tokenizer]")
    options = parser.parse_args(words)
    checkpoint = find_checkpoint(options.run)
    notes = read_notes(checkpoint)
    tokenizer = options.tokenizer or notes["tokenizer"]
    source = Path(hf_folder(tokenizer) or os.devnull)
    if hf_folder(tokenizer) and not (source / "tokenizer.json").exists():
        fail(f"{source} has no tokenizer.json any more: name its folder now as --tokenizer=hf:DIR.")
    with torch.device("meta"):
        net = Model(notes["model"])
    net.to_empty(device="cpu")
    load_checkpoint(checkpoint, {"model": net.state_dict()})
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    model.save_hf(net, options.folder, dtype, notes["end_of_text"])
    files = [source / name for name in ("tokenizer.json", "tokenizer_config.json") if (source / name).exists()]
    for file in files:
        shutil.copy(file, options.folder)
    print(f"{checkpoint} is now {options.folder}, in {options.dtype}"
          + f"; its tokenizer has no tokenizer.json: --init_from=hf:{options.folder} --tokenizer={tokenizer} loads it"
          * (not files))


def leave(code):
    """Ends this process, one of several ranks at once: neither threads nor other ranks are waited for. Taking the
    interpreter down while an error still holds process groups aborts now and then, and -6 is no exit code of ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        export(sys.argv[2:]) if sys.argv[1:2] == ["export"] else main(parse_flags(sys.argv[1:]))
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
        print("train.py:", " ".join(str(error).split()), file=sys.stderr)
        leave(2)
    except KeyboardInterrupt:
        print("train.py: stopped before the first step", file=sys.stderr)
        leave(130)
    except SystemExit as ended:  # of --help; of a rank that leaves with the others: see `give_up`
        leave(ended.code or 0)
    except Exception:
        traceback.print_exc()
        leave(1)
