"""Random halo exchanges of a world of one with itself, against torch's indexing.

Each is one launch of the kernel that copies and adds, with any number of boxes, strides, alignments
and dtypes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from gpudist import halo_exchange
from gpudist.world.partition import Partition
from tests.gpu.devices import require_gpu
from tests.gpu.layouts import DTYPES, Layout
from tests.gpu.operators import integers
from tests.gpu.worlds import OneRank

require_gpu()

ROUNDS, PER_ROUND = 20, 20
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Exchange:
    """Randomly drawn tensor, its memory layout, and the width of its halo."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    halo: tuple[tuple[int, int], ...]
    periodic: tuple[bool, ...]
    padding_value: float

    @classmethod
    def drawn(cls, draw: random.Random) -> Exchange:
        dims = draw.randint(1, 5)
        longest = (300, 40, 12, 7, 5)[dims - 1]
        shape = tuple(draw.randint(1, longest) for _ in range(dims))
        halo = tuple(_widths(draw, extent) for extent in shape)
        return cls(
            draw.choice(DTYPES),
            shape,
            Layout.drawn(draw, dims),
            halo,
            tuple(draw.random() < 0.5 for _ in range(dims)),
            draw.choice((0.0, 0.0, 1.0)),
        )

    def indexed(self, x: torch.Tensor) -> torch.Tensor:
        """The exchange, cell by cell."""
        inside = torch.ones((), dtype=torch.bool)
        for dim, ((left, right), wraps) in enumerate(zip(self.halo, self.periodic, strict=True)):
            extent = self.shape[dim]
            index = torch.arange(-left, max(-left, extent + right))
            there = (index >= 0) & (index < extent) | torch.tensor(wraps)
            x = x.index_select(dim, index % extent if wraps else index.clamp(0, extent - 1))
            inside = inside & there.reshape([-1 if d == dim else 1 for d in range(x.dim())])
        return torch.where(inside, x, torch.tensor(self.padding_value, dtype=x.dtype))


def _widths(draw: random.Random, extent: int) -> tuple[int, int]:
    widest = draw.choice((0, 2, 2, min(2 * extent + 1, 20)))
    lowest = -1 if extent > 2 else 0
    return draw.randint(lowest, widest), draw.randint(lowest, widest)


def _kept_form(x: torch.Tensor) -> torch.memory_format:
    form = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    is_kept = not x.is_contiguous() and x.is_contiguous(memory_format=form)
    return form if is_kept else torch.contiguous_format


def compare(P_world: Partition, seed: int) -> None:
    drawn = Exchange.drawn(random.Random(seed))
    P_x = P_world.create_cartesian_topology_partition([1] * len(drawn.shape))
    values = integers(drawn.shape, seed, drawn.dtype)
    x = drawn.layout.of(values.to(P_world.device))
    differentiable = drawn.dtype.is_floating_point or drawn.dtype.is_complex
    x.requires_grad_(differentiable)
    y = halo_exchange(
        x, P_x, halo=drawn.halo, periodic=drawn.periodic, padding_value=drawn.padding_value
    )
    whole = values.to(torch.complex128) if drawn.dtype.is_complex else values
    whole = whole.to(torch.float64) if drawn.dtype.is_floating_point else whole
    whole.requires_grad_(differentiable)
    expected = drawn.indexed(whole)
    assert y.dtype == drawn.dtype and y.is_contiguous(memory_format=_kept_form(x))
    assert torch.equal(y.detach().cpu(), expected.detach().to(drawn.dtype)), (seed, drawn)
    assert torch.equal(x.detach().cpu(), values), (seed, drawn)
    if differentiable:
        cotangent = integers(y.shape, seed + 1, drawn.dtype)
        (gradient,) = torch.autograd.grad(y, x, cotangent.to(y.device))
        (wanted,) = torch.autograd.grad(expected, whole, cotangent.to(whole.dtype))
        assert torch.equal(gradient.cpu(), wanted.to(drawn.dtype)), (seed, drawn)


@pytest.mark.parametrize("round_of_seeds", range(ROUNDS))
def test_random_halos(one_rank: OneRank, round_of_seeds: int) -> None:
    first = PER_ROUND * round_of_seeds
    for seed in range(first, first + PER_ROUND):
        one_rank.run(compare, seed=seed)
