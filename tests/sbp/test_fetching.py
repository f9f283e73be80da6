"""Functions that copy cells of global tensors: any attributes, any cuts, against torch's."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import P, S, random
from tests.sbp.tables import assert_everywhere, assert_table

CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "flip": (lambda x: x.flip(0, -1), (5, 4, 3)),
    "fliplr": (lambda x: torch.fliplr(x).flipud(), (5, 4, 3)),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), (5, 4, 3)),
    "roll windows": (lambda x: torch.roll(x, shifts=(-2, -2), dims=(1, 2)), (2, 8, 6)),
    "roll twice": (lambda x: x.roll((1, 3), (1, 1)), (2, 7)),
    "roll all": (lambda x: x.roll(3), (5, 4)),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)), (2, 7, 6)),
    "pad and crop": (lambda x: F.pad(x, (-3, 2, 4, -5), value=2.0), (2, 7, 6)),
    "pad samples": (lambda x: F.pad(x, (0, 0, 1, 1, 2, 0), "constant", 0.0), (2, 3, 4)),
    "crop": (lambda x: F.pad(x, (-1, -2)), (3, 8)),
    "reflect": (lambda x: F.pad(x, (2, 1, 3, 0), mode="reflect"), (1, 2, 7, 6)),
    "reflect as wide as blocks": (lambda x: F.pad(x, (1, 2), mode="reflect"), (1, 3)),
    "replicate": (lambda x: F.pad(x, (2, 5), mode="replicate"), (2, 2, 6)),
    "circular": (lambda x: F.pad(x, (3, 1, 2, 2), mode="circular"), (1, 2, 7, 6)),
    "circular crop": (lambda x: F.pad(x, (-1, 2), mode="circular"), (2, 2, 6)),
    "replicate and crop to one": (
        lambda x: F.pad(x, (1, 2, -1, -1), mode="replicate"),
        (1, 2, 3, 10),
    ),
    "tile": (lambda x: x.tile(3), (5, 4)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (5, 4)),
    "repeat own dims": (lambda x: x.repeat(2, 3), (5, 4)),
    "repeat interleaved": (lambda x: x.repeat_interleave(3, 1), (5, 4)),
    "repeat all": (lambda x: torch.repeat_interleave(x, 2), (5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@distributed(ranks=8, transports=("loopback",))
def test_copies(P_world: Partition, name: str) -> None:
    function, shape = CALLS[name]
    assert_everywhere(P_world, function, [random(shape)], (8, 5, 3), False)


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    x = random((1, 2, 9, 8))
    rows = [*(([S(d)], S(d)) for d in range(4)), ([P], P)]
    assert_table(P_world, lambda t: t.roll((2, 3), (2, 3)), [x], rows)
    assert_table(P_world, lambda t: t.flip(2, 3), [x], rows)
    padded = [([S(2)], S(2, [5, 3, 4])), ([S(3)], S(3, [4, 3, 2]))]
    assert_table(P_world, lambda t: F.pad(t, (1, 0, 2, 1)), [x], padded, cuts=False)
    assert_table(P_world, lambda t: F.pad(t, (1, 0, 2, 1), "reflect"), [x], padded, cuts=False)
