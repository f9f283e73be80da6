"""Apply a plan's edits to a converted network: layouts, split weights and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpudist.convert.block_checkpoints import let_recompute
from gpudist.convert.network_plan import NetworkPlan, Shape, workers_of
from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast, partial_sum, split
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.sbp.global_spec import global_spec, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.pins import Pin, PinHook, Pins, PlacedPin
from gpudist.sbp.placement import Placement
from gpudist.world.partition import CartesianPartition


def grid_of(
    path: str, shape: Shape, P_x: CartesianPartition
) -> tuple[CartesianPartition, list[int]]:
    """Return the first workers of ``P_x`` on a grid without axes of length 1, and its axes."""
    count = workers_of(path, shape, P_x.size)
    members = P_x.world.create_partition_inclusive(list(P_x.ranks[:count]))
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    return members.create_cartesian_topology_partition([shape[a] for a in axes] or [1]), axes


class Edits:
    """Edits of a plan, found possible on a network, which is as it was until :meth:`follow`.

    Attributes:
        weights: layers whose weights are to be split.
        pins: prescribed layouts; ``None`` if the plan prescribes none.

    Raises:
        ConversionError: on every rank alike, if the plan names a module that does not exist, or an
            edit is impossible.
    """

    def __init__(self, plan: NetworkPlan, network: nn.Module, P_x: CartesianPartition) -> None:
        modules = dict(network.named_modules(remove_duplicate=False))
        named = (*(pin.path for pin in plan.layouts), *plan.weights, *plan.recomputed)
        missing = [path for path in dict.fromkeys(named) if path not in modules]
        if missing:
            raise ConversionError(
                f"plan: the network has no modules {missing}; its modules are "
                f"{[path for path in modules if path]}"
            )
        placed = [_place_pin(pin, P_x) for pin in plan.layouts]
        self.pins = Pins(placed) if placed else None
        by_path: dict[str, list[PlacedPin]] = {}
        for placed_pin in placed:
            if not placed_pin.pin.function:
                by_path.setdefault(placed_pin.pin.path, []).append(placed_pin)
        self._hooks = [(modules[path], PinHook(pins)) for path, pins in by_path.items()]
        self._recomputed = [modules[path] for path in plan.recomputed]
        dims = {path: _weight_dims(path, modules, shape) for path, shape in plan.weights.items()}
        self.weights = [
            SplitWeight(path, modules[path], shape, dims[path], P_x)
            for path, shape in plan.weights.items()
        ]

    def follow(self) -> None:
        """Register the hooks on the modules, and let them recompute."""
        for module, hook in self._hooks:
            module.register_forward_pre_hook(hook.before, with_kwargs=True)
            module.register_forward_hook(hook.after, with_kwargs=True)
        for weight in self.weights:
            weight.layer.register_forward_pre_hook(weight.move_input, with_kwargs=True)
        for module in self._recomputed:
            let_recompute(module, by_plan=True)


_ROOMS = (torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.fft)


def _place_pin(pin: Pin, P_x: CartesianPartition) -> PlacedPin:
    """Return a pin with its workers.

    Raises:
        ConversionError: the grid or the attributes do not fit the network's workers, or torch has
            no such function.
    """
    # A property, such as x.mT, is listed as __get__.
    is_known = pin.function in ("", "__get__") or any(hasattr(r, pin.function) for r in _ROOMS)
    if not is_known:
        raise ConversionError(
            f"plan: {pin}, but torch has no function {pin.function!r}; the function column of "
            "print(gpudist.plan_of(...)) has the names"
        )
    grid = P_x.shape if pin.grid is None else pin.grid
    sbp = pin.sbp
    if pin.grid is None and len(sbp) == 1 and not sbp[0].is_split:
        sbp = sbp * len(grid)
    if len(sbp) != len(grid):
        raise ConversionError(
            f"plan: {pin}, but the network's grid {list(grid)} has {len(grid)} axes; give one "
            "attribute for each of them, or a grid of its own: layout(..., grid=[...])"
        )
    P, axes = grid_of(pin.path, grid, P_x)
    kept = tuple(sbp[axis] for axis in axes) or (broadcast,)
    for axis in axes:
        if (sizes := sbp[axis].sizes) is not None and len(sizes) != grid[axis]:
            raise ConversionError(
                f"plan: {pin}: {sbp[axis]!r} has {len(sizes)} sizes, but axis {axis} has "
                f"{grid[axis]} workers; give one size for each"
            )
    return PlacedPin(pin, Placement.of(P), kept)


def _refuse_shared(path: str, modules: dict[str, nn.Module]) -> None:
    parameters = {id(p) for p in modules[path].parameters(recurse=False)}
    others = [
        other
        for other, module in modules.items()
        if module is not modules[path]
        and any(id(p) in parameters for p in module._parameters.values())
    ]
    if others:
        raise ConversionError(
            f"{path}: split_weight splits its parameters, but the modules {others} use them too; "
            "split the weights of layers that share none"
        )


def is_edit(hook: Any) -> bool:
    """Return whether a hook was registered by :meth:`Edits.follow`."""
    return isinstance(getattr(hook, "__self__", None), PinHook | SplitWeight)


# Dims of the weight with the output and with the input channels.
_WEIGHT_DIMS: dict[type[nn.Module], tuple[int, int]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), (0, 1)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), (1, 0)),
}


def _weight_dims(path: str, modules: dict[str, nn.Module], shape: Shape) -> tuple[int, int]:
    """Return the dims of the weight that rows and columns of the grid split.

    Raises:
        ConversionError: the layer cannot be split on the grid.
    """
    layer: Any = modules[path]
    dims = next((dims for kind, dims in _WEIGHT_DIMS.items() if isinstance(layer, kind)), None)
    is_linear = isinstance(layer, nn.Linear)
    space = len(getattr(layer, "kernel_size", ()))
    if dims is None or (len(shape) < 3 if is_linear else len(shape) != 3 + space):
        raise ConversionError(
            f"{path}: split_weight got a {type(layer).__name__} and a grid {list(shape)}; it takes "
            "a Linear and a grid [*leading, rows, columns] with at least one leading axis, or a "
            "convolution and a grid [batch, rows, columns, *space] with an axis for each dim of "
            "the kernel"
        )
    if hasattr(layer, "parametrizations"):
        raise ConversionError(
            f"{path}: split_weight splits parameters, but those of this layer are computed from "
            f"{[name for name, _ in layer.named_parameters()]}; remove its parametrizations"
        )
    _refuse_shared(path, modules)
    rows, columns = shape[-2:] if is_linear else shape[1:3]
    groups = getattr(layer, "groups", 1)
    if groups > 1 and (groups % max(rows, 1) or columns > 1):
        raise ConversionError(
            f"{path}: the layer has {groups} groups, which {rows} rows and {columns} columns do "
            "not divide into whole groups; use a number of rows that divides the groups, and 1 "
            "column"
        )
    if groups > 1:
        return 0, 1
    ends = ("out_features", "in_features") if is_linear else ("out_channels", "in_channels")
    for name, n in zip(ends, (rows, columns), strict=True):
        if getattr(layer, name) < n:
            raise ConversionError(
                f"{path}: {name} is {getattr(layer, name)}, but the axis of the grid has {n} "
                "workers; use a smaller grid"
            )
    return dims


class SplitWeight:
    """Layer whose weight is split: each worker holds one block of it.

    Its parameters are global ones. During a call, tensors on the grid of the workers that compute
    the layer replace them. The grid is that of the input, with rows and columns of the weight in
    place of its channels. Rows of a layer with groups split whole groups, and so the input.
    """

    def __init__(
        self,
        path: str,
        layer: Any,
        shape: Shape,
        weight_dims: tuple[int, int],
        P_x: CartesianPartition,
    ) -> None:
        self.path, self.layer, self.shape = path, layer, shape
        self.P, axes = grid_of(path, shape, P_x)
        self.placement = Placement.of(self.P)
        rows = len(shape) - 2 if isinstance(layer, nn.Linear) else 1
        columns = rows + 1
        copied = rows if getattr(layer, "groups", 1) == 1 else None
        self.input_sbp = tuple(
            broadcast if axis == copied else split(axis - (axis > rows)) for axis in axes
        ) or (broadcast,)

        def used(p: torch.Tensor) -> ParameterPlacement:
            # A bias has rows alone.
            dims = enumerate(weight_dims if p.dim() > 1 else range(p.dim()), rows)
            splits = {axes.index(axis): split(dim) for axis, dim in dims if axis in axes}
            return ParameterPlacement.on(self.P, p.shape, splits)

        self.used = {name: used(p) for name, p in layer.named_parameters(recurse=False)}
        # Columns give terms, and the bias is added to one of them.
        self.bias_sbp = tuple(
            partial_sum if axis == columns else split(0) if axis == rows else broadcast
            for axis in axes
        ) or (broadcast,)
        # Copies are on all workers, so that all can compute with the norm of all gradients.
        self.placed = {
            name: ParameterPlacement.on(P_x, used.shape) if used.copies == self.P.size else used
            for name, used in self.used.items()
        }

    def move_input(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Move the input to the grid of the weight, as a hook before the forward."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, GlobalTensor):
            return None
        dims = len(self.shape) - 1
        if x.dim() != dims:
            raise ConversionError(
                f"{self.path}: the input has shape {list(x.shape)}, but the plan splits the "
                f"weight on a grid {list(self.shape)}, for inputs of {dims} dims; change the grid"
            )
        x = x.to_global(self.placement, self.input_sbp)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})

    def as_global(self, name: str, cells: torch.Tensor) -> GlobalTensor:
        """Return the parameter, with ``cells`` on this worker, on the workers that compute."""
        used = self.used[name]
        cells = cells if self.placement.active else cells.reshape(-1)[:0]
        x = wrap(
            GlobalTensor, cells, global_spec(self.placement, used.sbp, used.shape, cells.dtype)
        )
        is_term = name == "bias" and self.bias_sbp != used.sbp
        return x.to_global(sbp=self.bias_sbp) if is_term else x
