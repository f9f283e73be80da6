"""SyncBatchNorm and FSDP2 of torch: batch norm of the blocks, as if each were a rank's batch.

Statistics are of all cells, so a split of rows is a split of the batch to them. FSDP averages
gradients over the ranks, and the gradient of a sum of losses is that times their number.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, NotOffered, Result, whole_gradient

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def start() -> About:
    return About(f"torch {torch.__version__}", torch.version.git_version)


def run(case: Case, layout: Layout) -> Result:
    warnings.simplefilter("ignore")
    module = case.module(layout)
    leaves = [each for each in module.modules() if not isinstance(each, nn.Sequential)]
    if not all(isinstance(each, (*NORMS, nn.Tanh)) for each in leaves):
        raise NotOffered
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    net: Any = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if list(net.parameters()):
        fully_shard(net, mesh=init_device_mesh("cpu", (layout.ranks,)))
    x = case.input(layout)
    block = _blocks(x, layout)[rank].clone().requires_grad_()
    with case.context():
        y = net(block)
    output = _whole(y.detach(), layout)
    weights = _blocks(cotangent(output.shape), layout)[rank]
    backward(case, (y * weights).sum(), block, whole=lambda gradient: gradient)
    gradient = None if block.grad is None else _whole(block.grad, layout)
    gradients = [whole_gradient(each) for each in net.parameters()]
    summed = [None if each is None else layout.ranks * each for each in gradients]
    return Result(output, gradient, summed)


def _blocks(x: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    blocks = [x]
    for dim, parts in zip(layout.dims, layout.grid, strict=True):
        blocks = [part for block in blocks for part in block.chunk(parts, dim)]
    return blocks


def _whole(block: torch.Tensor, layout: Layout) -> torch.Tensor:
    blocks: list[Any] = [None] * layout.ranks
    dist.all_gather_object(blocks, block)
    for dim, parts in reversed([*zip(layout.dims, layout.grid, strict=True)]):
        blocks = [
            torch.cat(blocks[first : first + parts], dim) for first in range(0, len(blocks), parts)
        ]
    return blocks[0]
