"""Count the frozen cases in which gpudist is behind a peer, and print them with their reasons.

    python -m benchmarks.behind

``frozen_cases.jsonl`` has the cases with their peers, and is not changed: none may be removed or
replaced. Behind means that the median ratio to a peer, except a bound, is above ``BEHIND``.
``behind_reasons.json`` has the reason of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.compare import Key, by_case
from benchmarks.document import RESULTS, behind
from benchmarks.files import rows_of
from benchmarks.rows import Row
from gpudist.cli.tables import print_columns

FOLDER = Path(__file__).parent
FROZEN, REASONS = FOLDER / "frozen_cases.jsonl", FOLDER / "behind_reasons.json"
BEHIND = 1.05
GOAL = 20
HEADING = ("case", "ranks", "gpudist", "behind", "kind of reason")


@dataclass(frozen=True)
class Reason:
    """Why gpudist is behind in the cases of a subject whose names match.

    Attributes:
        subject, case, ranks: what it is the reason of; ``case`` is a pattern, and no ``ranks``
            stands for any.
        kind: what decides: the peer's kernel, Python, a bound, or what the peer leaves out.
        text: the reason.
    """

    subject: str
    case: str
    kind: str
    text: str
    ranks: int | None = None

    def is_of(self, key: Key) -> bool:
        subject, ranks, case = key
        is_there = self.subject == subject and self.ranks in (None, ranks)
        return is_there and fnmatchcase(case, self.case)


@dataclass(frozen=True)
class Behind:
    """A frozen case in which gpudist is behind.

    Attributes:
        key: subject, ranks and case.
        us: gpudist's median.
        ratios: ratio to each peer that is ahead, with only the better of two MPIs.
        reason: its reason, if one was written.
    """

    key: Key
    us: float
    ratios: dict[str, float]
    reason: Reason | None


@dataclass(frozen=True)
class Count:
    """Frozen cases against results.

    Attributes:
        cases: number of frozen cases.
        behind: those in which gpudist is behind.
        missing: cases, or peers of a case, without a result.
        wrong: cases with a wrong result.
    """

    cases: int
    behind: list[Behind]
    missing: list[str]
    wrong: list[str]


def frozen(path: Path = FROZEN) -> dict[Key, list[str]]:
    """Return the peers of every frozen case."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["subject"], line["ranks"], line["case"]): line["peers"] for line in lines}


def reasons(path: Path = REASONS) -> list[Reason]:
    """Return the reasons; the first that matches a case is its reason."""
    return [Reason(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def count(cases: dict[Key, list[str]], rows: Sequence[Row], why: Sequence[Reason]) -> Count:
    """Compare the frozen cases with rows."""
    measured = by_case(rows)
    found = Count(len(cases), [], [], [])
    for key, peers in cases.items():
        has = measured.get(key, {})
        name = f"{key[0]}, {key[1]} ranks: {key[2]}"
        if not has:
            found.missing.append(name)
            continue
        found.missing.extend(f"{name}: {peer}" for peer in peers if peer not in has)
        of = [has[peer] for peer in peers if peer in has]
        if not all(row.correct for row in of):
            found.wrong.append(name)
        slow = [row for row in of if row.ratio is not None and row.ratio > BEHIND]
        ratios = {peer: has[peer].ratio or 0.0 for peer in behind(slow)}
        if ratios:
            reason = next((each for each in why if each.is_of(key)), None)
            found.behind.append(Behind(key, of[0].us_median, ratios, reason))
    return found


def kinds(found: Sequence[Behind]) -> dict[str, int]:
    """Return the number of cases of every kind of reason, most frequent first."""
    return dict(Counter(kind(each.reason) for each in found).most_common())


def kind(reason: Reason | None) -> str:
    return reason.kind if reason else "no reason given"


def cells(each: Behind) -> tuple[str, ...]:
    """Return a row under ``HEADING``."""
    subject, ranks, case = each.key
    ahead = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in each.ratios.items())
    return (f"{subject}: {case}", str(ranks), f"{each.us:.1f} us", ahead, kind(each.reason))


def summary(found: Count) -> str:
    """Return the number of cases behind, and the goal."""
    return (
        f"gpudist is behind a peer in {len(found.behind)} of {found.cases} frozen cases "
        f"(goal: at most {GOAL})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.behind", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    options = parser.parse_args(arguments)
    found = count(frozen(), rows_of(options.results), reasons())
    print_columns(HEADING, [cells(each) for each in found.behind])
    print(f"\n{summary(found)}.")
    for kind, number in kinds(found.behind).items():
        print(f"{number:4} {kind}")
    print(f"{len(found.missing)} cases or peers without a result.")
    for name in found.missing:
        print(f"  missing: {name}")
    for name in found.wrong:
        print(f"  wrong: {name}")
    return 1 if found.missing or found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
