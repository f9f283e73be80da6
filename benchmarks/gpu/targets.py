"""Targets on a GPU, and whether the committed results meet them.

``python -m benchmarks.gpu.targets`` prints the table from ``benchmarks/results/gpu-*.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import (
    SUBJECTS,
    adjoint,
    copy,
    dropout,
    enqueue,
    latency,
    norms,
    overlap,
    packing,
    self_halo,
)
from benchmarks.gpu.files import RESULTS, path_of, read
from benchmarks.rows import NO_PEER

NOTHING = "There are no results: make gpu-bench GPU_OUT=FOLDER."
# Shares of the bandwidth of the device's own copy; as times, their reciprocals.
SHARE, SHARE_OF_SHORT_ROWS = 0.85, 0.80
CARRYING_NOTHING = "batch_isend_irecv, fake"


@dataclass(frozen=True)
class Target:
    """Limit: ``ratio`` times the peer's time plus ``more_us``, at least ``least_us``.

    Without a peer, the limit is ``more_us`` alone.
    """

    subject: str
    case: str
    peer: str
    ratio: float
    more_us: float = 0.0
    fallback: str = ""
    least_us: float = 0.0

    def limit_us(self, peer_us: float) -> float:
        return max(self.least_us, self.ratio * peer_us + self.more_us)

    def words(self) -> str:
        parts = [f"{self.ratio:.3g} x"] if self.peer != NO_PEER else []
        words = " + ".join([*parts, *([f"{self.more_us:g} us"] if self.more_us else [])])
        return f"{words} or {self.least_us:g} us" if self.least_us else words


def targets() -> Iterator[Target]:
    """Yield all targets on one GPU, in the order of the table."""
    for case in copy.cases(1):
        if case.parameters["bytes"] >= copy.SIZES["64 MiB"]:
            yield Target("copy", case.name, "copy_", 1 / SHARE)
    for case in packing.cases(1):
        share = SHARE if case.parameters["row"] >= 128 else SHARE_OF_SHORT_ROWS
        yield Target("packing", case.name, "copy_", 1 / share)
    for case in latency.cases(1):
        if case.clock == "device":
            yield Target("latency", case.name, NO_PEER, 0.0, 4.0)
    for case in enqueue.cases(1):
        if case.parameters["how"] == "graph":
            yield Target("enqueue", case.name, NO_PEER, 0.0, 10.0)
        else:
            peer = "batch_isend_irecv to itself, nccl"
            yield Target("enqueue", case.name, peer, 0.5, fallback=CARRYING_NOTHING)
    for number, case in enumerate(self_halo.cases(1)):
        yield Target("self_halo", case.name, "copy_", 1.1, 5.0)
        if number < 2 and case.parameters["captured"]:
            yield Target("self_halo", case.name, NO_PEER, 0.0, 6.0)
    for case in adjoint.cases(1):
        yield Target("adjoint", case.name, "forward", 1.15)
    yield from _of_steps()
    for case in overlap.cases(1):
        if case.parameters["way"] == "beside a halo":
            yield Target("overlap", case.name, "convolution alone", 1.05)
    for case in dropout.cases(1):
        what = case.parameters["what"]
        peer = f"torch.{what}" if what in dropout.DRAWS else "F.dropout"
        if case.clock == "device":
            yield Target("dropout", case.name, peer, 1.5)
    for case in norms.cases(1):
        if case.clock == "enqueue":
            continue
        if case.bytes >= norms.PASSES * copy.SIZES["16 MiB"]:
            yield Target("norms", case.name, "copy_", 1.4)
        else:
            yield Target("norms", case.name, "torch", 1.0, least_us=30.0)


def _of_steps() -> Iterator[Target]:
    from benchmarks.gpu import self_messages, unet_step

    for case in self_messages.cases(1):
        if case.clock == "enqueue" and case.parameters["how"] == "graph":
            yield Target("self_messages", case.name, NO_PEER, 0.0, 10.0)
    for case in unet_step.cases(1):
        if case.parameters["how"] != "eager":
            ratio = 1.2 if case.clock == "enqueue" else 1.05
            yield Target("unet_step", case.name, "torch", ratio)


def table(results: Path = RESULTS) -> str:
    """Return the table in Markdown, or say that there are no results."""
    files = {subject: path_of(subject, 1, results) for subject in SUBJECTS}
    rows = {subject: read(path)[1] for subject, path in files.items() if path.exists()}
    if not rows:
        return NOTHING
    lines = [
        "| subject | case | gpudist | peer | ratio | at most | reached |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    lines += [_line(target, rows.get(target.subject)) for target in targets()]
    return "\n".join(lines)


def _line(target: Target, rows: list[dict[str, Any]] | None) -> str:
    beginning = f"| {target.subject} | {target.case} "
    if rows is None:
        return f"{beginning}| | | | {target.words()} | not measured |"
    row = _find(rows, target)
    peer_us = 0.0 if target.peer == NO_PEER else row["peer_us_median"]
    over_us = row["us_median"] - target.limit_us(peer_us)
    peer = "" if target.peer == NO_PEER else f"{row['peer']}: {peer_us:.1f} us"
    ratio = "" if target.peer == NO_PEER else f"{row['us_median'] / peer_us:.2f}"
    reached = "yes" if over_us <= 0 else f"no, over by {over_us:.1f} us"
    return (
        f"{beginning}| {row['us_median']:.1f} us | {peer} | {ratio} | {target.words()} "
        f"| {reached} |"
    )


def _find(rows: list[dict[str, Any]], target: Target) -> dict[str, Any]:
    of_case = [row for row in rows if row["case"] == target.case]
    for peer in (target.peer, target.fallback):
        found = [row for row in of_case if peer in (NO_PEER, row["peer"])]
        if found and all(row["correct"] for row in found):
            return found[0]
    raise ValueError(f"{target.subject}, {target.case}: no correct row beside {target.peer}")


if __name__ == "__main__":
    print(table())
