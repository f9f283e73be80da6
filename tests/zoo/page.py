"""Write docs/zoo.md from the verdicts in build/zoo: ``python -m tests.zoo.page``."""

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

PAGE = ROOT / "docs" / "zoo.md"
RESULTS = ROOT / "benchmarks" / "results" / "zoo" / "verdicts.jsonl"
TEMPLATE = Path(__file__).with_name("page.md")


def page(networks: Sequence[Network], verdicts: dict[tuple[str, str], Verdict]) -> str:
    """Return the page; raises ``KeyError`` if a network has no verdict on a grid."""
    of = {n.name: [verdicts[n.name, grid] for grid in GRIDS] for n in networks}
    counts = Counter(verdict_of(these) for these in of.values())
    found = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "failed", "wrong"))
    packages = ", ".join(f"{name} {version(name.replace('_', '-'))}" for name in PACKAGES)
    differing = [n for n, these in of.items() if any(_is_misplanned(v) for v in these)]
    return TEMPLATE.read_text(encoding="utf-8").format(
        count=len(networks),
        summary=f"**{found}.** {packages}.",
        exceptions=f", except of {', '.join(differing)}" if differing else "",
    ) + "".join(_row(network, of[network.name]) for network in networks)


def _row(network: Network, verdicts: Sequence[Verdict]) -> str:
    error = max(each.error for each in verdicts)
    allowed = f"{network.tolerance:.0e}: {network.why}" if network.why else ""
    sent = [f"{each.sent_bytes / 1e3:,.1f}" for each in verdicts]
    cells = [f"`{network.name}`", verdict_of(verdicts), f"{error:.1e}", *sent, allowed]
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


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
