"""A chain of layers over one wide halo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.composed import ComposedWindow, Read
from gpudist.geometry.halo import reads_own_cells
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.layer import ParameterLayer, move_those
from gpudist.nn.parameters.movements import fuse_parameter_movements
from gpudist.nn.windowed.region_layer import BlockOperation, RegionLayer
from gpudist.ops.agreement import Agreement, ShapeMode
from gpudist.ops.bound import Bound
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.world.partition import CartesianPartition

# What maps each cell alone, has no parameters, and draws no numbers: ghosts are computed twice.
POINTWISE: tuple[type[nn.Module], ...] = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU,
    nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip


class HaloRegion(DistributedModule):
    """A chain of layers that exchanges one wide halo instead of one for each layer.

    Each worker gets at once every cell of the input that its block of the last output follows from,
    and computes what it needs of the layers between, ghosts included. Output and gradients are
    those of the layers one after the other; output blocks are balanced. Parameters keep the names
    that they have in a ``torch.nn.Sequential`` of the layers. The layers' own ``forward``, hooks,
    ``global_shape``, ``shape``, ``overlap`` and ``nested`` are not used.

    It pays where latency is most of the time: small blocks, deep chains, small kernels. ``n``
    layers that each take a time ``t`` to exchange ghosts save ``2 (n - 1) t`` a step. In turn, a
    layer whose block of outputs has ``b`` cells along a split dim computes ``b + g`` of them, where
    ``g``, at most, is the sum of ``dilation * (kernel - 1)`` over the layers behind it, each times
    the strides between.

    Args:
        P_x: owns the input and the output.
        layers: in order, at least one of them distributed: convolutions, also causal and
            transposed, with whole channels; pools that slide; constant pads; all made on ``P_x``.
            Between them, modules of torch.nn that map each cell alone, without parameters. A
            ``torch.nn.Sequential`` keeps its names.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        nested: exchange ghosts dim after dim instead of with all neighbours at once.

    Cost:
        Forward, one group of messages carries all ghosts and all parameters that move; backward,
        one carries the same bytes the other way, and one sums the gradients of replicated
        parameters. A halo wider than a block comes from several workers. Workers at an edge copy
        their block once for each layer whose padding is on one side of it.

    Raises:
        PartitionError: a layer is on another partition than ``P_x``, or splits channels.
        ShapeError: at construction, for a layer that a region cannot have (one that reads all of a
            dim, draws numbers, or copies padding); at the first call, on every rank alike, for what
            does not fit the input.

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
        nested: bool = False,
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
            raise ShapeError("HaloRegion: none of the layers is distributed; a Sequential will do")
        per_dim = zip(*(layer.windows for layer in self._layers), strict=True)
        self.windows = tuple(ComposedWindow(tuple(windows)) for windows in per_dim)
        self._agreement = Agreement("HaloRegion", P_x, P_x, P_x.dim, global_shape, shape)
        self._bound = Bound[_Bound](shape, self._agreement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        lent = [isinstance(a, ParameterLayer) and a.uses_copies for a in self._layers]
        bound = self._bound(x, self._bind, *lent)
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

    def _bind(self, x: torch.Tensor, *use_copies: int) -> _Bound:
        layout, index = self._agreement(x), self.P_x.index
        assert index is not None
        inputs = [layout.decomposition]
        for name, layer in zip(self._names, self._chain, strict=True):
            if isinstance(layer, RegionLayer):
                inputs.append(_outputs(name, layer, inputs[-1]))
        exchange = HaloExchange(self.P_x, self.windows, nested=self.nested)
        halo = exchange.bind_to(inputs[0], layout.dtype, x)
        has_ghosts = not all(map(reads_own_cells, inputs[0].dims, self.windows))
        reads = self._reads(inputs[0], inputs[-1], index)
        found: list[_Operation] = []
        for layer, outputs, read in zip(self._layers, inputs[1:], reads, strict=True):
            block = layer.bind_block(read, _shape(outputs, read, index))
            found.append(_Operation(block, len(layer.bind_parameters())))
        remaining = iter(found)
        operations = tuple(
            next(remaining) if isinstance(layer, RegionLayer) else None for layer in self._chain
        )
        parameters = tuple(p for layer in self._layers for p in layer.bind_parameters())
        return _Bound(halo, parameters, operations, has_ghosts)

    def _reads(
        self, inputs: Decomposition, outputs: Decomposition, index: Sequence[int]
    ) -> Sequence[Sequence[Read]]:
        """What this worker reads of each layer's input, per dim of features."""
        along = zip(self.windows[2:], inputs.dims[2:], outputs.dims[2:], index[2:], strict=True)
        per_dim = [window.reads(*last.block(i), first.extent) for window, first, last, i in along]
        return list(zip(*per_dim, strict=True))


@dataclass(frozen=True)
class _Operation:
    """What this worker computes of one layer, and of how many parameters."""

    of_block: BlockOperation
    parameters: int


@dataclass(frozen=True)
class _Bound:
    """What a region remembers of one shape of its input.

    Attributes:
        halo, parameters: movements of the input, and of the parameters of all layers, ``None`` for
            those that are there.
        operations: one per layer, ``None`` for one that maps each cell alone.
        has_ghosts: some worker reads cells of others, so that the input moves.
    """

    halo: Movement
    parameters: tuple[Movement | None, ...]
    operations: tuple[_Operation | None, ...]
    has_ghosts: bool


def _require_part(P_x: CartesianPartition, name: str, layer: nn.Module) -> None:
    """Refuse a layer that a region cannot have."""
    words = f"HaloRegion, layer {name} ({type(layer).__name__})"
    if isinstance(layer, RegionLayer):
        if layer.P_x != P_x:
            raise PartitionError(f"{words}: it is on {layer.P_x!r} and not on P_x, {P_x!r}")
        layer.require_region()
    elif type(layer) not in POINTWISE:
        raise ShapeError(
            f"{words}: a region has convolutions, pools that slide, constant pads, and modules of "
            "torch.nn that map each cell alone, without parameters or random numbers; end the "
            "region before it"
        )


def _outputs(name: str, layer: RegionLayer, inputs: Decomposition) -> Decomposition:
    """How the output of a layer is cut, if the layer takes the input."""
    try:
        layer.require_input(inputs)
        return layer.outputs_of(inputs)
    except ShapeError as error:
        words = f"HaloRegion, layer {name} ({type(layer).__name__})"
        raise ShapeError(f"{words}: {error}") from None


def _shape(outputs: Decomposition, reads: Sequence[Read], index: Sequence[int]) -> tuple[int, ...]:
    """Shape of what this worker computes of a layer's output: ghosts of the features included."""
    batch, channels = outputs.block(index).shape[:2]
    return (batch, channels, *(stop - start for start, stop in (read.outputs for read in reads)))
