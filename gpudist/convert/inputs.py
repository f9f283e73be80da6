"""What a converted network is given: blocks of global tensors, and whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from gpudist.errors import ConversionError, ShapeError
from gpudist.ops.agreement import Agreement, Layout
from gpudist.sbp.attributes import broadcast, split
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.world.partition import CartesianPartition

Kind = Literal["block", "whole", "dynamic"]
Inputs = Mapping[str, Kind | Sequence[int]]


class Entrance:
    """Makes the tensors that a network is given global ones.

    A plain tensor with as many dims as ``P_x`` has axes is this worker's block; any other is whole,
    the same on every worker. Ranks outside ``P_x`` give a tensor without cells for a block.

    Args:
        P_x: one axis for each dim of the inputs that are blocks.
        inputs: by name, what decides otherwise: ``"block"``, ``"whole"``, ``"dynamic"``, a block
            whose global shape is agreed on at every call, or the global shape of a block.
    """

    def __init__(self, P_x: CartesianPartition, inputs: Inputs) -> None:
        self.P_x, self.inputs = P_x, dict(inputs)
        self.axes = [axis for axis, n in enumerate(P_x.shape) if n > 1]
        grid = [P_x.shape[axis] for axis in self.axes] or [1]
        members = P_x.world.create_partition_inclusive(list(P_x.ranks))
        self.placement = Placement.of(members.create_cartesian_topology_partition(grid))
        self._agreements: dict[str, Agreement] = {}

    def __deepcopy__(self, memo: Any) -> Entrance:
        return Entrance(self.P_x, self.inputs)

    def kind_of(self, name: str, x: torch.Tensor) -> Kind | Sequence[int]:
        """What a plain tensor is."""
        given = self.inputs.get(name)
        if given is not None:
            return given
        is_placeholder = not self.P_x.active and not x.numel()
        return "block" if is_placeholder or x.dim() == self.P_x.dim else "whole"

    def __call__(self, name: str, x: torch.Tensor, is_first: bool = False) -> torch.Tensor:
        """The input of that name: global if it is a block, else as it is. Collective over the world
        where its shape is not known.

        Args:
            is_first: there is no other block so far, so that it must be one.

        Raises:
            ShapeError: on every rank alike, if it is not clear whether it is a block.
        """
        if isinstance(x, GlobalTensor):
            same = x._on_axes_of(self.placement)
            return x if same is None else same
        kind = self.kind_of(name, x)
        if kind == "whole":
            return x
        layout = self._agreed(name, kind)(x)
        blocks = layout.decomposition
        if not is_first and name not in self.inputs:
            self._require_cut(name, layout)
        sbp = tuple(split(axis, self._sizes(blocks.dims[axis])) for axis in self.axes)
        shape = blocks.shape
        local = x.view_as(x)
        if not self.P_x.active:
            local = x.reshape(-1)[:0].to(layout.dtype)
            if layout.requires_grad != local.requires_grad:
                local = local.detach().requires_grad_(bool(layout.requires_grad))
        return GlobalTensor._wrap(local, self.placement, sbp or (broadcast,), shape)

    @staticmethod
    def _sizes(blocks: Any) -> list[int]:
        return [blocks.length(i) for i in range(blocks.parts)]

    def _agreed(self, name: str, kind: Kind | Sequence[int]) -> Agreement:
        if name not in self._agreements:
            shape = None if isinstance(kind, str) else tuple(kind)
            mode: Any = "dynamic" if kind == "dynamic" else "static"
            P_x = self.P_x
            self._agreements[name] = Agreement(
                f"input {name!r}", P_x, P_x.world, P_x.dim, shape, mode
            )
        return self._agreements[name]

    def _require_cut(self, name: str, layout: Layout) -> None:
        """Refuse what may be a block or whole: one cell on every worker along all that is cut."""
        dims = [layout.decomposition.dims[axis] for axis in self.axes]
        if dims and all(self._sizes(blocks) == [1] * blocks.parts for blocks in dims):
            block = [1 if d in self.axes else n for d, n in enumerate(layout.decomposition.shape)]
            raise ShapeError(
                f"input {name!r} of shape {block} has one cell on every worker along the dims that "
                f"P_x of shape {list(self.P_x.shape)} cuts, so that it may be a block or whole; "
                f"say which: distribute(..., inputs={{{name!r}: 'block'}}) or 'whole'"
            )


def require_known(inputs: Inputs, names: Sequence[str], takes_any: bool) -> None:
    """Refuse names that no entry of the network has.

    Raises:
        ConversionError: there is one, or a value is none of those that are understood.
    """
    unknown = [name for name in inputs if name not in names]
    if unknown and not takes_any:
        raise ConversionError(f"inputs names {unknown}, but the network takes {list(names)}")
    for name, kind in inputs.items():
        is_shape = not isinstance(kind, str) and all(hasattr(n, "__index__") for n in kind)
        if not is_shape and kind not in ("block", "whole", "dynamic"):
            raise ConversionError(
                f"inputs[{name!r}] is {kind!r}; use 'block', 'whole', 'dynamic' or the shape of "
                "the whole tensor"
            )
