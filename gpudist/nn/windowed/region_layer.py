"""What a layer with windows offers, so that a region carries it out without its own messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.composed import Read
from gpudist.geometry.windows import Window
from gpudist.nn.distributed_module import DistributedModule
from gpudist.world.partition import CartesianPartition

# From a block of the input and the parameters, all of them on this worker, to one of the output.
BlockOperation = Callable[..., torch.Tensor]


class RegionLayer(DistributedModule):
    """A layer over a tensor ``[B, C, *spatial]`` whose outputs read a window of cells per dim."""

    P_x: CartesianPartition

    @abstractmethod
    def require_region(self) -> None:
        """Refuse to be part of a region.

        Raises:
            GpudistError: on every rank alike, for what the layer does that a region cannot.
        """

    @property
    @abstractmethod
    def windows(self) -> Sequence[Window]:
        """What an output reads, per dim of the tensor."""

    @abstractmethod
    def require_input(self, inputs: Decomposition) -> None:
        """Refuse an input, naming the layer; on every rank alike."""

    @abstractmethod
    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        """What makes a block of the output from the cells inside its reads, and the parameters.

        Args:
            reads: per dim of features.
            shape: of the block of the output; may be empty.
        """

    def outputs_of(self, inputs: Decomposition) -> Decomposition:
        """How the output is cut if the input is cut like ``inputs``."""
        along = zip(self.windows, inputs.dims, strict=True)
        return Decomposition(tuple(window.outputs(blocks) for window, blocks in along))

    def own_parameters(self) -> list[torch.Tensor]:
        """This worker's parameters, or the placeholders for them."""
        return []

    def bind_parameters(self) -> tuple[Movement | None, ...]:
        """Their movements to every worker of ``P_x``, ``None`` for those it holds."""
        return ()


@dataclass(frozen=True)
class WithPadding:
    """An operation on a block with padding around it.

    Attributes:
        operation: on the padded block.
        widths: of the padding, as torch's ``pad`` takes them.
        value: of the padding.
    """

    operation: BlockOperation
    widths: tuple[int, ...]
    value: float = 0.0

    def __call__(self, block: torch.Tensor, *parameters: Any) -> torch.Tensor:
        if any(self.widths):
            block = F.pad(block, self.widths, value=self.value)
        return self.operation(block, *parameters)


def padding_widths(reads: Sequence[Read]) -> tuple[int, ...]:
    """The padding around what is inside, last dim first, as torch's ``pad`` takes it."""
    return tuple(cells for read in reversed(reads) for cells in read.overhang)
