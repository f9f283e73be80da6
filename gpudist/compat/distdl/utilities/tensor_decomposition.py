"""Shapes and ranges of all blocks of a tensor, in arrays of shape ``[*partition, dims]``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist.compat.distdl.utilities.slicing import (
    Slices,
    assemble_slices as assemble_slices,
    compute_intersection as compute_intersection,
    compute_subshape,
    range_index as range_index,
    shared_slices,
)

Integers = NDArray[np.int64]


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
