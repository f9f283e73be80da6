"""Convolutions below torch's functions, of global tensors: any attributes, any cuts."""

from __future__ import annotations

import pytest
import torch

from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import random
from tests.sbp.tables import assert_everywhere


@pytest.mark.parametrize("transposed", [False, True])
@distributed(ranks=8, transports=("loopback",))
def test_convolution(P_world: Partition, transposed: bool) -> None:
    """The function that torch's table of samples does not have."""
    options = [2], [1], [1], transposed, [int(transposed)], 1
    shapes = [(2, 2, 6), (2, 3, 3)] if transposed else [(2, 2, 9), (3, 2, 3)]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    assert_everywhere(P_world, lambda x, w: torch.convolution(x, w, None, *options), xs, (6, 4, 2))
