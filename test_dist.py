"""Tests of runs on many ranks: layouts, gradients, norms, checkpoints, faults. [n] as in test_train.py.

Ranks are gloo processes on a CPU, two or four; each test ends within 60 s.
"""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import data
import train
from model import Model, ModelConfig
from quant import RECIPES
from test_train import MICRO, launch, micro, results, small, text  # noqa: F401 (fixtures)

CONFIG = ModelConfig(**MICRO, mtp=True, init_std=0.08)
LAYOUTS = {2: [(1, 1), (1, 2), (2, 1), (2, 2)], 4: [(1, 1), (1, 4), (1, 2), (4, 1), (2, 1), (2, 2), (2, 4), (4, 2)]}


def micro_batches(count):
    """Micro-batches of 2 sequences of 16 tokens, some of them ignored."""
    torch.manual_seed(1)
    tokens = torch.randint(CONFIG.vocab_size, (count, 2, 17))
    targets = tokens[..., 1:].masked_fill(torch.rand(count, 2, 16) < 0.2, data.IGNORED)
    return list(zip(tokens[..., :-1], targets))


def build(ep, fsdp, recipe, layout=None):
    torch.manual_seed(0)
    net = Model(CONFIG, layout and layout.experts.get_group("ep"))
    net.recipe = RECIPES[recipe]
    train.shard(net, layout)
    return net


def places(layout, tensors):
    """name -> (this rank's part, the shape of the whole, where the part begins)."""
    found = {}
    for name, t in tensors.items():
        whole = layout.whole(name, t.detach()) if layout else t
        part = (whole.shape, (0,) * whole.dim())
        if isinstance(whole, DTensor):
            _, begins = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
            part = (whole.shape, begins)
        found[name] = (train.local(t).detach().clone(), *part)
    return found


def put_together(ranks):
    """Whole tensors from what each rank told."""
    wholes = {}
    for of_rank in ranks:
        for name, (part, shape, begins) in of_rank.items():
            whole = wholes.setdefault(name, torch.full(shape, float("nan")))
            whole[tuple(slice(b, b + n) for b, n in zip(begins, part.shape))] = part
    return wholes


def gradients_of(layouts, recipe, accumulated):
    if "RANK" in os.environ:
        train.dist.init_process_group("gloo")
    batches, found = micro_batches(4 * accumulated), []
    for ep, fsdp in layouts:
        layout = train.Layout.of(ep, fsdp, torch.device("cpu"))
        net = build(ep, fsdp, recipe, layout)
        n = len(batches) // train.world_size()
        loss, norm, _ = train.gradients(net, batches[train.rank() * n:][:n], torch.device("cpu"), layout)
        found.append((loss, norm, places(layout, {name: p.grad for name, p in net.named_parameters()})))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_in_every_layout(ranks, recipe):  # [15] [18] [20]
    loss, norm, own = gradients_of([(1, 1)], recipe, 2)[0]
    one = put_together([own])
    answers = results(launch(gradients_of, LAYOUTS[ranks], recipe, 2, ranks=ranks))
    for layout, *of_ranks in zip(LAYOUTS[ranks], *answers):
        worst = {}
        for name, many in put_together([parts for _, _, parts in of_ranks]).items():
            ratio = ((many * one[name]).sum() / one[name].square().sum()).item()
            kind = "experts" if "experts" in name else name.split(".")[-1]
            worst[kind] = max(worst.get(kind, (0, 0)), ((many - one[name]).abs().max().item() / one[name].abs().max().item(), ratio))
        print(ranks, layout, recipe, [r[0] - loss for r in of_ranks], [r[1]/norm for r in of_ranks], {k: f"{e:.1e} {r:.6f}" for k, (e, r) in worst.items()})
