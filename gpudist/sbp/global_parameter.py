"""Parameters of converted networks that are split over workers: leaves with a global shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any
from weakref import getweakrefs

import torch
from torch.optim.optimizer import (
    _foreach_supported_types as optimized_types,
    register_optimizer_step_pre_hook,
)
from torch.utils import swap_tensors
from torch.utils._foreach_utils import _foreach_supported_types as listed_types

from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast, split
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.parameters.replication import copies_of, holders_of
from gpudist.sbp import methods
from gpudist.sbp.copies import copy_of
from gpudist.sbp.global_spec import GlobalSpec, global_spec, local_of, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import changes_in_place
from gpudist.sbp.placement import Placement
from gpudist.sbp.scope import current_scope
from gpudist.sbp.trees import map_tree
from gpudist.world.partition import CartesianPartition, Partition


class GlobalParameter(GlobalTensor):
    """A parameter of which each worker holds a block or a copy.

    Functions of torch compute on the global parameter. Its gradient has its own attributes: the
    gradients of copies are summed by the node that makes the copies, so that a network can sum
    those of all its parameters together.

    Attributes:
        placed: workers that hold the cells, as in the network's state dict.
        holders: workers that hold the same cells as this one, ``None`` if there are no others.
        broadcast: broadcast at each call of a network, if the workers that compute have no cells.
    """

    placed: ParameterPlacement
    holders: Partition | None
    broadcast: ParameterBroadcast | None = None

    @staticmethod
    def of(
        cells: torch.Tensor, placed: ParameterPlacement, spec: GlobalSpec, requires_grad: bool
    ) -> GlobalParameter:
        """Return the parameter whose part on this rank is ``cells``, which it shares."""
        _prepare_optimizers()
        box = spec.layout.box(spec.placement.index) if spec.placement.index is not None else None
        local = cells.detach().view(box.shape if box is not None else (0,))
        # The copies' node sums the gradients.
        vars(local)["_gpudist_watched"] = True
        parameter = wrap(GlobalParameter, local.requires_grad_(requires_grad), spec)
        parameter.placed, parameter.holders = placed, holders_of(placed)
        vars(parameter)["_is_param"] = True
        return parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named: dict[str, Any] = kwargs or {}
        if func in methods.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        method = methods.METHODS.get(func)
        if method is not None:
            result = method(*args, **named)
            if result is not NotImplemented:
                return result
        scope = current_scope()

        def leaf(x: Any) -> Any:
            return x._with_part(x._local) if type(x) is GlobalParameter else x

        def tensor(x: Any) -> Any:
            if type(x) is not GlobalParameter:
                return x
            copy = x if scope is None else copy_of(scope, x)
            return copy.tensor() if type(copy) is GlobalParameter else copy

        named = map_tree(named, tensor)
        if not args or not changes_in_place(func, named):
            return func(*map_tree(args, tensor), **named)
        result = func(map_tree(args[0], leaf), *map_tree(args[1:], tensor), **named)
        return args[0] if type(args[0]) is GlobalParameter else result

    @classmethod
    def _wrap(
        cls, local: Any, placement: Any, sbp: Any, shape: Any, strides: Any = None
    ) -> GlobalTensor:
        return GlobalTensor._wrap(local, placement, sbp, shape, strides)

    def tensor(self) -> GlobalTensor:
        """Return a global tensor on the graph, whose gradients are summed over copies."""
        local = self._local
        if self.holders is not None and local.requires_grad and torch.is_grad_enabled():
            (local,) = copies_of([local], [self.holders])
        return self._with_part(local)

    def to_global(self, *args: Any, **kwargs: Any) -> GlobalTensor:
        return self.tensor().to_global(*args, **kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        return self.tensor().to_local(**kwargs)

    def with_cells(self, cells: torch.Tensor) -> GlobalParameter:
        """Return another parameter with this one's layout, whose part on this rank is ``cells``."""
        spec = self._global_spec
        spec = global_spec(spec.placement, spec.sbp, spec.shape, cells.dtype)
        parameter = GlobalParameter.of(cells, self.placed, spec, self._local.requires_grad)
        parameter.broadcast = self.broadcast
        return parameter


def block_of(x: torch.Tensor, placed: ParameterPlacement | None = None) -> torch.Tensor:
    """Return this rank's part of a parameter, its gradient or its state, in the block's shape.

    Args:
        x: global tensor; a plain tensor is returned unchanged.
        placed: workers that hold the cells, if ``x`` is not a parameter.
    """
    if not isinstance(x, GlobalTensor):
        return x
    if isinstance(x, GlobalParameter):
        placed = x.placed
    local = local_of(x)
    if placed is None or local.shape == placed.own_shape:
        return local
    return local.view(placed.own_shape)


