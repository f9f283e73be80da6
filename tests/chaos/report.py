"""Write docs/reliability.md from what was tried: ``python -m tests.chaos.report``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.experiment import FAULTS, LONG_S, POINTS, SLOW_S, TRANSPORTS, cells, why_not
from tests.chaos.judge import BAD
from tests.chaos.operators import OPERATORS
from tests.chaos.results import CHAOS, Run, Tried, read

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

BEGINNING = """\
# What happens when something fails

`python -m tests.chaos.report` writes this page from the files in `benchmarks/results/reliability`.

## Ranks that die, stop, raise or are slow

Three or four ranks carry out an operator, forward and backward, again and again, and compare every
result with torch's in one process. One of them, the victim, is

- **killed**: `SIGKILL`;
- **stopped**: `SIGSTOP`, and continued when the others have given up;
- **crashed**: `SIGSEGV`;
- made to **raise** an exception of the user's;
- **slow**: it stands still for {slow_s:g} s.

That happens *before* the operator, while its input is *packed*, when some bytes of its *messages*
have gone, while what came is *unpacked*, in *backward*, while the world is joined (*init*), while a
*sub-communicator* is made, in *shutdown*, and at *any time*, which a clock chooses. Of the others,
the survivors, is asked that

- each raises, within {deadline_s:g} s and 1 s more: `PeerFailure` with the victim's rank, or, if it
  was stopped or never came, `CollectiveTimeout`; the text names the victim and the operation with
  its partition;
- no result that they get before is wrong, and all are right when the victim is only slow;
- nothing stays: no process, thread, descriptor, socket, shared memory or file.

The deadline of every wait is {deadline_s:g} s where the victim is stopped or struck in init, of
which survivors may learn by it alone, and {long_s:g} s elsewhere.
"""

HOW = """\
How the victim is struck where it packs and unpacks: one page of its memory is protected, and the
process that touches it is struck there, in the native core as well. Over NCCL's double the message
itself is interrupted at half of its bytes; over gloo and loopback, which move messages from Python,
the seams of the transport are. Large messages over shared memory are read by their receiver: there
a clock chooses the moment. No production code has a hook for it.

NCCL here is a test double of NCCL and of CUDA's runtime in host memory: nothing is claimed of GPUs.
The ranks of loopback are threads of one process, which can raise and be slow, and not die. The
sockets of a world that gloo could not connect stay gloo's until the process ends; so does a thread
that waits for the store where the rank that serves it is stopped.
"""

DISAGREEMENT = """\
## Ranks that disagree

Ranks call different operators, in another order, with another shape, dtype, partition or kernel, or
another number of times. *Detected* is `PlanMismatch` on every rank; *refused* another error that
the operator's page names, on every rank; *harmless* where every rank's numbers are right all the
same; *at the deadline* `CollectiveTimeout`, with what every rank did last.
"""

SOAK = """\
## Load and leaks

Random operators of random shapes, dtypes and partitions, each compared with an oracle: a wrong
result ends the run. What must not grow is compared between samples after a warm-up.
"""


def page(run: Run, rows: Sequence[Tried], others: Mapping[str, dict[str, Any]]) -> str:
    """The text; ``others`` are the files beside the experiments', by name, where they are there."""
    bad = [row for row in rows if row.how in BAD]
    parts = [
        BEGINNING.format(slow_s=SLOW_S, deadline_s=run.deadline_s, long_s=LONG_S),
        f"{len(rows)} experiments on {run.date}, seed {run.seed}, on {run.cores} cores\n"
        f"({run.machine}, no GPU), torch {run.torch}, of {_kinds(rows)} of {len(list(cells()))} "
        f"kinds\n(operator, transport, fault, point): {_totals(bad)}. {_repeated(rows)}\n",
        HOW,
        _by_fault(rows),
        _by_point(rows),
        "## Every operator\n",
        "Experiments that went as they should, of those tried; seconds from the fault to the last\n"
        "survivor's error, median and largest.\n",
    ]
    parts += [_by_operator(rows, transport) for transport in TRANSPORTS]
    for kind, beginning, tables in (
        ("disagreement", DISAGREEMENT, _side_by_side),
        ("soak", SOAK, lambda runs: [_figures(facts) for facts in runs]),
    ):
        runs = [facts for name, facts in others.items() if name.startswith(f"{kind}-")]
        if runs:
            parts += [beginning, *tables(runs)]
    if "resume" in others:
        parts += ["## Workers killed while they train\n", _resumed(others["resume"])]
    parts.append(
        "## To repeat it\n\n```console\n$ make chaos SEED=1\n$ make soak\n```\n\n"
        "`make chaos N=200` tries as many; `make test` a few of each fault and transport.\n"
        "`make check` also runs clang-tidy, a sample of `make mutants`, and the native core under\n"
        "the address, undefined-behaviour and thread sanitizers; `make sanitize` has the\n"
        "transports under them. `make coverage` finds lines and errors that no test executes, and\n"
        "`make fuzz-input` tries what may come from outside."
    )
    return "\n".join(parts) + "\n"


