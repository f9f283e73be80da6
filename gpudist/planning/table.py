"""Advice in words and numbers: for people, and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpudist.planning.advice import Advice
from gpudist.planning.clock import Phase

HEADING = (
    "grid", "step", "no overlap", "forward", "backward", "messages", "sent", "collectives",
    "memory", "imbalance",
)  # fmt: skip


def rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """A line for each partition under ``HEADING``; messages are those of the slowest rank."""
    return [_row(one) for one in advice]


def text(advice: Sequence[Advice]) -> str:
    """The lines under their heading, in columns."""
    lines = [HEADING, *rows(advice)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def facts(one: Advice) -> dict[str, Any]:
    """Of one partition, in seconds and bytes."""
    return {
        "grid": list(one.grid),
        "seconds": one.seconds,
        "serial_seconds": one.slowest.seconds(overlapped=False),
        "overlapped_seconds": one.slowest.seconds(overlapped=True),
        "memory_bytes": one.memory_bytes,
        "memory": asdict(one.memory),
        "imbalance": one.imbalance,
        "fits": one.fits,
        "ranks": [
            {"rank": r.rank, "forward": _phase(r.forward), "backward": _phase(r.backward)}
            for r in one.rehearsed
        ],
    }


def _phase(phase: Phase) -> dict[str, float]:
    return {**asdict(phase), "serial_s": phase.serial_s}


def _row(one: Advice) -> tuple[str, ...]:
    phases = (one.slowest.forward, one.slowest.backward)
    times = [p.overlapped_s if one.overlaps else p.serial_s for p in phases]
    return (
        str(list(one.grid)),
        _seconds(one.seconds),
        _seconds(one.slowest.seconds(overlapped=False)),
        *map(_seconds, times),
        str(sum(p.messages for p in phases)),
        _bytes(sum(p.message_bytes for p in phases)),
        str(sum(p.collectives for p in phases)),
        _bytes(one.memory_bytes) + (" too much" if one.fits is False else ""),
        f"{one.imbalance:.2f}",
    )


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(size_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"
