"""Layers without a family of their own: their sample calls, on any grid of all ranks."""

from __future__ import annotations

import importlib
import pkgutil
import random
from pathlib import Path

from gpudist.nn import LAYERS as ROWS
from gpudist.world.partition import Partition
from tests.fuzz.case import Case
from tests.fuzz.drawing import draw_grid, scattered
from tests.nn.contract import Pair, same_as_sequential

_others = [
    importlib.import_module(f"{__package__}.{module.name}")
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name != "samples"
]
_taken = {name for family in _others for name in family.LAYERS}
_rows = {row.name.removeprefix("Distributed"): row for row in ROWS}
LAYERS = tuple(sorted(_rows.keys() - _taken))


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    shape = _rows[layer].inputs[0].shape
    grid = draw_grid(random, len(shape), range(len(shape)), ranks)
    return Case(layer, grid, shape, seed=random.randint(0, 99))


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    same_as_sequential(Pair(_rows[case.layer], P_x))
