"""Torch's modes and tools around a converted network, and random numbers inside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpudist import distribute
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed
from tests.torchs_group import torchs_group

SHAPE = (2, 2, 9, 8)


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 3, stride=2)
    ).double()


class Dropping(nn.Module):
    """Draws by layers, functions and factories; a part of it is computed once more in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.conv(x), 0.5) + torch.rand(9, 8, dtype=x.dtype)
        return F.dropout2d(y, 0.5) * torch.rand_like(y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.part(x)
        found: Any = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return found


def trained(P_world: Partition, shape: Any, reentrant: bool | None) -> list[torch.Tensor]:
    """Output and gradients, of the second call of one seed."""
    torch.manual_seed(5)
    net: Any = distribute(Dropping(reentrant).double(), grid(P_world, shape))
    x = own_block(random_like_all(SHAPE, 1), net.P_x)
    net(x)
    y = net(x)
    y.square().sum().backward()
    return [y.full_tensor().detach(), net.conv.weight.grad, net.conv.bias.grad]


@pytest.mark.parametrize("reentrant", [None, True, False])
@distributed(ranks=4, transports=["host"])
def test_draws_are_alike_on_every_grid(P_world: Partition, reentrant: bool | None) -> None:
    first = trained(P_world, [1, 1, 1, 1], None)
    for shape in ([1, 1, 2, 2], [1, 1, 3, 1], [2, 1, 1, 2]):
        found = trained(P_world, shape, reentrant)
        for y, expected, what in zip(found, first, ("output", "weight", "bias"), strict=True):
            if P_world.rank == 0:
                assert_equal_to(y, expected, 1e-12, f"{what} on {shape}")


@distributed(ranks=2, transports=["host", "gloo"])
def test_forward_mode(P_world: Partition) -> None:
    alone = small()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1]))
    x, t = random_like_all(SHAPE, 1), random_like_all(SHAPE, 2)
    with fwAD.dual_level():
        expected = fwAD.unpack_dual(alone(fwAD.make_dual(x, t))).tangent
        blocks = [own_block(whole, net.P_x, requires_grad=False) for whole in (x, t)]
        y = net(fwAD.make_dual(*blocks))
        found = fwAD.unpack_dual(y.to_local()).tangent
        assert expected is not None and found is not None
        assert_equal_to(y.like(found).full_tensor(), expected, 1e-10, "tangent")


@distributed(ranks=2, transports=["host"])
def test_transforms_and_batched_gradients_are_refused(P_world: Partition) -> None:
    net: Any = distribute(small(), grid(P_world, [1, 1, 2, 1]))
    x = own_block(random_like_all(SHAPE, 1), net.P_x)
    for _ in range(2):
        for refused in (
            lambda: torch.func.grad(lambda x: net(x).sum().to_local())(x),
            lambda: torch.func.jvp(net, (x,), (x,)),
            lambda: torch.func.vmap(lambda part: net(part[None])[0])(x),
        ):
            with pytest.raises(ShapeError, match=r"torch\.func"):
                refused()
        y: Any = net(x).sum((1, 2, 3))
    with pytest.raises(ShapeError, match="loop over the gradients"):
        torch.autograd.grad(y, x, torch.eye(2, dtype=x.dtype), is_grads_batched=True)


@distributed(ranks=2, transports=["host"])
def test_inference_and_evaluation(P_world: Partition) -> None:
    alone = small().eval()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 1, 2]))
    assert not net.training
    x = random_like_all(SHAPE, 1)
    with torch.inference_mode():
        y = net(own_block(x, net.P_x, requires_grad=False))
        assert y.is_inference()
        assert_equal_to(y.full_tensor(), alone(x), 1e-12, "output")
    y = net(own_block(x, net.P_x, requires_grad=False))
    assert y.requires_grad
    assert_equal_to(y.full_tensor().detach(), alone(x).detach(), 1e-12, "output afterwards")


@distributed(ranks=2, transports=["host"])
def test_graph_that_is_kept(P_world: Partition) -> None:
    """Backward twice through one graph adds the gradients up."""
    net: Any = distribute(small(), grid(P_world, [1, 1, 2, 1]))
    loss = net(own_block(random_like_all(SHAPE, 1), net.P_x)).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    for p, gradient in zip(net.parameters(), once, strict=True):
        assert_equal_to(p.grad, 2 * gradient, 1e-12, "gradient")


@distributed(ranks=4, transports=["host"])
def test_data_parallel_without_sync(P_world: Partition, store_path: str) -> None:
    """Two backwards of which only the second one is averaged over the batch."""
    P_x = grid(P_world, [2, 1, 2, 1])
    alone = small()
    with torchs_group(P_world, store_path):
        mesh: Any = P_x.create_device_mesh([0])
        net: Any = distribute(copy.deepcopy(alone), P_x.along([1, 2, 3]))
        model: Any = DistributedDataParallel(net, process_group=mesh.get_group())
        for step in range(2):
            x = random_like_all((4, *SHAPE[1:]), step)
            alone(x).square().mean().backward()
            block = own_block(x, P_x, requires_grad=False)
            if step == 0:
                with model.no_sync():
                    model(block).square().mean().backward()
            else:
                model(block).square().mean().backward()
        for p, expected in zip(net.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None and expected.grad is not None
            assert_equal_to(p.grad, expected.grad, 1e-10, "gradient")


class Branching(nn.Module):
    """Uses its second layer in every other call only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small(), small()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) + self.second(x) if self.calls % 2 else self.first(x)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
@distributed(ranks=4, transports=["host"])
def test_data_parallel_that_watches_its_outputs(
    P_world: Partition, store_path: str, options: dict[str, Any]
) -> None:
    """Torch passes the outputs through a function, and looks for unused parameters in its graph."""
    P_x = grid(P_world, [2, 1, 2, 1])
    alone: Any = Branching() if "find_unused_parameters" in options else small()
    with torchs_group(P_world, store_path):
        mesh: Any = P_x.create_device_mesh([0])
        net: Any = distribute(copy.deepcopy(alone), P_x.along([1, 2, 3]))
        model: Any = DistributedDataParallel(net, process_group=mesh.get_group(), **options)
        for step in range(3):
            x = random_like_all((4, *SHAPE[1:]), step)
            alone(x).square().mean().backward()
            model(own_block(x, P_x, requires_grad=False)).square().mean().backward()
        for p, expected in zip(net.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None and expected.grad is not None
            assert_equal_to(p.grad, expected.grad, 1e-10, "gradient")


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    return str(tmp_path / "store")
