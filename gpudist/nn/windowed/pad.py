"""Distributed padding layers: constant, reflected, replicated and circular, over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.windows import PaddingWindow, Read
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.parameters.parameter import empty_output
from gpudist.nn.partitions import require_features
from gpudist.nn.windowed.edge_padding import (
    Pad,
    bind_edge_padding,
    require_padding_of_input,
    with_padding_mode,
)
from gpudist.nn.windowed.region_layer import BlockOperation, RegionLayer, padding_widths
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import BindCache, own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@dataclass(frozen=True)
class _BoundPad:
    """Movement and local padding of a layer, bound to one input shape.

    Attributes:
        halo: movement of the cells that each worker's output consists of.
        output_shape: shape of this worker's block of the output.
        edge_padding: local padding after the movement; ``None`` if there is nothing left to pad.
    """

    halo: Movement
    output_shape: tuple[int, ...]
    edge_padding: Pad | None


class _DistributedPad(RegionLayer):
    """Padding layer over a tensor ``[B, C, *spatial]`` partitioned by ``P_x`` in any dims."""

    _dims: int
    _mode: str = "constant"
    value: float = 0.0

    def __init__(
        self,
        P_x: CartesianPartition,
        padding: int | Sequence[int],
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        nested: bool | None = False,
    ) -> None:
        super().__init__()
        require_features(self._name, P_x, self._dims)
        self.P_x = P_x
        self.padding = _widths(self._name, padding, self._dims)
        # Torch lists the last dim first.
        pairs = zip(self.padding[::2], self.padding[1::2], strict=True)
        self._paddings = tuple(reversed(list(pairs)))
        for d, (left, right) in enumerate(self._paddings):
            if self._mode == "circular" and min(left, right) < 0 < max(left, right):
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: padding {(left, right)} crops on one side and "
                    "wraps on the other, which is not supported; crop first, then pad"
                )
        self.halo_exchange = HaloExchange(
            P_x,
            [with_padding_mode(PaddingWindow(*p), self._mode) for p in self._paddings],
            periodic=self._mode == "circular",
            padding_value=self.value,
            nested=nested,
            global_shape=global_shape,
            shape=shape,
        )
        self._agreement = self.halo_exchange.agreement
        self._bindings = BindCache[_BoundPad](shape, self._agreement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound = self._bindings(x, self._agree_and_bind)
        y = move((bound.halo,), (x,))[0]
        if 0 in bound.output_shape:
            return empty_output(bound.output_shape, y.dtype, y)
        if bound.edge_padding is not None:
            y = bound.edge_padding(y)
        return in_form(y, channels_last_form(x))

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _BoundPad:
        inputs, windows = layout.decomposition, self.windows
        self.require_input(inputs)
        halo = self.halo_exchange.bind_to(inputs, layout.dtype, x)
        outputs = self.outputs_of(inputs).block(own_index(self.P_x)).shape
        edge_padding = None
        if self._mode in ("reflect", "replicate") and 0 not in outputs:
            moved = halo.output_shape
            edge_padding = bind_edge_padding(self._name, layout, windows, self.P_x, x, moved)
        return _BoundPad(halo, outputs, edge_padding)

    def require_region(self) -> None:
        if self._mode != "constant":
            raise ShapeError(
                f"{self._name}: copied padding is not supported in a HaloRegion, where cells "
                "beyond the edge are constant; move the layer out of the region"
            )

    def require_input(self, inputs: Decomposition) -> None:
        require_padding_of_input(self._name, self._mode, self._paddings, inputs.shape[2:])

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        return _Padded(padding_widths(reads), self.halo_exchange.padding_value)


@dataclass(frozen=True)
class _Padded:
    """Constant padding of a block, which returns a new tensor even without padding."""

    widths: tuple[int, ...]
    value: float

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        return F.pad(block, self.widths, value=self.value)


def _widths(name: str, padding: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return ``padding`` for both sides of each dim, last dim first."""
    widths = tuple(padding) if isinstance(padding, Sequence) else (padding,) * (2 * dims)
    if len(widths) != 2 * dims or not all(isinstance(width, int) for width in widths):
        raise ShapeError(
            f"{name}: padding is {padding!r} but must be one number or {2 * dims}: left and right "
            "of the last dim, then of the dims before it"
        )
    return widths


