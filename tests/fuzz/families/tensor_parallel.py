"""Tensor-parallel layers on a line of workers, by both conventions of gradients."""

from __future__ import annotations

import random
from typing import Any

from gpudist.world.partition import Partition
from tests.fuzz.case import Case
from tests.fuzz.drawing import scattered
from tests.nn.tensor_parallel.parallel_attention_cases import EMBED, check_attention
from tests.nn.tensor_parallel.parallel_cases import CONVENTIONS
from tests.nn.tensor_parallel.parallel_linear_cases import check_column, check_row

LAYERS = ("ColumnParallelLinear", "ParallelAttention", "RowParallelLinear")


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    size = random.randint(1, ranks)
    extra: dict[str, Any] = {"convention": random.choice(CONVENTIONS)}
    if layer == "ParallelAttention":
        keys = random.randint(1, 4)
        shape = (random.randint(1, 3), random.randint(1, 6), EMBED)
        extra["heads"] = (keys * random.randint(1, 3), keys)
        extra["is_causal"] = random.random() < 0.5
        if random.random() < 0.6:
            extra["lengths"] = _blocks(random, shape[1], size)
    else:
        shape = (random.randint(1, 6), random.randint(1, 9))
        cut = shape[layer == "ColumnParallelLinear"]
        extra["sizes"] = _blocks(random, cut, size)
        extra["option"] = random.random() < 0.5
    return Case(layer, (size,), shape, seed=random.randint(0, 99), extra=extra)


def check(case: Case, P_world: Partition) -> None:
    P, extra = scattered(P_world, case.grid, case.seed), dict(case.extra)
    if not P.active:
        return
    convention = extra.pop("convention")
    if case.layer == "ParallelAttention":
        heads = extra.pop("heads")
        check_attention(P, convention, heads, case.shape[:2], **extra)
    elif case.layer == "ColumnParallelLinear":
        features = case.shape[0], case.shape[1]
        check_column(P, convention, extra["sizes"], features, gather_output=extra["option"])
    else:
        features = case.shape[0], case.shape[1]
        check_row(P, convention, extra["sizes"], features, parallel=extra["option"])


def _blocks(random: random.Random, extent: int, size: int) -> tuple[int, ...]:
    cuts = sorted(random.randint(0, extent) for _ in range(size - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))
