"""Apply a plan's edits to a converted network: layouts and split weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpudist.convert.blocks_in_state_dict import keep_blocks
from gpudist.convert.network_plan import NetworkPlan, Shape, workers_of
from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast, split
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, set_placements
from gpudist.sbp.global_parameter import replacement
from gpudist.sbp.global_spec import global_spec, wrapped
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


def follow(
    plan: NetworkPlan, network: nn.Module, P_x: CartesianPartition
) -> tuple[list[SplitWeight], Pins | None]:
    """Register the hooks of ``plan`` on the modules of ``network``, and split weights.

    Returns:
        The split weights, and the pins; ``None`` if the plan prescribes no layouts.

    Raises:
        ConversionError: on every rank alike, if the plan names a module that does not exist, or an
            edit is impossible.
    """
    modules = dict(network.named_modules(remove_duplicate=False))
    named = (*(pin.path for pin in plan.layouts), *plan.weights)
    missing = [path for path in dict.fromkeys(named) if path not in modules]
    if missing:
        raise ConversionError(
            f"plan: the network has no modules {missing}; its modules are "
            f"{[path for path in modules if path]}"
        )
    placed = [_placed(pin, P_x) for pin in plan.layouts]
    by_path: dict[str, list[PlacedPin]] = {}
    for one in placed:
        if not one.pin.function:
            by_path.setdefault(one.pin.path, []).append(one)
    for path, pins in by_path.items():
        hook = PinHook(pins)
        modules[path].register_forward_pre_hook(hook.before, with_kwargs=True)
        modules[path].register_forward_hook(hook.after, with_kwargs=True)
    for path in plan.weights:
        _refuse_shared(path, modules)
    weights = [SplitWeight(path, modules[path], shape, P_x) for path, shape in plan.weights.items()]
    return weights, Pins(placed) if placed else None


_ROOMS = (torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.fft)


def _placed(pin: Pin, P_x: CartesianPartition) -> PlacedPin:
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
    own = {id(p) for p in modules[path].parameters()}
    others = [
        other
        for other, module in modules.items()
        if module is not modules[path] and any(id(p) in own for p in module._parameters.values())
    ]
    if others:
        raise ConversionError(
            f"{path}: split_weight splits its parameters, but the modules {others} use them too; "
            "split the weights of layers that share none"
        )


def is_edit(hook: Any) -> bool:
    """Return whether a hook was registered by :func:`follow`."""
    return isinstance(getattr(hook, "__self__", None), PinHook | SplitWeight)


class SplitWeight:
    """Linear layer whose weight is split: each worker holds one block of it.

    Its parameters are global ones. During a call, tensors on the grid of the workers that compute
    the layer replace them.
    """

    def __init__(self, path: str, layer: nn.Module, shape: Shape, P_x: CartesianPartition) -> None:
        if not isinstance(layer, nn.Linear) or len(shape) < 3:
            raise ConversionError(
                f"{path}: split_weight got a {type(layer).__name__} and a grid {list(shape)}; it "
                "takes a Linear and a grid [*leading, rows, columns] with at least one leading "
                "axis"
            )
        self.path, self.layer, self.shape = path, layer, shape
        self.P, axes = grid_of(path, shape, P_x)
        self.placement = Placement.of(self.P)
        self.dims = len(shape) - 2
        rows, columns = self.dims, self.dims + 1
        splits = {axes.index(a): split(d) for d, a in enumerate((rows, columns)) if a in axes}
        self.used = {
            name: ParameterPlacement.on(
                self.P, p.shape, {a: one for a, one in splits.items() if one.dim < p.dim()}
            )
            for name, p in layer.named_parameters(recurse=False)
        }
        self.input_sbp = tuple(
            broadcast if a == rows else split(self.dims if a == columns else a) for a in axes
        ) or (broadcast,)
        for name, n in zip(("out_features", "in_features"), shape[-2:], strict=True):
            if getattr(layer, name) < n:
                raise ConversionError(
                    f"{path}: {name} is {getattr(layer, name)}, but the axis of the grid has {n} "
                    "workers; use a smaller grid"
                )
        # Copies are on all workers, so that all can compute with the norm of all gradients.
        self.placed = {
            name: ParameterPlacement.on(P_x, used.shape) if used.copies == self.P.size else used
            for name, used in self.used.items()
        }
        for name, placed in self.placed.items():
            parameter = getattr(layer, name)
            cells = parameter.detach().reshape(-1)[:0]
            if placed.own_box is not None:
                cells = parameter.detach()[placed.own_box.slices]
            layer._parameters[name] = replacement(  # pyright: ignore
                parameter, cells.clone(), placed, P_x
            )
        set_placements(layer, self.placed)
        keep_blocks(layer)
        layer.register_forward_pre_hook(self._move_input)

    def _move_input(self, layer: nn.Module, args: Any) -> Any:
        x = args[0]
        if not isinstance(x, GlobalTensor):
            return None
        if x.dim() != self.dims + 1:
            raise ConversionError(
                f"{self.path}: the input has shape {list(x.shape)}, but the plan splits the "
                f"weight on a grid {list(self.shape)}, for inputs of {self.dims + 1} dims; change "
                "the grid"
            )
        return (x.to_global(self.placement, self.input_sbp), *args[1:])

    def as_global(self, name: str, own: torch.Tensor) -> GlobalTensor:
        """Return the parameter, with ``own`` on this worker, on the workers that compute."""
        used = self.used[name]
        own = own if self.placement.active else own.reshape(-1)[:0]
        return wrapped(
            GlobalTensor, own, global_spec(self.placement, used.sbp, used.shape, own.dtype)
        )
