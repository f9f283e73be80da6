"""The table of docs/layers.md: which feature of which layer works under which partition.

``python -m tests.fuzz.table > docs/layers.md``

Every cell is run: the layer is compared with torch's, or refuses.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpudist import nn
from gpudist.geometry.cartesian import left_padded
from gpudist.testing.rank_pool import RankPool
from tests.fuzz.case import Case, Feature
from tests.fuzz.families import families
from tests.fuzz.run import Configuration, Runner

KINDS = ("batch", "channels", "features", "mixed")
RANKS = 8
FILE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"
# Layer, feature and kind of partition, and what becomes of it.
Key = tuple[str, str, str]
Cells = dict[Key, str]

INTRODUCTION = """\
# Layers, features and partitions

Which features of each layer of `gpudist.nn` work under which partition. The columns say what the
partition splits: `batch` (or other leading dims), `channels`, `features` (spatial dims; of a linear
layer or a normalization, its features), or `mixed`, several of these at once.

- `tested`: on up to 8 ranks, output, input gradient and parameter gradients equal those of torch's
  layer.
- `[1]`: the layer raises on every rank, with error 1 of the list below the table.
- `-`: the layer has no such case.

`python -m tests.fuzz.table > docs/layers.md` runs every cell and writes this file. `make fuzz` runs
random configurations of all layers of `gpudist.nn.LAYERS`; a layer without a row is compared with
torch's on its sample call, split along each dim and each pair of dims.
"""


def case_of(feature: Feature, grid: tuple[int, ...]) -> Case | None:
    """The case of a cell, with those uneven blocks that fit the grid; ``None`` if none does."""
    parts = left_padded(grid, len(feature.shape), 1)
    sizes = {d: blocks for d, blocks in feature.sizes.items() if len(blocks) == parts[d]}
    if feature.sizes and not sizes:
        return None
    return Case(feature.layer, grid, feature.shape, dict(feature.options), sizes)


def cases() -> dict[Key, Case]:
    """Return the cases of all cells, row by row."""
    found: dict[Key, Case] = {}
    for family in families():
        for feature in sorted(family.FEATURES, key=lambda each: family.LAYERS.index(each.layer)):
            grids = family.grids(feature)
            for kind in KINDS:
                case = case_of(feature, grids[kind]) if kind in grids else None
                if case is not None:
                    found[feature.layer, feature.feature, kind] = case
    return found


def carried_out(cases: Mapping[Key, Case], runner: Runner) -> Cells:
    """Run these cells and return their results.

    Raises:
        AssertionError: some of them are wrong.
    """
    cells: Cells = {}
    wrong: list[str] = []
    for key, case in cases.items():
        verdict = runner.judge(Configuration(case, RANKS))
        if verdict.how not in ("right", "refused"):
            wrong.append(f"{key}: {verdict.how}: {verdict.text}")
        cells[key] = "tested" if verdict.how == "right" else _one_line(verdict.text)
    assert not wrong, "\n".join(wrong)
    return cells


def document(cells: Mapping[Key, str]) -> str:
    """Return the whole file; refusals with the same text share a footnote."""
    notes: dict[str, int] = {}
    lines = [f"| layer | feature | {' | '.join(KINDS)} |", "|---|---|" + ":-:|" * len(KINDS)]
    for layer, feature in dict.fromkeys((layer, feature) for layer, feature, _ in cells):
        row = [f"`{_class_of(layer)}`", feature]
        for kind in KINDS:
            text = cells.get((layer, feature, kind), "-")
            if text not in ("tested", "-"):
                text = f"[{notes.setdefault(text, len(notes) + 1)}]"
            row.append(text)
        lines.append(f"| {' | '.join(row)} |")
    refused = [f"{number}. `{text}`" for text, number in notes.items()]
    parts = [INTRODUCTION, *_section("Table", lines), *_section("Refused", refused)]
    return "\n".join(parts)


def read(text: str) -> Cells:
    """Return the cells of a file that `document` wrote."""
    notes = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    cells: Cells = {}
    for layer, feature, *row in re.findall(
        r"^\| `(?:Distributed)?(\w+)` \| (.*?)" + r" \| ([^|]*?)" * len(KINDS) + r" \|$",
        text,
        re.MULTILINE,
    ):
        for kind, cell in zip(KINDS, row, strict=True):
            if cell != "-":
                cells[layer, feature, kind] = notes[cell[1:-1]] if cell != "tested" else cell
    return cells


def _class_of(layer: str) -> str:
    return layer if hasattr(nn, layer) else f"Distributed{layer}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return [f"## {title}\n", *lines, ""] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")


def main() -> None:
    warnings.simplefilter("ignore")
    sys.stdout.write(document(carried_out(cases(), Runner(_no_pool))))


def _no_pool() -> RankPool:
    raise AssertionError("the cells run over loopback")


if __name__ == "__main__":
    main()
