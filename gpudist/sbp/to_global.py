"""Convert tensors and modules to global ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import ConventionError, PartitionError, PlanMismatch, ShapeError
from gpudist.exchange.autograd import (
    Declared,
    apply_with_adjoint as apply_declared,
    move,
    move_without_node,
)
from gpudist.exchange.tracing import is_immediate, leave_untraced
from gpudist.geometry.cartesian import index_of
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, nd_sbp
from gpudist.nn.tensor_parallel.conventions import expect
from gpudist.ops.shape_agreement import wants_gradient
from gpudist.sbp.boxing import box_both_ways, movement_of
from gpudist.sbp.call import new_as_in, strides_of
from gpudist.sbp.copies import copy_of, require_copies
from gpudist.sbp.global_tensor import UNTRACED, GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.plain import origins_of
from gpudist.sbp.scope import current_scope
from gpudist.world.partition import Partition

_MAX_DIMS = 16
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

_Module = TypeVar("_Module", bound=torch.nn.Module)
Attributes = Sbp | Sequence[Sbp]


@overload
def to_global(
    x: torch.Tensor,
    placement: Placement | None = None,
    sbp: Attributes | None = None,
    *,
    grad_sbp: Attributes | None = None,
) -> GlobalTensor: ...
@overload
def to_global(
    x: _Module,
    placement: Placement | None = None,
    sbp: Attributes | None = None,
    *,
    grad_sbp: Attributes | None = None,
) -> _Module: ...
@checked()
@leave_untraced(UNTRACED)
def to_global(
    x: torch.Tensor | torch.nn.Module,
    placement: Placement | None = None,
    sbp: Attributes | None = None,
    *,
    grad_sbp: Attributes | None = None,
) -> Any:
    """Convert a plain tensor or a module to global tensors, or a global tensor to another layout.

    Collective: every rank of the world calls it, including those outside the placement.

    Args:
        x: plain tensor, global tensor, or module. Each rank of the placement passes its block, copy
            or term of a plain tensor; tensors of other ranks are ignored. Along an axis of copies,
            the first rank's tensor is used. The parameters and buffers of a module are converted
            one by one, in place. A plain tensor that requires grad, and that a copy is made of, is
            one value, equal on all ranks, such as a penalty on parameters: each rank gets its full
            gradient. An exception are values computed from parts or copies of other global tensors
            (``to_local``), or by movements and layers of this library, whose gradients add up.
        placement: placement of the result; may be omitted for a global tensor, which then keeps its
            own.
        sbp: one attribute for each axis of the placement, outer axis first, or ``broadcast`` or
            ``partial_sum`` for all axes; may be omitted for a global tensor.
        grad_sbp: attributes of the gradient that is passed back, by default the dual of ``sbp``.
            The gradient of a plain tensor is this rank's part of that global gradient:
            ``partial_sum`` gives each rank its own term of the gradient of a copy.

    Returns:
        The global tensor, or the module. If no data had to move, the part of a converted plain
        tensor shares memory with ``x``.

    Adjoint:
        The gradient of a copy is a term of the global gradient. Along an axis of copies, each rank
            of the placement gets the sum, by declaration. If ``x`` was computed from parts, the
            first rank gets the sum and the others zero, so that the gradients of ``x`` add up.

    Cost:
        For a plain tensor, one small all-gather, and a broadcast along axes of copies. For a global
        tensor, the cheapest boxing, in at most two sets of messages.

    Raises:
        ShapeError: on every rank alike, if the blocks are neither balanced (``n // p`` cells and
            one more in the first ``n % p``) nor of the sizes given by ``split``, or if their shapes
            or dtypes are inconsistent.
        ConventionError: the plain tensor uses the invariant convention of tensor-parallel layers,
            in which each rank has the full gradient; pass it through ``invariant_copy`` first. Or
            copies were computed from parts and from leaves that require grad.
    """
    if isinstance(x, torch.nn.Module):
        return _module_to_global(x, placement, sbp, grad_sbp)
    scope, tensor = current_scope(), x
    if scope is not None:
        tensor = copy_of(scope, x)
        require_copies(scope, "to_global", [tensor])
    if isinstance(tensor, GlobalTensor):
        return tensor.to_global(placement, sbp, grad_sbp=grad_sbp)
    if placement is None or sbp is None:
        raise PartitionError(
            "to_global: a plain tensor needs a placement and sbp, such as gpudist.to_global(x, "
            "gpudist.placement.of(P_x), [gpudist.sbp.split(dim), ...]) of this rank's block"
        )
    return _from_local(tensor, placement, nd_sbp(sbp, placement.axes), grad_sbp)


def _from_local(
    x: torch.Tensor, placement: Placement, sbp: NdSbp, grad_sbp: Attributes | None
) -> GlobalTensor:
    shape, dtype, needs_grad = agree_on_spec(x, placement, sbp)
    nd_sbp(sbp, placement.axes, len(shape))
    layout = placement.layout(sbp, shape)
    if not placement.active:
        local = torch.empty(0, dtype=dtype, device=x.device, requires_grad=needs_grad)
        return GlobalTensor._wrap(local, placement, sbp, shape)
    source = layout.first_copies
    world = placement.partition.world
    if grad_sbp is not None:
        gradient_layout = placement.layout(nd_sbp(grad_sbp, placement.axes, len(shape)), shape)
        local = box_both_ways(x, [source, layout], [layout.dual, gradient_layout], world)
        return GlobalTensor._wrap(local, placement, sbp, shape)
    expect("to_global", "dual", x, placement.partition)
    movement = movement_of(dtype, source, layout, world)
    local = x.view_as(x)
    if movement is not None and _is_one_value(x, placement):
        local = _share_value(x, source, layout, world)
    elif movement is not None:
        part = x if world.rank in source.ranks else x.reshape(-1)[:0]
        (local,) = move((movement,), (part,))
    return GlobalTensor._wrap(local, placement, sbp, shape, strides_of(new_as_in(x, shape)))


def from_part(
    x: torch.Tensor, placement: Placement, layout: Layout, back: Sequence[Layout]
) -> GlobalTensor:
    """Wrap this rank's part of a tensor, and box its gradient along the layouts of ``back``."""
    local = x if placement.active else x.reshape(-1)[:0]
    local = box_both_ways(local, [layout], back, placement.partition.world)
    like = new_as_in(x, layout.shape)
    return GlobalTensor._wrap(local, placement, layout.sbp, layout.shape, strides_of(like))


