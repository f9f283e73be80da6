"""Inputs whose size changes from call to call, such as in an evaluation beside training."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from benchmarks.resnet import ResNet18
from gpudist.errors import PlanMismatch, ShapeError
from tests.convert.training import assert_gradients, assert_whole
from tests.nn.compare import grid, own_block, random_like_all
from tests.ops.dense import operations
from tests.pool import distributed


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        self.bottom = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        y = self.bottom(nn.functional.max_pool2d(skip, 2))
        y = nn.functional.interpolate(y, size=skip.shape[2:], mode="bilinear")
        return self.head(torch.cat([skip, y], 1))


# The network, the size of training, and sizes of evaluations; dim 2 is split.
NETWORKS: dict[str, Any] = {
    "unet": (UNet, (2, 3, 13, 6), [(2, 3, 20, 6), (1, 3, 9, 8)]),
    "resnet": (partial(ResNet18, 2, 3), (2, 3, 27, 9), [(2, 3, 38, 9), (1, 3, 21, 12)]),
}
CONV = nn.Conv2d(1, 1, 3, padding=1).double()


def uneven_block(x: torch.Tensor, P: Any) -> torch.Tensor:
    sizes = [x.shape[2] // P.size - 1] * (P.size - 1)
    return own_block(x, P, {2: [*sizes, x.shape[2] - sum(sizes)]}, requires_grad=False)


@pytest.mark.parametrize("name", NETWORKS)
@distributed(ranks=[2, 3])
def test_evaluation_within_training(P_world: Any, name: str) -> None:
    make, size, others = NETWORKS[name]
    P_x = P_world.grid(1, 1, P_world.size, *[1] * (len(size) - 3))
    torch.manual_seed(3)
    alone: Any = make().double()
    net = gpudist.distribute(copy.deepcopy(alone), P_x)
    for step, context in enumerate((torch.no_grad, torch.inference_mode)):
        x = random_like_all(size, step)
        for each, given in ((alone, x), (net, uneven_block(x, P_x))):
            each.zero_grad()
            each.train()(given).square().mean().backward()
        assert_gradients(net, alone, active=True)
        for each in (alone, net):
            torch.optim.SGD(each.parameters(), 0.01).step()
            each.eval()
        for other in [others, [size, others[0]]][step]:
            x = random_like_all(other, 5)
            with context():
                assert_whole(net(uneven_block(x, P_x)), alone(x), name)


@distributed(ranks=[1, 2])
def test_only_calls_without_gradients_always_agree(P_world: Any) -> None:
    net = gpudist.distribute(nn.Identity(), P_world.grid(P_world.size, 1))

    def messages(n: int) -> int:
        before = operations(P_world)
        y = net(torch.rand(n + P_world.rank, 2))
        assert len(y) == P_world.size * n + P_world.size // 2
        return operations(P_world) - before - 1

    with torch.no_grad():
        messages(3)
        messages(4)
    assert messages(5) == P_world.size - 1
    with torch.no_grad():
        messages(4)
    assert messages(5) == 0


@distributed(ranks=2, transports=["host"])
def test_no_message_within_a_capture(P_world: Any) -> None:
    net = gpudist.distribute(nn.Identity(), P_world.grid(2, 1))
    with torch.no_grad():
        net(torch.rand(3, 2) + P_world.rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpudist.convert.inputs._is_captured", lambda x: True)
            before = operations(P_world)
            assert net(torch.rand(3, 2)).shape == (6, 2)
            assert operations(P_world) == before + 1
            with pytest.raises(PlanMismatch, match=r"agreed on as \[3, 2\] and is now \[4, 2\]"):
                net(torch.rand(4, 2))


@distributed(ranks=3)
def test_block_of_one_worker_alone_changes(P_world: Any) -> None:
    """The other worker's block is as before, and the third process has none."""
    P_x = grid(P_world, [1, 1, 2, 1], [0, 2])
    net = gpudist.distribute(copy.deepcopy(CONV), P_x)
    for n in (5, 4, 5, 7):
        x = random_like_all((1, 1, 4 + n, 3), n)
        with torch.no_grad():
            assert_whole(net(own_block(x, P_x, {2: [4, n]})), CONV(x), str(n))


@distributed(ranks=2)
def test_whole_tensors_of_another_size_raise(P_world: Any) -> None:
    net: Any = gpudist.distribute(copy.deepcopy(CONV), P_world.grid(1, 1, 2, 1))
    x = random_like_all((1, 1, 7, 3), 0)
    with torch.no_grad():
        net(own_block(x, net.P_x))
        for _ in range(2):
            with pytest.raises(ShapeError, match=r"all 2 .* the same values, .*'whole'"):
                net(x[:, :, :3])
        assert_whole(net(own_block(x, net.P_x)), CONV(x), "after the error")


@pytest.mark.parametrize("changes", [0, 1])
@distributed(ranks=2)
def test_error_with_gradients_names_the_input(P_world: Any, changes: int) -> None:
    net = gpudist.distribute(copy.deepcopy(CONV), P_world.grid(1, 1, 2, 1))
    net(torch.rand(1, 1, 4, 3).double() + P_world.rank)
    rows = 5 if P_world.rank == changes else 4
    with pytest.raises(PlanMismatch, match=rf"rank {changes} of .*\{{'input': 'dynamic'\}}\)"):
        net(torch.rand(1, 1, rows, 3).double() + P_world.rank).sum().backward()


@distributed(ranks=2)
def test_dynamic_with_gradients(P_world: Any) -> None:
    net: Any = gpudist.distribute(
        copy.deepcopy(CONV), P_world.grid(1, 1, 2, 1), inputs={"input": "dynamic"}
    )
    for n in (7, 5, 8):
        x = random_like_all((1, 1, n, 3), n)
        assert_whole(net(own_block(x, net.P_x)), CONV(x), str(n))


@distributed(ranks=2, transports=["host", "loopback", "gloo"])
def test_ranks_in_different_modes_raise(P_world: Any) -> None:
    """One rank waits for the agreement, and the other one's next message is another."""
    net = gpudist.distribute(copy.deepcopy(CONV), P_world.grid(1, 1, 2, 1))
    x = torch.rand(1, 1, 4, 3).double() + P_world.rank
    net(x)
    with pytest.raises(PlanMismatch, match="allgather_data"):
        with torch.no_grad() if P_world.rank else nullcontext():
            net(x)
        P_world.barrier()
