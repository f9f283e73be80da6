"""The norm of gradients over all workers, each cell counted once."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from gpudist.errors import ShapeError
from gpudist.nn import DistributedConv2d, DistributedLinear, utils
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, random_like_all
from tests.nn.parameters import replicated_cases
from tests.nn.parameters.replicated_cases import batches, loss_of, network, sequential_network
from tests.pool import distributed

F64 = torch.float64


def both(P_world: Partition, replicate: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Networks with the same gradients: of a convolution, a linear layer with blocks, and one that
    every rank holds.
    """
    P_x, P_row = grid(P_world, [1, 1, 2, 2]), grid(P_world, [1, 2])
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, dtype=F64),
        torch.nn.Linear(5, 7, dtype=F64),
        torch.nn.PReLU(3, dtype=F64),
    )
    options: dict[str, Any] = {"dtype": F64, "replicate_parameters": replicate}
    model = torch.nn.Sequential(
        DistributedConv2d(P_x, 2, 3, 3, **options),
        DistributedLinear(P_row, grid(P_world, [1, 1]), P_row, 5, 7, **options),
        torch.nn.PReLU(3, dtype=F64),
    )
    placed = placements(model)
    for i, (name, whole) in enumerate(sequential.named_parameters()):
        parameter = model.get_parameter(name)
        whole.grad = random_like_all(whole.shape, i)
        placement = placed.get(name)
        if placement is None:
            parameter.grad = whole.grad.clone()
        elif placement.own_box is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad = whole.grad[placement.own_box.slices].clone()
    return sequential, model


def assert_same_gradients(sequential: torch.nn.Module, model: torch.nn.Module) -> None:
    placed = placements(model)
    for name, parameter in model.named_parameters():
        whole, placement = sequential.get_parameter(name).grad, placed.get(name)
        assert whole is not None
        if placement is not None and placement.own_box is None:
            assert parameter.numel() == 0
            continue
        expected = whole if placement is None else whole[placement.own_box.slices]  # pyright: ignore
        assert_equal_to(parameter.grad, expected, 1e-12, name)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=5, transports=["loopback"])
def test_clip_grad_norm(
    P_world: Partition,
    replicate: bool,
    norm_type: float,
    max_norm: float,
    foreach: bool | None,
) -> None:
    """Rank 4 has no part in the distributed layers."""
    sequential, model = both(P_world, replicate)
    expected = torch.nn.utils.clip_grad_norm_(sequential.parameters(), max_norm, norm_type)
    total = utils.clip_grad_norm_(model, max_norm, norm_type, foreach=foreach)
    assert_equal_to(total, expected, 1e-12, "norm")
    bits = total.view(torch.int64).item()
    assert P_world.allgather_data([int(bits)]) == [[bits]] * 5
    assert_same_gradients(sequential, model)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@distributed(ranks=4)
def test_gradients_that_are_no_numbers(P_world: Partition, value: float, norm_type: float) -> None:
    """Only the last worker, which has the block, sees the NaN or infinity."""
    _, model = both(P_world, False)
    linear = DistributedLinear(
        grid(P_world, [1, 1]), grid(P_world, [1, 4]), grid(P_world, [4, 1]), 5, 8, dtype=F64
    )
    linear.weight.grad = torch.ones_like(linear.weight)
    if P_world.rank == 3:
        linear.weight.grad[0, 0] = value
    model.append(linear)  # pyright: ignore
    with pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    assert (linear.weight.grad == 1).any()
    total = utils.clip_grad_norm_(model, 1.0, norm_type)
    assert math.isnan(total) if math.isnan(value) else math.isinf(total)


@distributed(ranks=2, transports=["loopback"])
def test_gradients_that_there_are_none_of(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1])
    layer = DistributedLinear(P_x, 3, 2, dtype=torch.bfloat16)
    total = utils.clip_grad_norm_(layer, 1.0)
    assert total == 0 and total.dtype == torch.float32


@distributed(ranks=1, transports=["loopback"])
def test_sequential_modules_too(P_world: Partition) -> None:
    layer, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for one in (layer, other):
        one.weight.grad = torch.arange(6.0).view(2, 3)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    assert_equal_to(utils.clip_grad_norm_(layer, 1.0), expected, 1e-6, "norm")
    assert_equal_to(layer.weight.grad, cast(Any, other.weight.grad), 1e-6, "gradient")


@distributed(ranks=1, transports=["loopback"])
def test_what_is_refused(P_world: Partition) -> None:
    layer = DistributedLinear(grid(P_world, [1, 1]), 3, 2)
    with pytest.raises(ShapeError, match="pass the module"):
        utils.clip_grad_norm_(layer.parameters(), 1.0)  # pyright: ignore
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ShapeError, match="norm_type"):
            utils.clip_grad_norm_(layer, 1.0, norm_type)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_after_a_fused_backward(P_world: Partition, replicate: bool) -> None:
    """Steps of a network whose parameters move together, clipped as the sequential one's."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, replicate_parameters=replicate), sequential_network()
    for seed in (1, 2):
        norms: list[torch.Tensor] = []
        clips = torch.nn.utils.clip_grad_norm_, utils.clip_grad_norm_
        for one, clip, x in zip((sequential, model), clips, batches(P_x, seed), strict=True):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss_of(one, x).backward()
            given: Any = one.parameters() if one is sequential else one
            norms.append(clip(given, 0.5))
            optimizer.step()
        assert norms[0] > 0.5
        assert_equal_to(norms[1], norms[0], 1e-10, "norm")
        replicated_cases.assert_same_gradients(model, sequential, P_x)
