"""Compare two runs: how much slower or faster each case became, and whether that is significant.

``python -m benchmarks.compare A B``, where A and B are result files or folders of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.case_table import case_table
from benchmarks.files import BadFile, rows_of
from benchmarks.intervals import LEVEL, ratio_interval
from benchmarks.rows import Row

FASTER, SLOWER, EQUAL = "faster", "slower", "no difference"
NO_SAMPLES, WRONG = "no samples", "wrong"
Key = tuple[str, int, str]


@dataclass(frozen=True)
class Comparison:
    """One case measured in both runs; ``ratio`` is the time of B over the time of A.

    Attributes:
        low, high: bounds of ``ratio``; ``None`` if a run has no samples.
        peers_ratio: median of the same ratio over the peers, whose code did not change: the effect
            of the machine. ``None`` if the runs have no peer in common.
        verdict: faster or slower if the bounds exclude 1.
    """

    subject: str
    ranks: int
    case: str
    a_us: float
    b_us: float
    ratio: float
    low: float | None
    high: float | None
    peers_ratio: float | None
    verdict: str

    def is_above(self, limit: float) -> bool:
        """Whether B is significantly slower, by more than ``limit``.

        Without samples the ratio alone decides.
        """
        return self.verdict in (SLOWER, NO_SAMPLES) and self.ratio > limit


def compare(a: Sequence[Row], b: Sequence[Row]) -> list[Comparison]:
    """Compare every case that both runs have."""
    cases_a, cases_b = by_case(a), by_case(b)
    return [_compare(cases_a[key], cases_b[key]) for key in cases_a if key in cases_b]


def by_case(rows: Sequence[Row]) -> dict[Key, dict[str, Row]]:
    """Group rows by case and peer; later rows of the same case replace earlier ones."""
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.subject, row.ranks, row.case), {})[row.peer] = row
    return found


def _compare(a: Mapping[str, Row], b: Mapping[str, Row]) -> Comparison:
    ours_a, ours_b = next(iter(a.values())), next(iter(b.values()))
    bounds = (None, None)
    verdict = NO_SAMPLES
    if ours_a.us and ours_b.us:
        low, high = bounds = ratio_interval(ours_a.us, ours_b.us)
        verdict = FASTER if high < 1 else SLOWER if low > 1 else EQUAL
    if not all(row.correct for row in (*a.values(), *b.values())):
        verdict = WRONG
    return Comparison(
        ours_a.subject, ours_a.ranks, ours_a.case, ours_a.us_median, ours_b.us_median,
        ours_b.us_median / ours_a.us_median, *bounds, _peers_ratio(a, b), verdict,
    )  # fmt: skip


def _peers_ratio(a: Mapping[str, Row], b: Mapping[str, Row]) -> float | None:
    ratios: list[float] = []
    for peer in a.keys() & b.keys():
        before, after = a[peer].peer_us_median, b[peer].peer_us_median
        if before is not None and after is not None:
            ratios.append(after / before)
    return statistics.median(ratios) if ratios else None


def main() -> int:
    options = _options()
    try:
        rows_a, rows_b = rows_of(options.a), rows_of(options.b)
        found = compare(rows_a, rows_b)
        if not found:
            raise BadFile(f"{options.a} and {options.b} have no case in common")
    except BadFile as error:
        print(f"gpudist bench compare: error: {error}", file=sys.stderr)
        return 2
    cases_a, cases_b = by_case(rows_a).keys(), by_case(rows_b).keys()
    alone = {"only_a": [*(cases_a - cases_b)], "only_b": [*(cases_b - cases_a)]}
    if options.json:
        print(json.dumps({"comparisons": [asdict(each) for each in found], **alone}, indent=1))
    else:
        _show(found, {name: len(keys) for name, keys in alone.items()})
    limit = options.fail_above
    failed = [each for each in found if limit is not None and each.is_above(limit)]
    for each in failed:
        words = f"{each.subject}, {each.ranks} ranks, {each.case}: {each.ratio:.2f} times the time"
        print(f"above {limit:g}: {words}", file=sys.stderr)
    return 1 if failed or any(each.verdict == WRONG for each in found) else 0


def _show(found: Sequence[Comparison], alone: Mapping[str, int]) -> None:
    heading = ("A us", "B us", "B/A", f"{LEVEL:.0%} interval", "peers B/A", "verdict")
    rows = [(f"{each.subject}, {each.ranks} ranks: {each.case}", _row(each)) for each in found]
    print(case_table(heading, rows, left=0))
    verdicts = [each.verdict for each in found]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts))]
    only = f"only in A: {alone['only_a']}, only in B: {alone['only_b']}"
    print(f"{len(found)} cases: {', '.join(counts)}; {only}")


def _row(each: Comparison) -> tuple[str, ...]:
    interval = "" if each.low is None else f"{each.low:.2f} to {each.high:.2f}"
    peers = "" if each.peers_ratio is None else f"{each.peers_ratio:.2f}"
    times = (f"{each.a_us:.1f}", f"{each.b_us:.1f}", f"{each.ratio:.2f}")
    return (*times, interval, peers, each.verdict)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpudist bench compare", description=__doc__)
    parser.add_argument("a", type=Path, help="file or folder of the run before")
    parser.add_argument("b", type=Path, help="file or folder of the run after")
    parser.add_argument(
        "--fail-above", type=float, metavar="RATIO",
        help="exit with 1 if a case is slower, and takes more than RATIO times as long",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print for programs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
