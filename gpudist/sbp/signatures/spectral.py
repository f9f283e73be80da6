"""Fourier transforms of full dims; if such a dim is split, another is split instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, compose, register
from gpudist.sbp.signatures.along_axis import enter_along, on_cells

_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _dims(default: int | tuple[int, ...] | None, call: Call) -> tuple[int, ...]:
    count = call.tensors[0].dims
    dim, sizes = call.get(2, "dim", default), call.get(1, "s")
    if dim is None:
        dim = range(count - len(sizes), count) if sizes is not None else range(count)
    return tuple(d % count for d in ((dim,) if isinstance(dim, int) else dim))


# Number of dims in a function's name, and the dims that it transforms by default.
for _number, _default in (("", -1), ("2", (-2, -1)), ("n", None)):
    _functions = [getattr(torch.fft, f"{name}{_number}") for name in _ONE]
    enter_along(_functions, partial(_dims, _default), is_linear=True)


def shift(sign: int, input: Tensor, dim: Any = None) -> Tensor:
    """Exchange the halves along ``dim`` by rolling; the first half is the longer one."""
    dims = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    return torch.roll(input, [sign * (input.shape[d] // 2) for d in dims], list(dims))


compose(torch.fft.fftshift)(partial(shift, 1))
compose(torch.fft.ifftshift)(partial(shift, -1))


@register(torch.stft, Tensor.stft, any_cuts=True)
def short_time(call: Call, parts: int) -> list[SbpSignature]:
    """Split the batch, if there is one."""
    if call.tensors[0].dims < 2 or len(call.tensors) > 1:
        return []
    return [SbpSignature((split(0),), (split(0),), bind=on_cells)]
