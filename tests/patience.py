"""Time limits that also hold on a busy machine."""

from __future__ import annotations

import os
import time
from functools import lru_cache

_SPIN_S = 0.02
_EVERY_S = 5.0
_STEPS, _STEPS_S = 10**6, 0.04


def allowed_s(idle_s: float) -> float:
    """``idle_s``, longer by as much as other processes keep this one from its processor."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return idle_s * max(1.0, waiting, _wall_for_cpu(time.monotonic() // _EVERY_S))


@lru_cache(maxsize=1)
def _wall_for_cpu(period: float) -> float:
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - start_cpu_s < _SPIN_S:
        pass
    return (time.perf_counter() - start_s) / _SPIN_S


def allowed_cpu_s(seconds: float) -> float:
    """``seconds`` of a processor's time, longer on a processor that takes more for a plain loop.

    Processors of virtual machines become slower by half where others share them.
    """
    start_s = time.process_time()
    for _ in range(_STEPS):
        pass
    return seconds * max(1.0, (time.process_time() - start_s) / _STEPS_S)
