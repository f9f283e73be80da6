"""Attention in windows of a split image moves the lines of a halo, whatever the blocks are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.geometry.blocks import Blocks
from gpudist.sbp import outer
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

WORKERS, CHANNELS = 4, 2


class Shifted(nn.Module):
    """Attention within shifted windows, as Swin and SwinUNETR write it; dims are channels-last."""

    def __init__(self, window: int, shift: int, is_masked: bool = False) -> None:
        super().__init__()
        self.window, self.shift, self.is_masked = window, shift, is_masked
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, shift = self.window, self.shift
        b, height, width, c = x.shape
        y = F.pad(x, (0, 0, 0, -width % w, 0, -height % w))
        high, wide = y.shape[1:3]
        y = torch.roll(y, (-shift, -shift), (1, 2)) if shift else y
        q, k, v = self.qkv(self.windows(y)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        if self.is_masked:
            scores = scores.view(b, -1, w * w, w * w) + self.mask(high, wide)[None]
            scores = scores.view(-1, w * w, w * w)
        y = (scores.softmax(-1) @ v).view(b, high // w, wide // w, w, w, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(b, high, wide, c)
        y = torch.roll(y, (shift, shift), (1, 2)) if shift else y
        return x + y[:, :height, :width]

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        w, (b, height, width, c) = self.window, x.shape
        x = x.view(b, height // w, w, width // w, w, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, w * w, c)

    def mask(self, height: int, width: int) -> torch.Tensor:
        """Hide cells that were not neighbours before the roll."""
        regions = torch.zeros(1, height, width, 1, dtype=self.qkv.weight.dtype)
        ends = slice(-self.window), slice(-self.window, -self.shift), slice(-self.shift, None)
        for i, rows in enumerate(ends):
            for k, columns in enumerate(ends):
                regions[:, rows, columns] = 3 * i + k
        region = self.windows(regions).squeeze(-1)
        other = region.unsqueeze(1) - region.unsqueeze(2)
        return other.masked_fill(other != 0, -100.0).masked_fill(other == 0, 0.0)


class Grid(nn.Module):
    """Attention of cells that are far apart, as MaxViT writes it; dims are channels-last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, height, width, c = x.shape
        y = x.view(b, 4, height // 4, 4, width // 4, c).permute(0, 2, 4, 1, 3, 5)
        y = y.reshape(-1, 16, c)
        y = F.scaled_dot_product_attention(y, y, y).view(b, height // 4, width // 4, 4, 4, c)
        return F.layer_norm(y.permute(0, 3, 1, 4, 2, 5).reshape(x.shape), (c,))


class Neighbours(nn.Module):
    """Attention of each cell to its neighbours in a dilated window; channels come first."""

    def __init__(self, window: int, dilation: int) -> None:
        super().__init__()
        self.window, self.dilation = window, dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        margin = self.dilation * (self.window // 2)
        cells = F.unfold(x, self.window, self.dilation, margin).unflatten(1, (x.shape[1], -1))
        query = x.flatten(2).unsqueeze(2)
        weights = (query * cells).sum(1, keepdim=True).softmax(2)
        return (weights * cells).sum(2).view(x.shape)


def sent(network: nn.Module, grid: tuple[int, ...], shape: tuple[int, ...]) -> int:
    plan = gpudist.plan_of(network, grid, shape, ranks=range(WORKERS))
    return sum(row.sent_bytes for row in plan.rows)


# Windows that fit the blocks, that do not, and fewer windows than workers.
SHIFTED = [(32, 4, 2), (24, 4, 2), (36, 3, 1), (30, 5, 2), (30, 5, 0), (14, 7, 2), (16, 8, 3)]


@pytest.fixture(autouse=True)
def _masks_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "FEWEST_CELLS", 1)


@pytest.mark.parametrize(("height", "window", "shift"), SHIFTED, ids=str)
def test_bytes_of_shifted_windows(height: int, window: int, shift: int) -> None:
    """Lines move to whole windows and back, and by the shift and back; the mask does not move."""
    width = 2 * window
    network = Shifted(window, shift, is_masked=shift > 0)
    blocks = Blocks(height, WORKERS)
    cuts = [blocks.block(i)[1] for i in range(WORKERS)]
    nearest = [(cut + window // 2) // window * window for cut in cuts]
    to_windows = sum(abs(a - b) for a, b in zip(cuts, nearest, strict=True))
    with_windows = len({*nearest} - {0})
    lines = 2 * to_windows + (WORKERS + with_windows) * shift
    shape = (1, height, width, CHANNELS)
    assert sent(network, (1, WORKERS, 1, 1), shape) == lines * width * CHANNELS * 4


@pytest.mark.parametrize(("window", "dilation"), [(3, 1), (3, 2), (5, 1)], ids=str)
def test_bytes_of_neighbours(window: int, dilation: int) -> None:
    lines = 2 * (WORKERS - 1) * dilation * (window // 2)
    found = sent(Neighbours(window, dilation), (1, 1, WORKERS, 1), (2, CHANNELS, 30, 6))
    assert found == lines * 2 * 6 * CHANNELS * 4


def test_grid_stays_in_rows() -> None:
    """Long rows of channels are whole afterwards, although to split them would cost the same."""
    plan = gpudist.plan_of(Grid(), (1, WORKERS, 1, 1), (1, 32, 8, 64), ranks=range(WORKERS))
    assert plan.rows[-1].outputs == "(split(1),)"
    assert plan.rows[-1].sent_bytes == 0


@pytest.mark.parametrize(("height", "window", "shift"), [*SHIFTED[1:6:2], (22, 5, 2)], ids=str)
@distributed(ranks=4, transports=("loopback",))
def test_shifted_windows(P_world: Partition, height: int, window: int, shift: int) -> None:
    """Results and gradients are those of the sequential network; some heights are padded."""
    P_x = P_world.create_cartesian_topology_partition([1, WORKERS, 1, 1])
    torch.manual_seed(0)
    alone = Shifted(window, shift, is_masked=shift > 0).double()
    network = gpudist.distribute(copy.deepcopy(alone), P_x)
    x = random_like_all((1, height, 9, CHANNELS), 1).requires_grad_()
    expected = alone(x)
    (expected * expected.detach().cos()).sum().backward()
    block = own_block(x, P_x)
    y = network(block)
    assert_equal_to(y.full_tensor(), expected, 1e-10, "result")
    (y * y.detach().cos()).sum().backward()
    assert x.grad is not None
    assert_block_of(block.grad, x.grad, own_slices(x.shape, P_x), "gradient")
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        assert_equal_to(network.get_parameter(name).grad, parameter.grad, 1e-9, name)


@distributed(ranks=4, transports=("loopback",))
def test_neighbours(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1, WORKERS, 1])
    x = random_like_all((2, CHANNELS, 13, 6), 1)
    y = gpudist.distribute(Neighbours(3, 2), P_x)(own_block(x, P_x))
    assert_equal_to(y.full_tensor(), Neighbours(3, 2)(x), 1e-10, "result")
