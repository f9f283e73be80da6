"""Large results of small plain tensors in converted networks are made in blocks of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.sbp import GlobalTensor, outer, split
from gpudist.world.partition import Partition
from tests.nn.compare import own_block
from tests.pool import distributed

TOKENS = 60


@pytest.fixture(autouse=True)
def _small_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "FEWEST_CELLS", TOKENS**2)


class Masked(nn.Module):
    """Attention of frames to earlier ones, as a video decoder writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.arange(5).repeat_interleave(TOKENS // 5)
        row, column = torch.meshgrid(frames, frames, indexing="ij")
        mask = torch.where(row >= column, 0, -torch.inf).to(x.dtype)
        self.masks = [mask, frames[:, None] == frames]
        return F.scaled_dot_product_attention(x, x, x.sin(), mask[None])


@pytest.mark.parametrize("grid", [(1, 4, 1), (1, 2, 2)], ids=str)
@distributed(ranks=4, transports=["loopback"])
def test_mask_is_made_in_rows(P_world: Partition, grid: tuple[int, ...]) -> None:
    P_x = P_world.create_cartesian_topology_partition(grid)
    alone = Masked()
    net = gpudist.distribute(alone, P_x)
    x = torch.randn(2, TOKENS, 4, generator=torch.Generator().manual_seed(1))
    y = net(own_block(x, P_x))
    torch.testing.assert_close(y.full_tensor(), alone(x))
    for mask, expected in zip(net.masks, alone.masks, strict=True):
        assert isinstance(mask, GlobalTensor)
        assert mask.sbp == (split(0),) * (2 if grid[2] > 1 else 1)
        assert mask.to_local().numel() < expected.numel() // 3
        assert torch.equal(mask.full_tensor(), expected)


class Positions(nn.Module):
    """Pairs of positions that stay whole: few, learned, or as many as there are already."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.ones(TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(TOKENS, dtype=x.dtype)
        some = numbers[:3, None] - numbers[:3]
        learned = self.learned[:, None] - numbers
        there = torch.zeros(TOKENS, TOKENS) + numbers
        assert not any(isinstance(one, GlobalTensor) for one in (some, learned, there))
        return x * learned.sum() + some.sum() + there.sum()


@distributed(ranks=2, transports=["loopback"])
def test_others_stay_whole(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    x = torch.ones(1, TOKENS, 2)
    y = gpudist.distribute(Positions(), P_x)(own_block(x, P_x))
    torch.testing.assert_close(y.full_tensor(), Positions()(x))
