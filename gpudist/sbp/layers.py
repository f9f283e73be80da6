"""The layers of ``gpudist.nn`` on global tensors: their blocks in, the output's blocks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError
from gpudist.nn.distributed_module import carried_out_by
from gpudist.nn.loss.base import DistributedLoss
from gpudist.sbp.attributes import NdSbp, broadcast, misfit, split
from gpudist.sbp.boxing import declared, gradient_layout
from gpudist.sbp.derive import key_of
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.layout import Layout
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import mapped, tensors_in
from gpudist.sbp.to_global import agreed
from gpudist.world.partition import Partition

_REMEMBERED_SHAPES = 256


class _Lies(NamedTuple):
    """How an output lies."""

    placement: Placement
    sbp: NdSbp
    shape: tuple[int, ...]
    dtype: torch.dtype


@checked()
def call_layer(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer of ``gpudist.nn`` on global tensors, which every rank of the world calls.

    Args:
        layer: on the partition ``layer.P_x``.
        args, kwargs: of its ``forward``. Every tensor is global, and lies in the blocks of ``P_x``,
            one dim an axis, on whatever placement gives each rank its block. Nothing is boxed.

    Returns:
        Global tensors: placed like the input if each rank's block allows, else one dim an axis of
        ``layer.P_y``. A reduced loss is a copy on each rank.

    Cost:
        That of the layer; at the first call with a shape, an all-gather for the output's.

    Raises:
        PartitionError: on every rank alike, if an input lies in other blocks; it names the
            attributes that are needed.
    """
    tensors = list(tensors_in([args, kwargs]))
    name = type(layer).__name__
    is_loss = isinstance(layer, DistributedLoss)
    for number, x in enumerate(tensors):
        # A plain target is this worker's block, as the loss takes it.
        if isinstance(x, GlobalTensor) or not is_loss:
            _require_blocks(name, layer, x, number)

    def block(leaf: Any) -> Any:
        return _block(leaf) if isinstance(leaf, GlobalTensor) else leaf

    results = layer(*mapped(args, block), **mapped(kwargs, block))
    if isinstance(layer, DistributedLoss):
        return _loss(layer, results, tensors)
    outputs = list(tensors_in(results))
    lie = _outputs_lie(layer, args, kwargs, tensors, outputs)
    needs_grad = any(x.requires_grad for x in (*tensors, *layer.parameters()))
    wrapped = iter([_wrapped(y, one, needs_grad) for y, one in zip(outputs, lie, strict=True)])
    return mapped(results, lambda leaf: next(wrapped))


def _blocks_of(P: Partition, shape: tuple[int, ...], first: int) -> Layout:
    """The blocks of a tensor on a partition, whose axes are the tensor's dims from ``first`` on."""
    sbp = tuple(split(first + axis) for axis in range(P.dim))
    return Layout(P.ranks, P.shape, sbp, shape)


def _require_blocks(name: str, layer: Any, x: torch.Tensor, number: int) -> None:
    if not isinstance(x, GlobalTensor):
        raise PartitionError(
            f"{name}: a plain tensor of shape {list(x.shape)} meets global tensors; make it one "
            "with gpudist.to_global"
        )
    P, shape, given = layer.P_x, tuple(x.shape), x.global_layout
    is_target = isinstance(layer, DistributedLoss) and number > 0
    if is_target and 0 < x.dim() == P.dim - 1:
        # Without the dim of classes.
        sbp = (split(0), broadcast, *(split(axis - 1) for axis in range(2, P.dim)))
        needed = Layout(P.ranks, P.shape, sbp, shape)
    elif x.dim() < P.dim:
        raise PartitionError(
            f"{name}: a tensor of shape {list(shape)} has fewer dims than P_x of shape "
            f"{list(P.shape)} has axes"
        )
    else:
        needed = _blocks_of(P, shape, x.dim() - P.dim)
    if given != needed and (given.count("partial_sum") > 1 or given.boxes != needed.boxes):
        raise PartitionError(
            f"{name}: a tensor of shape {list(shape)} lies as {x.sbp} on {x.placement!r}, but the "
            f"layer needs the blocks of P_x: {needed.sbp} on {Placement.of(P)!r}; bring it there "
            f"with x.to_global({name}.P_x.to_placement(), {needed.sbp})"
        )


