"""The clocks of a GPU, and other operations on it that subjects need."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

# No GPU's clock is faster, so the stream is held at least this long.
CYCLES_PER_US = 2500
LEAST_HOLD_US, MOST_HOLD_US = 50.0, 50_000.0
ATTEMPTS = 4
CALLS_BEFORE_CAPTURE = 2


class Machine(Protocol):
    """Device on which calls are timed: a GPU, or the host in tests."""

    def device_us(self, call: Call, calls: int) -> float:
        """Return the microseconds per call on the device, over ``calls`` consecutive calls."""
        ...

    def enqueue_us(self, call: Call, calls: int) -> float:
        """Return the microseconds until a call returns, over ``calls`` consecutive calls."""
        ...

    def step_us(self, call: Call, calls: int) -> float:
        """Return the microseconds from a call until the device is done, mean of ``calls``."""
        ...

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        """Return the result of ``call``, and how much the device's memory grew meanwhile."""
        ...

    def finish(self) -> None:
        """Wait until everything enqueued on the device is complete."""
        ...

    def capture(self, call: Call) -> Call:
        """Capture what ``call`` enqueues on the current stream; return a call that replays it."""
        ...


@dataclass
class Replay:
    """Captured graph with the tensors that it reads and writes."""

    graph: Any
    call: Call
    result: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


class CudaMachine:
    """Torch's current GPU.

    Args:
        cuda: ``torch.cuda``, or its substitute in a test.
        clock_s: the host's clock.
        hold_us: fixed time that the GPU is held back while calls are enqueued, for several ranks
            whose calls must match; by default it adapts.
    """

    def __init__(
        self,
        cuda: Any = torch.cuda,
        clock_s: Callable[[], float] = time.perf_counter,
        hold_us: float | None = None,
    ) -> None:
        self._cuda = cuda
        self._clock_s = clock_s
        self._is_fixed = hold_us is not None
        self._hold_us = hold_us if hold_us is not None else LEAST_HOLD_US

    def device_us(self, call: Call, calls: int) -> float:
        """Measure between two events of the current stream.

        A kernel that spins holds the stream until all calls are enqueued; otherwise the GPU would
        wait for the host between short calls. If the hold was too short, the measurement is
        repeated.
        """
        us = 0.0
        for _ in range(ATTEMPTS):
            us, enqueuing_us = self._between_events(call, calls)
            was_held = enqueuing_us <= self._hold_us
            if not self._is_fixed:
                self._hold_us = min(max(LEAST_HOLD_US, 2 * enqueuing_us), MOST_HOLD_US)
            if was_held or self._is_fixed:
                break
        return us / calls

    def enqueue_us(self, call: Call, calls: int) -> float:
        self.finish()
        start_s = self._clock_s()
        for _ in range(calls):
            call()
        us = (self._clock_s() - start_s) * 1e6
        self.finish()
        return us / calls

    def step_us(self, call: Call, calls: int) -> float:
        self.finish()
        start_s = self._clock_s()
        for _ in range(calls):
            call()
            self.finish()
        return (self._clock_s() - start_s) * 1e6 / calls

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        self.finish()
        self._cuda.reset_peak_memory_stats()
        before = self._cuda.memory_allocated()
        result = call()
        self.finish()
        return result, self._cuda.max_memory_allocated() - before

    def finish(self) -> None:
        self._cuda.synchronize()

    def capture(self, call: Call) -> Call:
        # Torch accumulates gradients on the stream of the first backward: the capture's.
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            for _ in range(CALLS_BEFORE_CAPTURE):
                call()
        self.finish()
        graph = self._cuda.CUDAGraph()
        # Threads that watch communicators query events meanwhile.
        with self._cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = call()
        # A graph reads its inputs where they were: what `call` refers to must live as long.
        return Replay(graph, call, result)

    def _between_events(self, call: Call, calls: int) -> tuple[float, float]:
        """Return the microseconds on the device, and those until all calls were enqueued."""
        start = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        self.finish()
        self._cuda._sleep(int(self._hold_us * CYCLES_PER_US))
        start_s = self._clock_s()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        enqueuing_us = (self._clock_s() - start_s) * 1e6
        self.finish()
        return start.elapsed_time(end) * 1e3, enqueuing_us


class HostMachine:
    """The host as a substitute for a GPU, over the doubles; its times say nothing about GPUs.

    All calls are complete when they return, as on the double's null stream.
    """

    def device_us(self, call: Call, calls: int) -> float:
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start_s) * 1e6 / calls

    enqueue_us = step_us = device_us

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        return call(), 0

    def finish(self) -> None:
        pass

    def capture(self, call: Call) -> Call:
        call()
        return call
