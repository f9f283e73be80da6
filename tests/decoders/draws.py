"""Decoders in blocks against the sequential ones, for latents of drawn sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.decoders.autoencoders import DECODERS, autoencoder, distributed, latents, partition

GRIDS = ((2, 1), (1, 2), (4, 1), (2, 2))
LARGEST = 64
LIMIT_S = 300.0
# Largest error of a cell, in errors of the sequential decoder in float32.
ROUNDINGS = 8


@dataclass(frozen=True)
class Draw:
    """A decoder, the size of its latents, and a grid of workers over height and width."""

    name: str
    size: tuple[int, int]
    grid: tuple[int, int]


@dataclass(frozen=True)
class Errors:
    """Largest errors of a cell against the sequential decoder in float64, over the largest cell."""

    sequential: float
    distributed: float

    @property
    def is_rounding(self) -> bool:
        least = torch.finfo(torch.float32).eps
        return self.distributed <= ROUNDINGS * max(self.sequential, least)


def drawn(seed: int, number: int) -> Draw:
    """Return the draw with this number; decoders and grids take turns."""
    rng = random.Random(f"{seed}:{number}")
    names = list(DECODERS)
    grid = GRIDS[number // len(names) % len(GRIDS)]
    size = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    return Draw(names[number % len(names)], size, grid)


@torch.no_grad()
def errors(draw: Draw) -> Errors:
    """Decode in float64, in float32, and in float32 in blocks."""
    z = latents(draw.name, *draw.size)
    network = autoencoder(draw.name)
    alone = network.decode(z).sample
    found = run_distributed(_decoded, draw.grid[0] * draw.grid[1], draw, timeout=LIMIT_S)[0]
    expected = network.double().decode(z.double()).sample
    largest = float(expected.abs().max())

    def error(y: torch.Tensor) -> float:
        assert y.shape == expected.shape, f"{list(y.shape)} in place of {list(expected.shape)}"
        return float((y - expected).abs().max()) / largest

    return Errors(error(alone), error(found))


@torch.no_grad()
def _decoded(P_world: Partition, draw: Draw) -> torch.Tensor:
    P_x = partition(draw.name, P_world, *draw.grid)
    return distributed(draw.name, P_x).decode(latents(draw.name, *draw.size)).sample.full_tensor()
