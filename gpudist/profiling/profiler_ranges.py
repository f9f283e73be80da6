"""Add ranges around movements for torch.profiler and NVIDIA's tools."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.profiler import record_function

from gpudist.checks.arguments import checked
from gpudist.transport.base import Transport
from gpudist.transport.flight_recorder import ACTIVITY, Observer, Operation, Phase
from gpudist.world import runtime
from gpudist.world.partition import Partition


class Ranges(Observer):
    """Observer that opens a range at the start of each call and closes it at its end."""

    def __init__(self) -> None:
        self._has_gpu = torch.cuda.is_available()
        self._open: record_function | None = None

    def begin_call(self, operation: Operation, phase: Phase) -> None:
        row = operation[ACTIVITY].row
        name = f"gpudist: {row.operator} {row.partition}".rstrip()
        if phase != "run":
            name += f" ({phase})"
        self._open = record_function(name)
        self._open.__enter__()
        if self._has_gpu:
            torch.cuda.nvtx.range_push(name)

    def end_call(self, operation: Operation) -> None:
        if self._open is None:
            return
        if self._has_gpu:
            torch.cuda.nvtx.range_pop()
        self._open.__exit__(None, None, None)
        self._open = None


@checked()
def record_ranges(enabled: bool = True, P_world: Partition | None = None) -> ExitStack:
    """Record every movement of this worker as a range with its operator and partition.

    The ranges are torch's ``record_function``, which ``torch.profiler`` shows by the name
    ``gpudist: OPERATOR PARTITION``, and on GPUs also NVTX ranges, which Nsight Systems shows. A
    movement that overlaps other work has a range for its start and one for each wait.

    Args:
        enabled: whether to record; ``False`` stops recording.
        P_world: world to record, by default the one of :func:`gpudist.init`.

    Returns:
        A context manager that stops recording at the end of a ``with`` statement.

    Cost:
        Some microseconds per movement; nothing when it is off.
    """
    wire = (P_world if P_world is not None else runtime.world()).wire
    _stop(wire)
    if enabled:
        ranges = Ranges()
        for each in wire.wires:
            each.recorder.observe(ranges)
    recording = ExitStack()
    recording.callback(_stop, wire)
    return recording


def _stop(wire: Transport) -> None:
    for each in wire.wires:
        for observer in each.recorder.observers:
            if isinstance(observer, Ranges):
                each.recorder.ignore(observer)
