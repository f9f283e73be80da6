"""Normalization of a block as a single autograd node, whose backward reads the block twice.

As a composition of operators, its gradient would be a sum of several tensors of the size of the
block. The composition is used where gradients of gradients, tangents or a graph are needed. All
implementations move the same sums, so workers may use different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpudist.exchange.autograd import apply_handwritten, is_eager
from gpudist.nn.autocast import widen
from gpudist.nn.norm import kernels, lines
from gpudist.nn.norm.normalization import Normalization, Parameters, Running, Summing


class Normalized(NamedTuple):
    """Normalized block ``y``, and constants: sums over all workers, and the shift of the summed.

    The last two are the arguments of :meth:`Normalization.moments`.
    """

    y: torch.Tensor
    totals: torch.Tensor
    shift: torch.Tensor | None


def normalize(
    normalization: Normalization,
    x: torch.Tensor,
    parameters: Parameters,
    running: Running | None = None,
) -> Normalized:
    """Normalize a block; for the arguments see :meth:`Normalization.compose`.

    Args:
        running: running moments to update.

    Cost:
        One group of messages with the sums and the parameters, and before it one with sums if the
        block is float64 and its mean is subtracted; one of their adjoints in backward.
    """
    if kernels.fits(normalization, x, parameters):
        updates = running is not None and kernels.can_update(running, x)
        by = kernels.by_kernels(normalization, x, running if updates else None)
        y, shift = apply_handwritten(by, x, *parameters), None
        if by.shifts is not None:
            shift = by.shifts[..., 0] / max(1, normalization.cells)
        result = Normalized(y, by.totals, shift)
        return result if updates else _remember(normalization, result, running)
    # A block that shares no statistics may be empty; it is treated as by torch's layer.
    if normalization.total is None or not is_eager(x):
        composed = normalization.compose(x, parameters)
        result = Normalized(composed.y, composed.totals.detach(), composed.shift)
    else:
        kind: type[Summing] = _ByTorch
        if lines.fits(normalization, x, parameters):
            kind = kernels.DryPasses if x.is_meta else lines.ByLines
        summing = kind(normalization)
        y = apply_handwritten(summing, x, *parameters)
        result = Normalized(y, summing.totals, summing.shift)
    return _remember(normalization, result, running)


def _remember(
    normalization: Normalization, result: Normalized, running: Running | None
) -> Normalized:
    if running is not None and normalization.cells > 0:
        mean, variance = normalization.moments(result.totals, result.shift)
        assert mean is not None
        running.update(mean, variance * (normalization.cells / max(1, normalization.cells - 1)))
    return result


def is_alone(normalization: Normalization, x: torch.Tensor, parameters: Parameters) -> bool:
    """Return whether torch's kernel normalizes this block."""
    is_shared = normalization.total is not None or not x.numel()
    return not is_shared and not kernels.fits(normalization, x, parameters)


