"""Weights of convolutions and linear layers that a plan splits over workers, by channels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpudist import ConversionError, Plan, distribute
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.pool import distributed

CONVS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def factored(workers: int, axes: int, rng: random.Random) -> list[int]:
    """Return a grid with at most ``workers`` workers on ``axes`` axes."""
    shape = [1] * axes
    for _ in range(workers.bit_length() - 1):
        shape[rng.randrange(axes)] *= 2
    return shape


class Case:
    """A convolution, its input, and grids of the network and of the weight."""

    def __init__(self, number: int, workers: int) -> None:
        rng = random.Random(f"{number} on {workers}")
        self.dims = rng.randint(1, 3)
        self.is_transposed = rng.random() < 0.4
        groups = rng.choice((1, 1, 1, 4))
        self.shape = factored(workers, self.dims + 3, rng)
        if groups > 1:
            self.shape[1] *= self.shape[2]
            self.shape[2] = 1
        self.channels = groups * rng.randint(4 // groups, 6 // groups + 1), groups * rng.randint(
            4 // groups, 6 // groups + 1
        )
        self.options: dict[str, Any] = {
            "kernel_size": rng.randint(1, 3),
            "stride": rng.randint(1, 2),
            "padding": rng.choice((0, 1)),
            "dilation": rng.choice((1, 1, 2)),
            "groups": groups,
            "bias": rng.random() < 0.7,
        }
        if self.is_transposed:
            self.options["output_padding"] = self.options["stride"] - 1
        elif rng.random() < 0.3:
            self.options["padding_mode"] = rng.choice(("circular", "replicate", "reflect"))
        elif rng.random() < 0.2:
            self.options |= {"padding": "same", "stride": 1}
        self.P_x = factored(workers, self.dims + 2, rng)
        self.input = rng.randint(1, 3), self.channels[0], *(rng.randint(7, 9),) * self.dims
        self.replicates = rng.random() < 0.7

    def network(self) -> nn.Module:
        kind = (TRANSPOSED if self.is_transposed else CONVS)[self.dims - 1]
        return nn.Sequential(kind(*self.channels, **self.options), nn.Tanh())

    def __str__(self) -> str:
        return f"{self.network()[0]} on {self.shape}, input {self.input} on {self.P_x}"  # pyright: ignore


@pytest.mark.parametrize("number", range(200))
@distributed(ranks=4, transports=["loopback"])
def test_convolution(P_world: Partition, number: int) -> None:
    case = Case(number, P_world.size)
    print(case)
    assert_as_alone(
        case.network,
        grid(P_world, case.P_x),
        [case.input],
        lambda plan: plan.split_weight("0", case.shape),
        replicate_parameters=case.replicates,
    )
