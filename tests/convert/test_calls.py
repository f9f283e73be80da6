"""Modules called several times, tensors of one cell, and forwards of several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist import ConversionError, Plan, ShapeError, distribute
from gpudist.nn import DistributedConv2d
from gpudist.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

BOTH = pytest.mark.parametrize("replicate", [True, False])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.act = nn.PReLU(2)
        self.inner = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.conv(x)))
        return torch.add(x, self.inner(F.dropout(y, 0.0, self.training)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2, 1, 1), 0.7))
        self.register_buffer("shift", torch.tensor(0.25))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Pyramid(nn.Module):
    """One block at three resolutions, called twice at the first one, and one head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Conv2d(2, 3, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        fine = self.block(self.block(x))
        middle = self.block(self.pool(fine))
        coarse = self.block(self.pool(middle))
        return [self.head(fine), self.head(middle), self.head(input=coarse)]


@BOTH
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [1, 1, 3, 1]], ids=str)
@distributed(ranks=5, transports=["loopback"])
def test_block_at_several_resolutions(
    P_world: Partition, shape: Sequence[int], replicate: bool
) -> None:
    """Also where blocks of two resolutions have the same shape on some ranks alone."""
    P_x = grid(P_world, shape)
    for extent in (9, 14):
        net = assert_as_alone(
            Pyramid, P_x, [(2, 2, extent, extent)], replicate_parameters=replicate
        )
        assert type(net.block.conv) is DistributedConv2d
        assert net.block.norm.num_batches_tracked == 8 or not P_x.active


@distributed(ranks=2, transports=["loopback"])
def test_repeated_trusted_module(P_world: Partition) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(F.max_pool1d(self.inner(x), 2))

    def trust(plan: Plan) -> None:
        plan.trusted.add("inner")

    assert_as_alone(Twice, grid(P_world, [1, 1, 2]), [(2, 1, 9)], trust)


@distributed(ranks=2, transports=["loopback"])
def test_mode_of_a_repeated_layer(P_world: Partition) -> None:
    """All calls follow the layer: one that is frozen is so in each of them."""
    net: Any = distribute(Pyramid().double(), grid(P_world, [1, 1, 2, 1]))
    net.block.norm.eval()
    net(random_like_all((2, 2, 4, 8), 1))
    assert net.block.norm.num_batches_tracked == 0
    net.train()(random_like_all((2, 2, 4, 8), 1))
    assert net.block.norm.num_batches_tracked == 4


@distributed(ranks=3, transports=["loopback"])
def test_layer_on_two_partitions_is_refused(P_world: Partition) -> None:
    conv = nn.Conv2d(2, 2, 1)
    alone = nn.Sequential(conv, nn.ReLU(), conv)
    plan = Plan()
    plan.repartition("2", (1, 1, 1, 2))
    with pytest.raises(ConversionError, match=r"^2: called with .* for which its weights are"):
        distribute(alone, grid(P_world, [1, 1, 3, 1]), plan)


class OneCell(nn.Module):
    """A convolution whose kernel covers the image, beside the image, its rows and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, (5, 7))
        self.rows = nn.Conv2d(2, 2, (1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.conv(x))
        y = x * gate + self.rows(x)
        return torch.where(y > 0, y - x.mean((2, 3), keepdim=True), gate * 2)


@BOTH
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [1, 1, 3, 1], [2, 1, 1, 2]], ids=str)
@distributed(ranks=5, transports=["loopback"])
def test_one_cell_beside_many(P_world: Partition, shape: Sequence[int], replicate: bool) -> None:
    assert_as_alone(OneCell, grid(P_world, shape), [(3, 2, 5, 7)], replicate_parameters=replicate)


@distributed(ranks=4, transports=["loopback"])
def test_one_cell_of_an_unbalanced_batch(P_world: Partition) -> None:
    """One image and two, where balanced blocks have two and one."""
    P_x = grid(P_world, [2, 1, 1, 2])
    assert P_x.index is not None
    torch.manual_seed(3)
    alone = OneCell().double()
    whole = random_like_all((3, 2, 5, 7), 1)
    images = slice(0, 1) if P_x.index[0] == 0 else slice(1, 3)
    balanced = own_slices(whole.shape, P_x)
    assert balanced is not None
    where = (images, *balanced[1:])
    y = distribute(alone, P_x)(whole[where])
    assert_block_of(y, alone(whole), where, "output", 1e-12)


@distributed(ranks=2)
def test_sizes_that_do_not_fit(P_world: Partition) -> None:
    """As torch, but on every rank: 4 and 3 cells are blocks of 2 and 2, and of 2 and 1."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x + self.conv(x)], 1)

    net = distribute(Sum(), grid(P_world, [1, 1, 2]))
    with pytest.raises(ShapeError, match=r"dim 2: a tensor of 3 cells in blocks \[2, 1\]"):
        net(torch.ones(1, 1, 2))


