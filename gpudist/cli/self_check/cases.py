"""Operators on a tensor whose cells hold their own index, and their expected outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch

from gpudist import ops
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.ops import OPERATORS, zero_volume_tensor
from gpudist.ops.operators import OperatorRow
from gpudist.testing import run_distributed
from gpudist.transport.host.core_transport import is_built
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class Case:
    """One rank's part of an operator on a known tensor.

    Attributes:
        operator: linear operator under test.
        x: input on this rank.
        expected: expected output, cell by cell; ``None`` if this rank has none.
    """

    operator: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    expected: torch.Tensor | None

    def is_exact(self, y: torch.Tensor) -> bool:
        """Whether ``y`` is the expected output, cell by cell."""
        if self.expected is None:
            return y.numel() == 0
        return y.shape == self.expected.shape and bool((y == self.expected).all())


def cases(
    P_world: Partition, rows: int, columns: int, dtype: torch.dtype = torch.float64
) -> list[tuple[str, Callable[[], Case]]]:
    """Return all operators' names and the functions that create their cases, in a fixed order.

    An operator of ``OPERATORS`` without a case of its own is checked by the sample of its row, if
    this installation has the native core, which computes what to expect.

    Args:
        P_world: partition of all workers.
        rows, columns: extents of each worker's block when the tensor is cut by rows.
        dtype: dtype of the tensors; exact only if it can represent every cell's number.
    """
    made = _Cases(P_world, rows, columns, dtype)
    known: list[tuple[str, Callable[[], Case]]] = [
        ("halo_exchange", made.halo_exchange),
        ("halo_exchange, dim after dim", partial(made.halo_exchange, nested=True)),
        ("halo_exchange, periodic", partial(made.halo_exchange, periodic=True)),
        ("repartition", made.repartition),
        ("broadcast", made.broadcast),
        ("sum_reduce", made.sum_reduce),
        ("all_sum_reduce", made.all_sum_reduce),
        ("scatter", made.scatter),
        ("gather", made.gather),
        ("all_gather", made.all_gather),
        ("sum_scatter", made.sum_scatter),
        ("send_recv", made.send_recv),
    ]
    others = [row for row in OPERATORS if row.name not in dict(known)] if is_built() else []
    return known + [(row.name, partial(made.sample, row)) for row in others]


# Most ranks of a sample, all of which are computed on each of them.
_SAMPLE_RANKS = 8


class _Cases:
    """Factory of the cases: a method for each operator with numbers known beforehand."""

    def __init__(self, P_world: Partition, rows: int, columns: int, dtype: torch.dtype) -> None:
        n = P_world.size
        self.P_world = P_world
        self.dtype = dtype
        self.shape = (n * rows, columns)
        self.block_shape = (rows, columns)
        P_all = P_world.create_partition_inclusive(range(n))
        self.P_rows = P_all.create_cartesian_topology_partition([n, 1])
        self.P_columns = P_all.create_cartesian_topology_partition([1, n])
        self.P_grid = P_all.create_cartesian_topology_partition(_square(n))
        self.P_first, self.P_last = (
            P_world.create_partition_inclusive([rank]).create_cartesian_topology_partition([1, 1])
            for rank in (0, n - 1)
        )

    def halo_exchange(self, nested: bool = False, periodic: bool = False) -> Case:
        block = self._block(self.P_grid)
        operator = ops.HaloExchange(
            self.P_grid, halo=[(1, 1), (1, 1)], periodic=periodic, nested=nested
        )
        needed = Box(
            tuple(start - 1 for start in block.start), tuple(stop + 1 for stop in block.stop)
        )
        return Case(operator, self._numbers(block), self._numbers(needed, periodic))

    def repartition(self) -> Case:
        operator = ops.Repartition(self.P_rows, self.P_columns)
        x, expected = (self._numbers(self._block(P)) for P in (self.P_rows, self.P_columns))
        return Case(operator, x, expected)

    def broadcast(self) -> Case:
        whole = self._numbers(Box.whole(self.block_shape))
        operator = ops.Broadcast(self.P_first, self.P_rows)
        return Case(operator, self._on(self.P_first, whole), whole)

    def sum_reduce(self) -> Case:
        x, total = self._terms()
        operator = ops.SumReduce(self.P_rows, self.P_first)
        return Case(operator, x, total if self.P_first.active else None)

    def all_sum_reduce(self) -> Case:
        x, total = self._terms()
        return Case(ops.AllSumReduce(self.P_rows, [0]), x, total)

    def scatter(self) -> Case:
        whole = self._numbers(Box.whole(self.shape))
        x = self._on(self.P_first, whole)
        return Case(ops.Scatter(self.P_rows), x, self._numbers(self._block(self.P_rows)))

    def gather(self) -> Case:
        whole = self._numbers(Box.whole(self.shape)) if self.P_first.active else None
        block = self._numbers(self._block(self.P_rows))
        return Case(ops.Gather(self.P_rows), block, whole)

    def all_gather(self) -> Case:
        block = self._numbers(self._block(self.P_rows))
        whole = self._numbers(Box.whole(self.shape))
        return Case(ops.AllGather(self.P_rows, [0]), block, whole)

    def sum_scatter(self) -> Case:
        n = self.P_world.size
        x = self._numbers(Box.whole(self.shape)) + self._rank
        expected = n * self._numbers(self._block(self.P_rows)) + n * (n - 1) // 2
        return Case(ops.SumScatter(self.P_rows, [0]), x, expected)

    def send_recv(self) -> Case:
        block = self._numbers(Box.whole(self.block_shape))
        operator = ops.SendRecv(self.P_first, self.P_last)
        x = self._on(self.P_first, block)
        if self.P_last.active:
            return Case(operator, x, block)
        return Case(operator, x, None if self.P_first.active else x)

    def sample(self, row: OperatorRow) -> Case:
        """Return the row's sample on the first ranks, as loopback in this process computes it."""
        size = min(self.P_world.size, _SAMPLE_RANKS)
        P = self.P_world.create_partition_inclusive(range(size))
        operator, x = self._make_sample(row, P)
        if not P.active:
            return Case(operator, x, None)
        expected = run_distributed(self._run_sample, size, row)[P.plan_rank]
        return Case(operator, x, expected.to(self.P_world.device))

    def _run_sample(self, P: Partition, row: OperatorRow) -> torch.Tensor:
        operator, x = self._make_sample(row, P)
        return operator(x)

    def _make_sample(self, row: OperatorRow, P: Partition) -> tuple[Any, torch.Tensor]:
        operator = row.make(P)
        P_x: CartesianPartition = operator.P_x
        if not P_x.active:
            return operator, zero_volume_tensor(dtype=self.dtype, device=P.device)
        return operator, self._numbers(self._block(P_x)).to(P.device)

    @property
    def _rank(self) -> int:
        return self.P_world.rank or 0

    def _terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.P_world.size
        block = self._numbers(Box.whole(self.block_shape))
        return block + self._rank, n * block + n * (n - 1) // 2

    def _on(self, P: Partition, x: torch.Tensor) -> torch.Tensor:
        return x if P.active else zero_volume_tensor(dtype=self.dtype, device=self.P_world.device)

    def _block(self, P: CartesianPartition) -> Box:
        assert P.index is not None, "every worker has a block"
        return Decomposition.balanced(self.shape, P.shape).block(P.index)

    def _numbers(self, box: Box, periodic: bool = False) -> torch.Tensor:
        """Return the cells of ``box``, numbered from 1; zeros beyond the tensor's edge."""
        lines: list[torch.Tensor] = []
        inside: list[torch.Tensor] = []
        for start, stop, extent in zip(box.start, box.stop, self.shape, strict=True):
            cells = torch.arange(start, stop, device=self.P_world.device)
            lines.append(cells % extent)
            inside.append((cells >= 0) & (cells < extent) | periodic)
        numbers = lines[0][:, None] * self.shape[1] + lines[1] + 1
        return (numbers * (inside[0][:, None] & inside[1])).to(self.dtype)


def _square(n: int) -> tuple[int, int]:
    short = next(p for p in range(isqrt(n), 0, -1) if n % p == 0)
    return short, n // short
