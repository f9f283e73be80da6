"""Pictures of result files: bandwidth against size, scaling, gpudist and its peers.

``python -m benchmarks.plot FILES --output FOLDER``, where FILES are files or folders.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.files import BadFile, Run, read
from benchmarks.plots.bandwidth import bandwidth
from benchmarks.plots.beside import beside
from benchmarks.plots.scaling import scaling
from benchmarks.plots.style import save


def pictures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return every figure for which the rows have data, by file name."""
    rows = [row for run in runs for row in run.rows]
    ranks = sorted({row.ranks for row in rows})
    found: dict[str, Figure | None] = {f"bandwidth-{n}": bandwidth(rows, n) for n in ranks}
    cores = {run.environment.get("cores") for run in runs if run.source.startswith("scaling")}
    found["scaling"] = scaling(rows, cores.pop() if len(cores) == 1 else None)
    for run in runs:
        for subject, n in dict.fromkeys((row.subject, row.ranks) for row in run.rows):
            if subject != "scaling":
                found[f"beside-{run.source}"] = beside(run.rows, subject, n)
    return {name: figure for name, figure in found.items() if figure is not None}


def main() -> int:
    options = _options()
    try:
        runs = [run for path in options.files for run in read(path)]
        figures = pictures(runs)
        if not figures:
            raise BadFile("there is nothing to draw: no row has a peer")
        paths = [path for name, f in figures.items() for path in save(f, name, options.output)]
    except (BadFile, OSError) as error:
        print(f"gpudist bench plot: error: {error}", file=sys.stderr)
        return 2
    names = [str(path) for path in paths]
    print(json.dumps(names, indent=1) if options.json else "\n".join(names))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpudist bench plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="result files, or folders of them")
    parser.add_argument("--output", type=Path, default=Path("plots"), help="folder (plots)")
    parser.add_argument("--json", action="store_true", help="print the names for programs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
