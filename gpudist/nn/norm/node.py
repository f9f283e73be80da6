"""Normalization of a block as a single autograd node, whose backward reads the block twice.

As a composition of operators, its gradient would be a sum of several tensors of the size of the
block. The composition is used where gradients of gradients, tangents or a graph are needed. All
implementations move the same sums, so workers may use different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from gpudist.cache import Cache
from gpudist.checks.storage import PLAIN
from gpudist.exchange.autograd import apply_handwritten, is_eager
from gpudist.exchange.tracing import QUESTIONS
from gpudist.nn.autocast import widen
from gpudist.nn.norm import kernels, lines
from gpudist.nn.norm.normalization import Normalization, Parameters, Running
from gpudist.nn.norm.passes import BoundNorm, apply_bound

_transforms, _modes, _early_modes, _script_tracer = QUESTIONS
_is_contiguous = torch.Tensor.is_contiguous


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
    dtype: torch.dtype | None = None,
) -> Normalized:
    """Normalize a block; for the arguments see :meth:`Normalization.compose`.

    Args:
        running: running moments to update.
        dtype: dtype of the result if it is not the block's, and kernels compute it.

    Cost:
        One group of messages with the sums and the parameters, and before it one with sums if the
        block is float64 and its mean is subtracted; one of their adjoints in backward.
    """
    bound = kernels.bound_norm(normalization, x, parameters, dtype)
    updates = bound is not None and running is not None and kernels.can_update(running, x)
    if bound is None:
        bound = lines.bound_norm(normalization, x, parameters)
    # A block that shares no statistics may be empty; it is treated as by torch's layer.
    if bound is None and (normalization.total is None or not is_eager(x)):
        composed = normalization.compose(x, parameters)
        result = Normalized(composed.y, composed.totals.detach(), composed.shift)
    elif bound is None or x.is_meta:
        operator = (_ByTorch if bound is None else _Dry)(normalization, dtype)
        y = apply_handwritten(operator, x, *parameters)
        result = Normalized(y, operator.totals, operator.shift)
    else:
        seen: list[Any] = []
        weight, bias = [*(p if p is None else p.contiguous() for p in parameters), None, None][:2]
        y = apply_bound(bound, seen, running if updates else None, x, weight, bias)
        totals, shifts = seen
        shift = None if shifts is None else shifts[..., 0] / max(1, normalization.cells)
        result = Normalized(y, totals, shift)
    if running is not None and not updates and normalization.cells > 0:
        mean, variance = normalization.moments(result.totals, result.shift)
        assert mean is not None
        running.update(mean, variance * (normalization.cells / max(1, normalization.cells - 1)))
    return result


def is_alone(normalization: Normalization, x: torch.Tensor, parameters: Parameters) -> bool:
    """Return whether torch's kernel normalizes this block."""
    is_shared = normalization.total is not None or not x.numel()
    return not is_shared and kernels.bound_norm(normalization, x, parameters) is None


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
    if kernels.bound_norm(normalization, x, parameters, dtype) is None:
        x, dtype = x.to(dtype or x.dtype), None
        if normalization.total is None and x.numel():
            return normalization.alone(x, parameters)
    return normalize(normalization, x, parameters, dtype=dtype).y


def given(weight: torch.Tensor | None, bias: torch.Tensor | None) -> Parameters:
    """Return as many parameters as there are."""
    return [weight, bias][: 2 if bias is not None else weight is not None]


