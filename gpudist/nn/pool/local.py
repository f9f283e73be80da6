"""Torch's pools of one rank's tensor, and where the maxima are."""

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
        takes_maximum: or else the mean, in which padding counts.
        kernel, stride, dilation: one per spatial dim.
        ceil_mode: as torch's.
        divisor: of every sum, the cells of the kernel unless given.
    """

    takes_maximum: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    divisor: int | None = None

    @property
    def needs_whole_kernels(self) -> bool:
        """Whether torch refuses a tensor smaller than the kernel, however it is padded."""
        return len(self.kernel) == 3 and not self.takes_maximum

    def forward(
        self, x: torch.Tensor, padding: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and where the maxima are: flat indices in the spatial dims of ``x``."""
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
        """The maxima, and where they are."""
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
        """The gradient of ``x``."""
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
        # Torch divides by less where a window is cut, and a block is cut where its tensor is not.
        return self.ceil_mode, True, self.divisor or prod(self.kernel)

    def _as_2d(self) -> LocalPool:
        return replace(
            self,
            kernel=(1, *self.kernel),
            stride=(1, *self.stride),
            dilation=(1, *self.dilation),
        )


def no_samples(x: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """An empty batch of one channel and these ``extents``, made of ``x``.

    What torch's pool makes of it depends on ``x`` as the output of a rank with cells does, in
    backward, double backward and the backward of a tangent: no product of placeholders does so.
    """
    return x.reshape(-1)[:0].view(0, 1, *extents)


def coordinates(places: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Indices per dim of flat indices in a tensor of ``shape``."""
    per_dim: list[torch.Tensor] = []
    for extent in reversed(shape[1:]):
        per_dim.append(places % extent)
        places = torch.div(places, extent, rounding_mode="floor")
    return [places, *reversed(per_dim)]


def flattened(per_dim: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Flat indices of indices per dim in a tensor of ``shape``: what :func:`coordinates` undoes."""
    places = per_dim[0]
    for indices, extent in zip(per_dim[1:], shape[1:], strict=True):
        places = places * extent + indices
    return places


def behind_margin(
    places: torch.Tensor, shape: Sequence[int], margin: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """``places`` of maxima, those in a ``margin`` moved to the first tap of their window behind it.

    Torch's maximum of a window that holds nothing above ``-inf`` is at its first tap that is no
    padding. Where padding is a margin of cells in front of a tensor of ``shape``, torch takes the
    first of these cells instead.
    """
    per_dim = coordinates(places, shape)
    for d, (cells, step) in enumerate(zip(margin, dilation, strict=True)):
        if cells:
            missing = (cells - per_dim[d]).clamp(min=0)
            steps = torch.div(missing + step - 1, step, rounding_mode="floor")
            per_dim[d] = per_dim[d] + steps * step
    return flattened(per_dim, shape)


def taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The cells of ``x``, shape ``[B, C, *spatial]``, at flat indices in its spatial dims."""
    return x.flatten(2).gather(2, places.flatten(2)).view_as(places)
