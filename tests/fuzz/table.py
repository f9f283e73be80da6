"""The pages docs/layers.md and tests/fuzz/RESULTS.md: what works under which partition.

``python -m tests.fuzz.table`` writes both. Every cell of the second is run: the layer is compared
with torch's, or refuses. The first summarizes them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpudist import nn
from gpudist.geometry.cartesian import pad_left
from gpudist.testing.rank_pool import RankPool
from tests.fuzz.case import Case, Feature
from tests.fuzz.families import families
from tests.fuzz.run import Configuration, Runner

KINDS = ("batch", "channels", "features", "mixed")
RANKS = 8
ROOT = Path(__file__).resolve().parents[2]
MATRIX, FILE = ROOT / "docs" / "layers.md", Path(__file__).with_name("RESULTS.md")
# Reference page of the layers of each module of gpudist.nn; the first prefix that fits counts.
PAGES = {
    "affine.conv": "layers_conv",
    "windowed": "layers_conv",
    "affine": "layers_linear",
    "attention": "layers_linear",
    "norm": "layers_norm",
    "random": "layers_norm",
    "pool": "layers_pool",
    "loss": "layers_loss",
}
# Layer, feature and kind of partition, and what becomes of it.
Key = tuple[str, str, str]
Cells = dict[Key, str]
# Layers of modules that begin so share a row of the summary.
TOGETHER = ("affine.conv", "loss", "norm.softmax", "norm", "pool")

INTRODUCTION = """\
# Features of every layer

Which features of each layer of `gpudist.nn` work under which partition. [The table of
layers](../../docs/layers.md) explains the columns and has a summary.

- `tested`: on up to 8 ranks, output, input gradient and parameter gradients equal those of torch's
  layer.
- `[1]`: the layer raises on every rank, with error 1 of the list below the table.
- `-`: the layer has no such case.

`python -m tests.fuzz.table` runs every cell and writes this page. `make fuzz` runs
random configurations of all layers of `gpudist.nn.LAYERS`; a layer without a row is compared with
torch's on its sample call, split along each dim and each pair of dims.
"""

MATRIX_INTRODUCTION = """\
---
hide: [toc]
---

# The table of layers

Dims of the input that a partition may split, for every `Distributed` layer of `gpudist.nn`:

<div class="compact" markdown>
"""

MATRIX_LEGEND = """\
</div>

- `batch`: the batch or other leading dims; `features`: spatial dims, and of a linear layer or a
  normalization its features; `mixed`: several of these at once.
- *yes*: on up to 8 ranks, output, input gradient and parameter gradients equal those of torch's
  layer. `-`: there is no such case. `[1]`: note 1 says which call raises, on every rank.
- [Features of every layer](../tests/fuzz/RESULTS.md) has a row for each argument, such as strides,
  padding modes and reductions, and for uneven and empty blocks.
- [Tensor-parallel layers](tensor_parallel.md), [ring and all-to-all attention](attention.md) and
  [operators](reference/ops.md) have pages of their own. Activations and other functions of single
  cells need no distributed layer.
"""


def case_of(feature: Feature, grid: tuple[int, ...]) -> Case | None:
    """The case of a cell, with those uneven blocks that fit the grid; ``None`` if none does."""
    parts = pad_left(grid, len(feature.shape), 1)
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


def matrix(cells: Mapping[Key, str]) -> str:
    """Return the page with a row for similar layers; refusals are notes below it."""
    notes: dict[tuple[str, str], list[str]] = {}
    lines = [f"| layers | {' | '.join(KINDS)} |", "|---|" + ":-:|" * len(KINDS)]
    for names in _layers_by_row():
        row = [f"[{_briefly(names)}](reference/{_page_of(names[0])}.md)"]
        for kind in KINDS:
            said: dict[str, None] = {}
            for (layer, feature, where), text in cells.items():
                if layer in names and where == kind and text == "tested":
                    said = {"yes": None, **said}
                elif layer in names and where == kind:
                    features = notes.setdefault((layer, text), [])
                    features += [feature] if feature not in features else []
                    said[f"[{list(notes).index((layer, text)) + 1}]"] = None
            row.append(", ".join(said) or "-")
        lines.append(f"| {' | '.join(row)} |")
    listed = [
        f"{number}. {', '.join(features)}: `{text}`"
        for number, ((_, text), features) in enumerate(notes.items(), 1)
    ]
    return "\n".join([MATRIX_INTRODUCTION, *lines, "", MATRIX_LEGEND, *_section("Notes", listed)])


def _layers_by_row() -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for row in nn.LAYERS:
        module = row.kind.__module__.removeprefix("gpudist.nn.")
        start = next((start for start in TOGETHER if module.startswith(start)), module)
        found.setdefault(start, []).append(row.name.removeprefix("Distributed"))
    return [*found.values(), ["HaloRegion"]]


def _page_of(layer: str) -> str:
    module = getattr(nn, _class_of(layer)).__module__.removeprefix("gpudist.nn.")
    return next(page for start, page in PAGES.items() if module.startswith(start))


def _briefly(names: list[str]) -> str:
    if all(name.endswith("Loss") for name in names):
        return f"all {len(names)} losses"
    # Conv1d, Conv2d and Conv3d are Conv1d to 3d.
    three = [n[:-2] for n in names if n.endswith("1d") and f"{n[:-2]}3d" in names]
    hidden = {f"{stem}{dims}" for stem in three for dims in ("2d", "3d")}
    shown = [f"{n} to 3d" if n[:-2] in three else n for n in names if n not in hidden]
    return ", ".join(shown)


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
    cells = carried_out(cases(), Runner(_no_pool))
    FILE.write_text(document(cells), encoding="utf-8")
    MATRIX.write_text(matrix(cells), encoding="utf-8")


def _no_pool() -> RankPool:
    raise AssertionError("the cells run over loopback")


if __name__ == "__main__":
    main()
