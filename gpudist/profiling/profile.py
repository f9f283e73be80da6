"""A trace of the movements of all ranks, in one file."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpudist.checks.arguments import checked
from gpudist.profiling.clocks import Reading, aligned_ns, read_clock
from gpudist.profiling.gathering import collected
from gpudist.profiling.trace import Event, Tracer, events_of
from gpudist.world import runtime
from gpudist.world.host_channel import host_partition
from gpudist.world.partition import Partition


@checked()
@contextmanager
def profile(path: str | Path, P_world: Partition | None = None) -> Generator[None, None, None]:
    """Write a trace of the movements in the block, of all workers, to one file.

    The file is of Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing``
    show: one process a worker, a slice for each movement, an arrow for each message. The clocks of
    the workers are compared at the begin and at the end, and shown as the first worker's; how wrong
    that may be is in the file. Collective over the world.

    Args:
        path: of the file, which the first worker writes at the end.
        P_world: the world, if it is not that of :func:`gpudist.init`.

    Cost:
        Microseconds and some hundred bytes of memory a movement. Over NCCL a slice is the call on
        the host; the GPU's part is shown by ``torch.profiler`` and by Nsight Systems.

    Where the block raises, nothing is exchanged any more, and each worker writes its own part to
    ``path`` with ``.rank-RANK`` before the ending.
    """
    P = P_world if P_world is not None else runtime.world()
    P_host = host_partition(P)
    rank = P.rank or 0
    first = read_clock(P_host)
    tracer = Tracer()
    for wire in P.wire.wires:
        wire.recorder.observe(tracer)
    try:
        yield
    except BaseException:
        _write(_part_of(Path(path), rank), _events(tracer, rank, first, first), [first])
        raise
    finally:
        for wire in P.wire.wires:
            wire.recorder.ignore(tracer)
    last = read_clock(P_host)
    events = _events(tracer, rank, first, last)
    said = collected(P_host, json.dumps([max(first.error_ns, last.error_ns), events]).encode())
    if rank == 0:
        parts = [json.loads(text) for text in said]
        merged = [event for _, some in parts for event in some]
        _write(Path(path), merged, [Reading(0, 0, error_ns) for error_ns, _ in parts])


def _events(tracer: Tracer, rank: int, first: Reading, last: Reading) -> list[Event]:
    return events_of(tracer.calls, rank, partial(aligned_ns, first=first, last=last))


def _part_of(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def _write(path: Path, events: list[Event], readings: list[Reading]) -> None:
    """From the first event on, in time."""
    zero_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
    shifted = [
        {**event, "ts": round(event["ts"] - zero_us, 3)} if "ts" in event else event
        for event in events
    ]
    errors_us = [reading.error_ns / 1e3 for reading in readings]
    document = {
        "traceEvents": shifted,
        "displayTimeUnit": "ms",
        "otherData": {"clock errors, at most, by rank (us)": errors_us},
    }
    path.write_text(json.dumps(document), encoding="utf-8")
