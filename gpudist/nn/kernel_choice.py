"""Whether layers choose kernels that are faster on a CPU only, or the native core's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from gpudist.native import native as _native

# Dtypes of the native core that are floating point; none if the core is missing.
NATIVE_FLOATS = (
    {getattr(torch, dtype.name): dtype for dtype in _native.Dtype if "float" in dtype.name}
    if _native
    else {}
)
_suits_cpus = True


def suits_cpu(x: torch.Tensor) -> bool:
    """Return whether kernels made for CPUs may compute with ``x``; false on other devices.

    Every such choice is made here, so that a step can be counted on a CPU as a GPU would run it.
    """
    return _suits_cpus and x.device.type == "cpu"


@contextmanager
def as_on_gpu() -> Generator[None, None, None]:
    """Choose as on a GPU, in this process."""
    global _suits_cpus
    _suits_cpus, before = False, _suits_cpus
    try:
        yield
    finally:
        _suits_cpus = before
