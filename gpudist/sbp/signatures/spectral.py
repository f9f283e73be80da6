"""Fourier transforms of full dims; if such a dim is split, another is split instead."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, compose, register
from gpudist.sbp.signatures.along_axis import enter_along, on_cells

_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _dims(call: Call, default: tuple[int, ...] | None) -> tuple[int, ...]:
    count = call.tensors[0].dims
    given, sizes = call.get(2, "dim", default), call.get(1, "s")
    if given is None:
        given = range(count - len(sizes), count) if sizes is not None else range(count)
    return tuple(d % count for d in ((given,) if isinstance(given, int) else given))


def _of_one(call: Call) -> Collection[int]:
    return (call.get(2, "dim", -1) % call.tensors[0].dims,)


def _of_two(call: Call) -> Collection[int]:
    return _dims(call, (-2, -1))


def _of_many(call: Call) -> Collection[int]:
    return _dims(call, None)


enter_along([getattr(torch.fft, name) for name in _ONE], _of_one, is_linear=True)
enter_along([getattr(torch.fft, f"{name}2") for name in _ONE], _of_two, is_linear=True)
enter_along([getattr(torch.fft, f"{name}n") for name in _ONE], _of_many, is_linear=True)


def shift(input: Tensor, dim: Any, sign: int) -> Tensor:
    """Exchange the halves along ``dim`` by rolling."""
    dims = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = list(dims)
    halves = [input.shape[d] // 2 for d in dims]
    shifts = halves if sign > 0 else [input.shape[d] - n for d, n in zip(dims, halves, strict=True)]
    return torch.roll(input, shifts, dims)


@compose(torch.fft.fftshift)
def fftshift(input: Tensor, dim: Any = None) -> Tensor:
    return shift(input, dim, 1)


@compose(torch.fft.ifftshift)
def ifftshift(input: Tensor, dim: Any = None) -> Tensor:
    return shift(input, dim, -1)


@register(torch.stft, Tensor.stft, any_cuts=True)
def short_time(call: Call, parts: int) -> list[SbpSignature]:
    """Split the batch, if there is one."""
    if call.tensors[0].dims < 2 or len(call.tensors) > 1:
        return []
    return [SbpSignature((split(0),), (split(0),), bind=on_cells)]
