"""Layers whose outputs each read a range of cells: move what is needed, then compute on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import Window
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.parameter import tied_empty
from gpudist.ops.agreement import Agreement, Layout, ShapeMode
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import Bound, require_cartesian
from gpudist.world.partition import CartesianPartition

Compute = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Bound:
    """What a layer remembers of one shape of its input.

    Attributes:
        halo: gives this worker the cells it reads; ``None`` where every worker owns them.
        output_shape: of this worker's block.
        compute: the output block, from those cells or the own block; never called for none.
    """

    halo: Movement | None
    output_shape: tuple[int, ...]
    compute: Compute


class DistributedWindowed(DistributedModule):
    """A layer on one partition without parameters, whose windows follow from its input's shape."""

    def __init__(
        self, P_x: CartesianPartition, global_shape: Sequence[int] | None, shape: ShapeMode
    ) -> None:
        super().__init__()
        self._name = type(self).__name__
        require_cartesian(self._name, P_x)
        self.P_x = P_x
        self._agreement = Agreement(self._name, P_x, P_x, P_x.dim, global_shape, shape)
        self._bound = Bound[_Bound](shape, self._agreement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound = self._bound(x, self._bind)
        block = x if bound.halo is None else move((bound.halo,), (x,))[0]
        if 0 in bound.output_shape:
            return tied_empty(bound.output_shape, block.dtype, block)
        return bound.compute(block)

    def _bind(self, x: torch.Tensor) -> _Bound:
        layout = self._agreement(x)
        index, inputs = self.P_x.index, layout.decomposition
        assert index is not None
        windows = self._windows(layout, x)
        pairs = list(zip(inputs.dims, windows, strict=True))
        outputs = Decomposition(tuple(window.outputs(blocks) for blocks, window in pairs))
        own, cells, halo = outputs.block(index), inputs.block(index), None
        if not all(_owns_what_it_reads(blocks, window) for blocks, window in pairs):
            halo = HaloExchange(self.P_x, windows).bind_to(inputs, layout.dtype, x)
            ranges = [needed_range(*pair, i) for pair, i in zip(pairs, index, strict=True)]
            cells = Box(*zip(*ranges, strict=True))
        return _Bound(halo, own.shape, self._computation(layout, windows, cells, own, x))

    @abstractmethod
    def _windows(self, layout: Layout, x: torch.Tensor) -> tuple[Window, ...]:
        """One per dim; refuses, on every rank alike, a shape or dtype that is not supported."""

    @abstractmethod
    def _computation(
        self, layout: Layout, windows: Sequence[Window], cells: Box, outputs: Box, x: torch.Tensor
    ) -> Compute:
        """How the global box ``outputs`` follows from the global box ``cells`` of the input."""


def _owns_what_it_reads(inputs: Blocks, window: Window) -> bool:
    """Whether no worker of an axis reads cells of others."""
    for index in range(inputs.parts):
        (first, last), (start, stop) = inputs.block(index), needed_range(inputs, window, index)
        if start < stop and not (first <= start and stop <= last):
            return False
    return True