def _is_one_value(x: torch.Tensor, placement: Placement) -> bool:
    """Return whether ``x`` has a gradient and was not computed from parts.

    Raises:
        ConventionError: it was computed from parts and from leaves.
    """
    if not (wants_gradient(x) and is_immediate(x)):
        return False
    if x.grad_fn is None:
        return True
    part, has_leaf, _ = origins_of(x, placement)
    if part is not None and has_leaf:
        raise ConventionError(
            f"to_global: copies of a plain tensor of shape {list(x.shape)} come from {part.name}, "
            f"whose gradients add up over {len(part.ranks)} workers, and from leaves that require "
            "grad, of which each worker needs the full gradient; make both global by themselves, "
            "or pass grad_sbp with partial_sum along the axes of copies and add up the gradients "
            "of the leaves"
        )
    return part is None


def _share_value(x: torch.Tensor, source: Layout, layout: Layout, world: Partition) -> torch.Tensor:
    """Copy ``x`` along axes of copies, from the first rank; its gradient is full on each rank."""
    whole = tuple(
        attribute if attribute == broadcast else attribute.dual for attribute in layout.sbp
    )
    there = movement_of(x.dtype, source, layout, world)
    back = movement_of(x.dtype, layout.dual, layout.with_sbp(whole), world)
    assert there is not None and back is not None
    is_first = world.rank in source.ranks

    def copy(value: torch.Tensor) -> torch.Tensor:
        return move_without_node((there,), (value if is_first else value.reshape(-1)[:0],))[0]

    def add(terms: torch.Tensor) -> torch.Tensor:
        return move_without_node((back,), (terms,))[0]

    P = world.create_partition_inclusive(sorted(layout.ranks))
    return apply_declared(
        x,
        Declared("to_global", "invariant", "dual", P, copy),
        Declared("to_global", "dual", "invariant", P, add),
    )


