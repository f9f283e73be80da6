"""Tensors with one page that triggers the fault when touched, by means of the doubles."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from gpudist import recycling
from tests.doubles.nccl import arm, guard
from tests.faults.chaos.experiment import SLOW_S
from tests.faults.chaos.strike import Strike
from tests.faults.faults import FAULTS

# The memory of tensors, for as long as the process runs.
_memory: list[mmap.mmap] = []


def guarded(shape: Sequence[int], dtype: torch.dtype, where: float, strike: Strike) -> torch.Tensor:
    """Create an empty tensor with one page, at this part of it, that triggers the fault."""
    return _guard(_allocate(prod(shape), dtype), where, strike).reshape(*shape)


def guarded_copy(x: torch.Tensor, where: float, strike: Strike) -> torch.Tensor:
    """Return a copy of ``x`` with a page that triggers the fault; a matrix gets longer rows."""
    if x.dim() != 2:
        flat = _allocate(x.numel(), x.dtype)
        flat.copy_(x.detach().reshape(-1))
        return _guard(flat, where, strike).reshape(x.shape)
    rows, columns = x.shape
    flat = _allocate(rows * (columns + 8), x.dtype)
    y = flat.view(rows, columns + 8)[:, :columns]
    y.copy_(x.detach())
    _guard(flat, where, strike)
    return y


def guard_next_output(strike: Strike) -> Callable[[], None]:
    """Return a function that makes the next output of a movement strike.

    Call this before anything is bound.
    """
    make_maker, victim = recycling.maker, threading.current_thread()
    wanted: list[bool] = []

    def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        make = make_maker(shape, dtype, device)

        def make_guarded() -> torch.Tensor:
            if not wanted or not prod(shape) or threading.current_thread() is not victim:
                return make()
            wanted.clear()
            if strike.fault == "raised":
                strike.armed = True
                strike.fire()
            return guarded(shape, dtype, 0.5, strike)

        return make_guarded

    recycling.maker = maker
    return lambda: wanted.append(True)


def _allocate(cells: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = max(1, cells * dtype.itemsize)
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    _memory.append(memory)
    return torch.frombuffer(memory, dtype=dtype, count=cells)


def _guard(flat: torch.Tensor, where: float, strike: Strike) -> torch.Tensor:
    page = int(where * flat.numel() * flat.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    set_blow(strike)
    guard(flat.data_ptr() + page, mmap.PAGESIZE)
    return flat


def set_blow(strike: Strike) -> None:
    """Tell the doubles what is to happen."""
    arm(int(FAULTS[strike.fault] or 0), SLOW_S if strike.fault == "slow" else 0.0, strike.report)
