"""Networks made distributed without a change compute and learn what they do alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.resnet import BasicBlock
from gpudist.convert import distribute, sequential
from gpudist.nn import DistributedConv2d
from gpudist.nn.placement import placements
from gpudist.partition import Partition
from tests.convert.networks import NETWORKS
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

TOLERANCE = 1e-8
STEPS = 3
CASES = [(name, shape) for name, (_, _, shapes) in NETWORKS.items() for shape in shapes]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
@distributed(ranks=5, transports=["loopback"], timeout_s=120)
def test_trains_as_alone(P_world: Partition, name: str, shape: Sequence[int]) -> None:
    """Some ranks have no part in the network."""
    check_training(P_world, name, shape)


@distributed(ranks=4, transports=["host"], timeout_s=120)
def test_trains_as_alone_in_processes(P_world: Partition) -> None:
    check_training(P_world, "unet", [1, 1, 1, 2, 2])


@distributed(ranks=3, transports=["loopback"])
def test_goes_back_to_one_worker(P_world: Partition) -> None:
    """With the weights of now, in the mode of now, and with the original's frozen parameters."""
    alone = NETWORKS["aspp"][0]().double().eval()
    alone.convs[0].weight.requires_grad_(False)
    net = distribute(alone, grid(P_world, [1, 1, 1, 2], [2, 1]))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    back = sequential(net, root=1)
    assert (back is not None) == (P_world.rank == 1)
    if back is not None:
        assert not back.training
        for (name, found), expected in zip(
            back.named_parameters(), alone.parameters(), strict=True
        ):
            assert torch.equal(found, expected * 2), name
            assert found.requires_grad == expected.requires_grad == (name != "convs.0.weight")


@distributed(ranks=2, transports=["loopback"])
def test_original_is_not_changed(P_world: Partition) -> None:
    """Not its tree, and not its weights when those of the other one are."""
    alone = NETWORKS["unet"][0]()
    tree, state = str(alone), {k: v.clone() for k, v in alone.state_dict().items()}
    net = distribute(alone, grid(P_world, [1, 1, 2, 1, 1]))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert str(alone) == tree
    for key, value in alone.state_dict().items():
        assert torch.equal(value, state[key]), key


@distributed(ranks=2, transports=["loopback"])
def test_module_without_functions_to_replace_is_kept(P_world: Partition) -> None:
    alone = NETWORKS["unet"][0]()
    net: Any = distribute(alone, grid(P_world, [1, 1, 2, 1, 1]))
    assert type(net.down[0]) is torch.nn.Sequential
    alone = torch.nn.Sequential(BasicBlock(2, 4), torch.nn.ReLU())
    net = distribute(alone, grid(P_world, [1, 1, 2, 1]))
    assert type(net[0]) is BasicBlock and type(net[0].conv1) is DistributedConv2d


def check_training(P_world: Partition, name: str, shape: Sequence[int]) -> None:
    """Steps of SGD: outputs, gradients and weights are those of the network alone."""
    make, input_shape, _ = NETWORKS[name]
    torch.manual_seed(3)
    alone = make().double()
    P_x = grid(P_world, shape)
    state = {key: value.clone() for key, value in alone.state_dict().items()}
    drawn = torch.get_rng_state()
    net: Any = distribute(alone, P_x)
    assert torch.equal(torch.get_rng_state(), drawn), "the conversion drew random numbers"
    assert list(dict(net.named_parameters())) == list(dict(alone.named_parameters()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, net)]
    for step in range(STEPS):
        whole = random_like_all(input_shape, step).requires_grad_()
        block = own_block(whole, P_x)
        y_whole, y = alone(whole), net(block)
        assert P_x.active or y.shape == block.shape
        where = own_slices(y_whole.shape, net.P_y)
        assert_block_of(y.detach(), y_whole.detach(), where, f"output of step {step}", TOLERANCE)
        cotangent = random_like_all(y_whole.shape, step + 9) / y_whole.numel()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y_whole.backward(cotangent)
        y.backward(torch.zeros_like(y) if where is None else cotangent[where])
        slices = own_slices(whole.shape, P_x)
        assert_block_of(block.grad, gradient_of(whole), slices, "input gradient", TOLERANCE)
        check_gradients(net, alone, P_x.active)
        for optimizer in optimizers:
            optimizer.step()
    back = sequential(net)
    if P_x.active:
        assert back is not None and type(back) is type(alone)
        trained = alone.state_dict()
        assert list(back.state_dict()) == list(trained)
        for key, value in back.state_dict().items():
            assert_equal_to(value, trained[key], TOLERANCE, f"trained {key}")
        assert any(not torch.equal(value, state[key]) for key, value in trained.items())
    else:
        assert back is None


def check_gradients(net: torch.nn.Module, alone: torch.nn.Module, active: bool) -> None:
    placed, blocks = placements(net), dict(net.named_parameters())
    for key, whole in alone.named_parameters():
        what = f"gradient of {key}"
        if key not in placed:
            if active:
                assert_equal_to(blocks[key].grad, gradient_of(whole), TOLERANCE, what)
        elif (box := placed[key].own_box) is not None:
            assert_block_of(blocks[key].grad, gradient_of(whole), box.slices, what, TOLERANCE)
