"""Distributed shuffles of pixels and channels equal torch's, for any blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    assert_same_as_sequential,
    grid,
    own_block,
    random_like_all,
)
from tests.pool import distributed

LOOPBACK = ["loopback"]
GRIDS = [(2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2), (2, 2, 2, 1), (1, 2, 1, 4)]


def check(
    layer: str,
    P_x: CartesianPartition,
    factor: int,
    shape: Sequence[int],
    sizes: Cut | None = None,
    agreement: dict[str, Any] | None = None,
) -> None:
    # Only the dims that are not shuffled keep their blocks.
    kept = range(len(shape)) if layer == "ChannelShuffle" else range(len(shape) - 3)
    assert_same_as_sequential(
        lambda: getattr(torch.nn, layer)(factor),
        lambda: getattr(nn, f"Distributed{layer}")(P_x, factor, **(agreement or {})),
        P_x,
        P_x,
        shape,
        sizes=sizes,
        output_sizes={d: blocks for d, blocks in (sizes or {}).items() if d in kept},
        tolerance=0,
    )


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("factor", [1, 2, 3])
@distributed(ranks=8, transports=LOOPBACK)
def test_every_partition(P_world: Partition, factor: int, shape: tuple[int, ...]) -> None:
    """Balanced blocks of channels and features that end within groups, and some at their ends."""
    P_x = grid(P_world, shape, range(8)[-torch.Size(shape).numel() :])
    for channels, *features in ((2, 3, 5), (3, 4, 4), (1, 1, 2)):
        groups = channels * factor * factor
        check("PixelShuffle", P_x, factor, (2, groups, *features))
        check("PixelUnshuffle", P_x, factor, (2, channels, *(factor * n for n in features)))


@distributed(ranks=4, transports=LOOPBACK)
def test_uneven_and_empty_blocks(P_world: Partition) -> None:
    P_rows, P_channels = grid(P_world, [1, 1, 4, 1]), grid(P_world, [1, 3, 1, 1], [3, 1, 0])
    for cut in ([1, 0, 6, 1], [8, 0, 0, 0], [0, 0, 3, 5]):
        check("PixelShuffle", P_rows, 2, (2, 4, 8, 3), {2: cut})
        check("PixelUnshuffle", P_rows, 2, (2, 2, 8, 4), {2: cut})
        check("ChannelShuffle", P_rows, 2, (2, 4, 8, 4), {2: cut})
    for cut in ([1, 7, 0], [0, 0, 8], [3, 3, 2]):
        check("PixelShuffle", P_channels, 2, (2, 8, 3, 3), {1: cut})
        check("PixelUnshuffle", P_channels, 2, (2, 8, 4, 4), {1: cut})


@distributed(ranks=4, transports=LOOPBACK)
def test_any_number_of_leading_dims(P_world: Partition) -> None:
    for layer in ("PixelShuffle", "PixelUnshuffle"):
        check(layer, grid(P_world, [2, 2, 1]), 2, (8, 6, 4))
        check(layer, grid(P_world, [2, 1, 1, 2, 1]), 2, (3, 2, 4, 6, 4), {0: [2, 1]})
    check("ChannelShuffle", grid(P_world, [2, 1, 2]), 3, (3, 6, 5), {0: [0, 3]})


@distributed(ranks=4)
def test_nothing_moves_where_outputs_come_from_own_cells(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 2, 2, 1])
    for layer, shape in (
        (nn.DistributedPixelShuffle(P_x, 2), (2, 4, 3, 5)),
        (nn.DistributedPixelUnshuffle(P_x, 2), (2, 3, 2, 6)),
    ):
        x = torch.randn(shape)
        y = layer(x)
        before = P_world.wire.recorder.lines(last=1)
        assert torch.equal(layer(x), y)
        assert P_world.wire.recorder.lines(last=1) == before


@distributed(ranks=2, transports=LOOPBACK)
def test_an_output_is_a_new_contiguous_tensor(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1, 1, 1])
    x = torch.randn(1, 4, 4, 4)
    for layer in (
        nn.DistributedPixelShuffle,
        nn.DistributedPixelUnshuffle,
        nn.DistributedChannelShuffle,
    ):
        for factor in (1, 2):
            y = layer(P_x, factor)(x)
            assert y.is_contiguous()
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert y.numel() == y.untyped_storage().nbytes() // y.itemsize


@distributed(ranks=4, transports=LOOPBACK)
def test_what_makes_no_sense_is_refused_on_every_rank(P_world: Partition) -> None:
    P_x, P_channels = grid(P_world, [1, 1, 4, 1]), grid(P_world, [1, 4, 1, 1])
    with pytest.raises(ShapeError, match="upscale_factor is 0 but must be at least 1"):
        nn.DistributedPixelShuffle(P_x, 0)
    with pytest.raises(ShapeError, match="downscale_factor is -1"):
        nn.DistributedPixelUnshuffle(P_x, -1)
    with pytest.raises(ShapeError, match="groups is 0"):
        nn.DistributedChannelShuffle(P_x, 0)
    for layer in (nn.DistributedPixelShuffle, nn.DistributedPixelUnshuffle):
        with pytest.raises(PartitionError, match="at least 3 axes"):
            layer(grid(P_world, [2, 2]), 2)
    with pytest.raises(PartitionError, match=r"dim 1: P_x has shape .* one worker along the chan"):
        nn.DistributedChannelShuffle(P_channels, 2)
    x = own_block(random_like_all((2, 6, 5, 4), 1), P_x)
    with pytest.raises(ShapeError, match="dim 1: the global extent 6 is not a multiple of 4"):
        nn.DistributedPixelShuffle(P_x, 2)(x)
    with pytest.raises(ShapeError, match="dim 2: the global extent 5 is not a multiple of 2"):
        nn.DistributedPixelUnshuffle(P_x, 2)(x)
    with pytest.raises(ShapeError, match="dim 1: the global extent 6 is not a multiple of 4"):
        nn.DistributedChannelShuffle(P_x, 4)(x)
