"""DTensor: a sharded input, and a module whose parameters are replicated."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, Result, whole, whole_gradient


def start() -> About:
    import_module("torch._dynamo")  # DTensor's first call imports it: once here, not in every rank.
    return About(f"torch {torch.__version__}", torch.version.git_version)


def run(case: Case, layout: Layout) -> Result:
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", layout.grid)
    x: Any = case.input(layout)
    x = distribute_tensor(x, mesh, [Shard(dim) for dim in layout.dims_of(x.shape)])
    x.requires_grad_()
    net = distribute_module(case.module(layout), mesh)
    with case.context():
        y = whole(net(x))
    loss = (y * cotangent(y.shape)).sum()
    backward(case, loss, x, whole)
    parameters = [whole_gradient(parameter) for parameter in net.parameters()]
    return Result(y, whole_gradient(x), parameters)
