"""Functions that only move cells, of global tensors: any attributes, against torch's."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import random
from tests.sbp.tables import assert_everywhere


def unpooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2))


CALLS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "diff": (lambda x: torch.diff(x, dim=0), [(7, 3)]),
    "diff twice": (lambda x, y: x.diff(2, append=y), [(3, 7), (3, 2)]),
    "no diff": (lambda x, y: x.diff(0, prepend=y) + 0 * y.sum(), [(3, 7), (3, 2)]),
    "narrow": (lambda x: torch.narrow_copy(x, 0, 1, 3), [(5, 2)]),
    "along": (lambda x: x.take_along_dim((x[:1] > 0).long(), 1), [(3, 4)]),
    "tril": (lambda x: x.tril(1), [(2, 5, 6)]),
    "triu": (lambda x: torch.triu(x, diagonal=-1), [(6, 5)]),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), [(4, 3, 5)]),
    "trace": (lambda x: torch.trace(x), [(4, 5)]),
    "grid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), [(4,), (3,)]),
    "grid, xy": (lambda x, y: torch.meshgrid([x, y], indexing="xy"), [(4,), (3,)]),
    "broadcast": (lambda x, y: torch.broadcast_tensors(x, y), [(4, 1), (3,)]),
    "atleast": (lambda x: [torch.atleast_3d(x), *torch.atleast_3d(x[0], x[:, 0])], [(4, 3)]),
    "atleast one": (lambda x: torch.atleast_2d(x[0]), [(4, 3)]),
    "stacks": (lambda x, y: [torch.vstack([x, y]), torch.dstack([x, y])], [(3, 4), (3, 4)]),
    "stack": (lambda x, y: torch.hstack([x, y]), [(3, 4), (3, 2)]),
    "columns": (lambda x, y: torch.column_stack([x, y]), [(3, 4), (3,)]),
    "cuts": (lambda x: [*x.hsplit(2), *torch.vsplit(x, (1, 2)), *x.unsafe_chunk(2)], [(3, 4)]),
    "rot90": (lambda x: [torch.rot90(x, k, (0, 1)) for k in range(-1, 3)], [(3, 4, 2)]),
    "unpool": (lambda x: unpooled(x), [(4, 3, 4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@distributed(ranks=8, transports=("loopback",))
def test_rearrangement(P_world: Partition, name: str) -> None:
    function, shapes = CALLS[name]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    assert_everywhere(P_world, function, xs, (6, 4, 2), False)
