"""Convolutions on global tensors: any attributes, any cuts, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import random
from tests.sbp.tables import assert_everywhere

CONVOLUTIONS: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "1-D": (torch.conv1d, [(2, 2, 11), (4, 2, 3)], {"padding": 1}),
    "2-D": (torch.conv2d, [(2, 2, 7, 6), (3, 2, 3, 3), (3,)], {"padding": 1}),
    "no padding": (torch.conv2d, [(2, 2, 7, 6), (3, 2, 5, 4)], {}),
    "stride": (torch.conv2d, [(1, 2, 9, 8), (3, 2, 3, 2), (3,)], {"stride": 2, "padding": (1, 0)}),
    "dilation": (
        torch.conv2d,
        [(1, 2, 9, 8), (3, 2, 3, 3)],
        {"dilation": (2, 1), "padding": "same"},
    ),
    "same, even": (torch.conv2d, [(1, 2, 7, 6), (3, 2, 4, 2)], {"padding": "same"}),
    "groups": (torch.conv2d, [(2, 4, 5, 6), (4, 2, 3, 3), (4,)], {"groups": 2, "padding": 1}),
    "1x1": (torch.conv2d, [(2, 4, 5, 6), (3, 4, 1, 1), (3,)], {}),
    "3-D": (torch.conv3d, [(1, 2, 5, 4, 3), (2, 2, 3, 3, 3), (2,)], {"padding": 1}),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@distributed(ranks=8, transports=("loopback",))
def test_convolution(P_world: Partition, name: str) -> None:
    function, shapes, options = CONVOLUTIONS[name]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    assert_everywhere(P_world, lambda *t: function(*t, **options), xs, double=len(xs) == 2)
