"""Distributed PReLU: a learned slope for negative cells, one for all channels or one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.layout import split
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.parameters.parameter_layer import ParameterLayer, move_those
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import require_axes
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@layer(F.prelu, Sample((2, 4, 9, 8)), num_parameters=4)
class DistributedPReLU(ParameterLayer):
    """``max(0, x) + weight * min(0, x)`` of ``[B, C, *features]`` split over ``P_x`` in any dims.

    Args:
        P_x: partition of the input and the output, one axis per dim; axis 1 splits the channels.
        num_parameters: 1, or the global number of channels.
        init, device, dtype: as in :class:`torch.nn.PReLU`.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each block of the weight on every worker that uses it,
            so that forward sends nothing; otherwise the first worker of each block of channels
            holds it.

    Cost:
        A broadcast of each block of the weight over the workers that share its channels; backward
        sum-reduces its gradient.

    Raises:
        PartitionError: at construction, if ``P_x`` has fewer than two axes.
        ShapeError: on every rank alike, if the numbers of channels and parameters differ, or the
            channels are not split in balanced blocks.

    Source:
        He et al. 2015, arXiv:1502.01852.
    """

    _names = ("weight",)

    def __init__(
        self,
        P_x: CartesianPartition,
        num_parameters: int = 1,
        init: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        super().__init__()
        require_axes(
            self._name, P_x, P_x.dim >= 2, "an axis for the batch and one for the channels"
        )
        self.P_x, self.num_parameters, self.init = P_x, num_parameters, init
        splits = {1: split(0)} if num_parameters > 1 else None
        used = {"weight": ParameterPlacement.on(P_x, (num_parameters,), splits)}
        self._place(replicate_parameters, used, P_x)
        cells = self._placed["weight"].own_shape
        self.weight = torch.nn.Parameter(torch.full(cells, init, device=device, dtype=dtype))
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the block of the output for the block ``input``, of the same shape."""
        if not self.P_x.active:
            return input.clone()
        movements = self._bindings(input, self._agree_and_bind, self.way_of(input))
        (weight,) = move_those(movements, self.own_parameters())
        return F.prelu(input, weight)

    def _bind(
        self, layout: BlockLayout, x: torch.Tensor, *numbers: int
    ) -> tuple[Movement | None, ...]:
        channels = layout.decomposition.dims[1]
        if self.num_parameters > 1 and channels != self._placed["weight"].blocks[0]:
            raise ShapeError(
                f"{self._name}, dim 1: the input has {channels.extent} channels in blocks of "
                f"{list(channels.lengths)}, but the weight has "
                f"{self.num_parameters} cells in balanced blocks; repartition the input"
            )
        self._require_dtype(layout.dtype)
        return self.bind_parameters()
