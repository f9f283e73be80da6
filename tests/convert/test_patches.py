"""Fourier transforms of patches of an image, of which some workers have none."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.pool import distributed

# Permutations of [batch, channels, rows, p, columns, q], and how the first dims are merged.
FORMS = (((0, 1, 2, 4, 3, 5), None), ((0, 2, 4, 1, 3, 5), (0, 2)), ((0, 1, 2, 4, 3, 5), (2, 3)))


class Patches(nn.Module):
    """Filters spectra of square patches by a complex weight; ``seed`` draws how."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = Random(seed)
        self.size, self.down = draw.choice([(8, 1), (8, 2), (4, 2), (4, 4)])
        self.form, self.norm = draw.choice(FORMS), draw.choice([None, "ortho"])
        self.is_real, self.squares = draw.random() < 0.7, draw.random() < 0.5
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        modes = self.size // 2 + 1 if self.is_real else self.size
        self.filter = nn.Parameter(torch.randn(self.size, modes, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, (order, merged) = self.size, self.form
        x = F.interpolate(self.first(x), scale_factor=1 / self.down, mode="bilinear")
        b, c, h, w = x.shape
        y = x.view(b, c, h // p, p, w // p, p).permute(order)
        shape = y.shape
        y = y if merged is None else y.flatten(*merged)
        transform: Any = torch.fft.rfft2 if self.is_real else torch.fft.fft2
        z = transform(y, norm=self.norm) * torch.view_as_complex(self.filter)
        z = z * transform(y, norm=self.norm).conj() if self.squares else z
        if self.is_real:
            y = torch.fft.irfft2(z, s=(p, p), norm=self.norm)
        else:
            y = torch.fft.ifft2(z, norm=self.norm).real
        back = [order.index(d) for d in range(6)]
        return x + y.reshape(shape).permute(back).reshape(b, c, h, w)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axis", [2, 3])
@distributed(ranks=[3, 5], transports=["loopback"])
def test_spectra_of_patches(P_world: Partition, axis: int, seed: int) -> None:
    shape = [1, 1, 1, 1]
    shape[axis] = P_world.size
    sizes = (1, 3, 32, 16) if axis == 2 else (1, 3, 16, 32)
    assert_as_alone(
        lambda: Patches(seed), grid(P_world, shape), [sizes], replicate_parameters=seed % 2 == 0
    )
