"""Write tests/zoo/RESULTS.md from the verdicts in build/zoo: ``python -m tests.zoo.page``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tests.zoo.judge import GRIDS, Verdict
from tests.zoo.network import Network
from tests.zoo.networks import PACKAGES, all_networks
from tests.zoo.results import ROOT, code_version, kept, verdict_of

PAGE = Path(__file__).with_name("RESULTS.md")
RESULTS = ROOT / "benchmarks" / "results" / "zoo" / "verdicts.jsonl"
TEMPLATE = Path(__file__).with_name("page.md")
# Grid of the numbers that are shown of one grid only.
_DETAILED = "2x2"
_COLUMNS = ("network", "verdict", "error", *GRIDS, "messages", "moved", "memory")
_HEAD = (f"| {' | '.join(_COLUMNS)} |", f"|---|---|{'--:|' * (len(_COLUMNS) - 2)}")


def page(networks: Sequence[Network], verdicts: dict[tuple[str, str], Verdict]) -> str:
    """Return the page; raises ``KeyError`` if a network has no verdict on a grid."""
    of = {n.name: [verdicts[n.name, grid] for grid in GRIDS] for n in networks}
    counts = Counter(verdict_of(these) for these in of.values())
    found = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "failed", "wrong"))
    differing = [n for n, these in of.items() if any(_is_misplanned(v) for v in these)]
    return TEMPLATE.read_text(encoding="utf-8").format(
        count=len(networks),
        summary=found,
        exceptions=f", except of {', '.join(differing)}" if differing else "",
        tables="".join(_table(package, networks, of) for package in PACKAGES),
        allowed="\n".join(f"- `{n.name}`: {n.tolerance:.0e}, {n.why}" for n in networks if n.why),
    )


def _table(package: str, networks: Sequence[Network], verdicts: dict[str, list[Verdict]]) -> str:
    rows = [_row(n, verdicts[n.name]) for n in networks if n.package == package]
    if not rows:
        return ""
    heading = f"## {package} {version(package.replace('_', '-'))}"
    return "\n".join(["", heading, "", *_HEAD, *rows, ""])


def _row(network: Network, verdicts: Sequence[Verdict]) -> str:
    error = max(each.error for each in verdicts)
    of = {each.grid: each for each in verdicts}[_DETAILED]
    numbers = [
        f"{error:.1e}",
        *(_kilobytes(each.sent_bytes) for each in verdicts),
        f"{of.messages:,}",
        _kilobytes(of.repartitioned_bytes),
        f"{of.kept_bytes / of.alone_kept_bytes:.2f}" if of.alone_kept_bytes else "-",
    ]
    name = network.name.partition("/")[2]
    return f"| {' | '.join([f'`{name}`', verdict_of(verdicts), *numbers])} |"


def _kilobytes(n: int) -> str:
    return f"{n / 1e3:,.1f}"


def _is_misplanned(verdict: Verdict) -> bool:
    return verdict.planned_bytes != verdict.forward_bytes


def main() -> int:
    verdicts = kept("distribute", code_version())
    networks = all_networks()
    missing = [(n.name, grid) for n in networks for grid in GRIDS if (n.name, grid) not in verdicts]
    if missing:
        print(f"{len(missing)} verdicts are missing, of {missing[0]} first: run make zoo")
        return 1
    PAGE.write_text(page(networks, verdicts), encoding="utf-8")
    rows = [asdict(verdicts[n.name, grid]) for n in networks for grid in GRIDS]
    for row in rows:
        row.update(seconds=round(row["seconds"], 1), alone_seconds=round(row["alone_seconds"], 1))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} and {RESULTS.relative_to(ROOT)}: {len(networks)} networks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
