"""Base class of normalization layers: parameters in blocks, statistics over several blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.checks.storage import on_meta
from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.layout import split
from gpudist.nn.norm.node import normalize_block
from gpudist.nn.norm.normalization import Normalization
from gpudist.nn.parameters.parameter import bind_parameter
from gpudist.nn.parameters.parameter_layer import ParameterLayer
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, plan_recut
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class Norm(ParameterLayer):
    """Layer that normalizes a tensor split over ``P_x`` and scales it by parameters split alike.

    The weight and the bias are split in balanced blocks along some axes. Each block is owned by the
    worker at index 0 of all other axes or, if replicated, by every worker that uses it. All other
    workers hold zero-volume parameters.

    Args:
        P_x: partition of the input and the output, one axis per dim.
        parameter_shape: global shape of the weight, and of the bias.
        parameter_axes: axes of ``P_x`` that split the dims of the parameters.
        weight, bias: whether the layer has a weight, and a bias.
        device, dtype: device and dtype of the parameters, as in torch.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: whether every worker holds the parameter blocks it uses.
    """

    _reads_low = True

    def __init__(
        self,
        P_x: CartesianPartition,
        parameter_shape: Sequence[int],
        parameter_axes: Sequence[int],
        weight: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        replicate_parameters: bool,
    ) -> None:
        super().__init__()
        on_meta("a parameter", parameter_shape, dtype)
        self.P_x = P_x
        splits = {axis: split(d) for d, axis in enumerate(parameter_axes)}
        self._axes = tuple(parameter_axes)
        self._used = ParameterPlacement.on(P_x, parameter_shape, splits)
        wanted = {"weight": weight, "bias": bias}
        self._place(replicate_parameters, {n: self._used for n in wanted if wanted[n]}, P_x)
        self.register_parameter("weight", self._full_parameter("weight", 1.0, device, dtype))
        self.register_parameter("bias", self._full_parameter("bias", 0.0, device, dtype))
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def _full_parameter(
        self, name: str, value: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> torch.nn.Parameter | None:
        if name not in self._placed:
            return None
        shape = self._placed[name].own_shape
        return torch.nn.Parameter(torch.full(shape, value, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = self._device_that_widens((input,))
        if not device:
            return self._normalize(input)
        with torch.autocast(device, enabled=False):
            return self._normalize(input, torch.float32)

    def _normalize(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if not self.P_x.active:
            return x.to(dtype or x.dtype, copy=True)
        bound: Normalization = self._bindings(x, self._agree_and_bind, self.way_of(x))
        return normalize_block(bound, x, self.own_parameters(), dtype)

    def _weight_and_bias(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = parameters[0] if self.weight is not None else None
        return weight, parameters[-1] if self.bias is not None else None

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> Normalization:
        if not layout.dtype.is_floating_point:
            raise ShapeError(
                f"{type(self).__name__}: the input is {layout.dtype}; convert it to floating point"
            )
        self._check(layout)
        by, cut = self._normalization(layout), layout.decomposition
        channels = cut.dims[1] if by.group_count else Blocks(0, 1)
        return by.bind(
            self.P_x,
            range(self.P_x.dim),
            cut.block(own_index(self.P_x)),
            cut.shape,
            [channels.block(i) for i in range(channels.parts)],
            layout.key,
            self._bind_parameters(layout),
        )

    def _check(self, layout: BlockLayout) -> None:
        raise NotImplementedError

    def _normalization(self, layout: BlockLayout) -> Normalization:
        raise NotImplementedError

    def _bind_parameters(self, layout: BlockLayout) -> tuple[Movement | None, ...]:
        """Bind the movements of parameter blocks from their owners to the workers of the input."""
        if not self._placed:
            return ()
        P_x, (held, *_) = self.P_x, self._placed.values()
        held = self._used if self.uses_copies else held
        cuts = [layout.decomposition.dims[axis].sizes for axis in self._axes]
        splits = {axis: split(d, cuts[d]) for d, axis in enumerate(self._axes)}
        needed = ParameterPlacement.on(held.P, held.shape, splits)
        if needed == held and held.P.size == P_x.size:
            return (None,) * len(self._own)
        movements: list[Movement] = []
        present = [name for name in self._placed if getattr(self, name) is not None]
        for name, parameter in zip(present, self._own, strict=True):
            dtype = parameter.dtype
            movement = bind_parameter(needed, P_x, dtype, name, P_x)
            if needed != held:
                label = f"repartition of the {name} on {list(P_x.shape)}"
                plan = plan_recut(held, needed, P_x)
                movement = bind(plan, P_x, label, dtype, held.own_shape, dtype).then(movement)
            movements.append(movement)
        return tuple(movements)