def normalize_block(
    normalization: Normalization,
    x: torch.Tensor,
    parameters: Parameters,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalize a block, by torch's kernel if it has cells and shares no statistics.

    Args:
        dtype: dtype of the result if it is not the block's: the single precision in which autocast
            computes. The kernels widen the cells that they read; for others the block is widened.
    """
    if dtype is not None:
        parameters = [widen(p) for p in parameters]
    if kernels.fits(normalization, x, parameters, dtype):
        by = kernels.by_kernels(normalization, x, dtype=dtype)
        return apply_handwritten(by, x, *parameters)
    if dtype is not None:
        x = x.to(dtype)
    if normalization.total is None and x.numel():
        return normalization.alone(x, parameters)
    return normalize(normalization, x, parameters).y


class _ByTorch(Summing):
    def forward(
        self, x: torch.Tensor, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        result = self.normalization.compose(x, parameters)
        self.totals, self.shift = result.totals, result.shift
        weight = result.parameters[0] if parameters else None
        return result.y, [*result[3:8], weight]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        return _Adjoint(self.normalization, inputs[0], *kept)(gradient, needs)


class _Adjoint:
    """Backward of one normalization, from the tensors saved in forward."""

    def __init__(
        self,
        normalization: Normalization,
        x: torch.Tensor,
        own_mean: torch.Tensor | None,
        offset: torch.Tensor | None,
        mean: torch.Tensor | None,
        error: torch.Tensor | None,
        inverse: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> None:
        self._by = normalization
        self._dtype = x.dtype
        self._rest, _ = normalization.subtract_own_mean(x, own_mean)
        self._offset, self._mean, self._error = offset, mean, error
        self._inverse, self._weight = inverse, weight

    def __call__(self, gradient: torch.Tensor, needs: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return the gradients of the block, and of the parameters on their owners."""
        by, weight, gradient = self._by, self._weight, gradient.to(self._rest.dtype)
        if by.per_channel:
            first, second = self._sums(gradient)
            own_sums = [
                self._of_channels(second * self._inverse),
                self._of_channels(first),
            ]
            shape = (-1, *(1,) * (gradient.dim() - 2))
            weight = 1.0 if weight is None else weight.double().view(shape)
            first, second, scale = first * weight, second * weight, self._inverse * weight
        else:
            own_sums = self._of_cells(gradient, needs[1:])
            gradient = gradient if weight is None else gradient * weight.to(gradient.dtype)
            first, second = self._sums(gradient)
            scale = self._inverse
        of_sums = self._of_totals(first, second)
        of_sums, of_parameters = by.move_gradients(of_sums, own_sums, needs)
        return [self._of_block(gradient, scale, of_sums), *of_parameters]

    def _sums(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by = self._by
        first = by.sum(gradient).double()
        second = by.sum(gradient * self._rest).double()
        return first, second if self._error is None else second - self._error * first

    def _of_channels(self, lines: torch.Tensor) -> torch.Tensor:
        return lines.sum([d for d in range(lines.dim()) if d != 1])

    def _of_cells(self, gradient: torch.Tensor, needs: Sequence[bool]) -> list[torch.Tensor]:
        """Return the gradients of parameters of the shape of the last dims."""
        leading = list(range(gradient.dim() - len(self._by.dims)))

        def sum_leading(x: torch.Tensor) -> torch.Tensor:
            return x.sum(leading) if leading else x

        if not any(needs):
            return [gradient.new_empty(0)] * len(needs)
        z = self._rest if self._error is None else self._rest - self._error.to(gradient.dtype)
        return [
            sum_leading(gradient * (z * self._inverse.to(gradient.dtype))),
            sum_leading(gradient),
        ]

    def _of_totals(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return this worker's part of the sums' gradient, from sums of the scaled gradient."""
        by = self._by
        of_square = -0.5 * self._inverse.pow(3) * second / max(1, by.cells)
        if self._mean is None:
            return of_square.unsqueeze(-1)
        mean = by.of_lines(self._mean, first.dim())
        of_sum = -self._inverse * first / max(1, by.cells) - 2 * mean * of_square
        return by.of_statistics(torch.stack([of_sum, of_square], -1))

    def _of_block(
        self, gradient: torch.Tensor, scale: torch.Tensor, of_sums: torch.Tensor | None
    ) -> torch.Tensor | None:
        if of_sums is None:
            return None
        of_lines = self._by.of_lines(of_sums, gradient.dim())
        of_square = of_lines[..., -1]
        rest, factor = self._rest, (2 * of_square).to(gradient.dtype)
        # If no mean is subtracted, ``rest`` may be the input itself: do not overwrite it.
        x = rest * factor if self._error is None else rest.mul_(factor)
        x.addcmul_(gradient, scale.to(gradient.dtype))
        if self._offset is not None:
            of_sum = of_lines[..., 0] + 2 * self._offset * of_square
            x.add_(of_sum.to(gradient.dtype))
        return x.to(self._dtype)
