"""Call the layers of ``gpudist.nn`` on global tensors: pass their blocks, wrap the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.cache import cache_of
from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError
from gpudist.geometry.layout import Layout, broadcast, misfit, split
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.loss.base import DistributedLoss
from gpudist.sbp.call import key_of
from gpudist.sbp.global_spec import GlobalSpec, global_spec, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import entry
from gpudist.sbp.placement import Placement
from gpudist.sbp.to_global import agree_on_spec, from_part
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition


@checked()
def call_layer(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer of ``gpudist.nn`` on global tensors. Collective over the world.

    Args:
        layer: layer on the partition ``layer.P_x``.
        args, kwargs: arguments of its ``forward``. Every tensor is global and has the blocks of
            ``P_x``, one dim per axis, on any placement that assigns each rank its block. No input
            is boxed.

    Returns:
        Global tensors, on the placement of the input if the blocks of all ranks allow it, else
        split with one dim per axis of ``layer.P_y``. A reduced loss is a copy on each rank.

    Cost:
        The cost of the layer; at the first call with a shape, an all-gather of the output's shape.

    Raises:
        PartitionError: on every rank alike, if an input has other blocks; the message names the
            required attributes.
    """
    return _call(layer, args, kwargs)


@entry(DistributedModule)
def _call(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = tensors_in([args, kwargs])
    name = type(layer).__name__
    is_loss = isinstance(layer, DistributedLoss)
    for number, x in enumerate(tensors):
        # A plain target holds this worker's block, as it does for the loss without global tensors.
        if isinstance(x, GlobalTensor) or not is_loss:
            _require_blocks(name, layer, x, number)

    def block(leaf: Any) -> Any:
        return _block(leaf) if isinstance(leaf, GlobalTensor) else leaf

    results = layer(*map_tree(args, block), **map_tree(kwargs, block))
    if isinstance(layer, DistributedLoss):
        return _loss(layer, results, tensors)
    outputs = tensors_in(results)
    specs = _output_specs(layer, args, kwargs, tensors, outputs)
    needs_grad = any(x.requires_grad for x in (*tensors, *layer.parameters()))
    wrapped = iter(
        [_wrap_output(y, spec, needs_grad) for y, spec in zip(outputs, specs, strict=True)]
    )
    return map_tree(results, lambda leaf: next(wrapped))


def _blocks_of(P: Partition, shape: tuple[int, ...], first: int) -> Layout:
    sbp = tuple(split(first + axis) for axis in range(P.dim))
    return Layout(P.ranks, P.shape, sbp, shape)


def _require_blocks(name: str, layer: Any, x: torch.Tensor, number: int) -> None:
    if not isinstance(x, GlobalTensor):
        raise PartitionError(
            f"{name}: a plain tensor of shape {list(x.shape)} is used with global tensors; convert "
            "this rank's block of P_x, gpudist.to_global(x, gpudist.placement.of(layer.P_x), "
            "[gpudist.sbp.split(dim), ...])"
        )
    P, spec = layer.P_x, x._global_spec
    is_target = isinstance(layer, DistributedLoss) and number > 0
    key = _require_blocks, P, is_target
    if key in spec.calls:
        return
    shape, layout = spec.shape, spec.layout
    if is_target and 0 < x.dim() == P.dim - 1:
        # A target of class indices has no dim of classes.
        sbp = (split(0), broadcast, *(split(axis - 1) for axis in range(2, P.dim)))
        needed = Layout(P.ranks, P.shape, sbp, shape)
    elif x.dim() < P.dim:
        raise PartitionError(
            f"{name}: a tensor of shape {list(shape)} has {x.dim()} dims, but P_x of shape "
            f"{list(P.shape)} has {P.dim} axes; use a tensor with at least {P.dim} dims"
        )
    else:
        needed = _blocks_of(P, shape, x.dim() - P.dim)
    if layout != needed and (layout.count("partial_sum") > 1 or layout.boxes != needed.boxes):
        raise PartitionError(
            f"{name}: a tensor of shape {list(shape)} is {x.sbp} on {x.placement!r}, but the layer "
            f"needs the blocks of P_x: {needed.sbp} on {Placement.of(P)!r}; move it there with "
            f"x.to_global(gpudist.placement.of(layer.P_x), {needed.sbp})"
        )
    spec.calls[key] = True


def _block(x: GlobalTensor) -> torch.Tensor:
    local = x._local
    return local if x.placement.active or not x.dim() else local.reshape(x.shape[0] or 1, 0)


def _wrap_output(y: torch.Tensor, spec: GlobalSpec, needs_grad: bool) -> GlobalTensor:
    if not spec.placement.active:
        y = y.reshape(-1)[:0].to(spec.dtype)
        # A worker outside the layer gets its own input back, which may have no graph.
        if needs_grad and spec.dtype.is_floating_point and torch.is_grad_enabled():
            y = y if y.requires_grad else y.requires_grad_()
    return wrap(GlobalTensor, y, spec)


def _output_specs(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Any],
    outputs: Sequence[torch.Tensor],
) -> list[GlobalSpec]:
    # Ranks agree on the output shape once for each shape of the inputs.
    remembered = cache_of(vars(layer), "_output_specs")
    others = map_tree([args, kwargs], lambda x: None if isinstance(x, torch.Tensor) else x)
    try:
        key: object = tuple(x.global_layout for x in tensors), key_of(others), len(outputs)
    except TypeError:
        key = object()  # of this call alone
    return remembered.get_or_make(
        key, lambda: [_agree_on_output(layer, tensors[0], y) for y in outputs]
    )


def _agree_on_output(layer: Any, x: GlobalTensor, y: torch.Tensor) -> GlobalSpec:
    P_y = getattr(layer, "P_y", layer.P_x)
    # The partitions have no axes for these leading dims; an embedding adds a last dim.
    first = x.dim() - layer.P_x.dim
    sbp = tuple(split(first + axis) for axis in range(P_y.dim))
    shape, dtype, _ = agree_on_spec(y, Placement.of(P_y), sbp)
    if not misfit(x.sbp, x.placement.shape, shape):
        like_input = x.placement.layout(x.sbp, shape)
        if like_input.boxes == _blocks_of(P_y, shape, first).boxes:
            return global_spec(x.placement, x.sbp, shape, dtype)
    return global_spec(Placement.of(P_y), sbp, shape, dtype)


def _loss(layer: DistributedLoss, loss: torch.Tensor, tensors: Sequence[Any]) -> GlobalTensor:
    """Wrap a loss in the layout of the target if unreduced, else as a copy."""
    last: GlobalTensor = next(x for x in reversed(tensors) if isinstance(x, GlobalTensor))
    placement = last.placement
    if layer.reduction == "none" and last is not tensors[-1]:
        raise PartitionError(
            f"{type(layer).__name__}: reduction='none' of a global tensor needs a global target; "
            "convert it with gpudist.to_global"
        )
    if layer.reduction == "none":
        if last.global_layout.count("broadcast") > 1:
            raise NotImplementedError(
                f"{type(layer).__name__}: reduction='none' with split classes does not give blocks "
                "of a global tensor; use 'sum' or 'mean', or a P_x that does not split the classes"
            )
        spec = global_spec(placement, last.sbp, tuple(last.shape), loss.dtype)
        return _wrap_output(loss, spec, any(x.requires_grad for x in tensors))
    copies = placement.copies(())
    return from_part(loss, placement, copies, [copies.dual, copies])
