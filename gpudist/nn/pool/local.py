"""Local pools of torch, and the indices of their maxima."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

# Torch's maxima with their flat indices in the spatial dims, and its means, by their number.
MAXIMUM: dict[int, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
MEAN: dict[int, Callable[..., torch.Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def no_samples(x: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """Return an empty batch with one channel and these ``extents``, derived from ``x``.

    The result of torch's pool on it depends on ``x`` like the output of a rank with cells: in
    backward, double backward and the backward of a tangent. A product of placeholders would not.
    """
    return x.reshape(-1)[:0].view(0, 1, *extents)


def coordinates(places: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Convert flat indices in a tensor of ``shape`` to indices per dim."""
    per_dim: list[torch.Tensor] = []
    for extent in reversed(shape[1:]):
        per_dim.append(places % extent)
        places = torch.div(places, extent, rounding_mode="floor")
    return [places, *reversed(per_dim)]


def flat_indices(per_dim: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Convert indices per dim in a tensor of ``shape`` to flat ones; inverse of ``coordinates``."""
    places = per_dim[0]
    for indices, extent in zip(per_dim[1:], shape[1:], strict=True):
        places = places * extent + indices
    return places


def gather_cells(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather cells of ``x``, shape ``[B, C, *spatial]``, at flat indices in its spatial dims."""
    return x.flatten(2).gather(2, places.flatten(2)).view_as(places)
