"""docs/layers.md says what the layers do."""

from __future__ import annotations

import pytest

from tests.fuzz import table
from tests.fuzz.case import Feature
from tests.fuzz.families import families
from tests.fuzz.run import Runner
from tests.pool import the_pool

pytestmark = pytest.mark.filterwarnings("ignore")
# Cells that the suite carries out; of a larger table, every second one, or third, ...
MOST = 300


def test_the_file_has_a_cell_for_every_feature() -> None:
    text = table.FILE.read_text()
    cells = table.read(text)
    assert list(cells) == list(table.cases()), "make it anew: python -m tests.fuzz.table"
    assert table.document(cells) == text


def test_the_cells_are_true() -> None:
    cases = table.cases()
    keys = list(cases)[:: -(-len(cases) // MOST)]
    found = table.carried_out({key: cases[key] for key in keys}, Runner(the_pool))
    cells = table.read(table.FILE.read_text())
    assert found == {key: cells[key] for key in keys}, "make it anew: python -m tests.fuzz.table"


def test_a_table_reads_as_it_was_written() -> None:
    cells = {
        ("Conv1d", "stride", "batch"): "tested",
        ("Conv1d", "stride", "mixed"): "ShapeError: dim 1: [1, 2] | 'no'",
        ("Conv1d", "groups", "channels"): "ShapeError: other",
        ("Linear", "bias", "mixed"): "ShapeError: other",
    }
    text = table.document(cells)
    assert table.read(text) == cells
    assert text.count("ShapeError: other") == 1
    assert "| `DistributedConv1d` | stride | tested | - | - | [1] |" in text


def test_uneven_blocks_that_fit_no_axis_make_no_cell() -> None:
    feature = Feature("Conv1d", "uneven blocks", {}, (2, 2, 7), {2: (1, 6), 0: (0, 1, 1)})
    assert table.case_of(feature, (2, 1, 1)) is None
    split = table.case_of(feature, (1, 1, 2))
    assert split is not None and split.sizes == {2: (1, 6)}
    axis = table.case_of(feature, (2,))
    assert axis is not None and axis.sizes == {2: (1, 6)}


def test_kinds_of_partitions_are_the_columns() -> None:
    for family in families():
        names = [(feature.layer, feature.feature) for feature in family.FEATURES]
        assert len(set(names)) == len(names)
        for feature in family.FEATURES:
            assert feature.layer in family.LAYERS and "|" not in feature.feature
            assert set(family.grids(feature)) <= set(table.KINDS)
