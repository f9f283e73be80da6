"""Interpolation of global tensors: any attributes, any cuts, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import P, S, random
from tests.sbp.tables import assert_everywhere, assert_table

# Options that torch's samples do not have.
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "nearest, by a fraction": ((1, 2, 7, 6), {"scale_factor": (1.5, 0.7)}),
    "bilinear, recomputed": (
        (1, 2, 7, 6),
        {"scale_factor": 1.3, "mode": "bilinear", "recompute_scale_factor": True},
    ),
    "antialias": ((2, 3, 7, 6), {"size": (4, 5), "mode": "bilinear", "antialias": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@distributed(ranks=8, transports=("loopback",))
def test_interpolate(P_world: Partition, name: str) -> None:
    shape, options = CALLS[name]
    assert_everywhere(
        P_world, lambda x: F.interpolate(x, **options), [random(shape)], (5, 4, 2), False
    )


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    rows = [*(([S(d)], S(d)) for d in range(4)), ([P], P)]
    x = random((4, 3, 9, 8))
    calls: list[dict[str, Any]] = [{"scale_factor": 2.0}, {"size": (5, 7), "mode": "bilinear"}]
    for options in calls:
        assert_table(
            P_world, lambda t, given=options: F.interpolate(t, **given), [x], rows, cuts=False
        )
    placement = Placement.of(P_world.create_partition_inclusive(range(2)).grid(2))
    if placement.active:
        for shape in ((0, 2, 4), (0, 2, 4, 4), (0, 2, 4, 4, 2)):
            empty: Any = global_of(random(shape), placement, (S(2),))
            assert F.interpolate(empty, scale_factor=2).shape == (0, 2, *(2 * n for n in shape[2:]))
