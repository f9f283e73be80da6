"""Large results of small plain tensors in converted networks are made where they are needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.sbp import GlobalTensor, explain, outer, split
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
        frames += 1
        return F.scaled_dot_product_attention(x, x, x.sin(), mask[None])


@pytest.mark.parametrize("grid", [(1, 4, 1), (1, 2, 2)], ids=str)
@distributed(ranks=4, transports=["loopback"])
def test_mask_is_made_in_rows(P_world: Partition, grid: tuple[int, ...]) -> None:
    P_x = P_world.create_cartesian_topology_partition(grid)
    alone = Masked()
    net = gpudist.distribute(copy.deepcopy(alone), P_x)
    x = torch.randn(2, TOKENS, 4, generator=torch.Generator().manual_seed(1))
    y = net(own_block(x, P_x))
    torch.testing.assert_close(y.full_tensor(), alone(x))
    for mask, expected in zip(net.masks, alone.masks, strict=True):
        assert isinstance(mask, outer.OuterTensor) and mask.dtype == expected.dtype
        rows = mask.rows()
        assert isinstance(rows, GlobalTensor)
        assert rows.sbp == (split(0),) * (2 if grid[2] > 1 else 1)
        assert rows.to_local().numel() < expected.numel() // 3
        assert torch.equal(rows.full_tensor(), expected)
        assert torch.equal(mask.whole(), expected)


class Chosen(nn.Module):
    """A function of a mask added to values that are split along any dim."""

    def __init__(self, chain: Any) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS, dtype=x.dtype)
        found = self.chain(places[:, None] - places)
        return x + (found if found.dim() < 3 else found.movedim(-1, 1).mT)


# Functions of a matrix of pairs of places, and whether their cells are made where they are added.
CHAINS: dict[str, tuple[Any, bool]] = {
    "elementwise": (lambda m: m.masked_fill(m != 0, -9).masked_fill(m == 0, 1.5), True),
    "views": (lambda m: m[None].expand(2, -1, -1)[:, :, None].squeeze(2), True),
    "part": (lambda m: m.abs()[:, 3].unsqueeze(1).expand(-1, TOKENS).t().contiguous(), False),
    "cast": (lambda m: (m > 2).float().type_as(m).to(m.dtype), True),
    "view of repeated dims": (lambda m: m.view(-1).view(TOKENS, TOKENS), False),
    "sum": (lambda m: m + m.sum(1, keepdim=True), False),
    "sorted": (lambda m: torch.cat([m, m]).sort(0)[0][::2], False),
}


def written(m: torch.Tensor) -> torch.Tensor:
    """Write to a mask and to a view of it: both change, and what was computed before does not."""
    before, view = m * 2, m[1:, None]
    view += 1
    m[0] = 7
    m.masked_fill_(m > 50, 0)
    return m + before + m.t().sum() + view[:, 0].sum(0)


CHAINS["written"] = (written, False)


@pytest.mark.parametrize("name", CHAINS)
@distributed(ranks=3, transports=["loopback"])
def test_functions_of_masks(P_world: Partition, name: str) -> None:
    """Results are torch's for any split, also with a rank outside the partition."""
    chain, is_made_there = CHAINS[name]
    x = torch.randn(2, TOKENS, TOKENS, dtype=torch.float64)
    x = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    for grid in ([2, 1, 1], [1, 2, 1], [1, 1, 2]):
        P_x = P_world.create_partition_inclusive([2, 0]).create_cartesian_topology_partition(grid)
        with explain() as lines:
            y = gpudist.distribute(Chosen(chain), P_x)(own_block(x, P_x))
        expected = Chosen(chain)(x)
        if P_x.active:
            torch.testing.assert_close(y.full_tensor(), expected)
        if is_made_there:
            assert all(line.endswith("; 0 bytes boxed") for line in lines), lines


class Held(nn.Module):
    """Changes a mask while there are views of it, which a rank may free before."""

    def __init__(self, frees: bool) -> None:
        super().__init__()
        self.frees = frees

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS, dtype=x.dtype)
        mask = places[:, None] - places
        freed, used = [mask.view(TOKENS // 4, 4, TOKENS)], mask[TOKENS // 4 :]
        if self.frees:
            freed.clear()
        mask += x[0]
        return x + mask.abs() + used.sum(0)


@distributed(ranks=2, transports=["loopback"])
def test_a_rank_may_free_views_before_others(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    x = torch.linspace(0, 1, TOKENS * TOKENS, dtype=torch.float64).view(1, TOKENS, TOKENS)
    net = gpudist.distribute(Held(P_world.rank == 0), P_x)
    block, whole = own_block(x, P_x).requires_grad_(), x.clone().requires_grad_()
    y, expected = net(block), Held(True)(whole)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert block.grad is not None and whole.grad is not None
    torch.testing.assert_close(block.grad, own_block(whole.grad, P_x))


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
        kinds = GlobalTensor, outer.OuterTensor
        assert not any(isinstance(one, kinds) for one in (some, learned, there))
        return x * learned.sum() + some.sum() + there.sum()


@distributed(ranks=2, transports=["loopback"])
def test_others_stay_whole(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    x = torch.ones(1, TOKENS, 2)
    y = gpudist.distribute(Positions(), P_x)(own_block(x, P_x))
    torch.testing.assert_close(y.full_tensor(), Positions()(x))


class OfCopies(nn.Module):
    """A mask of positions that the network makes like its input, as torchvision's Swin does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.new_zeros(TOKENS) + torch.arange(TOKENS, dtype=x.dtype)
        apart = places.unsqueeze(1) - places
        self.mask = apart.masked_fill(apart.abs() > 3, -100.0)
        return x + self.mask


@distributed(ranks=2, transports=["loopback"])
def test_masks_of_copies(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    x = torch.linspace(0, 1, TOKENS * TOKENS).view(1, TOKENS, TOKENS).requires_grad_()
    net, alone = gpudist.distribute(OfCopies(), P_x), OfCopies()
    with explain() as lines:
        y = net(own_block(x, P_x))
    assert isinstance(net.mask, outer.OuterTensor)
    assert all(line.endswith("; 0 bytes boxed") for line in lines), lines
    torch.testing.assert_close(y.full_tensor(), alone(x))
    assert torch.equal(net.mask.whole(), alone.mask)


@distributed(ranks=2, transports=["loopback"])
def test_autocast(P_world: Partition) -> None:
    """Masks in single precision are made as without autocast; others by torch at once."""
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    x = torch.linspace(0, 1, TOKENS * TOKENS).view(1, TOKENS, TOKENS)
    net, alone = gpudist.distribute(OfCopies(), P_x), OfCopies()
    low = gpudist.distribute(Chosen(lambda m: m.bfloat16().exp()), P_x)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = net(own_block(x, P_x)), alone(x)
        z, other = low(own_block(x, P_x)), Chosen(lambda m: m.bfloat16().exp())(x)
    assert isinstance(net.mask, outer.OuterTensor)
    assert net.mask.dtype == alone.mask.dtype and z.dtype == other.dtype
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(z.full_tensor(), other)
