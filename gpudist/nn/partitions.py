"""What the layers ask of their partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from gpudist.checks.arguments import check
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition


def leading_partitions(
    name: str, arguments: Sequence[Any], options: dict[str, Any]
) -> tuple[CartesianPartition | None, CartesianPartition | None, tuple[Any, ...]]:
    """``P_y`` and ``P_w``, given right after ``P_x`` or by name, and the arguments behind them."""
    count = 0
    while count < len(arguments) and isinstance(arguments[count], Partition):
        count += 1
    if count not in (0, 2):
        raise PartitionError(
            f"{name}: give P_x alone, or P_x, P_y and P_w; got {count + 1} partitions"
        )
    named = options.pop("P_y", None), options.pop("P_w", None)
    check(_behind_P_x, name, named, {})
    P_y, P_w = arguments[:2] if count else named
    if (P_y is None) != (P_w is None):
        raise PartitionError(f"{name}: P_y and P_w belong together; give both or neither")
    return P_y, P_w, tuple(arguments[count:])


def _behind_P_x(P_y: Partition | None, P_w: Partition | None) -> None:
    """What may be given by name."""


_Arguments = TypeVar("_Arguments")


def arguments_of(
    name: str, kind: type[_Arguments], arguments: Sequence[Any], options: dict[str, Any]
) -> _Arguments:
    """The arguments of torch's layer, of a dataclass that lists them, checked."""
    given = kind(*arguments, **options)
    require_types(name, given)
    return given


def require_types(name: str, given: object) -> None:
    """Refuse fields of a dataclass that its annotations do not admit."""
    check(type(given).__init__, name, (None, *vars(given).values()), {})


def require_shape(name: str, what: str, P: Partition, shape: Sequence[int | None]) -> None:
    """Refuse a partition whose axes are not these; ``None`` stands for any."""
    fits = P.dim == len(shape) and all(
        wanted in (None, axis) for wanted, axis in zip(shape, P.shape, strict=True)
    )
    if not fits:
        wanted = ["any" if axis is None else axis for axis in shape]
        raise PartitionError(f"{name}: {what} has shape {list(P.shape)} but must be {wanted}")


def require_cells(name: str, dim: int, parts: int, extent: int, what: str) -> None:
    """Refuse more blocks than cells in a dim where an empty block makes no sense."""
    if parts > extent:
        raise ShapeError(
            f"{name}, dim {dim}: {parts} blocks but only {extent} {what}; use at most {extent} "
            "workers along that axis"
        )


def regrid(P: Partition, shape: Sequence[int]) -> CartesianPartition:
    """The same workers in the same order on another grid."""
    return P.create_cartesian_topology_partition(shape)


def plane(P: CartesianPartition, keep: Sequence[int]) -> CartesianPartition:
    """The workers whose index is 0 on every axis but those to ``keep``; the same on every rank."""
    shape = [extent if axis in keep else 1 for axis, extent in enumerate(P.shape)]
    strides = [0] * P.dim
    stride = 1
    for axis in reversed(range(P.dim)):
        strides[axis], stride = stride, stride * P.shape[axis]
    ranks = [0]
    for axis, extent in enumerate(shape):
        ranks = [rank + i * strides[axis] for rank in ranks for i in range(extent)]
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
