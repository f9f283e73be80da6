"""No layer sends, keeps or holds in flight more than the table of costs says."""

from __future__ import annotations

import pytest

from gpudist.nn.layer_table import LAYERS
from tests.nn.contract import Grid, grids
from tests.nn.costs import Costs, compare, read_table

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = {row.name: row for row in LAYERS}
TABLE = read_table()


def test_every_layer_and_grid_is_in_the_table() -> None:
    assert {(row.name, shape) for row in LAYERS for shape in grids(row, every=False)} <= set(TABLE)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "shape"), TABLE, ids=lambda part: str(part).replace(" ", ""))
def test_costs_are_not_higher_than_in_the_table(name: str, shape: Grid) -> None:
    assert not compare(ROWS[name], shape, TABLE[name, shape])


def test_more_of_anything_is_found() -> None:
    before = Costs([4, 4, 0], [96, 96, 0], [1, 1, 0], 100, 20)
    assert not before.excess(before)
    assert not Costs([4, 3, 0], [96, 90, 0], [1, 1, 0], 90, 30).excess(before)
    worse = Costs([4, 5, 0], [96, 96, 1], [2, 1, 0], 101, 20)
    assert [text.split(":")[0] for text in worse.excess(before)] == [
        "messages", "size_bytes", "in_flight", "kept_bytes",
    ]  # fmt: skip
