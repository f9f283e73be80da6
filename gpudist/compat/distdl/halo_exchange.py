"""Halo exchange of blocks that have room for their ghosts, with DistDL's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpudist.checks.arguments import Checked
from gpudist.compat.distdl.adapter import MPIBufferManager
from gpudist.compat.distdl.partition import MPICartesianPartition
from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.ops import halo_exchange

Integers = NDArray[np.int64]
Range = tuple[int, int]


class HaloExchange(Checked, torch.nn.Module):
    """Fill the ghost cells of a block with cells of its neighbours.

    Ghosts at the edge of the tensor, which have no owner, are kept. Unlike DistDL's, this layer
    returns a new tensor and leaves its input and the gradient as they are.

    Args:
        P_x: partition of the tensor, one axis per dim.
        halo_shape, recv_buffer_shape: arrays of shape ``[dims, 2]`` with the numbers of ghost cells
            on the left and right of this worker's block; equal. ``None`` on workers outside
            ``P_x``. Along an axis, workers with the same index have the same widths.
        send_buffer_shape: ignored; what is sent follows from what the neighbours receive.
        buffer_manager: ignored.

    Adjoint:
        Ghost cells are added into the cells they were copied from; the gradient of the ghosts of
        the input is 0.

    Cost:
        A small all-gather of widths and blocks, and one message per worker that owns a ghost cell.

    Raises:
        ShapeError: on every rank alike, if widths or blocks differ along an axis.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        halo_shape: Any,
        recv_buffer_shape: Any,
        send_buffer_shape: Any = None,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self._widths: Integers | None = None
        if P_x.active:
            widths = np.array(recv_buffer_shape, np.int64)
            if widths.shape != (P_x.dim, 2):
                raise ShapeError(
                    f"HaloExchange: recv_buffer_shape has shape {list(widths.shape)}; it must be "
                    f"{[P_x.dim, 2]}, a left and a right width for each axis of {P_x!r}"
                )
            # At the edge of the tensor, ghosts have no owner: they belong to the block.
            widths[P_x.index == 0, 0] = 0
            widths[P_x.index == P_x.shape - 1, 1] = 0
            self._widths = widths

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._widths is None:
            return input.clone()
        left, right = self._widths.T
        bulk = np.array(input.shape) - left - right
        rows = self.P_x.allgather_data([*left.tolist(), *right.tolist(), *bulk.tolist()])
        windows = self._windows(rows.reshape(*self.P_x.shape, 3, self.P_x.dim))
        block = tuple(slice(a, a + n) for a, n in zip(left.tolist(), bulk.tolist(), strict=True))
        return halo_exchange(input[block], self.P_x.partition, windows)

    def _windows(self, table: Integers) -> list[_ListedHalos]:
        """Return the window of each dim, given all workers' widths and block shapes."""
        windows: list[_ListedHalos] = []
        for d in range(self.P_x.dim):
            # One row for each index along the axis, and one column for each worker there.
            of_index = np.moveaxis(table[..., d], d, 0).reshape(table.shape[d], -1, 3)
            if np.any(of_index != of_index[:, :1]):
                raise ShapeError(
                    f"HaloExchange, dim {d}: workers with the same index along the axis have "
                    f"different halos or blocks: {of_index.tolist()} (left, right, cells of the "
                    "block); give them the same"
                )
            left, right, cells = of_index[:, 0].T.tolist()
            stops = np.cumsum(cells).tolist()
            ranges = [(stop - n, stop) for stop, n in zip(stops, cells, strict=True)]
            windows.append(_ListedHalos(tuple(ranges), tuple(zip(left, right, strict=True))))
        return windows


@dataclass(frozen=True)
class _ListedHalos:
    """Window that adds listed widths to each of the listed blocks."""

    blocks: tuple[Range, ...]
    widths: tuple[Range, ...]

    def outputs(self, inputs: Blocks) -> Blocks:
        return inputs

    def needed(self, start: int, stop: int, extent: int) -> Range:
        left, right = self.widths[self.blocks.index((start, stop))]
        return start - left, stop + right
