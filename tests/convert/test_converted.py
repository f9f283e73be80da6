"""What users do with a converted network: copy it, save it, clip it, evaluate it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist import distribute
from gpudist.checkpoint import full_state_dict, load_full_state_dict
from gpudist.nn import DistributedConv2d, DistributedGroupNorm
from gpudist.nn.utils import clip_grad_norm_
from gpudist.partition import Partition
from tests.convert.networks import NETWORKS
from tests.convert.test_calls import Block, OneCell, Pyramid
from tests.convert.training import assert_gradients
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

BOTH = pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
UNET, WHOLE, SPLIT = NETWORKS["unet"][0], (2, 1, 8, 8, 12), [1, 1, 1, 2, 1]


def both(P_world: Partition, replicate: bool) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(3)
    alone = UNET().double()
    return alone, distribute(alone, grid(P_world, SPLIT), replicate_parameters=replicate)


@BOTH
@distributed(ranks=2)
def test_copy(P_world: Partition, replicate: bool) -> None:
    """Learns for itself, and computes the same."""
    _, net = both(P_world, replicate)
    block = own_block(random_like_all(WHOLE, 1), net.P_x)
    expected = net(block)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    y = copied(block)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in net.parameters())


@BOTH
@distributed(ranks=2, transports=["loopback"])
def test_state_of_one_worker_and_back(P_world: Partition, replicate: bool) -> None:
    """The names, shapes and values of the network alone."""
    alone, net = both(P_world, replicate)
    state = full_state_dict(net, to_all=True)
    assert list(state) == list(alone.state_dict())
    assert all(torch.equal(value, alone.state_dict()[key]) for key, value in state.items())
    doubled = {key: value * 2 for key, value in state.items()}
    load_full_state_dict(net, doubled if P_world.rank == 0 else None)
    again = full_state_dict(net, to_all=True)
    assert all(torch.equal(value, doubled[key]) for key, value in again.items())


@BOTH
@distributed(ranks=2, transports=["loopback"])
def test_clipped_gradients(P_world: Partition, replicate: bool) -> None:
    """By the norm of the network alone, weights of PReLU included."""
    alone, net = both(P_world, replicate)
    whole = random_like_all(WHOLE, 1)
    alone(whole).square().mean().backward()
    y = net(own_block(whole, net.P_x))
    (y.square().sum() / (2 * 3 * 8 * 8 * 12)).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    found = clip_grad_norm_(net, 0.01)
    assert expected > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert_gradients(net, alone, active=True)


@pytest.mark.parametrize("reentrant", [True, False])
@BOTH
@distributed(ranks=2, transports=["loopback"])
def test_activation_checkpoints(P_world: Partition, replicate: bool, reentrant: bool) -> None:
    """Of a part with PReLU and a parameter of its own, repeated outside of the forward."""
    torch.manual_seed(3)
    alone = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), Block(), torch.nn.Conv2d(2, 2, 3))
    alone.double()
    net: Any = distribute(alone, grid(P_world, [1, 1, 2, 1]), replicate_parameters=replicate)
    block = net[1]
    net[1] = _Checkpointed(block, reentrant)
    whole = random_like_all((2, 1, 9, 7), 1)
    y_whole = alone(whole)
    cotangent = random_like_all(y_whole.shape, 2)
    y_whole.backward(cotangent)
    y = net(own_block(whole, net.P_x))
    y.backward(cotangent[own_slices(y_whole.shape, net.P_y)])
    net[1] = block
    assert_gradients(net, alone, active=True)


class _Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@BOTH
@distributed(ranks=2, transports=["loopback", "host"])
def test_evaluation(
    P_world: Partition, replicate: bool, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """The messages of the layers alone, none of them for gradients, and their outputs."""
    P_x = grid(P_world, [1, 1, 2, 1])
    layers = (
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.PReLU(4),
        torch.nn.Conv2d(4, 2, 3),
    )
    alone = torch.nn.Sequential(*layers).double().eval()
    net: Any = distribute(alone, P_x, replicate_parameters=replicate)
    options: dict[str, Any] = {"dtype": torch.float64, "replicate_parameters": replicate}
    by_hand = (
        DistributedConv2d(P_x, 1, 4, 3, padding=1, **options),
        DistributedGroupNorm(P_x, 2, 4, **options),
        torch.nn.PReLU(4, dtype=torch.float64),
        DistributedConv2d(P_x, 4, 2, 3, **options),
    )
    plain = torch.nn.Sequential(*by_hand)
    whole = random_like_all((2, 1, 9, 7), 1)
    block = own_block(whole, P_x, requires_grad=False)
    recorder = P_world.wire.recorder
    with mode():
        counts: list[list[int]] = []
        for network in (net, plain):
            counts.append([])
            for _ in range(3):
                before = recorder.count
                y = network(block)
                counts[-1].append(recorder.count - before)
                assert not y.requires_grad
        expected = alone(whole)
        assert_block_of(net(block), expected, own_slices(expected.shape, net.P_y), "output")
    assert counts[0] == counts[1]
    assert counts[0][0] > counts[0][1] == counts[0][2]
    with_gradients = net(block)
    assert_block_of(
        with_gradients.detach(), expected, own_slices(expected.shape, net.P_y), "with gradients"
    )


@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_compiled(P_world: Partition) -> None:
    """In one graph: a repeated block, shared parameters, and a tensor of one cell."""
    for make, shape in ((Pyramid, (2, 2, 8, 8)), (OneCell, (2, 2, 5, 7))):
        torch.manual_seed(3)
        P_x = grid(P_world, [1, 1, 2, 1])
        net: Any = distribute(make().double().eval(), P_x)
        block = own_block(random_like_all(shape, 1), P_x)
        results: list[list[torch.Tensor]] = []
        torch.compiler.reset()
        for network in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
            net.zero_grad()
            y = network(block)
            y = torch.cat([part.flatten() for part in y]) if isinstance(y, list) else y
            y.square().sum().backward()
            results.append([y.detach(), *[p.grad.clone() for p in net.parameters()]])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager)
