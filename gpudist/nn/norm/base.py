"""Base class of normalization layers: parameters in blocks, statistics over several blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.broadcasting import Pairing
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.repartition import plan_repartition
from gpudist.nn.norm.node import normalized
from gpudist.nn.norm.normalization import Normalization
from gpudist.nn.parameters.parameter_layer import ParameterLayer
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import plane
from gpudist.ops.bound import Bound
from gpudist.ops.broadcast import plan_between
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement, ShapeMode
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
        self.P_x = P_x
        self._axes = tuple(parameter_axes)
        self._P_owner = P_x if replicate_parameters else plane(P_x, self._axes)
        self._cut = Decomposition.balanced(parameter_shape, [P_x.shape[a] for a in self._axes])
        self.register_parameter("weight", self._parameter(1.0, device, dtype) if weight else None)
        self.register_parameter("bias", self._parameter(0.0, device, dtype) if bias else None)
        self.weight: torch.nn.Parameter | None
        self.bias: torch.nn.Parameter | None
        users = {"weight": P_x, "bias": P_x}
        self._place(replicate_parameters, Norm._placements(self), users, P_x)
        self._agreement = ShapeAgreement(
            type(self).__name__, P_x, P_x, P_x.dim, global_shape, shape
        )
        self._bound = Bound[Normalization](shape, self._agreement)

    def _parameter(
        self, value: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> torch.nn.Parameter:
        shape = self._block_shape(self._P_owner.index)
        return torch.nn.Parameter(torch.full(shape, value, device=device, dtype=dtype))

    def _block_shape(self, index: Sequence[int] | None) -> tuple[int, ...]:
        return (0,) if index is None else self._cut.block([index[a] for a in self._axes]).shape

    def _placements(self) -> dict[str, ParameterPlacement]:
        placed = ParameterPlacement(self._P_owner, self._cut, self._axes)
        return {name: placed for name, _ in self.named_parameters(recurse=False)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        bound = self._bound(input, self._bind, self.uses_copies)
        return normalized(bound, input, self.own_parameters())

    def _named(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = parameters[0] if self.weight is not None else None
        return weight, parameters[-1] if self.bias is not None else None

    def _bind(self, x: torch.Tensor, uses_copies: int) -> Normalization:
        layout = self._agreement(x)
        if not layout.dtype.is_floating_point:
            raise ShapeError(
                f"{type(self).__name__}: the input is {layout.dtype}; convert it to floating point"
            )
        self._check(layout)
        assert self.P_x.index is not None
        by, cut = self._unbound(layout), layout.decomposition
        channels = cut.dims[1] if by.group_count else Blocks(0, 1)
        return by.bind(
            self.P_x,
            range(self.P_x.dim),
            cut.block(self.P_x.index),
            cut.shape,
            [channels.block(i) for i in range(channels.parts)],
            layout.key,
            self._bind_parameters(layout),
        )

    def _check(self, layout: BlockLayout) -> None:
        raise NotImplementedError

    def _unbound(self, layout: BlockLayout) -> Normalization:
        raise NotImplementedError

    def _bind_parameters(self, layout: BlockLayout) -> tuple[Movement | None, ...]:
        """Bind the movements of parameter blocks from their owners to the workers of the input."""
        P_x, P_owner = self.P_x, self._P_source
        needed = Decomposition(tuple(layout.decomposition.dims[axis] for axis in self._axes))
        if needed == self._cut and P_owner.size == P_x.size:
            return (None,) * len(self._own)

        def shape_of(rank: int) -> tuple[int, ...]:
            index = P_owner.cartesian_index(rank)
            return needed.block([index[axis] for axis in self._axes]).shape

        pairing = Pairing(P_owner.shape, P_x.shape)
        plan = plan_between(P_owner, P_x, P_x, pairing, shape_of, (self._axes, needed))
        movements: list[Movement] = []
        between = f"{list(P_owner.shape)} -> {list(P_x.shape)}"
        for name, parameter in self._present.items():
            shape, dtype = parameter.shape, parameter.dtype
            broadcast = bind(plan, P_x, f"broadcast of the {name} {between}", dtype, shape, dtype)
            movements.append(self._recut(needed, name, parameter, broadcast))
        return tuple(movements)

    @property
    def _P_source(self) -> CartesianPartition:
        return self.P_x if self.uses_copies else self._P_owner

    @property
    def _present(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.named_parameters(recurse=False)]
        return dict(zip(names, self._own, strict=True))

    def _recut(
        self, needed: Decomposition, name: str, parameter: torch.Tensor, broadcast: Movement
    ) -> Movement:
        """Return ``broadcast``, preceded by a repartition if ``needed`` blocks are not balanced."""
        if needed == self._cut:
            return broadcast
        P_x, P_owner, axes = self.P_x, self._P_source, self._axes
        own = None if P_owner.index is None else [P_owner.index[axis] for axis in axes]

        def rank_at(index: Sequence[int]) -> int:
            full = list(P_owner.index or [0] * P_x.dim)
            for axis, i in zip(axes, index, strict=True):
                full[axis] = i
            return rank_of(full, P_x.shape)

        assert P_x.rank is not None
        plan = plan_repartition(
            self._cut, needed, P_x.rank, own, own, rank_at, rank_at, key=(axes, P_x.digest)
        )
        shape, dtype = parameter.shape, parameter.dtype
        label = f"repartition of the {name} on {list(P_x.shape)}"
        return bind(plan, P_x, label, dtype, shape, dtype).then(broadcast)
