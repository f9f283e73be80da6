"""Functions of DistDL that are not layers."""

from __future__ import annotations

import torch


class ZeroVolumeCorrectorFunction:
    """Function that turns a zero-volume tensor into a number, so that ``backward`` can start."""

    @staticmethod
    def apply(input: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``input``, or 0 if it has no cells.

        Adjoint:
            Copy of the gradient, or a zero-volume tensor.
        """
        return input.clone() if input.numel() else input.sum()
