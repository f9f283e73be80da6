"""Write tests/faults/RESULTS.md from recorded results: ``python -m tests.faults.report``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.chaos.experiment import LONG_S, SLOW_S, TRANSPORTS, cells, why_not
from tests.faults.chaos.judge import BAD
from tests.faults.chaos.results import CHAOS, Run, Tried, read
from tests.faults.faults import FAULTS, POINTS
from tests.faults.operators import OPERATORS

DOCUMENT = Path(__file__).with_name("RESULTS.md")

BEGINNING = """\
# What happens when something fails

When a rank dies or raises, every other rank raises `PeerFailure`, which names the failed rank and
the operation. If a rank is stopped or does not arrive, the others raise `CollectiveTimeout` at the
deadline of `gpudist.init(timeout=...)`. This page shows the tests behind these claims and their
last results. Repeat them with

```console
$ make chaos SEED=1
$ make soak
```

`make chaos` runs for up to 15 minutes, and `make chaos N=200` at most 200 experiments. Both
commands update `benchmarks/results/reliability` and this page (`python -m tests.faults.report`).

## Faults

Three or four ranks repeat one operator, forward and backward, and compare every result with torch's
on a single process. Then one rank, the *victim*, has a fault:

| fault | the victim |
| --- | --- |
| killed | gets `SIGKILL` |
| stopped | gets `SIGSTOP`, and `SIGCONT` once the other ranks have given up |
| crashed | gets `SIGSEGV` |
| raised | raises an exception of the user's |
| slow | sleeps for {slow_s:g} s |

| point | when |
| --- | --- |
| before | before the operator |
| packing | while it packs its input |
| message | in the middle of its messages |
| unpacking | while it unpacks what it received |
| backward | in the backward pass |
| init | while it joins the world |
| split | while ranks create a sub-communicator |
| shutdown | while it closes the world |
| any time | at a random time |

An experiment passes if, on every other rank (*survivor*),

- an error is raised within {deadline_s:g} s + 1 s: `PeerFailure` with the victim's rank, or
  `CollectiveTimeout` if the victim was stopped or failed in init. The text names the victim, the
  operation and its partition;
- every result before the error is right. If the victim is only slow, all results are right;
- no process, thread, file descriptor, socket, shared memory or file remains.

The deadline is {deadline_s:g} s if the victim is stopped or fails in init, where it may be the only
sign of the fault, and {long_s:g} s otherwise.
"""

HOW = """\
No production code has a hook for fault injection:

- packing and unpacking: one page of the victim's memory is protected, so the access itself triggers
  the fault, in the native core too;
- message: over nccl the test double stops at half of the bytes; over gloo and loopback the test
  wraps the Python methods by which a rank waits. Receivers read large shared-memory messages
  directly from the sender, so there the fault comes at a random time.

Limits of these tests:

- **No GPU.** "nccl" is a test double of NCCL and of CUDA's driver in host memory.
- Ranks of loopback are threads of one process, so they can only raise or be slow. One runs at a
  time, so no other rank could notice that one packs or unpacks slowly.
- If gloo fails to connect, it keeps the world's sockets until the process ends. If the rank that
  serves the store is stopped, a thread that waits for the store remains as long.

### By transport and fault
"""

COLUMNS = """\
Passed / tried, then seconds from the fault to the last survivor's error: median, largest.
"""

DISAGREEMENT = """\
## Ranks that disagree

Ranks call different operators or the same operators in a different order, or with a different
shape, dtype, partition, kernel or number of calls. Each case ends in one of five ways:

- *detected*: `PlanMismatch` on every rank;
- *refused*: another documented error, such as `ShapeError`, on every rank;
- *harmless*: every rank gets the right numbers;
- *at the deadline*: `CollectiveTimeout`, with the last operations of every rank;
- *wrong*: anything else. No case may end so.
"""

SOAK = """\
## Load and leaks

Long runs of random operators with random shapes, dtypes and partitions. Each result is compared
with an oracle, and a wrong one ends the run. Growth is measured between samples after a warm-up.
"""


def page(run: Run, rows: Sequence[Tried], others: Mapping[str, dict[str, Any]]) -> str:
    """The text; ``others`` are the files beside the experiments', by name, where they are there."""
    bad = [row for row in rows if row.how in BAD]
    parts = [
        BEGINNING.format(slow_s=SLOW_S, deadline_s=run.deadline_s, long_s=LONG_S),
        f"{len(rows)} experiments on {run.date}, seed {run.seed}, {run.cores} cores\n"
        f"({run.machine}, no GPU), torch {run.torch}, in {_kinds(rows)} of {len(list(cells()))}\n"
        "combinations of operator, transport, fault and point:\n"
        f"{_totals(bad)}.\n{_repeated(rows)}\n",
        HOW,
        _by_fault(rows),
        "### By point\n",
        COLUMNS,
        _by_point(rows),
        "## Every operator\n",
        COLUMNS,
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
        parts += ["## Workers killed during training\n", _resumed(others["resume"])]
    parts.append(
        "## Related commands\n\n"
        "| command | what it does |\n| --- | --- |\n"
        "| `make test` | the test suite, with a few experiments for each fault and transport |\n"
        "| `make check` | lint, types, tests, clang-tidy, some mutants, sanitizers on the core |\n"
        "| `make sanitize` | core and transports under address, undefined and thread sanitizers |\n"
        "| `make coverage` | lines and errors that no test executes |\n"
        "| `make fuzz-input` | damaged files, variables, keys, arguments and messages |"
    )
    return "\n".join(parts) + "\n"


def _totals(bad: Sequence[Tried]) -> str:
    counts = [(how, sum(row.how == how for row in bad)) for how in BAD]
    words = {"left": "with leftovers", "unreached": "never struck"}
    return ", ".join(f"{count} {words.get(how, how)}" for how, count in counts)


def _kinds(rows: Sequence[Tried]) -> int:
    return len({(row.operator, row.transport, row.fault, row.point) for row in rows})


def _repeated(rows: Sequence[Tried]) -> str:
    count = sum(row.attempts > 1 for row in rows)
    if not count:
        return "None was repeated."
    return (
        f"{count} ran more than once because the machine was busy: survivors were late, or the\n"
        "deadline passed before the fault."
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
    head = ["transport, fault", "tried", "detected", "no error expected", "median, s", "largest, s"]
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
    environment = facts["environment"]
    origin = f"`{environment['command']}`, on {environment['machine']}"
    return origin + (f", commit {environment['commit'][:9]}" if "commit" in environment else "")


def _resumed(facts: Mapping[str, Any]) -> str:
    outcome = "; ".join(facts["differences"]) or "Losses and parameters are bitwise equal."
    steps, repeated = facts["steps"], facts["steps_repeated"]
    return (
        f"`python -m tests.examples.killed_training` killed {len(facts['kills'])} workers of\n"
        f"`examples/resume.py` on {facts['ranks']} ranks and let torchrun restart them.\n"
        f"The {steps} steps are compared with an undisturbed run; {repeated} were repeated from a\n"
        f"checkpoint. {outcome}\n"
    )


def made() -> str:
    """The page as the committed results make it."""
    paths = {path.stem: path for path in sorted(CHAOS.parent.glob("*.json"))}
    return page(*read(CHAOS), {name: json.loads(path.read_text()) for name, path in paths.items()})


if __name__ == "__main__":
    DOCUMENT.write_text(made())
