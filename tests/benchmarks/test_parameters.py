"""The benchmark of the placements finds results right, wrong ones wrong, and counts traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import parameters
from benchmarks.parameter_traffic import counted
from benchmarks.parameters import NETWORKS, SIDES
from gpudist.world.partition import Partition
from tests.nn.compare import own_block, random_like_all
from tests.pool import distributed


@pytest.mark.one_in(2)
@distributed(ranks=[2, 4], transports=["loopback"], timeout_s=120)
def test_all_sides_are_right_and_checked(P_world: Partition) -> None:
    for case in parameters.cases(P_world.size):
        shape = NETWORKS[case.parameters["network"]].shape
        small = (2, shape[1], 16, 16) if len(shape) == 4 else (8, shape[1])
        sides = parameters.sides(
            replace(case, parameters={**case.parameters, "shape": small}), P_world
        )
        assert list(sides) == list(SIDES)
        for side in sides.values():
            y, *gradients = side.call()
            assert side.is_right((y, *gradients)), case.name
            assert not side.is_right((y + y.abs().max() / 100, *gradients)), case.name
            assert not side.is_right((y, 2 * gradients[0], *gradients[1:])), case.name


@distributed(ranks=2, transports=["host"])
def test_traffic(P_world: Partition) -> None:
    """Two linear layers: four parameters, of which two are too large to be copied together.

    Each rank sums half of a large gradient and sends it on: two messages instead of one.
    """
    network = NETWORKS["large linear"]
    P_x = P_world.create_cartesian_topology_partition(network.grid(2))
    x = own_block(random_like_all((4, 2048), 1).float(), P_x)
    nbytes = sum(p.nbytes for p in network.sequential().parameters())
    expected = {
        "gpudist": ([1, 3, nbytes], [1, 3, nbytes]),
        "one owner, each layer": ([2, 4, nbytes], [2, 4, nbytes]),
        "replicated, fused": ([0, 0, 0], [1, 10, 2 * nbytes]),
        "replicated, each layer": ([0, 0, 0], [2, 12, 2 * nbytes]),
    }
    for name, how in SIDES.items():
        module = network.distributed(P_x, *how)
        module(x).sum().backward()
        with counted(P_world) as forward:
            y = module(x).sum()
        with counted(P_world) as backward:
            y.backward()
        for traffic, (groups, *sent) in zip((forward, backward), expected[name], strict=True):
            assert traffic.groups == groups, name
            assert P_world.allreduce_data([traffic.messages, traffic.nbytes]) == sent, name
