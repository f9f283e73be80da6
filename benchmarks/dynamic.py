"""Operators with dynamic shapes, compared with operators that agree on a shape once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.case import KIB, Case, Side, is_empty, pattern
from gpudist.ops import Broadcast, SendRecv, zero_volume_tensor
from gpudist.world.partition import Partition

COUNT = KIB  # float32, so 4 KiB
# Shapes of the blocks in consecutive calls, for the cases with changing shapes.
SHAPES = ((COUNT,), (2, COUNT // 2), (4, 4, COUNT // 16), (COUNT, 1))
OPERATORS = {"send_recv": SendRecv, "broadcast": Broadcast}


def cases(ranks: int) -> list[Case]:
    """Return the cases: from rank 0 to rank 1 or to all ranks; bytes are the size of the block."""
    return [
        Case(
            "dynamic", f"{operator}, 4 KiB" + (", four shapes in turn" if changes else ""),
            ranks, 4 * COUNT, {"operator": operator, "changes": changes}, 4 * COUNT,
        )
        for operator in OPERATORS
        for changes in (False, True)
    ]  # fmt: skip


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; the peer has one operator with ``shape="static"`` for each shape."""
    is_broadcast = case.parameters["operator"] == "broadcast"
    P_x = P_world.create_partition_inclusive([0])
    P_y = P_world if is_broadcast else P_world.create_partition_inclusive([1])
    make = OPERATORS[case.parameters["operator"]]
    shapes = SHAPES if case.parameters["changes"] else SHAPES[:1]
    block = torch.from_numpy(pattern(COUNT, 0))
    xs = [block.view(shape) if P_x.active else zero_volume_tensor() for shape in shapes]
    dynamic = make(P_x, P_y, shape="dynamic")
    static = [make(P_x, P_y) for _ in shapes]
    return {
        "gpudist": _in_turn([dynamic] * len(xs), xs, P_y.active),
        "static": _in_turn(static, xs, P_y.active),
    }


def _in_turn(operators: list[Any], xs: list[torch.Tensor], receives: bool) -> Side:
    turns = cycle(range(len(xs)))
    last: list[int] = []

    def call() -> torch.Tensor:
        turn = next(turns)
        last[:] = [turn]
        return operators[turn](xs[turn])

    def is_right(y: Any) -> bool:
        shape = SHAPES[last[0]]
        return np.array_equal(np.asarray(y), pattern(COUNT, 0).reshape(shape))

    right: Callable[[Any], bool] = is_right if receives else is_empty
    return Side(call, right)
