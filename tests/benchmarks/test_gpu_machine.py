"""Clocks of a GPU, tested on a simulated one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.gpu.machine import ATTEMPTS, CYCLES_PER_US, MOST_HOLD_US, CudaMachine


class SimulatedGpu:
    """``torch.cuda`` with one stream: work starts when all work before it is done."""

    def __init__(self) -> None:
        self.host_us = 1000.0
        self.free_us = 0.0
        self.held_us: list[float] = []
        self.launches = 0
        self.did: list[str] = []

    def call(self, host_us: float, device_us: float) -> Callable[[], str]:
        def launch() -> str:
            self.launches += 1
            self.host_us += host_us
            self.free_us = max(self.free_us, self.host_us) + device_us
            return "result"

        return launch

    def clock_s(self) -> float:
        return self.host_us / 1e6

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.free_us)

    def _sleep(self, cycles: int) -> None:
        self.held_us.append(cycles / CYCLES_PER_US)
        self.free_us = max(self.free_us, self.host_us) + cycles / CYCLES_PER_US

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return SimulatedEvent(self)

    def CUDAGraph(self) -> Any:
        return self

    def Stream(self) -> Any:
        return self

    current_stream = Stream

    def wait_stream(self, stream: object) -> None:
        self.did.append("wait")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.did.append("beside")
        yield

    def replay(self) -> None:
        self.did.append("replay")

    @contextmanager
    def graph(self, graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        self.did.append(f"begin, {capture_error_mode}")
        yield
        self.did.append("end")


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.at_us = -1.0

    def record(self) -> None:
        self.at_us = max(self._gpu.free_us, self._gpu.host_us)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        return (end.at_us - self.at_us) / 1e3


def machine_of(gpu: SimulatedGpu, hold_us: float | None = None) -> CudaMachine:
    return CudaMachine(gpu, gpu.clock_s, hold_us)


@pytest.mark.parametrize(("host_us", "device_us"), [(20.0, 3.0), (0.5, 400.0), (700.0, 1.0)])
def test_device_time_is_without_what_the_host_takes(host_us: float, device_us: float) -> None:
    gpu = SimulatedGpu()
    machine = machine_of(gpu)
    call = gpu.call(host_us, device_us)
    assert machine.device_us(call, 8) == pytest.approx(device_us, rel=1e-3)
    assert machine.enqueue_us(call, 8) == pytest.approx(host_us, rel=1e-3)


def test_the_gpu_is_held_as_long_as_the_calls_before_took() -> None:
    """An iteration for which the stream was not held long enough is measured again."""
    gpu = SimulatedGpu()
    machine = machine_of(gpu)
    machine.device_us(gpu.call(20.0, 3.0), 8)
    assert gpu.held_us == pytest.approx([50.0, 320.0]) and gpu.launches == 16
    machine.device_us(gpu.call(20.0, 3.0), 8)
    machine.device_us(gpu.call(1.0, 3.0), 8)
    assert gpu.held_us[2:] == pytest.approx([320.0, 320.0])
    machine.device_us(gpu.call(1.0, 3.0), 8)
    assert gpu.held_us[-1] == pytest.approx(50.0)


def test_a_host_that_is_ever_slower_is_given_up() -> None:
    gpu = SimulatedGpu()
    machine_of(gpu).device_us(gpu.call(MOST_HOLD_US, 3.0), 2)
    assert gpu.launches == 2 * ATTEMPTS and gpu.held_us[-1] == pytest.approx(MOST_HOLD_US)


def test_of_several_ranks_each_makes_the_same_calls() -> None:
    gpu = SimulatedGpu()
    machine_of(gpu, hold_us=10.0).device_us(gpu.call(20.0, 3.0), 8)
    assert gpu.launches == 8 and gpu.held_us == pytest.approx([10.0])


def test_a_captured_call_is_replayed() -> None:
    gpu = SimulatedGpu()
    replay = machine_of(gpu).capture(gpu.call(1.0, 1.0))
    # Before the capture, on its stream: a first call cannot be captured.
    assert gpu.did == ["wait", "beside", "begin, thread_local", "end"] and gpu.launches == 3
    assert replay() == "result" and gpu.did[-1] == "replay" and gpu.launches == 3


def test_a_step_is_timed_until_the_gpu_is_done() -> None:
    gpu = SimulatedGpu()
    assert machine_of(gpu).step_us(gpu.call(20.0, 400.0), 4) == pytest.approx(420.0)


def test_the_tensors_that_a_graph_reads_live_as_long_as_it() -> None:
    """Otherwise a replay reads whatever was allocated in their place since."""
    x = torch.ones(3)
    alive = weakref.ref(x)
    replay = machine_of(SimulatedGpu()).capture(lambda x=x: x + 1)
    del x
    assert alive() is not None and torch.equal(replay(), torch.full((3,), 2.0))
