"""Balanced blocks, slices, and indices on grids, in arrays of integers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist.geometry.blocks import balanced_block
from gpudist.geometry.cartesian import column_major_number, rank_of

Integers = NDArray[np.int64]
Slices = tuple[slice, ...]


def _ranges(P_shape: Any, index: Any, shape: Any) -> Integers:
    numbers = zip(*(np.atleast_1d(each).tolist() for each in (shape, P_shape, index)), strict=True)
    return np.array([balanced_block(*each) for each in numbers], np.int64).reshape(-1, 2)


def compute_subshape(P_shape: Any, index: Any, shape: Any) -> Integers:
    """Return the shape of the balanced block at ``index`` of a tensor of global ``shape``."""
    start, stop = _ranges(P_shape, index, shape).T
    return stop - start


def compute_start_index(P_shape: Any, index: Any, shape: Any) -> Integers:
    """Return the first global index of the balanced block at ``index``."""
    return _ranges(P_shape, index, shape)[:, 0]


def compute_stop_index(P_shape: Any, index: Any, shape: Any) -> Integers:
    """Return the global index behind the balanced block at ``index``."""
    return _ranges(P_shape, index, shape)[:, 1]


def compute_intersection(
    r0_start_index: Any, r0_stop_index: Any, r1_start_index: Any, r1_stop_index: Any
) -> tuple[Integers, Integers, Integers]:
    """Return start, stop and shape of the intersection of two boxes."""
    start = np.maximum(r0_start_index, r1_start_index)
    stop = np.minimum(r0_stop_index, r1_stop_index)
    return start, stop, np.maximum(stop - start, 0)


def assemble_slices(start_index: Iterable[int], stop_index: Iterable[int]) -> Slices:
    """Return one slice per dim."""
    return tuple(slice(a, b) for a, b in zip(start_index, stop_index, strict=True))


def compute_partition_intersection(
    P_x_r_shape: Any, P_x_r_index: Any, P_x_s_shape: Any, P_x_s_index: Any, x_shape: Any
) -> Slices | None:
    """Return the part of block r that block s of another partition shares, in cells of block r.

    Args:
        P_x_r_shape, P_x_s_shape: shapes of the two partitions.
        P_x_r_index, P_x_s_index: indices of the two blocks.
        x_shape: global shape of the tensor.

    Returns:
        Slices, or ``None`` if the blocks share no cell.
    """
    first = _ranges(P_x_r_shape, P_x_r_index, x_shape)
    second = _ranges(P_x_s_shape, P_x_s_index, x_shape)
    return shared_slices(*first.T, *second.T)


def shared_slices(
    x_start: Integers, x_stop: Integers, y_start: Integers, y_stop: Integers
) -> Slices | None:
    """Return the intersection of two boxes in cells of the first; ``None`` if it is empty."""
    start, stop, shape = compute_intersection(x_start, x_stop, y_start, y_stop)
    return assemble_slices(start - x_start, stop - x_start) if np.all(shape) else None


def compute_nd_slice_volume(slices: Sequence[slice]) -> int:
    """Return the number of cells in ``slices``."""
    return prod(compute_nd_slice_shape(slices))


def compute_nd_slice_shape(slices: Sequence[slice]) -> tuple[int, ...]:
    """Return the shape of a tensor indexed with ``slices``."""
    return tuple(s.stop - s.start for s in slices)


def range_index(shape: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Return all indices on a grid of ``shape``, the last axis fastest."""
    return product(*map(range, shape))


def worker_layout(shape: Iterable[int]) -> Integers:
    """Return the rank of the worker at each index on a grid of ``shape``."""
    grid = tuple(shape)
    return np.arange(prod(grid)).reshape(grid)


def filtered_range_index(
    shape: Sequence[int], filter: Sequence[int | None]
) -> Iterator[tuple[int, ...]]:
    """Return the indices on a grid of ``shape`` that equal ``filter`` wherever that is a number."""
    fixed = [range(n) if at is None else (at,) for n, at in zip(shape, filter, strict=True)]
    return product(*fixed)


def assemble_index_filter(
    index: Sequence[int], dims: Collection[int], invert: bool = False
) -> tuple[int | None, ...]:
    """Return ``index`` with ``None`` outside ``dims``, or inside them if ``invert``."""
    return tuple(None if (d in dims) == invert else i for d, i in enumerate(index))


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the number of ``index`` on a grid of ``shape`` whose last axis runs fastest."""
    return rank_of(index, shape)


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the number of ``index`` on a grid of ``shape`` whose first axis runs fastest."""
    return column_major_number(index, shape)


def compute_subtensor_shapes_balanced(
    global_tensor_structure: Any, P_tensor_shape: Any
) -> Integers:
    """Return the shapes of all balanced blocks.

    Args:
        global_tensor_structure: object whose ``shape`` is the global shape.
        P_tensor_shape: shape of the partition.
    """
    grid = np.atleast_1d(P_tensor_shape)
    shapes = [compute_subshape(grid, i, global_tensor_structure.shape) for i in range_index(grid)]
    return np.array(shapes).reshape(*grid, len(grid))


def compute_subtensor_stop_indices(shapes: Integers) -> Integers:
    """Return the global indices behind all blocks of these ``shapes``."""
    along = [np.cumsum(shapes[..., d], axis=d) for d in range(shapes.shape[-1])]
    return np.stack(along, axis=-1)


def compute_subtensor_start_indices(shapes: Integers) -> Integers:
    """Return the first global indices of all blocks of these ``shapes``."""
    return compute_subtensor_stop_indices(shapes) - shapes


def compute_subtensor_intersection_slice(
    x_start_index: Any, x_stop_index: Any, y_start_index: Any, y_stop_index: Any
) -> Slices | None:
    """Return the intersection of two boxes in cells of the first; ``None`` if it is empty."""
    boxes = (x_start_index, x_stop_index, y_start_index, y_stop_index)
    return shared_slices(*map(np.atleast_1d, boxes))
