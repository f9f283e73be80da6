"""Convolution of a local tensor with the faster of torch's kernels.

For one sample in float32 on a CPU, torch chooses between its native kernel and oneDNN's by the size
of the tensor, so a block may be computed by another kernel than the whole tensor. In three
dimensions, from a few thousand elements on, the native kernel is up to 12 times slower; this module
then calls oneDNN's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.checks.arguments import checked
from gpudist.exchange.autograd import is_eager
from gpudist.nn.autocast import product_dtype
from gpudist.nn.kernel_choice import suits_cpu

# Elements, measured with one thread and a 3 x 3 x 3 kernel: both kernels take the same time at
# 2048, and oneDNN's is twice as fast at 16384.
SMALLEST_INPUT = 4096
_FUNCTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_Backend: Any = torch._C._ConvBackend  # pyright: ignore
_uses_onednn = True
_SLOW = (_Backend.Slow3d, _Backend.SlowDilated3d)


@checked()
def use_onednn(enabled: bool) -> None:
    """Choose whether oneDNN's kernel convolves blocks of volumes where torch's is slower.

    This affects convolutions of one sample in float32 with three spatial dims on a CPU, for which
    torch would use its native kernel. With oneDNN's kernel, a training step of a small U-Net is 3
    to 4 times faster. Its rounding errors are about 1.5 times as large as those of the native
    kernel.

    Args:
        enabled: ``False`` to use the kernel that torch chooses, as in the sequential network. The
            setting is ``True`` until this function is called.
    """
    global _uses_onednn
    _uses_onednn = enabled


def miscomputes_single(x: torch.Tensor) -> bool:
    """Return whether torch may convolve wrongly where a strided last dim has one output.

    oneDNN's kernels for bfloat16 do on CPUs with AMX, forward and backward; see
    https://github.com/pytorch/pytorch/issues/169688. A whole tensor rarely has a single output
    there, a block may.
    """
    return suits_cpu(x) and product_dtype(x) == torch.bfloat16


# Compared by identity: torch 2.11's Dynamo hashes an instance before its fields are set.
@dataclass(frozen=True, eq=False)
class LocalConvolution:
    """Convolution with the arguments of torch's functions, one number per dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the convolution of ``x``, differentiable any number of times."""
        further = self._further_cells(x, weight) if self.stride[-1] > 1 else 0
        if further:
            return self(F.pad(x, (0, further)), weight, bias)[..., :1].clone()
        if not self._replaces(x, weight):
            # Unlike torch.convolution, these functions respect autocast.
            options = self.stride, self.padding, self.dilation, self.groups
            return _FUNCTIONS[len(self.stride)](x, weight, bias, *options)
        inputs = (x, weight, bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            return _Convolve.apply(self, *inputs)  # pyright: ignore
        return self._by_onednn(x, weight, bias)

    def gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: Sequence[bool]
    ) -> Any:
        """Return the gradients of ``x`` and of ``weight``; ``None`` if not needed."""
        if torch.is_grad_enabled() or not self._replaces(x, weight):
            return self.all_gradients(gradient, x, weight, (*needs[:2], False))[:2]
        # Torch always uses oneDNN's kernel for oneDNN tensors.
        gradients = torch.ops.aten.convolution_backward(
            gradient.contiguous().to_mkldnn(), x.to_mkldnn(), weight, None, *self._rest(),
            [needs[0], needs[1], False],
        )[:2]  # fmt: skip
        return [None if t is None else t.to_dense() for t in gradients]

    def all_gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: Sequence[bool]
    ) -> list[Any]:
        """Return the gradients of ``x``, ``weight`` and the bias; ``None`` if not needed."""
        sizes = [weight.shape[0]] if needs[2] else None
        further = self._further_cells(x, weight) if self.stride[-1] > 1 else 0
        if further:
            x, gradient = F.pad(x, (0, further)), F.pad(gradient, (0, 1))
        gradients = list(
            torch.ops.aten.convolution_backward(
                gradient, x, weight, sizes, *self._rest(), list(needs)
            )
        )
        if further and needs[0]:
            gradients[0] = gradients[0][..., :-further]
        return gradients

    def _further_cells(self, x: torch.Tensor, weight: torch.Tensor) -> int:
        # Zeros behind the last dim, for a second output where a single one may be wrong.
        if not miscomputes_single(x):
            return 0
        stride = self.stride[-1]
        taken = self.dilation[-1] * (weight.shape[-1] - 1) + 1
        left = x.shape[-1] + 2 * self.padding[-1] - taken
        return stride - left if 0 <= left < stride else 0

    def _replaces(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether torch would use its native kernel although oneDNN's is faster."""
        return (
            _uses_onednn
            and len(self.stride) == 3
            and is_eager(x)
            and x.dtype == weight.dtype == torch.float32
            and suits_cpu(x)
            and x.numel() >= SMALLEST_INPUT
            and prod(weight.shape[2:]) > 1
            and x.is_contiguous()
            and torch.backends.mkldnn.is_available()
            and torch._C._get_mkldnn_enabled()
            and not torch.is_autocast_enabled("cpu")
            and torch._C._select_conv_backend(x, weight, None, *self._rest(), None) in _SLOW
        )

    def _by_onednn(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.ops.aten.mkldnn_convolution(
            x, weight, bias, self.padding, self.stride, self.dilation, self.groups
        )

    def _rest(self) -> tuple[Any, ...]:
        none = (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, False, none, self.groups


def convolve_volumes(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Convolve as ``torch.conv3d``, with the faster kernel for a batch of volumes."""
    if isinstance(padding, str) or x.dim() != 5:
        return torch.conv3d(x, weight, bias, stride, padding, dilation, groups)
    numbers = (_per_dim(stride), _per_dim(padding), _per_dim(dilation))
    return LocalConvolution(*numbers, groups)(x, weight, bias)


def _per_dim(value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return numbers * 3 if len(numbers) == 1 else numbers


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        convolution: LocalConvolution,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.convolution = convolution
        ctx.save_for_backward(x, weight)
        return convolution._by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient, needs = gradients[0], ctx.needs_input_grad[1:]
        of_x, of_weight = ctx.convolution.gradients(gradient, x, weight, needs)
        of_bias = gradient.sum((0, *range(2, gradient.dim()))) if needs[2] else None
        return None, of_x, of_weight, of_bias
