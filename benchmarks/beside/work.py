"""The cases: the same work for every library, and its result without any; needs only torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.case import KIB, MIB, Case, equals, pattern, pattern_sum
from benchmarks.training import Step, Training, is_right

SUBJECT = "beside"
UNET, BLOCK, HALO, ALL_REDUCE = "U-Net", "transformer block", "halo", "all-reduce"
ROWS = 2  # the split dim


@dataclass(frozen=True)
class Goal:
    """Largest ratios of gpudist to a peer: of time, and of memory if there is a goal for it."""

    time: float
    memory: float | None = None


GOALS = {
    UNET: Goal(1 / 1.3, 0.9),
    BLOCK: Goal(1 / 1.3, 0.9),
    HALO: Goal(1.05),
    ALL_REDUCE: Goal(1.05),
}
# Cases of benchmarks.correctness with the operators of the work, in rows.
OPERATORS = {
    UNET: (
        "conv3d 3, padding 1",
        "transposed3d 2, stride 2",
        "max pool3d 2",
        "group norm 2, 3-D",
        "conv 1",
    ),
}
# Sides of the U-Net, and samples, tokens, features and heads of the transformer block.
CUBES = (32, 64)
BLOCKS = {"small": (4, 32, 128, 4), "large": (4, 256, 256, 8)}
HALO_CUBES = (16, 64)
REDUCED = {"4 KiB": 4 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
CHANNELS = 8
CLASSES = 3


def cases(ranks: int) -> list[Case]:
    """Return the cases; ``parameters["memory"]`` tells which are measured for memory too."""
    found: list[Case] = []
    for n in CUBES:
        shape = (1, 1, n, n, n)
        words = f"{UNET} step, {n}^3 in rows"
        parameters = {"work": UNET, "shape": shape, "memory": n == CUBES[-1]}
        found.append(Case(SUBJECT, words, ranks, prod(shape) * 4 // ranks, parameters))
    for name, (samples, tokens, width, heads) in BLOCKS.items():
        words = f"{BLOCK} step, {samples} x {tokens} tokens, {width} features"
        shape = (samples, tokens, width)
        parameters = {"work": BLOCK, "shape": shape, "heads": heads, "memory": name == "large"}
        found.append(Case(SUBJECT, words, ranks, prod(shape) * 4, parameters))
    for n in HALO_CUBES:
        shape = (1, CHANNELS, n, n, n)
        parameters = {"work": HALO, "shape": shape, "memory": n == HALO_CUBES[-1]}
        words = f"{HALO}, {CHANNELS} channels, {n}^3 in rows"
        face = CHANNELS * n * n * 4
        found.append(Case(SUBJECT, words, ranks, face, parameters, prod(shape) * 4 // ranks))
    for name, nbytes in REDUCED.items():
        parameters = {"work": ALL_REDUCE, "count": nbytes // 4, "memory": nbytes == 16 * MIB}
        found.append(Case(SUBJECT, f"{ALL_REDUCE}, {name}", ranks, nbytes, parameters, nbytes))
    return found


class MeanSquare(nn.Module):
    """Mean of the squared differences, in functions that every library has."""

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()


@dataclass(frozen=True)
class Problem:
    """A network with its batch.

    Attributes:
        make: returns the network, with equal weights on every rank.
        x, target: whole batch and its target.
        expected: step of the sequential network, made when it is first compared.
    """

    make: Callable[[], nn.Module]
    x: torch.Tensor
    target: torch.Tensor

    def alone(self) -> Training:
        """Return training of the sequential network."""
        return Training(self.make(), MeanSquare(), self.x, self.target)

    @cached_property
    def expected(self) -> Step:
        return self.alone().step()

    def part(self, dim: int, rank: int, ranks: int) -> Problem:
        """Return the problem of one of equal parts of the batch."""
        x, target = (each.chunk(ranks, dim)[rank].clone() for each in (self.x, self.target))
        return Problem(self.make, x, target)


def problem(case: Case, make: Callable[[], nn.Module], channels: int | None = None) -> Problem:
    """Return the problem of a network on the case's shape, with ``channels`` in the target."""
    shape = case.parameters["shape"]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    wanted = shape if channels is None else (shape[0], channels, *shape[2:])
    target = torch.randn(wanted, generator=generator)

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return Problem(seeded, x, target)


def unet(case: Case) -> Problem:
    """Return the problem of the U-Net of the examples."""
    from examples.networks import UNet3d

    return problem(case, lambda: UNet3d(1, CLASSES, CHANNELS), CLASSES)


def is_whole_and_right(result: Step, expected: Step) -> bool:
    """Whether no gradient is missing, and all agree."""
    return result.gradients.keys() == expected.gradients.keys() and is_right(result, expected)


@dataclass(frozen=True)
class Halo:
    """One rank's halo of a row on both sides, zero beyond the edges.

    Attributes:
        block: the rank's block.
        needed: the block with its halo.
    """

    block: torch.Tensor
    needed: np.ndarray

    def is_right(self, result: Any) -> bool:
        return equals(self.needed)(result)


def halo(case: Case, rank: int) -> Halo:
    """Return the halo of a rank's rows."""
    shape = case.parameters["shape"]
    whole = pattern(prod(shape), 0).reshape(shape)
    padded = np.pad(whole, [(int(dim == ROWS),) * 2 for dim in range(len(shape))])
    rows = shape[ROWS] // case.ranks
    first = rank * rows
    block = torch.from_numpy(whole[:, :, first : first + rows].copy())
    return Halo(block, padded[:, :, first : first + rows + 2].copy())


def reduced(case: Case, rank: int) -> tuple[torch.Tensor, Callable[[Any], bool]]:
    """Return a rank's block and the check of the sum over ranks."""
    count = case.parameters["count"]
    return torch.from_numpy(pattern(count, rank)), equals(pattern_sum(count, case.ranks))