def _totals(bad: Sequence[Tried]) -> str:
    counts = [(how, sum(row.how == how for row in bad)) for how in BAD]
    words = {"left": "with something left", "unreached": "that did not come to the point"}
    return ", ".join(f"{count} {words.get(how, how)}" for how, count in counts)


def _kinds(rows: Sequence[Tried]) -> int:
    return len({(row.operator, row.transport, row.fault, row.point) for row in rows})


def _repeated(rows: Sequence[Tried]) -> str:
    count = sum(row.attempts > 1 for row in rows)
    if not count:
        return "None was repeated."
    return (
        f"Of these {count} were carried out two or three times, since they came late, or their\n"
        "deadline passed before the fault, on a machine with much else to do."
    )


def _good(rows: Iterable[Tried]) -> list[Tried]:
    return [row for row in rows if row.how not in BAD]


def _latest(rows: Iterable[Tried]) -> list[float]:
    return [max(row.after_s) for row in rows if row.after_s]


def _cell(rows: Sequence[Tried]) -> str:
    if not rows:
        return ""
    text = f"{len(_good(rows))}/{len(rows)}"
    times = _latest(rows)
    if times:
        text += f", {statistics.median(times):.2f}, {max(times):.2f}"
    return text


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _by_fault(rows: Sequence[Tried]) -> str:
    lines = []
    for transport in TRANSPORTS:
        for fault in FAULTS:
            here = [row for row in rows if (row.transport, row.fault) == (transport, fault)]
            if not here:
                continue
            bad = {how: str(sum(row.how == how for row in here)) for how in BAD}
            times = _latest(here)
            shown = [f"{statistics.median(times):.2f}", f"{max(times):.2f}"] if times else ["", ""]
            detected = str(sum(row.how == "detected" for row in here))
            survived = str(sum(row.how == "survived" for row in here))
            counts = [bad["lost"], bad["hung"], bad["wrong"]]
            lines.append(
                [f"{transport}, {fault}", str(len(here)), detected, survived, *shown, *counts]
            )
    head = ["transport, fault", "tried", "detected", "nothing to detect", "median, s", "largest, s"]
    return _table([*head, "lost", "hung", "wrong"], lines)


def _by_point(rows: Sequence[Tried]) -> str:
    lines = []
    for point in POINTS:
        line = [point]
        for transport in TRANSPORTS:
            if all(why_not(transport, fault, point) for fault in FAULTS):
                line.append("-")
                continue
            here = [row for row in rows if (row.transport, row.point) == (transport, point)]
            line.append(_cell(here))
        lines.append(line)
    return _table(["point", *TRANSPORTS], lines)


def _by_operator(rows: Sequence[Tried], transport: str) -> str:
    faults = [f for f in FAULTS if not all(why_not(transport, f, point) for point in POINTS)]
    lines = []
    for operator in OPERATORS:
        here = [row for row in rows if (row.operator, row.transport) == (operator, transport)]
        lines.append(
            [operator, *(_cell([r for r in here if r.fault == fault]) for fault in faults)]
        )
    return f"### {transport}\n\n" + _table(["operator", *faults], lines)


def _figures(facts: Mapping[str, Any]) -> str:
    lines = [
        [
            str(figure["name"]),
            f"{figure['value']} {figure['unit']}".rstrip(),
            "" if figure["limit"] is None else str(figure["limit"]),
        ]
        for figure in facts["figures"]
    ]
    return _origin(facts) + ":\n\n" + _table(["figure", "found", "allowed"], lines)


def _side_by_side(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table of the same figures of several subjects, which their names begin with."""
    found: dict[str, dict[str, str]] = {}
    for facts in runs:
        for figure in facts["figures"]:
            subject, _, quantity = str(figure["name"]).partition(": ")
            column = subject.rpartition(" over ")[2]
            found.setdefault(column, {})[f"{quantity}, {figure['unit']}"] = str(figure["value"])
    quantities = list(next(iter(found.values())))
    lines = [[q, *(values.get(q, "") for values in found.values())] for q in quantities]
    origins = list(dict.fromkeys(map(_origin, runs)))
    return ["; ".join(origins) + ":\n", _table(["", *found], lines)]


def _origin(facts: Mapping[str, Any]) -> str:
    """Where figures come from, in words."""
    environment = facts["environment"]
    origin = f"`{environment['command']}`, on {environment['machine']}"
    return origin + (f", commit {environment['commit'][:9]}" if "commit" in environment else "")


def _resumed(facts: Mapping[str, Any]) -> str:
    outcome = "; ".join(facts["differences"]) or "Losses and parameters are bitwise equal."
    return (
        f"`python -m tests.examples.killed_training` killed {len(facts['kills'])} workers of\n"
        f"`examples/resume.py` on {facts['ranks']} ranks, which torchrun started again, and\n"
        f"compared the {facts['steps']} steps with training that nobody disturbs;\n"
        f"{facts['steps_repeated']} steps were done again from the checkpoint before. {outcome}\n"
    )


def made() -> str:
    """The page as the committed results make it."""
    paths = {path.stem: path for path in sorted(CHAOS.parent.glob("*.json"))}
    return page(*read(CHAOS), {name: json.loads(path.read_text()) for name, path in paths.items()})


if __name__ == "__main__":
    DOCUMENT.write_text(made())
