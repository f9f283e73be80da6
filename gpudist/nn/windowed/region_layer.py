"""Base class of windowed layers that a HaloRegion can run without separate messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.windows import Read, Window
from gpudist.nn.distributed_module import DistributedModule
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.world.partition import CartesianPartition

# Function that computes an output block from a local input block and the parameters.
BlockOperation = Callable[..., torch.Tensor]


class RegionLayer(DistributedModule):
    """Layer over a tensor ``[B, C, *spatial]`` whose outputs read a window of cells per dim."""

    P_x: CartesianPartition
    # Exchange of the cells that a block reads, unless the layer has windows of its own.
    halo_exchange: HaloExchange

    @abstractmethod
    def require_region(self) -> None:
        """Check that the layer can be part of a region.

        Raises:
            GpudistError: on every rank alike, if a region does not support the layer.
        """

    @property
    def windows(self) -> Sequence[Window]:
        """Windows of cells that an output reads, one per dim of the tensor."""
        return self.halo_exchange.halo.windows

    @abstractmethod
    def require_input(self, inputs: Decomposition) -> None:
        """Raise, on every rank alike, if an input does not fit; the message names the layer."""

    @abstractmethod
    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        """Return the operation that computes an output block from the cells it reads.

        The operation takes the cells of ``reads`` inside the tensor, and the parameters.

        Args:
            reads: cells that the block reads, one entry per feature dim.
            shape: shape of the output block; may be empty.
        """

    def outputs_of(self, inputs: Decomposition) -> Decomposition:
        """Return the decomposition of the output for an input decomposed like ``inputs``."""
        along = zip(self.windows, inputs.dims, strict=True)
        return Decomposition(tuple(window.outputs(blocks) for window, blocks in along))

    def own_parameters(self) -> list[torch.Tensor]:
        """Return this worker's parameters or their placeholders."""
        return []

    def bind_parameters(self) -> tuple[Movement | None, ...]:
        """Return movements of the parameters to all of ``P_x``; ``None`` for local ones."""
        return ()


@dataclass(frozen=True)
class WithPadding:
    """Operation on a block with padding around it.

    Attributes:
        operation: operation on the padded block.
        widths: cells of padding, in the order of torch's ``pad``.
        value: value of the padding.
    """

    operation: BlockOperation
    widths: tuple[int, ...]
    value: float = 0.0

    def __call__(self, block: torch.Tensor, *parameters: Any) -> torch.Tensor:
        if any(self.widths):
            block = F.pad(block, self.widths, value=self.value)
        return self.operation(block, *parameters)


def padding_widths(reads: Sequence[Read]) -> tuple[int, ...]:
    """Return the padding around the cells inside the tensor, in the order of torch's ``pad``."""
    return tuple(cells for read in reversed(reads) for cells in read.overhang)