class BlockNorm:
    """Normalization of the blocks of one call by their moments over workers.

    Kernels are bound once for each layout and dtype of the block. With them, a call is a few
    functions of C++, the native core and :func:`~gpudist.nn.norm.passes.apply_bound`.

    Args:
        by: the normalization.
        slots: numbers of the weight and the bias among the tensors of a call, and of the running
            moments to update, if any; ``None`` for a tensor that is not there.
        dtype: dtype of the result, in which autocast computes; ``None`` for the block's.
        momentum: share of the new moments.
        alone: updates running moments by torch's function, see :func:`is_alone`.

    Attributes:
        reads_low: whether 16-bit tensors are widened as they are read.
    """

    def __init__(
        self,
        by: Normalization,
        slots: Sequence[int | None],
        dtype: torch.dtype | None = None,
        momentum: float = 0.0,
        alone: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        self._by, self._slots, self._dtype = by, [*slots, None, None][:4], dtype
        self._momentum, self._alone = momentum, alone
        self._bound: Cache[object, BoundNorm] = Cache()
        self.reads_low = dtype is not None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x, (weight_at, bias_at, mean_at, variance_at) = tensors[0], self._slots
        weight = None if weight_at is None else tensors[weight_at]
        bias = None if bias_at is None else tensors[bias_at]
        running = None
        if mean_at is not None and variance_at is not None:
            running = tensors[mean_at], tensors[variance_at], self._momentum, None
        # What ``is_eager`` asks.
        if not (
            _transforms() or _modes() or _early_modes() or _script_tracer()
            or forward_ad._current_level >= 0 or type(x) not in PLAIN  # pyright: ignore
        ):  # fmt: skip
            bound = self._bound.get((x.dtype, x.stride()))
            if bound is not None and all(map(_is_contiguous, tensors[1:])):
                return apply_bound(bound, None, running, x, weight, bias)
        return self._look_up(tensors, given(weight, bias), running)

    def _look_up(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Parameters,
        moments: tuple[torch.Tensor, torch.Tensor, float, None] | None,
    ) -> torch.Tensor:
        """Do the same for any tensors, and keep what is bound for later calls."""
        by, x = self._by, tensors[0]
        running = None if moments is None else Running(*moments)
        dtype = None if x.dtype == self._dtype else self._dtype
        bound = kernels.bound_norm(by, x, parameters, dtype)
        if (
            bound is not None
            and not x.is_meta
            and all([p is not None and dtype in (None, p.dtype) for p in parameters])
            and (running is None or kernels.can_update(running, x))
        ):
            self._bound[x.dtype, x.stride()] = bound
        if running is None:
            return normalize_block(by, x, parameters, dtype)
        if self._alone is not None and is_alone(by, x, parameters):
            return self._alone(tensors)
        return normalize(by, x, parameters, running).y


class _ByTorch:
    """Normalization of one block as a handwritten operator, which keeps the sums it moved.

    Attributes:
        totals: sums over all workers, as a constant; set by ``forward``, like ``shift``.
        shift: shift of each statistic, which was subtracted from the summed values; ``None`` for 0.
    """

    totals: torch.Tensor
    shift: torch.Tensor | None = None

    def __init__(self, normalization: Normalization, dtype: torch.dtype | None) -> None:
        self.normalization, self.dtype = normalization, dtype

    def compose(self, x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor:
        return self.normalization.compose(x.to(self.dtype or x.dtype), parameters).y

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


class _Dry(_ByTorch):
    """Normalization of a block without data, with the native core's passes and messages."""

    def forward(
        self, x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        by = self.normalization
        # A pass over the block, and a kernel that adds its parts.
        sums = x.sum().double().new_empty(by.sums_shape(x.shape))
        self.totals, moved = by.move(sums, parameters)
        y = torch.neg(x) if self.dtype in (None, x.dtype) else x.to(self.dtype)
        return y, [self.totals, *moved[:1]]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        by, x, totals = self.normalization, inputs[0], kept[0]
        # A pass over both, and a kernel that adds its parts.
        for read in (gradient, x):
            read.sum()
        own_sums = [
            torch.empty_like(kept[1]) if needed and kept[1:] else None for needed in needs[1:]
        ]
        of_totals, of_parameters = by.move_gradients(torch.empty_like(totals), own_sums, needs)
        of_x = None if of_totals is None else torch.add(gradient, x)
        return [of_x, *of_parameters]


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
            others = [d for d in range(first.dim()) if d != 1]
            own_sums = [(second * self._inverse).sum(others), first.sum(others)]
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
