"""Embedding: indices split on ``P_x`` alone, or the table cut by rows and columns."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import torch

from gpudist.world.partition import Partition
from tests.fuzz.case import TOLERANCE, Case
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.affine.embedding_cases import Partitions, check_embedding, indices_of, owned_by
from tests.nn.placing import Placing, draw_placing

LAYERS = ("Embedding",)


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    """The shape is that of the indices; ``table`` has the blocks of rows and of columns."""
    dims = random.randint(1, 3)
    shape = tuple(random.randint(0 if random.random() < 0.05 else 1, 5) for _ in range(dims))
    rows = random.randint(1, 12)
    options: dict[str, Any] = {"num_embeddings": rows, "embedding_dim": random.randint(1, 6)}
    if random.random() < 0.5:
        options["padding_idx"] = random.randint(-rows, rows - 1)
    extra: dict[str, Any] = {}
    free = ranks
    if random.random() < 0.7:
        table = random.randint(1, ranks), random.randint(1, 2)
        if prod(table) <= ranks:
            extra, free = {"table": table}, ranks // prod(table)
    grid = draw_grid(random, dims, range(dims), free)
    sizes = draw_sizes(random, shape, grid, range(dims))
    dtype, seed = draw_dtype(random), random.randint(0, 99)
    return Case(layer, grid, shape, options, sizes, dtype, seed, extra | draw_placing(random))


def check(case: Case, P_world: Partition) -> None:
    options = dict(case.options)
    table = options.pop("num_embeddings"), options.pop("embedding_dim")
    P_x = scattered(P_world, case.grid, case.seed)
    partitions: Partitions = P_x, None, None
    split = options.pop("table", case.extra.get("table"))
    if split is not None:
        rows, columns = split
        P_y = scattered(P_world, (*case.grid, columns), case.seed and case.seed + 1)
        P_w = scattered(P_world, (*case.grid, rows, columns), case.seed and case.seed + 2)
        partitions = P_x, P_y, P_w
    indices = [indices_of(case.shape, table[0], case.seed)]
    dtype = getattr(torch, case.dtype)
    tolerance = TOLERANCE[case.dtype]
    placing = Placing(case.extra, owned_by(partitions))
    check_embedding(
        partitions, table, indices, case.sizes, tolerance, placing=placing, dtype=dtype, **options
    )
