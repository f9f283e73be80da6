"""Trace the movements of all ranks into one file."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpudist.checks.arguments import checked
from gpudist.profiling.clocks import Reading, align_ns, read_clock
from gpudist.profiling.trace import Event, Tracer, events_of
from gpudist.world import runtime
from gpudist.world.host_channel import host_partition
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts_on_first


@checked()
@contextmanager
def profile(path: str | Path, P_world: Partition | None = None) -> Generator[None, None, None]:
    """Trace the movements of all workers in the block, and write them to one file.

    The file has Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` show:
    one process per worker, a slice for each movement, an arrow for each message. The workers'
    clocks are compared at the beginning and at the end, and times are converted to the first
    worker's clock; the file states the error. Collective over the world.

    Args:
        path: file that the first worker writes at the end.
        P_world: world to trace, by default the one of :func:`gpudist.init`.

    Returns:
        A context manager; the file contains the movements of its block.

    Cost:
        Microseconds and some hundred bytes of memory per movement. Over NCCL, a slice shows the
        call on the host; ``torch.profiler`` and Nsight Systems show the work on the GPU.

    If the block raises, nothing more is exchanged, and each worker writes its own part to ``path``
    with ``.rank-RANK`` before the suffix.
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
        whole = Path(path)
        part = whole.with_name(f"{whole.stem}.rank-{rank}{whole.suffix}")
        _write(part, _events(tracer, rank, first, first), [first])
        raise
    finally:
        for wire in P.wire.wires:
            wire.recorder.ignore(tracer)
    last = read_clock(P_host)
    events = _events(tracer, rank, first, last)
    said = gather_texts_on_first(
        P, json.dumps([max(first.error_ns, last.error_ns), events]).encode()
    )
    if rank == 0:
        parts = [json.loads(text) for text in said]
        merged = [event for _, some in parts for event in some]
        _write(Path(path), merged, [Reading(0, 0, error_ns) for error_ns, _ in parts])


def _events(tracer: Tracer, rank: int, first: Reading, last: Reading) -> list[Event]:
    return events_of(tracer.calls, rank, partial(align_ns, first=first, last=last))


def _write(path: Path, events: list[Event], readings: list[Reading]) -> None:
    """Write the events, with times relative to the first."""
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
