"""Workers that scale their losses either all skip a step or all take it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.amp import GradScaler
from gpudist.errors import PartitionError
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.nn.parameters.replicated_cases import network, sequential_network
from tests.pool import distributed

SGD, ADAM = "sgd", "fused adam"


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if kind == SGD:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3, fused=True)


@pytest.mark.parametrize("kind", [SGD, ADAM])
@pytest.mark.parametrize("replicated", [False, True])
@distributed(ranks=5, transports=["loopback", "host"], timeout_s=120)
def test_trains_as_alone_where_steps_are_skipped(
    P_world: Partition, replicated: bool, kind: str
) -> None:
    """One cell of one block is infinite in two steps; the last rank takes no part."""
    P_x = grid(P_world, [1, 1, 2, 2])
    net = network(P_x, fused=replicated, replicate_parameters=replicated)
    alone = sequential_network()
    options = {"init_scale": 1024.0, "growth_interval": 2}
    scalers = [GradScaler(P_world, **options), torch.amp.GradScaler("cpu", **options)]
    optimizers = [optimizer_of(kind, m.parameters()) for m in (net, alone)]
    loss = nn.DistributedMSELoss(P_x)
    scales: list[float] = []
    for step in range(7):
        x, target = random_like_all((4, 2, 9, 6), step), random_like_all((4, 2, 4, 2), step + 9)
        if step in (2, 5):
            target[0, 0, 0, 0] = math.inf
        value = loss(net(own_block(x, P_x)), own_block(target, P_x, requires_grad=False))
        values = [value, (alone(x) - target).square().mean()]
        for scaler, optimizer, value in zip(scalers, optimizers, values, strict=True):
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    assert scales == [1024, 2048, 1024, 1024, 2048, 1024, 1024]
    wholes = dict(alone.named_parameters())
    for name, parameter in net.named_parameters():
        if parameter.numel():
            assert_equal_to(parameter.detach(), wholes[name].detach(), 1e-9, name)


@pytest.mark.parametrize("rank", [0, 2])
@distributed(ranks=3, transports=["loopback", "host"])
def test_all_skip_where_one_finds_no_number(P_world: Partition, rank: int) -> None:
    """Some parameters have no cells, and one optimizer has no parameter with a gradient."""
    cells = 0 if P_world.rank == 1 else 3
    weight = torch.nn.Parameter(torch.ones(cells))
    idle = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler(P_world, init_scale=8.0)
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in (weight, idle)]
    for bad, expected in ((True, 1.0), (False, 0.0)):
        value = math.nan if bad and P_world.rank == rank else 1.0
        scaler.scale((weight * value).sum()).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert weight.tolist() == [expected] * cells


@distributed(ranks=2, transports=["host"])
def test_one_message_each_step(P_world: Partition) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for enabled in (True, False):
        scaler = GradScaler(P_world, enabled=enabled)
        scaler.scale(weight.sum()).backward()
        before = P_world.wire.recorder.count
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert P_world.wire.recorder.count - before == enabled


@distributed(ranks=2, transports=["loopback"])
def test_worker_outside_is_refused(P_world: Partition) -> None:
    P_0 = P_world.create_partition_inclusive([0])
    if P_world.rank == 1:
        with pytest.raises(PartitionError, match="pass a partition that has it"):
            GradScaler(P_0)
    else:
        assert GradScaler(P_0).is_enabled()
