"""Transposed convolutions to test: who owns what, and the comparison with torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.nn import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from gpudist.world.partition import CartesianPartition
from tests.nn.compare import Cut, Slices, assert_same_as_sequential

F64 = torch.float64
SEQUENTIAL: dict[int, Any] = {
    1: torch.nn.ConvTranspose1d,
    2: torch.nn.ConvTranspose2d,
    3: torch.nn.ConvTranspose3d,
}
DISTRIBUTED: dict[int, Any] = {
    1: DistributedConvTranspose1d,
    2: DistributedConvTranspose2d,
    3: DistributedConvTranspose3d,
}


def owner(
    P_w: CartesianPartition, parts: tuple[int, int], diagonal: bool = False
) -> Callable[..., Slices | None]:
    """Weights in ``parts``, of output and of input channels, at spatial index 0 of ``P_w``."""

    def owned(name: str, shape: torch.Size) -> Slices | None:
        index = P_w.index
        if index is None or any(index[2:]) or (parts == (1, 1) and any(index)):
            return None
        if name == "bias":
            cut = Decomposition.balanced(shape, parts[:1])
            return cut.block(index[:1]).slices if index[1] == 0 else None
        order = (0, 1) if diagonal else (1, 0)
        ones = (1,) * (len(shape) - 2)
        cut = Decomposition.balanced(shape, (*(parts[axis] for axis in order), *ones))
        return cut.block((*(index[axis] for axis in order), *index[2:])).slices

    return owned


def check(
    P_x: CartesianPartition,
    *arguments: Any,
    shape: Sequence[int],
    others: tuple[CartesianPartition, CartesianPartition] | None = None,
    diagonal: bool = False,
    owned: Callable[..., Slices | None] | None = None,
    sizes: Cut | None = None,
    output_sizes: Cut | None = None,
    output_size: Sequence[int] | None = None,
    batches: Sequence[int] = (),
    agreement: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """A layer on ``P_x`` alone, or with ``others``, its ``P_y`` and ``P_w``."""
    dims = len(shape) - 2
    P_y, P_w = others or (P_x, P_x)
    if owned is None:
        owned = owner(P_w, (P_w.shape[0], P_w.shape[1]) if others else (1, 1), diagonal)
    partitions = (P_x, *(others or ()))
    assert_same_as_sequential(
        lambda: Sized(SEQUENTIAL[dims](*arguments, dtype=F64, **options), output_size),
        lambda: Sized(
            DISTRIBUTED[dims](*partitions, *arguments, dtype=F64, **options, **(agreement or {})),
            output_size,
        ),
        P_x,
        P_y,
        shape,
        lambda name, shape: owned(name.removeprefix("layer."), shape),
        sizes=sizes,
        output_sizes=output_sizes,
        batches=batches,
    )


class Sized(torch.nn.Module):
    """A layer that is called with the size of its output, if that is given."""

    def __init__(self, layer: torch.nn.Module, output_size: Sequence[int] | None) -> None:
        super().__init__()
        self.layer = layer
        self.output_size = None if output_size is None else list(output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.output_size)
