"""Helpers of the layers for checking and deriving partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import product
from typing import Any

from gpudist.checks.arguments import CHECKS_ITSELF, check_constructor
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.cartesian import rank_of
from gpudist.world.partition import CartesianPartition, Partition


def partitions_lead(init: Callable[..., None]) -> Callable[..., None]:
    """Accept ``P_y`` and ``P_w``, keywords of ``init``, also as positional arguments after ``P_x``.

    The constructor checks its arguments itself; messages name the layer.
    """

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        count = 0
        while count < len(args) and isinstance(args[count], Partition):
            count += 1
        if count not in (0, 1, 3):
            raise PartitionError(
                f"{name}: got {count} partitions; pass P_x alone, or P_x, P_y and P_w"
            )
        if count == 3:
            kwargs = dict(P_y=args[1], P_w=args[2], **kwargs)
            args = (args[0], *args[3:])
        check_constructor(init, name, (self, *args), kwargs)
        if (kwargs.get("P_y") is None) != (kwargs.get("P_w") is None):
            raise PartitionError(f"{name}: only one of P_y and P_w is given; give both or neither")
        init(self, *args, **kwargs)

    setattr(call, CHECKS_ITSELF, True)
    return call


def require_shape(name: str, what: str, P: Partition, shape: Sequence[int | None]) -> None:
    """Raise unless ``P`` has the given shape; ``None`` stands for any extent."""
    fits = P.dim == len(shape) and all(
        wanted in (None, axis) for wanted, axis in zip(shape, P.shape, strict=True)
    )
    if not fits:
        wanted = ["any" if axis is None else axis for axis in shape]
        raise PartitionError(f"{name}: {what} has shape {list(P.shape)} but must be {wanted}")


def require_axes(name: str, P_x: Partition, fits: bool, axes: str) -> None:
    """Raise unless ``fits``; ``axes`` says which axes ``P_x`` needs."""
    if not fits:
        raise PartitionError(f"{name}: P_x has shape {list(P_x.shape)} but needs {axes}")


def require_features(name: str, P_x: Partition, dims: int) -> None:
    """Raise unless ``P_x`` has axes for batch, channels and ``dims`` dims of features."""
    axes = f"{dims + 2} axes: batch, channels and {dims} of features"
    require_axes(name, P_x, P_x.dim == dims + 2, axes)


def require_axis(name: str, P_x: CartesianPartition, dim: int) -> None:
    """Raise unless ``dim`` of the tensor is an axis of ``P_x``."""
    if not -P_x.dim <= dim < P_x.dim:
        raise PartitionError(
            f"{name}: dim {dim} is not one of the {P_x.dim} axes of P_x of shape "
            f"{list(P_x.shape)}; give it one axis per dim of the tensor"
        )


def require_cells(name: str, dim: int, parts: int, extent: int, what: str) -> None:
    """Raise if a dim that must not have empty blocks has more blocks than cells."""
    if parts > extent:
        raise ShapeError(
            f"{name}, dim {dim}: {parts} blocks but only {extent} {what}; use at most {extent} "
            "workers along that axis"
        )


def refuse_given(name: str, **unsupported: object) -> None:
    """Raise for an argument of torch's layer that is neither ``None`` nor ``False``."""
    for argument, value in unsupported.items():
        if value is not None and value is not False:
            raise ShapeError(f"{name}: {argument} is not supported; omit it")


def plane(P: CartesianPartition, keep: Sequence[int]) -> CartesianPartition:
    """Return the workers whose index is 0 on every axis not in ``keep``."""
    shape = [extent if axis in keep else 1 for axis, extent in enumerate(P.shape)]
    ranks = [rank_of(index, P.shape) for index in product(*map(range, shape))]
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
