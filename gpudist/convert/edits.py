"""What an edited plan changes in a converted network: where tensors and weights lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gpudist.convert.plan import Plan, Shape, workers_of
from gpudist.errors import ConversionError
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.parameters.placement import Placement as Blocks
from gpudist.sbp.attributes import NdSbp, broadcast, split
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.layout import Layout
from gpudist.sbp.placement import Placement
from gpudist.world.partition import CartesianPartition, Partition


def grid_of(
    path: str, shape: Shape, P_x: CartesianPartition
) -> tuple[CartesianPartition, list[int]]:
    """The first workers of ``P_x`` on a grid of the axes with several, and which axes these are."""
    count = workers_of(path, shape, P_x.size)
    members = P_x.world.create_partition_inclusive(list(P_x.ranks[:count]))
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    return members.create_cartesian_topology_partition([shape[a] for a in axes] or [1]), axes


def follow(plan: Plan, network: nn.Module, P_x: CartesianPartition) -> list[SplitWeight]:
    """Put the hooks of ``plan`` on the modules of ``network``, and cut the weights.

    Raises:
        ConversionError: on every rank alike, if it names what is not there, or cannot be.
    """
    modules = dict(network.named_modules(remove_duplicate=False))
    missing = [path for path in (*plan.repartitions, *plan.weights) if path not in modules]
    if missing:
        raise ConversionError(
            f"the plan names {missing}, which the network does not have; its modules are "
            f"{[path for path in modules if path]}"
        )
    for path, shape in plan.repartitions.items():
        P, axes = grid_of(path, shape, P_x)
        sbp = tuple(split(axis) for axis in axes) or (broadcast,)
        hook = partial(_move_first, path, shape, Placement.of(P), sbp)
        modules[path].register_forward_pre_hook(hook)
    return [SplitWeight(path, modules[path], shape, P_x) for path, shape in plan.weights.items()]


def is_edit(hook: Any) -> bool:
    """Whether a hook follows a plan."""
    return getattr(hook, "func", None) is _move_first or (
        getattr(hook, "__func__", None) is SplitWeight._move_input
    )


def _move_first(
    path: str, shape: Shape, placement: Placement, sbp: NdSbp, module: nn.Module, args: Any
) -> Any:
    if not args or not isinstance(args[0], GlobalTensor):
        return None
    if args[0].dim() != len(shape):
        raise ConversionError(
            f"{path}: the plan moves its input to a grid of shape {list(shape)}, but it has shape "
            f"{list(args[0].shape)}; give one axis for each dim"
        )
    return (args[0].to_global(placement, sbp), *args[1:])


class SplitWeight:
    """A linear layer whose weight is cut: each worker has a block, in place of the whole.

    Its parameters are ordinary ones, of the shape of the block. In a call they stand for global
    tensors.
    """

    def __init__(self, path: str, layer: nn.Module, shape: Shape, P_x: CartesianPartition) -> None:
        if not isinstance(layer, nn.Linear) or len(shape) < 3:
            raise ConversionError(
                f"{path}: a {type(layer).__name__} and a grid {list(shape)}; split_weight takes a "
                "Linear and [*leading, rows, columns], with at least one leading axis"
            )
        self.path, self.layer, self.shape = path, layer, shape
        self.P, axes = grid_of(path, shape, P_x)
        self.placement = Placement.of(self.P)
        self.dims = len(shape) - 2
        rows, columns = self.dims, self.dims + 1
        self.sbps: dict[str, NdSbp] = {
            "weight": tuple(
                split(0) if a == rows else split(1) if a == columns else broadcast for a in axes
            )
            or (broadcast,),
            "bias": tuple(split(0) if a == rows else broadcast for a in axes) or (broadcast,),
        }
        self.input_sbp = tuple(
            broadcast if a == rows else split(self.dims if a == columns else a) for a in axes
        ) or (broadcast,)
        self.shapes = {name: tuple(p.shape) for name, p in layer.named_parameters(recurse=False)}
        for name, n in zip(("out_features", "in_features"), shape[-2:], strict=True):
            if getattr(layer, name) < n:
                raise ConversionError(
                    f"{path}: {getattr(layer, name)} {name} cannot be cut over {n} workers"
                )
        self._cut()
        full = P_x.world.create_partition_inclusive(list(self.P.ranks))
        grid = full.create_cartesian_topology_partition(shape)
        cuts = {"weight": (rows, columns), "bias": (rows,)}
        layer._placements = lambda: {  # pyright: ignore
            name: Blocks(
                grid,
                Decomposition.balanced(self.shapes[name], [shape[a] for a in cuts[name]]),
                cuts[name],
            )
            for name in self.shapes
        }
        layer.register_forward_pre_hook(self._move_input)

    def layout(self, name: str) -> Layout:
        return self.placement.layout(self.sbps[name], self.shapes[name])

    def _cut(self) -> None:
        for name, parameter in list(self.layer.named_parameters(recurse=False)):
            index = self.placement.index
            cells = parameter.detach().reshape(-1)[:0]
            if index is not None:
                cells = parameter.detach()[self.layout(name).box(index).slices]
            own = nn.Parameter(cells.clone(), parameter.requires_grad)
            self.layer._parameters[name] = own

    def _move_input(self, layer: nn.Module, args: Any) -> Any:
        x = args[0]
        if not isinstance(x, GlobalTensor):
            return None
        if x.dim() != self.dims + 1:
            raise ConversionError(
                f"{self.path}: the plan cuts its weight on a grid of shape {list(self.shape)}, for "
                f"inputs of {self.dims + 1} dims, but the input has shape {list(x.shape)}"
            )
        return (x.to_global(self.placement, self.input_sbp), *args[1:])

    def holders(self, name: str) -> Partition | None:
        """The workers that hold the same block as this one, ``None`` if there is no other."""
        if not self.P.active:
            return None
        axes = [i for i, one in enumerate(self.sbps[name]) if one == broadcast]
        same = self.P.along(axes)
        if same.size == 1:
            return None
        return self.P.world.create_partition_inclusive(sorted(same.ranks))

    def as_global(self, name: str, own: torch.Tensor) -> GlobalTensor:
        """The whole parameter, of which this worker has ``own``."""
        return GlobalTensor._wrap(own, self.placement, self.sbps[name], self.shapes[name])
