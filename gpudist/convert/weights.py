"""Weights of a tree of modules: into the blocks of a distributed one, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gpudist.arguments import checked
from gpudist.convert.values import with_shape
from gpudist.errors import ConversionError
from gpudist.nn.placement import Placement, placements
from gpudist.ops import AllSumReduce, SumReduce
from gpudist.partition import CartesianPartition

_SKELETON = "_gpudist_skeleton"


class Skeleton:
    """The tree that was converted, without its weights. No module, so that it is no child."""

    def __init__(self, module: torch.nn.Module) -> None:
        tensors = (*module.parameters(), *module.buffers())
        memo: dict[int, Any] = {id(x): _without_cells(x) for x in tensors}
        self.module = copy.deepcopy(module, memo)

    def with_empty_weights(self, device: torch.device) -> torch.nn.Module:
        return copy.deepcopy(self.module).to_empty(device=device)


def _without_cells(x: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(x, device="meta")
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=x.requires_grad)
    return empty


def copy_weights(source: torch.nn.Module, layer: torch.nn.Module) -> None:
    """Give a distributed layer this worker's blocks of the weights of the layer it stands for."""
    wholes = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    blocks = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    with torch.no_grad():
        for name, placement in placements(layer).items():
            if name not in wholes:
                continue  # a state that the sequential layer has not
            box = placement.own_box
            if box is not None:
                blocks[name].copy_(wholes[name][box.slices])
            blocks[name].requires_grad_(wholes[name].requires_grad)


@checked(ConversionError)
def sequential(distributed: torch.nn.Module, root: int | None = None) -> torch.nn.Module | None:
    """The tree of torch modules that :func:`distribute` was given, with the weights of now.

    Collective over the partition that was given to :func:`distribute`.

    Args:
        distributed: what :func:`distribute` returned.
        root: rank in that partition of the worker that gets it; all of them unless given.

    Returns:
        A tree of the original classes, on the partition's device; ``None`` on workers that do not
        get it.

    Cost:
        An all-reduce, or a reduce, of each whole parameter and buffer of a distributed layer.

    Raises:
        ConversionError: ``distributed`` is not the result of :func:`distribute`.
    """
    skeleton = getattr(distributed, _SKELETON, None)
    if not isinstance(skeleton, Skeleton):
        raise ConversionError("sequential: the module is not what distribute() returned")
    P_x: Any = distributed.P_x
    if not P_x.active:
        return None
    module = skeleton.with_empty_weights(P_x.device)
    placed = placements(distributed)
    blocks = {**dict(_all_tensors(distributed))}
    with torch.no_grad():
        for name, whole in _all_tensors(module):
            block = blocks[name].detach()
            if name in placed:
                block = _whole_of(block, placed[name], P_x, root)
            if root is None or P_x.rank == root:
                whole.copy_(block)
    return module.train(distributed.training) if root in (None, P_x.rank) else None


def _all_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, shared ones under all of their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _whole_of(
    block: torch.Tensor, placement: Placement, P_x: CartesianPartition, root: int | None
) -> torch.Tensor:
    """The whole tensor from the first of the owners of every cell; zeros off the root."""
    whole = torch.zeros(placement.shape, dtype=block.dtype, device=block.device)
    box = placement.own_box
    if box is not None and placement.is_first_copy:
        whole[box.slices] = block
    P_line = with_shape(P_x, (P_x.size,))
    if root is None:
        return AllSumReduce(P_line, (0,))(whole)
    return SumReduce(P_line, P_x.create_partition_inclusive([root]))(whole)
