"""Convert the inputs of a network to global tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from gpudist.errors import ConversionError, ShapeError
from gpudist.geometry.layout import broadcast, split
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement
from gpudist.sbp.global_spec import global_spec, on_axes_of, wrapped
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.world.partition import CartesianPartition

Kind = Literal["block", "whole", "dynamic", "split"]
Inputs = Mapping[str, Kind | Sequence[int]]


class Entrance:
    """Converter of a network's input blocks to global tensors.

    A plain tensor with as many dims as ``P_x`` has axes is this worker's block; any other is whole,
    that is, equal on every worker. In place of a block, ranks outside ``P_x`` pass an empty tensor.

    Args:
        P_x: partition of the inputs that are blocks, one axis for each of their dims.
        inputs: kinds of inputs by name, where the default does not fit: ``"block"``, ``"whole"``,
            ``"dynamic"`` (a block whose global shape the ranks agree on at every call), ``"split"``
            (equal on every worker, which takes its block of it), or the global shape of a block.
    """

    def __init__(self, P_x: CartesianPartition, inputs: Inputs) -> None:
        self.P_x, self.inputs = P_x, dict(inputs)
        self.axes = [axis for axis, n in enumerate(P_x.shape) if n > 1]
        grid = [P_x.shape[axis] for axis in self.axes] or [1]
        members = P_x.world.create_partition_inclusive(list(P_x.ranks))
        self.placement = Placement.of(members.create_cartesian_topology_partition(grid))
        self._agreements: dict[str, ShapeAgreement] = {}

    def __deepcopy__(self, memo: Any) -> Entrance:
        return Entrance(self.P_x, self.inputs)

    def kind_of(self, name: str, x: torch.Tensor) -> Kind | Sequence[int]:
        """Return the kind of a plain tensor."""
        given = self.inputs.get(name)
        if given is not None:
            return given
        is_placeholder = not self.P_x.active and not x.numel()
        return "block" if is_placeholder or x.dim() == self.P_x.dim else "whole"

    def is_held_by_all(self, name: str, x: torch.Tensor) -> bool:
        """Return whether every worker passes the whole tensor."""
        return not isinstance(x, GlobalTensor) and self.kind_of(name, x) in ("whole", "split")

    def __call__(self, name: str, x: torch.Tensor, is_first: bool = False) -> torch.Tensor:
        """Return a block as a global tensor, and any other input unchanged.

        Collective over the world if the global shape is unknown.

        Args:
            name: argument name of the input.
            x: the input.
            is_first: whether no block precedes this input, which must therefore be one.

        Raises:
            ShapeError: on every rank alike, if the input could be a block as well as the whole
                tensor.
        """
        if isinstance(x, GlobalTensor):
            same = on_axes_of(x, self.placement)
            return x if same is None else same
        kind = self.kind_of(name, x)
        if kind == "whole":
            return x
        if kind == "split":
            return self._cut(name, x)
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
        how = global_spec(self.placement, sbp or (broadcast,), shape, local.dtype)
        return wrapped(GlobalTensor, local, how)

    def _cut(self, name: str, x: torch.Tensor) -> GlobalTensor:
        """Return a tensor that every worker holds as balanced blocks."""
        if x.dim() != self.P_x.dim:
            raise ShapeError(
                f"input {name!r} has shape {list(x.shape)}; 'split' needs one dim for each of the "
                f"{self.P_x.dim} axes of P_x, which has the shape {list(self.P_x.shape)}"
            )
        copies = (broadcast,) * self.placement.axes
        local = x.view_as(x) if self.P_x.active else x.reshape(-1)[:0]
        how = global_spec(self.placement, copies, tuple(x.shape), x.dtype)
        whole = wrapped(GlobalTensor, local, how)
        return whole.to_global(sbp=tuple(split(axis) for axis in self.axes) or copies)

    @staticmethod
    def _sizes(blocks: Any) -> list[int]:
        return [blocks.length(i) for i in range(blocks.parts)]

    def _agreed(self, name: str, kind: Kind | Sequence[int]) -> ShapeAgreement:
        if name not in self._agreements:
            shape = None if isinstance(kind, str) else tuple(kind)
            mode: Any = "dynamic" if kind == "dynamic" else "static"
            P_x = self.P_x
            self._agreements[name] = ShapeAgreement(
                f"input {name!r}", P_x, P_x.world, P_x.dim, shape, mode
            )
        return self._agreements[name]

    def _require_cut(self, name: str, layout: BlockLayout) -> None:
        """Raise for an ambiguous input: one cell on every worker along every split dim."""
        dims = [layout.decomposition.dims[axis] for axis in self.axes]
        if dims and all(self._sizes(blocks) == [1] * blocks.parts for blocks in dims):
            block = [1 if d in self.axes else n for d, n in enumerate(layout.decomposition.shape)]
            raise ShapeError(
                f"input {name!r} of shape {block} has one cell on every worker along the dims "
                f"that P_x of shape {list(self.P_x.shape)} splits, so it could be a block or the "
                f"whole tensor; say which: distribute(..., inputs={{{name!r}: 'block'}}) or "
                "'whole'"
            )


def require_known(inputs: Inputs, names: Sequence[str], takes_any: bool) -> None:
    """Raise if a name is not an argument of the network's methods.

    Raises:
        ConversionError: a name or a value of ``inputs`` is not known.
    """
    unknown = [name for name in inputs if name not in names]
    if unknown and not takes_any:
        raise ConversionError(
            f"distribute: inputs names {unknown}, but the arguments of the network are "
            f"{list(names)}"
        )
    for name, kind in inputs.items():
        is_shape = not isinstance(kind, str) and all(hasattr(n, "__index__") for n in kind)
        if not is_shape and kind not in ("block", "whole", "dynamic", "split"):
            raise ConversionError(
                f"distribute: inputs[{name!r}] is {kind!r}; use 'block', 'whole', 'dynamic', "
                "'split' or the global shape of the tensor"
            )
