"""Bodies for tensors of every dtype in any memory layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.gpu.operators import integers, on_cpu, on_grid
from tests.ops.dense import local_input, partition_of

LAYOUTS = ("contiguous", "transposed", "channels last", "strided", "unaligned")
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)

# In the gaps of a layout: no other value of the tests.
BETWEEN = 5


@dataclass(frozen=True)
class Layout:
    """Memory layout of a tensor.

    Attributes:
        order: order of its dims, the slowest first.
        steps: distance of neighbours, in cells of a dim.
        offset: offset of the first cell, in items.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int

    @classmethod
    def drawn(cls, draw: random.Random, dims: int, grain: int = 1) -> Layout:
        """``grain``: what the offset is a multiple of."""
        in_order = draw.random() < 0.5
        order = tuple(range(dims)) if in_order else tuple(draw.sample(range(dims), dims))
        steps = tuple(draw.choice((1, 1, 1, 2)) for _ in range(dims))
        return cls(order, steps, grain * draw.randrange(8))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the same values in this layout."""
        strides, stride = [0] * values.dim(), 1
        for dim in reversed(self.order):
            strides[dim] = stride * self.steps[dim]
            stride *= values.shape[dim] * self.steps[dim]
        room = values.new_full((self.offset + stride,), BETWEEN)
        return room.as_strided(values.shape, strides, self.offset).copy_(values)


def all_memory(x: torch.Tensor) -> torch.Tensor:
    """Everything in the memory that ``x`` is a part of, gaps included."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same four-dimensional tensor in other memory; a placeholder has none."""
    if x.dim() != 4:
        return x
    if layout == "transposed":
        return x.transpose(0, 3).contiguous().transpose(0, 3)
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        wide = x.new_zeros([2 * n + 1 for n in x.shape])
        return wide[1::2, 1::2, 1::2, 1::2].copy_(x)
    if layout == "unaligned":
        return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return x.contiguous()


def of_layout(P_world: Partition, layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Run operators that move and that add, with gradients.

    Those of ones are an expanded scalar.
    """
    results: dict[str, torch.Tensor] = {}
    rank = P_world.rank or 0
    for name, operator, x in _operators(P_world, dtype):
        if not (dtype.is_floating_point or dtype.is_complex):
            results[name] = operator(laid_out(x, layout))
            continue
        x = laid_out(x, layout).requires_grad_()
        y = operator(x)
        (ones,) = torch.autograd.grad(y.sum(), x, torch.ones_like(y.sum()), retain_graph=True)
        cotangent = laid_out(integers(y.shape, 50 + rank, dtype).to(y.device), layout)
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        results |= {name: y, f"ones of {name}": ones, f"gradient of {name}": gradient}
    return on_cpu(**results)


def _operators(
    P_world: Partition, dtype: torch.dtype
) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    P_x = on_grid(P_world, [1, 1])
    root = partition_of(P_world, [0], [1, 1, 1, 1])
    shares = P_world.create_cartesian_topology_partition([1, P_world.size, 1, 1])
    x = local_input(integers((2, 4, 5, 7), 0, dtype), P_x).to(P_world.device)
    # A rank's own, of the same shape on all of them.
    mine = integers((2, 3, 4, 5), P_world.rank or 0, dtype).to(P_world.device)
    yield "halo", nn.HaloExchange(P_x, halo=((1, 2), (2, 1))), x
    yield "repartition", nn.Repartition(P_x, shares), x
    yield "all-gather", nn.AllGather(P_x, (2, 3)), x
    yield "broadcast", nn.Broadcast(root, P_x), mine if root.active else mine.new_empty(2, 0)
    if dtype == torch.bool:
        return
    halo = nn.HaloExchange(P_x, halo=((1, 2), (2, 1)), periodic=True)
    yield "periodic halo", halo, x
    yield "all-sum-reduce", nn.AllSumReduce(P_x, (3,)), mine
    yield "sum-reduce", nn.SumReduce(P_x, root), mine
