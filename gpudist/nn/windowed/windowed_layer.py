"""Base class of layers whose outputs read ranges of cells: move cells, then compute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.geometry.halo import needed_range, owns_what_it_reads
from gpudist.geometry.windows import Window
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.parameter import empty_output
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import own_index, require_cartesian
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

Compute = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _BoundWindowedLayer:
    """Movement and local computation of a layer, bound to one input shape.

    Attributes:
        halo: movement of the cells that this worker reads; ``None`` if every worker owns what it
            reads.
        output_shape: shape of this worker's block of the output.
        compute: function from these cells, or the local block, to the output block; not called for
            an empty output block.
    """

    halo: Movement | None
    output_shape: tuple[int, ...]
    compute: Compute | None


class DistributedWindowed(DistributedModule):
    """Layer on one partition, without parameters, whose windows depend on the input shape."""

    def __init__(
        self, P_x: CartesianPartition, global_shape: Sequence[int] | None, shape: ShapeMode
    ) -> None:
        super().__init__()
        require_cartesian(self._name, P_x)
        self.P_x = P_x
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound: _BoundWindowedLayer = self._bindings(x, self._agree_and_bind)
        block = x if bound.halo is None else move((bound.halo,), (x,))[0]
        if bound.compute is None:
            return empty_output(bound.output_shape, block.dtype, block)
        return bound.compute(block)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _BoundWindowedLayer:
        index, inputs = own_index(self.P_x), layout.decomposition
        windows = self._windows(layout, x)
        pairs = list(zip(inputs.dims, windows, strict=True))
        outputs = Decomposition(tuple(window.outputs(blocks) for blocks, window in pairs))
        output_box, cells, halo = outputs.block(index), inputs.block(index), None
        if not all(owns_what_it_reads(blocks, window) for blocks, window in pairs):
            halo = HaloExchange(self.P_x, windows).bind_to(inputs, layout.dtype, x)
            ranges = [needed_range(*pair, i) for pair, i in zip(pairs, index, strict=True)]
            cells = Box(*zip(*ranges, strict=True))
        compute = None
        if 0 not in output_box.shape:
            compute = self._computation(layout, windows, cells, output_box, x)
        return _BoundWindowedLayer(halo, output_box.shape, compute)

    @abstractmethod
    def _windows(self, layout: BlockLayout, x: torch.Tensor) -> tuple[Window, ...]:
        # Return one window per dim; raise, on every rank alike, for an unsupported shape or dtype.
        raise NotImplementedError

    @abstractmethod
    def _computation(
        self,
        layout: BlockLayout,
        windows: Sequence[Window],
        cells: Box,
        outputs: Box,
        x: torch.Tensor,
    ) -> Compute:
        # Return the function that computes the global box ``outputs`` from the global box
        # ``cells``.
        raise NotImplementedError