def agree_on_spec(
    x: torch.Tensor, placement: Placement, sbp: NdSbp
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Agree on the global shape, the dtype and ``requires_grad`` on all ranks."""
    fits = x.dim() <= _MAX_DIMS and x.dtype in _DTYPES and x.device.type == placement.type
    dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else 0
    shape = tuple(x.shape)[:_MAX_DIMS]
    row = [fits, dtype, x.requires_grad, len(shape), *shape, *(0,) * (_MAX_DIMS - len(shape))]
    rows = placement.partition.world.allgather_data([int(n) for n in row])
    blocks = [rows[rank] for rank in placement.partition.ranks]
    for rank, row in zip(placement.partition.ranks, blocks, strict=True):
        if not row[0]:
            raise ShapeError(
                f"to_global: the tensor of rank {rank} is not on {placement.type!r}, has more "
                f"than {_MAX_DIMS} dims, or has a dtype other than {_DTYPES}; convert it first"
            )
    facts = {tuple(row[1:4]) for row in blocks}
    if len(facts) > 1:
        raise PlanMismatch(
            "to_global: the ranks' tensors do not form one global tensor: dtype, requires_grad "
            "and number of dims are "
            f"{sorted(((str(_DTYPES[a]), bool(b), c) for a, b, c in facts))}; make them equal on "
            "all ranks"
        )
    dtype, needs_grad, dims = facts.pop()
    shapes = [tuple(row[4 : 4 + dims]) for row in blocks]
    whole = _global_shape(shapes, placement, sbp)
    return whole, _DTYPES[dtype], bool(needs_grad)


def _global_shape(
    shapes: list[tuple[int, ...]], placement: Placement, sbp: NdSbp
) -> tuple[int, ...]:
    """Return the global shape of a tensor with these blocks, which must match ``sbp``."""
    nd_sbp(sbp, placement.axes, len(shapes[0]))
    extents = list(shapes[0])
    indices = [index_of(i, placement.shape) for i in range(len(shapes))]
    for dim in range(len(extents)):
        axes = [axis for axis, attribute in enumerate(sbp) if attribute.dim == dim]
        extents[dim] = sum(
            shape[dim]
            for shape, index in zip(shapes, indices, strict=True)
            if not any(i for axis, i in enumerate(index) if axis not in axes)
        )
    layout = placement.layout(sbp, tuple(extents))
    for rank, shape, index in zip(placement.partition.ranks, shapes, indices, strict=True):
        expected = layout.box(index).shape
        if shape != expected:
            raise ShapeError(
                f"to_global: the block of rank {rank} has shape {list(shape)}, but for sbp {sbp} "
                f"of a tensor of global shape {extents} it must be {list(expected)}: blocks are "
                "balanced, n // p cells and one more in the first n % p, unless split(dim, "
                "sizes=[...]) gives the cells of each"
            )
    return tuple(extents)


def _module_to_global(
    module: torch.nn.Module,
    placement: Placement | None,
    sbp: Attributes | None,
    grad_sbp: Attributes | None,
) -> torch.nn.Module:
    """Convert every parameter and buffer; shared ones stay shared."""
    converted: dict[int, Any] = {}

    def convert(x: torch.Tensor) -> Any:
        if id(x) not in converted:
            y = to_global(x.detach(), placement, sbp, grad_sbp=grad_sbp)
            is_parameter = isinstance(x, torch.nn.Parameter)
            converted[id(x)] = torch.nn.Parameter(y, x.requires_grad) if is_parameter else y
        return converted[id(x)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                tensors[name] = None if x is None else convert(x)
    return module


def install_methods() -> None:
    """Add a method ``to_global`` to ``torch.Tensor`` and ``torch.nn.Module``, as in OneFlow.

    Importing gpudist does not call this function, and does not change torch.
    """
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to_global = to_global  # type: ignore[attr-defined]
