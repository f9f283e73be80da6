"""Time limits that also hold on a busy machine."""

from __future__ import annotations

import os
import time
from functools import lru_cache

_SPIN_S = 0.02
_EVERY_S = 5.0


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
