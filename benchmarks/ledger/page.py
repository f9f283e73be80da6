"""Tables of RESULTS.md beside this file, from rows: ``python -m benchmarks.ledger.page``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ledger.__main__ import ROWS, read_rows
from benchmarks.ledger.step import Row

PAGE = Path(__file__).with_name("RESULTS.md")
# Rows of benchmarks.ledger.on_gpu, with the name of the GPU.
SEEN = ROWS.with_name("h200.jsonl")
_MARK = "<!-- made by python -m benchmarks.ledger.page -->\n"


def main() -> None:
    PAGE.write_text(page(read_rows()), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """Return the page with tables of these rows in place of its own."""
    begin = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    seen = [json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()]
    return f"{begin}{_MARK}\n## Seen by an H200\n\n{_seen_table(seen)}{tables(rows)}"


def _seen_table(rows: Sequence[dict[str, Any]]) -> str:
    headings = ("network", "ranks", "dtype, layout", "kernels", "held MB", "host ms", "step ms")
    lines = [headings, ("---", "---:", "---", *["---:"] * 4)]
    for row in rows:
        units = {
            "kernels": (1, 0),
            "held_bytes": (1e6, 1),
            "host_us": (1e3, 1),
            "step_us": (1e3, 1),
        }
        cells = [
            f"{row[name] / unit:.{places}f} ({row[name + '_sequential'] / unit:.{places}f})"
            if name in row
            else ""
            for name, (unit, places) in units.items()
        ]
        layout = f"{row['dtype']}, {row['layout'].replace('_', '-')}"
        lines.append((row["network"], str(row["ranks"]), layout, *cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(rows: Sequence[Row]) -> str:
    """Return a table in Markdown for each dtype and layout."""
    kinds = dict.fromkeys((row.dtype, row.layout) for row in rows)
    return "".join(
        f"\n## {'Autocast to bfloat16' if dtype != 'float32' else 'float32'}, "
        f"{layout.replace('_', '-')}\n\n{_table([r for r in rows if (r.dtype, r.layout) == kind])}"
        for kind in kinds
        for dtype, layout in [kind]
    )


def _table(rows: Sequence[Row]) -> str:
    headings = (
        "network", "ranks", "launches", "halos", "split norms", "MB", "copied MB", "moved MB",
        "kept MB", "NCCL groups", "host ms",
    )  # fmt: skip
    lines = [headings, ("---", *["---:"] * (len(headings) - 1)), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.network,
        str(row.ranks),
        f"{row.launches} ({row.launches_sequential})",
        str(row.halos),
        str(row.split_norms),
        f"{row.device_bytes / 1e6:.1f} ({row.device_bytes_sequential / 1e6:.1f})",
        f"{row.copied_bytes / 1e6:.1f}",
        f"{row.moved_bytes / 1e6:.2f}",
        f"{row.kept_bytes / 1e6:.2f} ({row.kept_bytes_sequential / 1e6:.2f})",
        str(row.nccl_groups),
        ""
        if row.host_us is None or row.host_us_sequential is None
        else f"{row.host_us / 1e3:.1f} ({row.host_us_sequential / 1e3:.1f})",
    )


if __name__ == "__main__":
    main()
