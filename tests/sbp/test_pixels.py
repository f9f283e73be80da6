"""Shuffles, patches and sampled images as global tensors: any attributes, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import assert_everywhere, assert_table

# Functions that torch's table of samples does not have.
CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "fold": (lambda x: F.fold(x, (4, 5), 2), (2, 8, 12)),
    "image of patches": (lambda x: F.fold(x, (8, 6), 2, stride=2), (2, 8, 12)),
    "affine": (lambda t: F.affine_grid(t, [3, 2, 4, 5], align_corners=False), (3, 2, 3)),
}


@pytest.mark.parametrize("name", CALLS)
@distributed(ranks=8, transports=("loopback",))
def test_pixels(P_world: Partition, name: str) -> None:
    function, shape = CALLS[name]
    assert_everywhere(P_world, function, [random(shape)], (6, 4, 2), False)


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    x = random((1, 12, 12, 6))
    rows = [([S(1)], S(1)), ([S(2)], S(2)), ([S(3)], S(3)), ([P], P)]
    assert_table(P_world, lambda t: F.pixel_shuffle(t, 2), [x], rows, cuts=False)
    assert_table(P_world, lambda t: F.pixel_unshuffle(t, 2), [x], rows, cuts=False)
    grid = random((1, 9, 8, 2))
    rows = [([S(1), B], S(1)), ([B, S(1)], S(2)), ([B, S(2)], S(3)), ([P, B], P)]
    assert_table(
        P_world, lambda t, g: F.grid_sample(t, g, align_corners=False), [x, grid], rows, cuts=False
    )
