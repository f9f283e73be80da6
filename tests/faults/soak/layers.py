"""Layers made, used and dropped repeatedly: everything they held is freed."""

from __future__ import annotations

import gc
import random
import weakref

import torch

from gpudist import nn
from gpudist.exchange import MovementStep
from gpudist.world.partition import Partition
from tests.faults.soak.samples import Sample, take

SAMPLES = 40
# Between collections of garbage.
TOGETHER = 10


def run(
    P_world: Partition, count: int, seed: int, samples: int = SAMPLES
) -> tuple[list[Sample], int, int]:
    """Make, use and drop ``count`` networks of four layers. Collective.

    Returns:
        This rank's samples, how many layers outlived their last use, and the largest number of
        steps of movements that were kept.
    """
    rng = random.Random(seed)
    taken = [take(P_world, 0)]
    alive, most = 0, 0
    died: list[weakref.ref[torch.nn.Module]] = []
    for number in range(count):
        died += _use(P_world, rng)
        if (number + 1) % TOGETHER == 0:
            gc.collect()
            alive += sum(ref() is not None for ref in died)
            died.clear()
            most = max(most, sum(isinstance(thing, MovementStep) for thing in gc.get_objects()))
        if (number + 1) * samples // count > number * samples // count:
            taken.append(take(P_world, number + 1))
    return taken, alive, most


def _use(P_world: Partition, rng: random.Random) -> list[weakref.ref[torch.nn.Module]]:
    size = P_world.size
    P_x = P_world.create_cartesian_topology_partition([1, 1, size, 1])
    channels = rng.randint(1, 3)
    net = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 1, channels, 3, padding=1),
        nn.DistributedBatchNorm(P_x, channels),
        nn.DistributedMaxPool2d(P_x, 2),
        nn.DistributedConv2d(P_x, channels, 1, 1),
    )
    x = torch.randn(2, 1, 4 * rng.randint(1, 3), 4 * rng.randint(1, 3))
    y = net(x.requires_grad_())
    if rng.random() < 0.8:  # else the graph is dropped, and nobody goes back through it
        y.sum().backward()
    return [weakref.ref(layer) for layer in net.modules()]