def _block(x: GlobalTensor) -> torch.Tensor:
    """This rank's block; elsewhere a placeholder that tells the batch."""
    local = x.to_local()
    return local if x.placement.active or not x.dim() else local.reshape(x.shape[0] or 1, 0)


def _wrapped(y: torch.Tensor, lies: _Lies, needs_grad: bool) -> GlobalTensor:
    placement, sbp, shape, dtype = lies
    if not placement.active:
        y = y.reshape(-1)[:0].to(dtype)
        # A worker that the layer does not know gets its input back, which may have no graph.
        if needs_grad and dtype.is_floating_point and torch.is_grad_enabled():
            y = y if y.requires_grad else y.requires_grad_()
    return GlobalTensor._wrap(y, placement, sbp, shape)


def _outputs_lie(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Any],
    outputs: Sequence[torch.Tensor],
) -> list[_Lies]:
    """What all ranks agree on once for each shape: that of the outputs follows from the inputs'."""
    remembered: dict[Any, list[_Lies]] = vars(layer).setdefault("_outputs_lie", {})
    others = mapped([args, kwargs], lambda x: None if isinstance(x, torch.Tensor) else x)
    key = tuple(x.global_layout for x in tensors), key_of(others), len(outputs)
    if key not in remembered:
        if len(remembered) >= _REMEMBERED_SHAPES:
            remembered.clear()
        remembered[key] = [_agreed(layer, tensors[0], y) for y in outputs]
    return remembered[key]


def _agreed(layer: Any, x: GlobalTensor, y: torch.Tensor) -> _Lies:
    P_y = getattr(layer, "P_y", layer.P_x)
    # Leading dims that the partitions have no axes for; an embedding adds a last one.
    first = x.dim() - layer.P_x.dim
    sbp = tuple(split(first + axis) for axis in range(P_y.dim))
    shape, dtype, _ = agreed(y, Placement.of(P_y), sbp)
    if not misfit(x.sbp, x.placement.shape, shape):
        like_input = x.placement.layout(x.sbp, shape)
        if like_input.boxes == _blocks_of(P_y, shape, first).boxes:
            return _Lies(x.placement, x.sbp, shape, dtype)
    return _Lies(Placement.of(P_y), sbp, shape, dtype)


def _loss(layer: DistributedLoss, loss: torch.Tensor, tensors: Sequence[Any]) -> GlobalTensor:
    """A loss of each cell lies like the target; a number is invariant: its gradient is a copy."""
    last: GlobalTensor = next(x for x in reversed(tensors) if isinstance(x, GlobalTensor))
    placement = last.placement
    if layer.reduction == "none" and last is not tensors[-1]:
        raise PartitionError(
            f"{type(layer).__name__}: reduction='none' of a global tensor takes a global target; "
            "make it one with gpudist.to_global"
        )
    if layer.reduction == "none":
        if last.global_layout.count("broadcast") > 1:
            raise NotImplementedError(
                f"{type(layer).__name__}: reduction='none' with split classes gives no block of a "
                "global tensor; use 'sum' or 'mean', or a P_x that does not split the classes"
            )
        lies = _Lies(placement, last.sbp, tuple(last.shape), loss.dtype)
        return _wrapped(loss, lies, any(x.requires_grad for x in tensors))
    copies = placement.copies(())
    local = loss if placement.active else loss.reshape(-1)[:0]
    back = [gradient_layout(copies), copies]
    local = declared(local, [copies], back, placement.partition.world)
    return GlobalTensor._wrap(local, placement, copies.sbp, ())


carried_out_by[GlobalTensor] = call_layer
