"""Format advice as tables for people, and as values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from gpudist.checks.columns import columns
from gpudist.planning.advice import Advice
from gpudist.planning.clock import Phase
from gpudist.planning.hardware import Profile

TIME_HEADING = ("grid", "step", "no overlap", "forward", "backward", "imbalance")
MESSAGE_HEADING = ("grid", "messages", "sent", "collectives", "all messages", "all sent")
MEMORY_HEADING = (
    "grid", "memory", "parameters", "gradients", "optimizer", "activations",
)  # fmt: skip

# Up to so many ranks, tests compare counts with those of real steps, and benchmarks times.
COMPARED_RANKS = 4
COUNTS = ("messages", "bytes", "collectives", "memory")
TIMES = ("times",)


def choice(advice: Sequence[Advice]) -> str:
    """Sentence that says how many partitions were planned, and of how many."""
    candidates = advice[0].candidates
    if len(advice) >= candidates:
        return f"Planned all {candidates} partitions."
    return (
        f"Planned {len(advice)} of {candidates} partitions, chosen by a quick estimate: the first "
        f"is the fastest of these, and another may be faster (--best {candidates} plans all)."
    )


def evidence(advice: Sequence[Advice], profile: Profile) -> dict[str, list[str]]:
    """Names of the numbers that were compared with real steps of such a size, and of the others.

    Counts were compared over host and gloo. Times were compared with a profile that was measured
    on the same machine, by as many ranks.
    """
    ranks = prod(advice[0].grid)
    is_small = ranks <= COMPARED_RANKS
    validated = [*COUNTS] if is_small and profile.wire != "nccl" else []
    if is_small and profile.measured_on == ranks:
        validated += TIMES
    extrapolated = [name for name in (*COUNTS, *TIMES) if name not in validated]
    return {"validated": validated, "extrapolated": extrapolated}


def time_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``TIME_HEADING``, one per partition, for the slowest rank."""
    return [_time_row(one) for one in advice]


def message_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``MESSAGE_HEADING``, for the slowest rank and for all ranks."""
    return [_message_row(one) for one in advice]


def memory_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``MEMORY_HEADING``, one per partition, for the largest rank."""
    return [_memory_row(one) for one in advice]


def text(advice: Sequence[Advice]) -> str:
    """Format times and messages as two tables."""
    tables = ((TIME_HEADING, time_rows(advice)), (MESSAGE_HEADING, message_rows(advice)))
    return "\n\n".join(columns([heading, *rows]) for heading, rows in tables)


def facts(one: Advice) -> dict[str, Any]:
    """Return the values for one partition, in seconds and bytes, for JSON."""
    return {
        "grid": list(one.grid),
        "seconds": one.seconds,
        "serial_seconds": one.slowest.seconds(overlapped=False),
        "overlapped_seconds": one.slowest.seconds(overlapped=True),
        "memory_bytes": one.memory_bytes,
        "memory": {**asdict(one.memory), "gradients": one.memory.gradients},
        "imbalance": one.imbalance,
        "fits": one.fits,
        "candidates": one.candidates,
        "all_ranks": {
            "messages": one.all_messages,
            "message_bytes": one.all_message_bytes,
            "is_exact": one.is_total,
        },
        "ranks": [
            {"rank": r.rank, "forward": _phase(r.forward), "backward": _phase(r.backward)}
            for r in one.rehearsed
        ],
    }


def _phase(phase: Phase) -> dict[str, float]:
    return {**asdict(phase), "serial_s": phase.serial_s}


def _time_row(one: Advice) -> tuple[str, ...]:
    phases = (one.slowest.forward, one.slowest.backward)
    times = [p.overlapped_s if one.overlaps else p.serial_s for p in phases]
    return (
        str(list(one.grid)),
        seconds_of(one.seconds),
        seconds_of(one.slowest.seconds(overlapped=False)),
        *map(seconds_of, times),
        f"{one.imbalance:.2f}",
    )


def _message_row(one: Advice) -> tuple[str, ...]:
    most = "" if one.is_total else "<= "
    return (
        str(list(one.grid)),
        str(one.slowest.messages),
        bytes_of(one.slowest.message_bytes),
        str(one.slowest.forward.collectives + one.slowest.backward.collectives),
        most + str(one.all_messages),
        most + bytes_of(one.all_message_bytes),
    )


def _memory_row(one: Advice) -> tuple[str, ...]:
    memory = one.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations)
    whole = bytes_of(memory.total) + (" too much" if one.fits is False else "")
    return str(list(one.grid)), whole, *map(bytes_of, parts)


def seconds_of(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_of(size_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"
