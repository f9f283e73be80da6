"""The shapes of whole inputs, by which a converted network knows its own blocks from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.ops.agreement import refuse
from gpudist.ops.given_shape import wrong_block
from gpudist.partition import CartesianPartition

Shape = Sequence[int]
Shapes = Shape | Sequence[Shape] | Mapping[str, Shape]


def refuse_other_blocks(
    network: torch.nn.Module, P_x: CartesianPartition, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Have every call of ``network`` refuse inputs that are not its blocks of whole ones.

    Args:
        network: takes these inputs by position, in this order, or by name.
        P_x: owns each in balanced blocks.
        shapes: of the whole inputs.
    """
    # First of all hooks: others may send messages.
    network.register_forward_pre_hook(
        partial(_require_blocks, P_x, shapes), prepend=True, with_kwargs=True
    )


def shapes_by_name(
    given: Shapes, names: Sequence[str], P_x: CartesianPartition
) -> dict[str, tuple[int, ...]]:
    """What the user gave as ``global_shape``, for each input.

    Raises:
        ShapeError: it is not one shape for each, of one extent for each axis of ``P_x``.
    """
    if isinstance(given, Mapping):
        named: dict[str, Any] = dict(given)
    elif all(hasattr(extent, "__index__") for extent in given):
        named = {names[0]: given}
    else:
        named = {name: shape for name, shape in zip(names, given, strict=False)}
        if len(given) != len(names):
            named = {}
    if set(named) != set(names):
        raise ShapeError(
            f"distribute: global_shape is {given}, but the inputs are {list(names)}; give one "
            "shape for each, in this order or by name"
        )
    for name, shape in named.items():
        if len(shape) != P_x.dim or not all(hasattr(n, "__index__") and n >= 0 for n in shape):
            raise ShapeError(
                f"distribute: the global shape {list(shape)} of {name!r} must have {P_x.dim} "
                f"extents, one for each axis of the partition {list(P_x.shape)}"
            )
    return {name: tuple(named[name]) for name in names}


def _require_blocks(
    P_x: CartesianPartition,
    shapes: dict[str, tuple[int, ...]],
    network: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = {**dict(zip(shapes, args, strict=False)), **kwargs}
    for name, whole in shapes.items():
        x = given.get(name)
        if not isinstance(x, torch.Tensor):
            continue  # refused by the forward, with its own words
        where = f"{type(network).__name__}, input {name!r}"
        if P_x.index is None:
            if x.numel():
                refuse(
                    P_x,
                    ShapeError(
                        f"{where}: got {list(x.shape)} on a rank outside of the partition, which "
                        "has no block; pass gpudist.zero_volume_tensor(batch), or what "
                        "gpudist.scatter(x, P_x) returns"
                    ),
                )
            continue
        own = Decomposition.balanced(whole, P_x.shape).block(P_x.index).shape
        error = wrong_block(where, P_x, x.shape, own, whole, P_x.shape)
        if error is not None:
            refuse(P_x, error)
