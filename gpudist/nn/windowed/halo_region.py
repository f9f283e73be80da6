"""Chain of layers with one wide halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.halo import reads_own_cells
from gpudist.geometry.windows import ComposedWindow, Read
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.movements import fuse_parameter_movements
from gpudist.nn.parameters.parameter_layer import ParameterLayer, move_those
from gpudist.nn.windowed.region_layer import BlockOperation, RegionLayer
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

# Elementwise modules without parameters or random numbers, since several workers compute the same
# ghosts.
POINTWISE: tuple[type[nn.Module], ...] = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU,
    nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip


class HaloRegion(DistributedModule):
    """Chain of layers that exchanges one wide halo instead of one per layer.

    Each worker receives, in one exchange, all input cells on which its block of the last output
    depends, and computes the intermediate outputs it needs, ghosts included. Output and gradients
    equal those of the layers applied one by one. Output blocks are balanced. Parameters have the
    same names as in a ``torch.nn.Sequential`` of the layers. The region does not use the layers'
    own ``forward``, hooks, ``global_shape``, ``shape`` or ``nested``.

    A region is faster where latency dominates: small blocks, deep chains, small kernels. If each of
    ``n`` layers takes a time ``t`` to exchange ghosts, it saves ``2 (n - 1) t`` per step. In
    return, a layer with ``b`` outputs per block along a split dim computes ``b + g`` of them, where
    ``g`` is at most the sum of ``dilation * (kernel - 1)`` over the layers behind it, each times
    the strides in between.

    Args:
        P_x: partition of the input and the output.
        layers: layers in order, at least one of them distributed. Supported on ``P_x`` are
            convolutions with whole channels, including causal and transposed ones, sliding pools,
            and constant pads; between them, elementwise modules of torch.nn without parameters. The
            names in a ``torch.nn.Sequential`` are kept.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: exchange ghosts dim by dim instead of with all neighbours at once; ``None``: see
            :func:`~gpudist.halo_exchange`.

    Cost:
        In forward, one group of messages carries all ghosts and all parameters that move. In
        backward, one group carries the same bytes in the opposite direction, and another one sums
        the gradients of replicated parameters. A halo wider than a block is received from several
        workers. Workers at an edge copy their block once for each layer that pads one side of it.

    Raises:
        PartitionError: a layer is on another partition than ``P_x``, or splits channels.
        ShapeError: at construction, for a layer that a region does not support (one that reads all
            of a dim, draws random numbers, or copies padding); at the first call, on every rank
            alike, for a layer that does not fit its input.

    Source:
        Demmel, Hoemmen, Mohiyuddin & Yelick 2008, "Avoiding communication in sparse matrix
        computations", for one stencil applied many times.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        layers: Sequence[nn.Module] | nn.Sequential,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        nested: bool | None = False,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.nested = nested
        chain = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
        self._names = tuple(chain._modules)
        for name, layer in zip(self._names, chain, strict=True):
            _require_part(P_x, name, layer)
            self.add_module(name, layer)
        self._chain = tuple(chain)
        if any(getattr(layer, "replicate_parameters", False) for layer in chain):
            fuse_parameter_movements(self)
        self._layers = tuple(layer for layer in self._chain if isinstance(layer, RegionLayer))
        if not self._layers:
            raise ShapeError("HaloRegion: none of the layers is distributed; use a Sequential")
        per_dim = zip(*(layer.windows for layer in self._layers), strict=True)
        self.windows = tuple(ComposedWindow(tuple(windows)) for windows in per_dim)
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        ways = [a.way_of(x) for a in self._layers if isinstance(a, ParameterLayer)]
        bound: _BoundRegion = self._bindings(x, self._agree_and_bind, *ways)
        parameters = [p for layer in self._layers for p in layer.own_parameters()]
        halo = bound.halo if bound.has_ghosts else None
        block, *parameters = move_those((halo, *bound.parameters), [x, *parameters])
        block = in_form(block, channels_last_form(x))
        for layer, operation in zip(self._chain, bound.operations, strict=True):
            if operation is None:
                block = layer(block)
                continue
            block = operation.of_block(block, *parameters[: operation.parameters])
            parameters = parameters[operation.parameters :]
        return block

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _BoundRegion:
        index = own_index(self.P_x)
        inputs = [layout.decomposition]
        for name, layer in zip(self._names, self._chain, strict=True):
            if isinstance(layer, RegionLayer):
                inputs.append(_outputs(name, layer, inputs[-1]))
        exchange = HaloExchange(self.P_x, self.windows, nested=self.nested)
        halo = exchange.bind_to(inputs[0], layout.dtype, x)
        has_ghosts = not all(map(reads_own_cells, inputs[0].dims, self.windows))
        reads = self._reads(inputs[0], inputs[-1], index)
        remaining = iter(
            [
                _LocalOperation(
                    layer.bind_block(read, _shape(outputs, read, index)),
                    len(layer.bind_parameters()),
                )
                for layer, outputs, read in zip(self._layers, inputs[1:], reads, strict=True)
            ]
        )
        operations = tuple(
            next(remaining) if isinstance(layer, RegionLayer) else None for layer in self._chain
        )
        parameters = tuple(p for layer in self._layers for p in layer.bind_parameters())
        return _BoundRegion(halo, parameters, operations, has_ghosts)

    def _reads(
        self, inputs: Decomposition, outputs: Decomposition, index: Sequence[int]
    ) -> Sequence[Sequence[Read]]:
        along = zip(self.windows[2:], inputs.dims[2:], outputs.dims[2:], index[2:], strict=True)
        per_dim = [window.reads(*last.block(i), first.extent) for window, first, last, i in along]
        return list(zip(*per_dim, strict=True))