class Joined(nn.Module):
    """A tensor of one cell can be added, but not put beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(x)], 1)


@distributed(ranks=2, transports=["loopback"])
def test_joined_sizes_that_do_not_fit(P_world: Partition) -> None:
    net = distribute(Joined(), grid(P_world, [1, 1, 2]))
    with pytest.raises(ShapeError, match=r"dim 2: a tensor of 1 cells in blocks \[1, 0\]"):
        net(torch.ones(1, 1, 2))


class Several(nn.Module):
    """Two tensors in, one of them by name, and a dict of a tuple's parts out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.mix = Mix()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, factor: float = 2.0) -> Any:
        value, gate = self.conv(x).chunk(2, dim=1)
        mixed, rest = self.mix(value, gate, scale=3)
        return {"mixed": mixed * mask * factor, "rest": F.max_pool2d(rest, 2)}


class Mix(nn.Module):
    def forward(self, value: torch.Tensor, gate: torch.Tensor, scale: int) -> Any:
        return value * gate.sigmoid() * scale, value + gate


@BOTH
@distributed(ranks=4, transports=["loopback"])
def test_several_tensors(P_world: Partition, replicate: bool) -> None:
    """The mask is of one cell in a dim that is split."""
    P_x = grid(P_world, [1, 1, 2, 2])
    for mask in ((3, 1, 6, 7), (3, 2, 1, 7), (3, 1, 1, 1)):
        shapes = [(3, 2, 6, 7), mask]
        net = assert_as_alone(Several, P_x, shapes, replicate_parameters=replicate)
        assert net.P_y == {"mixed": P_x, "rest": P_x}
    blocks = [own_block(random_like_all(shape, 1), P_x) for shape in shapes]
    by_name = net(mask=blocks[1], x=blocks[0])
    assert torch.equal(by_name["mixed"], net(*blocks)["mixed"])


class WithFacts(nn.Module):
    """A tensor, with what is the same on every worker beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(2.0).view(2, 1, 1))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": x + self.shift, "shift": self.shift, "others": [5, "five"], "none": None}


@distributed(ranks=2, transports=["loopback"])
def test_what_is_no_tensor_on_a_partition(P_world: Partition) -> None:
    alone = WithFacts().double()
    P_x = grid(P_world, [1, 1, 1, 2])
    net = distribute(alone, P_x)
    assert net.P_y == {"y": P_x, "shift": None, "others": [None] * 2, "none": None}
    whole = random_like_all((3, 2, 4, 6), 1)
    expected, found = alone(whole), net(own_block(whole, P_x))
    assert torch.equal(found.pop("y"), own_block(expected.pop("y"), P_x))
    assert torch.equal(found.pop("shift"), expected.pop("shift"))
    assert found == expected


@distributed(ranks=2, transports=["loopback"])
def test_other_inputs_are_refused(P_world: Partition) -> None:
    """An argument that the conversion took at its default, and ones without a name."""

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
            return x * factor

    class Many(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[0]

    class Nothing(nn.Module):
        def forward(self) -> int:
            return 1

    P_x = grid(P_world, [1, 1, 2])
    net = distribute(Kept(), P_x)
    assert torch.equal(net(torch.ones(1, 1, 2)), torch.full((1, 1, 2), 2.0))
    with pytest.raises(ConversionError, match=r"1 arguments and \['factor'\].* for \['x'\]"):
        net(torch.ones(1, 1, 2), factor=3.0)
    with pytest.raises(ConversionError, match=r"called with 2 .* for \['x'\]"):
        net(torch.ones(1, 1, 2), 3.0)
    with pytest.raises(ConversionError, match=r"its forward takes \*tensors"):
        distribute(Many(), P_x)
    with pytest.raises(ConversionError, match="no argument of its forward is without a default"):
        distribute(Nothing(), P_x)
