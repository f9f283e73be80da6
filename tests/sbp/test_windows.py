"""Convolutions on global tensors: any attributes, any cuts, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.world.partition import Partition
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
    "depthwise": (torch.conv1d, [(2, 4, 9), (4, 1, 3), (4,)], {"groups": 4}),
    "below": (
        lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0], 1),
        [(2, 2, 9), (3, 2, 3)],
        {},
    ),
    "transposed, below": (
        lambda x, w: torch.convolution(x, w, None, [2], [1], [1], True, [1], 1),
        [(2, 2, 6), (2, 3, 3)],
        {},
    ),
    "transposed, 1-D": (F.conv_transpose1d, [(2, 2, 9), (2, 3, 2), (3,)], {"stride": 2}),
    "transposed, 2-D": (
        torch.conv_transpose2d,
        [(2, 2, 6, 5), (2, 3, 3, 4)],
        {"stride": (2, 1), "padding": (1, 2), "output_padding": (1, 0)},
    ),
    "transposed, in groups": (
        torch.conv_transpose2d,
        [(1, 4, 6, 5), (4, 1, 3, 3), (2,)],
        {"groups": 2, "dilation": 2},
    ),
    "transposed, 3-D": (torch.conv_transpose3d, [(1, 2, 4, 3, 3), (2, 2, 2, 2, 2)], {"stride": 2}),
    "3-D": (torch.conv3d, [(1, 2, 5, 4, 3), (2, 2, 3, 3, 3), (2,)], {"padding": 1}),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@distributed(ranks=8, transports=("loopback",))
def test_convolution(P_world: Partition, name: str) -> None:
    function, shapes, options = CONVOLUTIONS[name]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    assert_everywhere(P_world, lambda *t: function(*t, **options), xs, (6, 4, 2), len(xs) == 2)