@dataclass(frozen=True)
class _LocalOperation:
    """Local computation of one layer, and its number of parameters."""

    of_block: BlockOperation
    parameters: int


@dataclass(frozen=True)
class _BoundRegion:
    """Movements and local operations of a region, bound to one input shape.

    Attributes:
        halo: movement of the input.
        parameters: movements of the parameters of all layers; ``None`` for a parameter that is
            already local.
        operations: local operations, one per layer; ``None`` for an elementwise module.
        has_ghosts: whether any worker reads cells of others, so that the input must be moved.
    """

    halo: Movement
    parameters: tuple[Movement | None, ...]
    operations: tuple[_LocalOperation | None, ...]
    has_ghosts: bool


def _require_part(P_x: CartesianPartition, name: str, layer: nn.Module) -> None:
    """Raise for a layer that a region does not support."""
    words = f"HaloRegion, layer {name} ({type(layer).__name__})"
    if isinstance(layer, RegionLayer):
        if layer.P_x != P_x:
            raise PartitionError(
                f"{words}: the layer is on {layer.P_x!r}, but the region is on P_x, {P_x!r}; "
                "create the layer on P_x"
            )
        layer.require_region()
    elif type(layer) not in POINTWISE:
        raise ShapeError(
            f"{words}: a region supports convolutions, sliding pools, constant pads, and "
            "elementwise modules of torch.nn without parameters or random numbers; end the region "
            "before this layer"
        )


def _outputs(name: str, layer: RegionLayer, inputs: Decomposition) -> Decomposition:
    try:
        layer.require_input(inputs)
        return layer.outputs_of(inputs)
    except ShapeError as error:
        words = f"HaloRegion, layer {name} ({type(layer).__name__})"
        raise ShapeError(f"{words}: {error}") from None


def _shape(outputs: Decomposition, reads: Sequence[Read], index: Sequence[int]) -> tuple[int, ...]:
    batch, channels = outputs.block(index).shape[:2]
    return (batch, channels, *(stop - start for start, stop in (read.outputs for read in reads)))
