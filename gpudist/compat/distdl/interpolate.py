"""Interpolation of a part of a tensor to a part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.compat.distdl.layers import torchs_mode_of
from gpudist.errors import ShapeError
from gpudist.geometry.interpolation import InterpolationMode, InterpolationWindow
from gpudist.nn.windowed.resampling import Resampling, interpolating_step, sum_dtype

_MODES: dict[str, InterpolationMode] = {"nearest": "nearest", "linear": "linear"}


class Interpolate(torch.nn.Module):
    """Interpolate cells ``[x_local_start, x_local_stop)`` to ``[y_local_start, y_local_stop)``.

    Positions are those of the global tensors. Nothing is communicated.

    Args:
        x_local_start, x_local_stop, x_global_shape: range of the input's cells, and global shape.
        y_local_start, y_local_stop, y_global_shape: range of the output's cells, and global shape.
        scale_factor: scale of the positions, unless it is the ratio of the extents.
        mode: ``"nearest"`` or ``"linear"``.
        align_corners: see ``torch.nn.Upsample``; ignored by ``"nearest"``.

    Raises:
        ShapeError: the mode is another one, or the outputs read cells outside of the input's.
    """

    def __init__(
        self,
        x_local_start: Sequence[int],
        x_local_stop: Sequence[int],
        x_global_shape: Sequence[int],
        y_local_start: Sequence[int],
        y_local_stop: Sequence[int],
        y_global_shape: Sequence[int],
        scale_factor: float | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        super().__init__()
        torchs_mode_of("Interpolate", mode, len(x_global_shape))
        self._mode: InterpolationMode = _MODES[mode]
        self._scale = scale_factor
        self._aligned = align_corners and mode == "linear"
        self._extents = [int(n) for n in x_global_shape]
        self._sizes = [int(n) for n in y_global_shape]
        self._cells = _ranges(x_local_start, x_local_stop)
        self._outputs = _ranges(y_local_start, y_local_stop)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        steps: list[Any] = []
        for d in range(2, len(self._extents)):
            window = InterpolationWindow(
                self._mode, self._sizes[d], self._scale, self._aligned,
                input.dtype != torch.float64, "cuda" if input.is_cuda else "general",
            )  # fmt: skip
            cells, outputs, extent = self._cells[d], self._outputs[d], self._extents[d]
            first, last = window.needed(*outputs, extent)
            if not cells[0] <= first <= last <= cells[1]:
                raise ShapeError(
                    f"Interpolate, dim {d}: outputs {list(outputs)} read cells {[first, last]} but "
                    f"the input has {list(cells)}; pass all cells that they read"
                )
            steps.append(interpolating_step(window, extent, cells, outputs, d, input))
        return Resampling(tuple(filter(None, steps)), sum_dtype(input.dtype))(input)


def _ranges(start: Sequence[int], stop: Sequence[int]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in zip(start, stop, strict=True)]
