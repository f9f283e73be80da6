"""Movements of parameters are kept as long as their world, and no longer."""

from __future__ import annotations

import gc

import torch

from gpudist import checkpoint, nn
from gpudist.exchange import Movement
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed


def movements_on(P_world: Partition) -> list[Movement]:
    found = [each for each in gc.get_objects() if type(each) is Movement]
    return [m for m in found if any(P.wire is P_world.wire for _, P in m.stages)]


@distributed(ranks=2, transports=("loopback",))
def test_movements_end_with_their_world(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1, 1])
    network = torch.nn.Sequential(
        nn.DistributedConv1d(P_x, in_channels=1, out_channels=2, kernel_size=1),
        nn.DistributedBatchNorm1d(P_x, num_features=2, replicate_parameters=True),
    )
    nn.fuse_parameter_movements(network)
    network(torch.ones(1, 1, 3)).square().sum().backward()
    checkpoint.load_full_state_dict(network, checkpoint.full_state_dict(network))
    assert movements_on(P_world)
    network.zero_grad()
    del network
    P_world.wire.remembered.clear()
    gc.collect()
    assert not movements_on(P_world)
