"""Convolution of a local tensor with the faster of torch's kernels.

For one sample in float32 on a CPU, torch chooses between its native kernel and oneDNN's by the size
of the tensor, so a block may be computed by another kernel than the whole tensor. In three
dimensions, from a few thousand elements on, the native kernel is up to 12 times slower; this module
then calls oneDNN's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
_any_autocast: Any = torch._C._is_any_autocast_enabled  # pyright: ignore
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


def is_miscomputed(
    x: torch.Tensor,
    outputs: Iterable[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
) -> bool:
    """Return whether torch may convolve ``x`` wrongly, forward or backward.

    On CPUs, oneDNN's kernels for 16-bit numbers read memory that is not theirs where a dim of the
    input or of the output has one or two cells, or, beside padding, fewer than the kernel spans;
    see https://github.com/pytorch/pytorch/issues/169688. A whole tensor rarely has such extents, a
    block may. Such blocks are convolved by :func:`convolve_in_float32`.

    Args:
        x: input of torch's convolution, plain or transposed.
        outputs, kernel, dilation, padding: extents of its output, and its arguments, per
            spatial dim.
    """
    return (
        suits_cpu(x)
        and product_dtype(x).itemsize == 2
        and any(
            min(cells, made) <= (max(2, d * (k - 1)) if p else 2)
            for cells, made, k, d, p in zip(
                x.shape[2:], outputs, kernel, dilation, padding, strict=True
            )
        )
    )


def convolve_in_float32(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Call ``torch.convolution`` in float32 on numbers as autocast reads them, and round once."""
    dtype = product_dtype(x)
    inputs = [None if t is None else t.to(dtype).float() for t in (x, weight, bias)]
    return torch.convolution(*inputs, *rest).to(dtype)  # pyright: ignore[reportArgumentType]


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
        # On the path of every convolution, so nothing is called that does not matter.
        on_cpu = suits_cpu(x)
        if (
            on_cpu
            and (x.dtype.itemsize == 2 or _any_autocast())
            and self._is_miscomputed(x, weight)
        ):
            return convolve_in_float32(x, weight, bias, *self._rest())
        if not (on_cpu and len(self.stride) == 3 and self._replaces(x, weight)):
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
        is_replaced = suits_cpu(x) and len(self.stride) == 3 and self._replaces(x, weight)
        if torch.is_grad_enabled() or not is_replaced:
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
        operands = gradient, x, weight
        if self._is_miscomputed(x, weight):
            operands = [t.float() for t in operands]
        return [
            None if t is None else t.to(weight.dtype)
            for t in torch.ops.aten.convolution_backward(
                *operands, sizes, *self._rest(), list(needs)
            )
        ]

    def _is_miscomputed(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        kernel = weight.shape[2:]
        windows = zip(x.shape[2:], kernel, self.stride, self.dilation, self.padding, strict=True)
        outputs = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in windows)
        return is_miscomputed(x, outputs, kernel, self.dilation, self.padding)

    def _replaces(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether torch would use its native kernel although oneDNN's is faster."""
        return (
            _uses_onednn
            and is_eager(x)
            and x.dtype == weight.dtype == torch.float32
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


def convolve_block(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Convolve a batch as ``torch.conv1d`` to ``conv3d``, by the kernel that suits a block."""
    kernel = weight.shape[2:]
    dilations = number_per_dim(dilation, len(kernel))
    if padding == "same":
        spans = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        x = F.pad(x, [n for span in reversed(spans) for n in (0, span % 2)])
        padding = [span // 2 for span in spans]
    paddings = number_per_dim(0 if padding == "valid" else padding, len(kernel))
    strides = number_per_dim(stride, len(kernel))
    return LocalConvolution(strides, paddings, dilations, groups)(x, weight, bias)


def number_per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """Return one number per dim, given a single number or one per dim."""
    if isinstance(value, (tuple, list)):
        return tuple(int(n) for n in value) * (dims if len(value) == 1 else 1)
    return (int(value),) * dims


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
