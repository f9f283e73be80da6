"""ShardTensor of PhysicsNeMo: a scattered volume and a network of plain tensors; its halo."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from benchmarks.beside import work
from benchmarks.case import Case, Side
from benchmarks.correctness.adapters.shard_tensor import join, start
from benchmarks.correctness.ranks import whole
from benchmarks.training import Step, Training

__all__ = ["sides", "start"]


class WholeLoss(work.MeanSquare):
    """The loss as a plain tensor."""

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return whole(super().forward(y, target))


def sides(case: Case) -> Mapping[str, Side]:
    join()
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("rows",))
    return _WORK[case.parameters["work"]](case, mesh)


def _unet(case: Case, mesh: Any) -> Mapping[str, Side]:
    domain_parallel = import_module("physicsnemo.domain_parallel")
    problem = work.unet(case)
    x, target = (
        domain_parallel.scatter_tensor(each, 0, mesh, [Shard(work.ROWS)])
        for each in (problem.x, problem.target)
    )
    network = problem.make()
    domain_parallel.sync_module_over_mesh(network, mesh["rows"])
    training = Training(network, WholeLoss(), x, target)

    def is_right(result: Step) -> bool:
        gradients = {name: whole(each) for name, each in result.gradients.items()}
        return work.is_whole_and_right(Step(result.loss, gradients), problem.expected)

    return {"ShardTensor": Side(training.step, is_right, training.start_again)}


def _halo(case: Case, mesh: Any) -> Mapping[str, Side]:
    module = import_module("physicsnemo.domain_parallel.shard_utils.halo")
    halo = work.halo(case, dist.get_rank())

    # Its other method, "p2p", calls torch.cuda.set_device.
    config = module.HaloConfig(0, work.ROWS, halo_size=1, edge_padding_size=1)
    exchange = partial(module.halo_padding, halo.block, mesh, config)
    return {"ShardTensor": Side(exchange, halo.is_right)}


_WORK = {work.UNET: _unet, work.HALO: _halo}
