"""The host in place of a GPU, for tests: no time of it says anything about a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.machine import Call


class HostMachine:
    """Everything is complete when it returns, as on the null stream of the double."""

    def device_us(self, call: Call, calls: int) -> float:
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start_s) * 1e6 / calls

    enqueue_us = device_us

    def finish(self) -> None:
        pass

    def capture(self, call: Call) -> Call:
        call()
        return call

    def beside(self, call: Callable[[], Any]) -> Callable[[], None]:
        call()
        return lambda: None
