"""Torch's default dtype, which belongs to the process, for ranks that are its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_before = (torch.float32, torch.complex64)


@contextmanager
def float64_by_default(*, with_complex: bool = False) -> Iterator[None]:
    """Create float64 tensors where no dtype is given, until the last thread leaves the context.

    Args:
        with_complex: whether ``torch.cfloat``, which does not follow the default dtype, is
            exchanged for its double.
    """
    global _inside, _before
    # Torch keeps the names of dtypes in its files at first use.
    torch.storage._dtype_to_storage_type_map()
    with _lock:
        if _inside == 0:
            _before = torch.get_default_dtype(), torch.cfloat
            torch.set_default_dtype(torch.float64)
        _inside += 1
        if with_complex:
            torch.cfloat = torch.complex128
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.set_default_dtype(_before[0])
                torch.cfloat = _before[1]
