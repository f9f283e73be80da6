"""torch's DTensor and torch.distributed over gloo."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.beside import work
from benchmarks.beside.adapters import ours
from benchmarks.case import Case, Side
from benchmarks.correctness.adapters.dtensor import start
from benchmarks.peers import gloo
from benchmarks.training import Training

__all__ = ["sides", "start"]


def sides(case: Case) -> Mapping[str, Side]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return _WORK[case.parameters["work"]](case)


def _block(case: Case) -> Mapping[str, Side]:
    problem = ours.block(case)
    plan = {
        "attention.qkv.*": ColwiseParallel(),
        "attention.out_proj": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    network = parallelize_module(problem.make(), init_device_mesh("cpu", (case.ranks,)), plan)
    training = Training(network, work.MeanSquare(), problem.x, problem.target)
    return {
        "DTensor": Side(
            training.step,
            lambda r: ours.is_right_apart(r, problem.expected),
            training.start_again,
        )
    }


def _halo(case: Case) -> Mapping[str, Side]:
    rank, last = dist.get_rank(), case.ranks - 1
    halo = work.halo(case, rank)
    x = halo.block
    rows = x.shape[work.ROWS]

    def exchange() -> torch.Tensor:
        y = x.new_zeros(halo.needed.shape)
        y.narrow(work.ROWS, 1, rows).copy_(x)
        to = [*[(rank - 1, 0, 0)] * (rank > 0), *[(rank + 1, rows - 1, rows + 1)] * (rank < last)]
        sends = [(peer, x.narrow(work.ROWS, own, 1).contiguous()) for peer, own, _ in to]
        receives = [(peer, torch.empty_like(sent)) for peer, sent in sends]
        gloo.exchange(sends, receives)
        for (_, _, place), (_, buffer) in zip(to, receives, strict=True):
            y.narrow(work.ROWS, place, 1).copy_(buffer)
        return y

    return {"torch.distributed": Side(exchange, halo.is_right)}


def _all_reduce(case: Case) -> Mapping[str, Side]:
    x, is_right = work.reduced(case, dist.get_rank())
    mesh = init_device_mesh("cpu", (case.ranks,))

    def in_place() -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def redistributed() -> torch.Tensor:
        part = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    return {"torch.distributed": Side(in_place, is_right), "DTensor": Side(redistributed, is_right)}


_WORK = {work.BLOCK: _block, work.HALO: _halo, work.ALL_REDUCE: _all_reduce}