class _DistributedConstantPad(_DistributedPad):
    """Pad a tensor ``[B, C, *spatial]``, partitioned by ``P_x`` in any dims, with a constant.

    Output blocks are balanced, and keep the ``torch.channels_last`` format of the input.

    Args:
        P_x: partition of the input and the output.
        padding: cells on every side, or left and right of the last dim, then of the dims before it,
            as in the torch layer; negative values crop.
        value: value of the padding.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: move cells dim by dim instead of to all workers that need some at once; ``None``:
            see :func:`~gpudist.halo_exchange`.

    Adjoint:
        Crop the padding; every worker receives the gradient of its own cells.

    Cost:
        One halo exchange, which copies the block. Its messages carry the cells that change owners
        because the output is balanced.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments; a ShapeError at the
            first call, on every rank alike, if more cells are cropped than there are.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        padding: int | Sequence[int],
        value: float,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        nested: bool | None = False,
    ) -> None:
        self.value = value
        super().__init__(P_x, padding, global_shape=global_shape, shape=shape, nested=nested)


class _DistributedZeroPad(_DistributedPad):
    """Pad a tensor ``[B, C, *spatial]``, partitioned by ``P_x`` in any dims, with zeros.

    Equivalent to :class:`DistributedConstantPad2d` with value 0.

    Args:
        P_x ... nested: see :class:`DistributedConstantPad2d`, without ``value``.
    """


class _DistributedCopyingPad(_DistributedPad):
    """Pad a tensor ``[B, C, *spatial]``, partitioned by ``P_x`` in any dims, with copies of cells.

    ``Reflection`` mirrors cells at the edge, ``Replication`` repeats the edge, and ``Circular``
    copies the cells of the opposite end. Copies may come from other workers, and a worker's output
    may consist of copies only. Output blocks are balanced, and keep the ``torch.channels_last``
    format of the input.

    Args:
        P_x: partition of the input and the output.
        padding: cells on every side, or left and right of the last dim, then of the dims before it,
            as in the torch layer. Negative values crop; circular padding cannot crop one side of a
            dim and wrap the other.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: move cells dim by dim instead of to all workers that need some at once; ``None``:
            see :func:`~gpudist.halo_exchange`.

    Adjoint:
        Add the gradients of copies to those of the cells they were copied from.

    Cost:
        One halo exchange, which copies the block. Its messages carry the cells that change owners
        because the output is balanced, and the cells copied from other workers. Workers at an edge
        copy their block once more, except for circular padding.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments; a ShapeError at the
            first call, on every rank alike, if the padding does not fit. Reflected padding must be
            smaller than the extent, circular padding at most the extent, and at least one cell must
            remain.
    """


@layer(F.pad, Sample((2, 4, 9)), padding=1, value=0.5)
class DistributedConstantPad1d(_DistributedConstantPad):
    _dims = 1


@layer(F.pad, Sample((2, 4, 9, 8)), padding=1, value=0.5)
class DistributedConstantPad2d(_DistributedConstantPad):
    _dims = 2


@layer(F.pad, Sample((2, 4, 5, 6, 3)), padding=1, value=0.5)
class DistributedConstantPad3d(_DistributedConstantPad):
    _dims = 3


@layer(F.pad, Sample((2, 4, 9)), padding=1)
class DistributedZeroPad1d(_DistributedZeroPad):
    _dims = 1


@layer(F.pad, Sample((2, 4, 9, 8)), padding=1)
class DistributedZeroPad2d(_DistributedZeroPad):
    _dims = 2


@layer(F.pad, Sample((2, 4, 5, 6, 3)), padding=1)
class DistributedZeroPad3d(_DistributedZeroPad):
    _dims = 3


@layer(F.pad, Sample((2, 4, 9)), padding=1)
class DistributedReflectionPad1d(_DistributedCopyingPad):
    _dims = 1
    _mode = "reflect"


@layer(F.pad, Sample((2, 4, 9, 8)), padding=1)
class DistributedReflectionPad2d(_DistributedCopyingPad):
    _dims = 2
    _mode = "reflect"


@layer(F.pad, Sample((2, 4, 5, 6, 3)), padding=1)
class DistributedReflectionPad3d(_DistributedCopyingPad):
    _dims = 3
    _mode = "reflect"


@layer(F.pad, Sample((2, 4, 9)), padding=1)
class DistributedReplicationPad1d(_DistributedCopyingPad):
    _dims = 1
    _mode = "replicate"


@layer(F.pad, Sample((2, 4, 9, 8)), padding=1)
class DistributedReplicationPad2d(_DistributedCopyingPad):
    _dims = 2
    _mode = "replicate"


@layer(F.pad, Sample((2, 4, 5, 6, 3)), padding=1)
class DistributedReplicationPad3d(_DistributedCopyingPad):
    _dims = 3
    _mode = "replicate"


@layer(F.pad, Sample((2, 4, 9)), padding=1)
class DistributedCircularPad1d(_DistributedCopyingPad):
    _dims = 1
    _mode = "circular"


@layer(F.pad, Sample((2, 4, 9, 8)), padding=1)
class DistributedCircularPad2d(_DistributedCopyingPad):
    _dims = 2
    _mode = "circular"


@layer(F.pad, Sample((2, 4, 5, 6, 3)), padding=1)
class DistributedCircularPad3d(_DistributedCopyingPad):
    _dims = 3
    _mode = "circular"
