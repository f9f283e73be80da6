"""Format advice as tables for people, and as values for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from gpudist.checks.columns import columns
from gpudist.planning.advice import Advice
from gpudist.planning.fitting import Fit, smallest
from gpudist.planning.hardware import Profile

TIME_HEADING = ("grid", "step", "no overlap", "forward", "backward", "imbalance")
MESSAGE_HEADING = ("grid", "messages", "sent", "collectives", "all messages", "all sent")
MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "activations", "temporary", "staging",
)  # fmt: skip
MEMORY_HEADING = ("grid", "memory", *MEMORY_PARTS)
FIT_HEADING = ("GPUs", "grid", "peak", "fits", "parameters", "activations", "temporary")
# Of the same number, every text says the same.
ORIGIN = "Messages, bytes and memory are counted from a step without data; times are predicted from"
UNCOUNTED = "Workspaces of convolutions and the device's own memory are not counted."


def title_of(advice: Advice) -> str:
    """Name of a row: the grid, and whether it is planned with edits."""
    return f"{'' if advice.plan is None else 'plan on '}{list(advice.grid)}"


def choice(advice: Sequence[Advice]) -> str:
    """Sentence that says how many partitions were planned, and of how many."""
    candidates, planned = advice[0].candidates, sum(entry.plan is None for entry in advice)
    if planned >= candidates:
        return f"Planned all {candidates} partitions."
    return (
        f"Planned {planned} of {candidates} partitions, chosen by a quick estimate: the first "
        f"is the fastest of these, and another may be faster (--best {candidates} plans all)."
    )


def verdict(advice: Sequence[Advice], profile: Profile) -> str:
    """Sentence that says whether a step fits, on the fastest grid that does."""
    fit = [entry for entry in advice if entry.fits is not False]
    best = fit[0] if fit else min(advice, key=lambda entry: entry.memory_bytes)
    grid, peak, ranks = title_of(best), bytes_of(best.memory_bytes), prod(best.grid)
    if best.fits is None:
        return f"Best grid for {ranks} ranks: {grid}, {peak} on a rank at the peak."
    of = f"{peak} of {profile.memory_gib:g} GiB"
    if fit:
        return f"Fits on {ranks} ranks: grid {grid} needs {of} on each at the peak."
    return f"Does not fit on {ranks} ranks: grid {grid} needs {of}. {REMEDY}"


REMEDY = "More ranks, --recompute, --optimizer sgd, --one-owner or a smaller batch reduce it."


def fit_verdict(all_fits: Sequence[Fit], memory_gib: float) -> str:
    """Sentence that says whether a step fits, and on how many workers."""
    best = smallest(all_fits)
    if best is None:
        least = min(all_fits, key=lambda fit: fit.memory.total)
        return (
            f"Does not fit on 1 to {all_fits[-1].ranks} GPUs of {memory_gib:g} GiB: the least is "
            f"{bytes_of(least.memory.total)} on each of {least.ranks}. {REMEDY}"
        )
    number = f"{best.ranks} GPU{'s' if best.ranks > 1 else ''}"
    words = f"{bytes_of(best.memory.total)} of {memory_gib:g} GiB on each at the peak"
    return f"Fits on {number}: grid {list(best.grid)} needs {words}."


def fit_rows(all_fits: Sequence[Fit]) -> list[tuple[str, ...]]:
    """Return the rows under ``FIT_HEADING``; estimates are marked by ``~``."""
    return [
        (
            str(fit.ranks),
            str(list(fit.grid)).replace(" ", ""),
            ("" if fit.is_counted else "~") + bytes_of(fit.memory.total),
            "yes" if fit.fits else "no",
            bytes_of(fit.memory.parameters + fit.memory.gradients + fit.memory.optimizer),
            bytes_of(fit.memory.activations),
            bytes_of(fit.memory.temporary + fit.memory.staging),
        )
        for fit in all_fits
    ]


def fit_facts(fit: Fit) -> dict[str, Any]:
    """Return the values for one number of workers, in bytes, for JSON."""
    return {**asdict(fit), "memory_bytes": fit.memory.total}


def time_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``TIME_HEADING``, one per partition, for the slowest rank."""
    return [
        (
            title_of(entry),
            *map(seconds_of, (entry.seconds, entry.slowest.seconds(overlapped=False))),
            *(
                seconds_of(phase.overlapped_s if entry.overlaps else phase.serial_s)
                for phase in (entry.slowest.forward, entry.slowest.backward)
            ),
            f"{entry.imbalance:.2f}",
        )
        for entry in advice
    ]


def message_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``MESSAGE_HEADING``, for the slowest rank and for all ranks."""
    return [_message_row(entry) for entry in advice]


def memory_rows(advice: Sequence[Advice]) -> list[tuple[str, ...]]:
    """Return the rows under ``MEMORY_HEADING``, one per partition, for the largest rank."""
    return [
        (
            title_of(entry),
            bytes_of(entry.memory.total) + (" too much" if entry.fits is False else ""),
            *(bytes_of(getattr(entry.memory, name)) for name in MEMORY_PARTS),
        )
        for entry in advice
    ]


def text(advice: Sequence[Advice]) -> str:
    """Format times and messages as two tables."""
    tables = ((TIME_HEADING, time_rows(advice)), (MESSAGE_HEADING, message_rows(advice)))
    return "\n\n".join(columns([heading, *rows]) for heading, rows in tables)


def facts(advice: Advice) -> dict[str, Any]:
    """Return the values for one partition, in seconds and bytes, for JSON."""
    return {
        "grid": list(advice.grid),
        "plan": None if advice.plan is None else json.loads(advice.plan.to_text()),
        "seconds": advice.seconds,
        "serial_seconds": advice.slowest.seconds(overlapped=False),
        "overlapped_seconds": advice.slowest.seconds(overlapped=True),
        "memory_bytes": advice.memory_bytes,
        "memory": asdict(advice.memory),
        "imbalance": advice.imbalance,
        "fits": advice.fits,
        "candidates": advice.candidates,
        "all_ranks": {
            "messages": advice.all_messages,
            "message_bytes": advice.all_message_bytes,
            "is_exact": advice.is_total,
        },
        "ranks": [
            {
                "rank": r.rank,
                "forward": {**asdict(r.forward), "serial_s": r.forward.serial_s},
                "backward": {**asdict(r.backward), "serial_s": r.backward.serial_s},
            }
            for r in advice.rehearsed
        ],
    }


def _message_row(advice: Advice) -> tuple[str, ...]:
    most = "" if advice.is_total else "<= "
    return (
        title_of(advice),
        str(advice.slowest.messages),
        bytes_of(advice.slowest.message_bytes),
        str(advice.slowest.forward.collectives + advice.slowest.backward.collectives),
        most + str(advice.all_messages),
        most + bytes_of(advice.all_message_bytes),
    )


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
