"""gpudist: a converted U-Net, tensor-parallel layers, and operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import gpudist
from benchmarks.beside import work
from benchmarks.case import Case, Side
from benchmarks.correctness.adapters.gpudist_distribute import start
from benchmarks.training import Step, Training, is_right
from examples.gpt import Block, Cut, ParallelBlock
from gpudist.nn import fuse_parameter_movements
from gpudist.nn.parameters.parameter_placement import placements
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
        lambda r: is_right_apart(r, own_step(network, problem.expected)),
        training.start_again,
    )


def own_step(network: torch.nn.Module, expected: Step) -> Step:
    """Return the step with the blocks of gradients that a rank of a split network has."""
    placed = placements(network)
    boxes = {name: placed[name].own_box for name in placed}
    blocks = {
        name: gradient[box.slices] if (box := boxes.get(name)) is not None else gradient
        for name, gradient in expected.gradients.items()
    }
    return Step(expected.loss, blocks)


def is_right_apart(result: Step, expected: Step) -> bool:
    """Whether every gradient, but the bias of keys, is there and agrees."""
    # The bias of keys shifts all scores of a query equally, so its gradient is only rounding error.
    names = [name for name in expected.gradients if not name.endswith("k_proj.bias")]
    gradients = {name: _whole(result.gradients[name]) for name in names}
    return is_right(Step(result.loss, gradients), expected)


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


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
