"""Without a GPU, Triton kernels are tested in Triton's interpreter, which must be chosen before triton is imported.
`pytest --gpu` leaves out what a GPU makes no difference to."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="only tests of kernels, and those that need a GPU")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu"):
        reasons = lambda item: [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
        items[:] = [item for item in items if item.path.stem == "test_kernels" or "[cuda" in item.name or "-cuda" in item.name
                    or any("GPU" in reason for reason in reasons(item))]
