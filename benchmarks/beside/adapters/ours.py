"""gpudist: a converted U-Net, tensor-parallel layers, and operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import gpudist
from benchmarks import transformer
from benchmarks.beside import work
from benchmarks.case import Case, Side
from benchmarks.correctness.adapters.gpudist_distribute import start
from benchmarks.training import Training
from examples.gpt import Block, Cut, ParallelBlock
from gpudist.nn import fuse_parameter_movements
from gpudist.ops import AllSumReduce, HaloExchange
from gpudist.world.partition import Partition

__all__ = ["sides", "start"]


class SplitBlock(ParallelBlock):
    """Block of the GPT, split along heads and inner features."""

    def forward(self, x: torch.Tensor, length: int = 0) -> torch.Tensor:
        return super().forward(x, x.shape[1])


def sides(case: Case) -> Mapping[str, Side]:
    return {"gpudist": side(case, gpudist.init())}


def side(case: Case, P_world: Partition) -> Side:
    return _WORK[case.parameters["work"]](case, P_world)


def _unet(case: Case, P_world: Partition) -> Side:
    problem = work.unet(case)
    grid = [case.ranks if dim == work.ROWS else 1 for dim in range(problem.x.dim())]
    P_x = P_world.create_cartesian_topology_partition(grid)
    network = gpudist.distribute(problem.make(), P_x)
    x, target = (gpudist.scatter(each, P_x) for each in (problem.x, problem.target))
    target = gpudist.to_global(target, gpudist.placement.of(P_x), _splits(P_x))
    training = Training(network, work.MeanSquare(), x, target)
    return Side(
        training.step, lambda r: work.is_whole_and_right(r, problem.expected), training.start_again
    )


def _splits(P_x: Any) -> tuple[Any, ...]:
    return tuple(gpudist.sbp.split(dim) for dim in range(P_x.dim))


def block(case: Case) -> work.Problem:
    """Return the problem of the GPT's block."""
    width, heads = case.parameters["shape"][-1], case.parameters["heads"]
    return work.problem(case, lambda: Block(width, heads))


def _block(case: Case, P_world: Partition) -> Side:
    problem = block(case)
    width, heads = case.parameters["shape"][-1], case.parameters["heads"]
    P = P_world.create_cartesian_topology_partition([1, P_world.size])
    torch.manual_seed(0)
    network = SplitBlock(Cut(P, split_sequence=False, attention="heads"), width, heads)
    fuse_parameter_movements(network, P)
    training = Training(network, work.MeanSquare(), problem.x, problem.target)
    return Side(
        training.step,
        lambda r: transformer.is_right_apart(r, transformer.own_step(network, problem.expected)),
        training.start_again,
    )


def _halo(case: Case, P_world: Partition) -> Side:
    halo = work.halo(case, P_world.rank or 0)
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1, 1])
    exchange = HaloExchange(P_x, halo=[(1, 1), (0, 0), (0, 0)])
    return Side(lambda: exchange(halo.block), halo.is_right)


def _all_reduce(case: Case, P_world: Partition) -> Side:
    x, is_right = work.reduced(case, P_world.rank or 0)
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    all_sum_reduce = AllSumReduce(P_x, [0])
    return Side(lambda: all_sum_reduce(x), is_right)


_WORK = {
    work.UNET: _unet,
    work.BLOCK: _block,
    work.HALO: _halo,
    work.ALL_REDUCE: _all_reduce,
}
