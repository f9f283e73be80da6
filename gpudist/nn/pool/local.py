"""Local pools of torch, with the indices of maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

_aten = torch.ops.aten


@dataclass(frozen=True)
class LocalPool:
    """Torch's maximum or mean over windows of a tensor ``[B, C, *spatial]``, and its adjoint.

    Attributes:
        takes_maximum: whether to take the maximum; otherwise the mean, in which padding counts.
        kernel, stride, dilation: as in the torch layer, one per spatial dim.
        ceil_mode: as in the torch layer.
        divisor: divisor of every sum; by default the number of cells of the kernel.
    """

    takes_maximum: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    divisor: int | None = None

    @property
    def needs_whole_kernels(self) -> bool:
        """Whether torch rejects tensors smaller than the kernel, even if they are padded."""
        return len(self.kernel) == 3 and not self.takes_maximum

    def forward(
        self, x: torch.Tensor, padding: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and flat indices of the maxima in the spatial dims of ``x``."""
        if len(self.kernel) == 1:
            y, places = self._as_2d().forward(x.unsqueeze(2), (0, *padding))
            return y.squeeze(2), None if places is None else places.squeeze(2)
        three = len(self.kernel) == 3
        if self.takes_maximum:
            pool = _aten.max_pool3d_with_indices if three else _aten.max_pool2d_with_indices
            return pool(x, self.kernel, self.stride, padding, self.dilation, self.ceil_mode)
        pool = _aten.avg_pool3d if three else _aten.avg_pool2d
        return pool(x, self.kernel, self.stride, padding, *self._of_mean), None

    def maxima(
        self, x: torch.Tensor, padding: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima and their flat indices; only for a pool that takes the maximum."""
        y, places = self.forward(x, padding)
        assert places is not None
        return y, places

    def adjoint(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        places: torch.Tensor | None,
        padding: tuple[int, ...],
    ) -> torch.Tensor:
        """Return the gradient of ``x``."""
        if len(self.kernel) == 1:
            gradient, x = gradient.unsqueeze(2), x.unsqueeze(2)
            places = None if places is None else places.unsqueeze(2)
            return self._as_2d().adjoint(gradient, x, places, (0, *padding)).squeeze(2)
        three = len(self.kernel) == 3
        window = self.kernel, self.stride, padding
        if self.takes_maximum:
            adjoint = (
                _aten.max_pool3d_with_indices_backward
                if three
                else _aten.max_pool2d_with_indices_backward
            )
            return adjoint(gradient, x, *window, self.dilation, self.ceil_mode, places)
        adjoint = _aten.avg_pool3d_backward if three else _aten.avg_pool2d_backward
        return adjoint(gradient, x, *window, *self._of_mean)

    @property
    def _of_mean(self) -> tuple[bool, bool, int]:
        # Torch divides by fewer cells if a window is truncated, which may happen in a block where
        # it does not in the global tensor.
        return self.ceil_mode, True, self.divisor or prod(self.kernel)

    def _as_2d(self) -> LocalPool:
        return replace(
            self,
            kernel=(1, *self.kernel),
            stride=(1, *self.stride),
            dilation=(1, *self.dilation),
        )


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


def behind_margin(
    places: torch.Tensor, shape: Sequence[int], margin: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """Move ``places`` of maxima from the ``margin`` to the window's first tap behind it.

    If all cells of a window are ``-inf``, torch places its maximum at the first tap outside the
    padding. If the padding consists of a margin of cells in front of a tensor of ``shape``, torch
    takes the first cell of the margin instead.
    """
    per_dim = coordinates(places, shape)
    for d, (cells, step) in enumerate(zip(margin, dilation, strict=True)):
        if cells:
            missing = (cells - per_dim[d]).clamp(min=0)
            steps = torch.div(missing + step - 1, step, rounding_mode="floor")
            per_dim[d] = per_dim[d] + steps * step
    return flat_indices(per_dim, shape)


def gather_cells(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather cells of ``x``, shape ``[B, C, *spatial]``, at flat indices in its spatial dims."""
    return x.flatten(2).gather(2, places.flatten(2)).view_as(places)