def state_of(parameter: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the state that an optimizer keeps for a parameter, from this rank's block of it."""
    if not isinstance(parameter, GlobalParameter):
        return block
    spec = parameter._global_spec
    spec = global_spec(spec.placement, spec.sbp, spec.shape, block.dtype)
    return wrap(GlobalTensor, block.view(parameter._local.shape), spec)


def _shared_spec(
    placed: ParameterPlacement, P_x: CartesianPartition, dtype: torch.dtype
) -> GlobalSpec:
    """Return the spec of a parameter on all workers of ``P_x``, so that parameters can be combined.

    Blocks that are cut along several dims, and copies on a part of the workers only, remain on
    their own grid.
    """
    members = P_x.world.create_partition_inclusive(list(P_x.ranks))
    placement = Placement.of(members.create_cartesian_topology_partition((P_x.size,)))
    P, dims = placed.P, {attribute.dim for attribute in placed.sbp if attribute.is_split}
    if placed.copies == P_x.size:
        sbp = broadcast
    elif len(dims) < 2 and placed.copies == 1 and P.ranks == P_x.ranks[: P.size]:
        (dim,) = dims or {0}
        sizes = [placed.box(rank).shape[dim] for rank in range(P.size)]
        sbp = split(dim, [*sizes, *(0,) * (P_x.size - P.size)])
    else:
        return global_spec(
            Placement.of(P.create_cartesian_topology_partition(P.shape)),
            placed.sbp,
            placed.shape,
            dtype,
        )
    return global_spec(placement, (sbp,), placed.shape, dtype)


def exchange(
    parameter: torch.Tensor,
    placed: ParameterPlacement,
    P_x: CartesianPartition,
    broadcast: ParameterBroadcast | None = None,
) -> None:
    """Make a full parameter a global one; it stays the same object, with its hooks and attributes.

    Args:
        parameter: the full parameter, for which :func:`obstacle` returns no text.
        placed: workers that are to hold its cells.
        P_x: all workers of the network.
        broadcast: broadcast of the cells at each call, if any.
    """
    box = placed.own_box

    def part_of(x: torch.Tensor) -> torch.Tensor:
        if box is None:
            return x.detach().new_empty(0)
        return x.detach() if box.shape == x.shape else x.detach()[box.slices].clone()

    spec = _shared_spec(placed, P_x, parameter.dtype)
    new = GlobalParameter.of(part_of(parameter), placed, spec, parameter.requires_grad)
    new.broadcast = broadcast
    local, attributes = new._local, vars(new)
    attributes |= {name: x for name, x in vars(parameter).items() if name not in attributes}
    if parameter.grad is not None:
        local.grad = part_of(parameter.grad).view(local.shape)
    hooks: Any = parameter._backward_hooks
    later_hooks: Any = parameter._post_accumulate_grad_hooks
    swap_tensors(parameter, new)
    # The user's handles remove hooks from these dicts.
    for number, hook in (hooks or {}).items():
        hooks[number] = methods.hook_of_part(parameter, hook)
    for number, hook in (later_hooks or {}).items():
        later_hooks[number] = methods.later_hook_of_part(parameter, hook)
    local._backward_hooks, local._post_accumulate_grad_hooks = hooks, later_hooks


def obstacle(parameter: Any, own: Collection[int]) -> str:
    """Return why a parameter cannot become a global one, and a remedy; empty if it can.

    Args:
        parameter: the full parameter.
        own: identities of weak references that the network itself keeps.
    """
    if isinstance(parameter, GlobalTensor):
        return "is a global tensor already; give the network a full one"
    if any(id(weak) not in own for weak in getweakrefs(parameter)):
        return (
            "has weak references elsewhere, which would refer to this worker's part of it; make "
            "what keeps them, such as a moving average of weights, after gpudist.distribute"
        )
    if parameter._use_count() > 1:
        return (
            "is part of a graph, whose backward would not find it; call backward before, and "
            "delete what was computed from the parameter"
        )
    if getattr(type(parameter), "__slots__", ()):
        return f"is a {type(parameter).__name__}, a class with __slots__; use torch.nn.Parameter"
    return ""


@cache
def _prepare_optimizers() -> None:
    # Optimizers apply a function to all parameters at once, on devices where it is faster, if the
    # exact types of the tensors are in two private lists, which DTensor extends too.
    for kinds in (optimized_types, listed_types):
        kinds += [GlobalTensor, GlobalParameter]  # pyright: ignore
    register_optimizer_step_pre_hook(_refuse_full_state)


def _refuse_full_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise if an optimizer has state of a full parameter for one that is global now.

    Raises:
        ConversionError: the message says how to keep the state.
    """
    for parameter, state in optimizer.state.items():
        full = isinstance(parameter, GlobalParameter) and [
            key for key, x in state.items() if type(x) is torch.Tensor and x.numel() > 1
        ]
        if full:
            raise ConversionError(
                f"{type(optimizer).__name__}: the state {full} of a parameter of shape "
                f"{list(parameter.shape)} is full, but gpudist.distribute has left a part of the "
                "parameter on each worker; make the optimizer after distribute, and load the state "
                "with gpudist.checkpoint.load_full_optimizer_state_dict"
            )
