"""Convolutions to test: where tensor and weight are, and the comparison with torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.blocks import Decomposition
from gpudist.nn import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_same_as_sequential,
    grid,
)

Placed = tuple[Sequence[int], Sequence[int] | None]
F64 = torch.float64
SEQUENTIAL = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
DISTRIBUTED = {1: DistributedConv1d, 2: DistributedConv2d, 3: DistributedConv3d}


def owner(P_w: CartesianPartition, parts: tuple[int, int]) -> Callable[..., Slices | None]:
    """Weights in ``parts`` at spatial index 0 of ``P_w``, biases on the first column of those."""

    def owned(name: str, shape: torch.Size) -> Slices | None:
        index = P_w.index
        if index is None or any(index[2:]) or (parts == (1, 1) and any(index)):
            return None
        if name == "bias" and index[1] > 0:
            return None
        cut = Decomposition.balanced(shape, (*parts, *(1,) * len(shape))[: len(shape)])
        return cut.block((*index[:2], *(0,) * len(shape))[: len(shape)]).slices

    return owned


def check(
    P_x: CartesianPartition,
    *arguments: Any,
    shape: Sequence[int],
    others: tuple[CartesianPartition, CartesianPartition] | None = None,
    owned: Callable[..., Slices | None] | None = None,
    sizes: Cut | None = None,
    output_sizes: Cut | None = None,
    batches: Sequence[int] = (),
    agreement: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """A layer on ``P_x`` alone, or with ``others``, its ``P_y`` and ``P_w``."""
    dims = len(shape) - 2
    P_y, P_w = others or (P_x, P_x)
    if owned is None:
        owned = owner(P_w, (P_w.shape[0], P_w.shape[1]) if others else (1, 1))
    assert_same_as_sequential(
        lambda: SEQUENTIAL[dims](*arguments, dtype=F64, **options),
        lambda: DISTRIBUTED[dims](
            P_x, *(others or ()), *arguments, dtype=F64, **options, **(agreement or {})
        ),
        P_x,
        P_y,
        shape,
        owned,
        sizes=sizes,
        output_sizes=output_sizes,
        batches=batches,
    )


CHANNELS: dict[str, tuple[Placed, Placed, Placed]] = {
    "inputs": (([1, 3, 1, 1], None), ([1, 1, 1, 1], None), ([1, 3, 1, 1], None)),
    "both": (([1, 2, 1, 1], None), ([1, 2, 1, 1], None), ([2, 2, 1, 1], None)),
    "disjoint": (([1, 2, 1, 1], [6, 7]), ([1, 2, 1, 1], [0, 8]), ([2, 2, 1, 1], [5, 4, 3, 2])),
    "features": (([1, 1, 2, 2], None), ([1, 1, 2, 2], None), ([1, 1, 2, 2], None)),
    "features, moved": (
        ([1, 1, 2, 2], [0, 1, 2, 3]),
        ([1, 1, 2, 2], [5, 4, 3, 2]),
        ([1, 1, 2, 2], [6, 7, 2, 3]),
    ),
    "all": (([1, 2, 2, 1], [8, 7, 6, 5]), ([1, 2, 2, 1], None), ([2, 2, 2, 1], None)),
}


def placed(P_world: Partition, case: str) -> tuple[CartesianPartition, ...]:
    return tuple(grid(P_world, shape, ranks) for shape, ranks in CHANNELS[case])


class CausalConv1d(torch.nn.Conv1d):
    """Causal convolution: torch's convolution, padded in front only."""

    def __init__(self, *arguments: Any, padding_mode: str = "zeros", **options: Any) -> None:
        names = ("stride", "dilation", "groups", "bias")
        named = dict(zip(names, arguments[3:], strict=False))
        super().__init__(*arguments[:3], **named, **options)
        self.mode = "constant" if padding_mode == "zeros" else padding_mode

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        reach = self.dilation[0] * (self.kernel_size[0] - 1)
        return super().forward(F.pad(input, (reach, 0), self.mode))
