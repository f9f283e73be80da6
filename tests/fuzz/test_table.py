"""The pages docs/layers.md and tests/fuzz/RESULTS.md agree with the behaviour of the layers."""

from __future__ import annotations

import pytest

from tests.fuzz import table
from tests.fuzz.families import samples
from tests.fuzz.run import Runner
from tests.pool import the_pool

pytestmark = pytest.mark.filterwarnings("ignore")
# Cells that the suite carries out; of a larger table, every second one, or third, ...
MOST = 150


def test_the_file_has_a_cell_for_every_feature() -> None:
    text = table.FILE.read_text()
    cells = table.read(text)
    # A layer may appear in the table later: the contract runs its sample call.
    keys = [key for key in table.cases() if key in cells or key[0] not in samples.LAYERS]
    assert list(cells) == keys, "make it anew: python -m tests.fuzz.table"
    assert table.document(cells) == text
    assert table.matrix(cells) == table.MATRIX.read_text(), "python -m tests.fuzz.table"


def test_the_cells_are_true() -> None:
    cases = table.cases()
    cells = table.read(table.FILE.read_text())
    keys = list(cells)[:: -(-len(cells) // MOST)]
    found = table.carried_out({key: cases[key] for key in keys}, Runner(the_pool))
    assert found == {key: cells[key] for key in keys}, "make it anew: python -m tests.fuzz.table"
