"""Forward mode through layers: the tangents of the sequential ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

F64 = torch.float64


def networks(P_x: CartesianPartition) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        torch.nn.MaxPool1d(3, 2, 1),
        torch.nn.AvgPool1d(2, 1, ceil_mode=True),
        torch.nn.Upsample(size=7, mode="linear"),
        torch.nn.ConvTranspose1d(3, 2, 3, 2, 1, dtype=F64),
        torch.nn.AdaptiveMaxPool1d(3),
        torch.nn.AdaptiveAvgPool1d(1),
    )
    torch.manual_seed(1)
    distributed = torch.nn.Sequential(
        nn.DistributedConv1d(P_x, 2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        nn.DistributedMaxPool1d(P_x, 3, 2, 1),
        nn.DistributedAvgPool1d(P_x, 2, 1, ceil_mode=True),
        nn.DistributedUpsample(P_x, 7, mode="linear"),
        nn.DistributedConvTranspose1d(P_x, 3, 2, 3, 2, 1, dtype=F64),
        nn.DistributedAdaptiveMaxPool1d(P_x, 3),
        nn.DistributedAdaptiveAvgPool1d(P_x, 1),
    )
    return sequential, distributed


def jvp(
    function: Callable[..., torch.Tensor], x: torch.Tensor, tangent: torch.Tensor, transform: bool
) -> torch.Tensor:
    if transform:
        return torch.func.jvp(function, (x,), (tangent,))[1]
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x, tangent))
        moved = forward_ad.unpack_dual(y).tangent
    assert moved is not None
    return moved


@pytest.mark.parametrize("transform", [True, False])
@distributed(ranks=3, transports=["host", "gloo"])
def test_input(P_world: Partition, transform: bool) -> None:
    """Parameters may not require grad, and one rank takes no part."""
    P_x = grid(P_world, [1, 1, 2], [2, 0])
    sequential, distributed = networks(P_x)
    whole, tangent = random_like_all((2, 2, 9), 1), random_like_all((2, 2, 9), 2)
    expected = jvp(sequential, whole, tangent, transform).detach()
    block = own_block(tangent, P_x, requires_grad=False)
    for learns in (True, False):
        distributed.requires_grad_(learns)
        x = own_block(whole, P_x, requires_grad=learns)
        actual = jvp(distributed, x, block, transform).detach()
        assert_block_of(actual, expected, own_slices(expected.shape, P_x), "tangent", 1e-12)


@distributed(ranks=3, transports=["host"])
def test_norms(P_world: Partition) -> None:
    """Statistics of one worker and of several, with a rank without a part."""
    P_x, shape = grid(P_world, [1, 1, 2], [2, 0]), (2, 4, 6)
    pairs = (
        (torch.nn.BatchNorm1d(4, dtype=F64), nn.DistributedBatchNorm1d(P_x, 4, dtype=F64)),
        (torch.nn.GroupNorm(2, 4, dtype=F64), nn.DistributedGroupNorm(P_x, 2, 4, dtype=F64)),
        (torch.nn.LayerNorm([4, 6], dtype=F64), nn.DistributedLayerNorm(P_x, [4, 6], dtype=F64)),
        (torch.nn.RMSNorm(6, dtype=F64), nn.DistributedRMSNorm(P_x, 6, dtype=F64)),
    )
    whole, tangent = random_like_all(shape, 1), random_like_all(shape, 2)
    block, block_tangent = (own_block(t, P_x, requires_grad=False) for t in (whole, tangent))
    for sequential, layer in pairs:
        expected = jvp(sequential, whole, tangent, False).detach()
        actual = jvp(layer, block, block_tangent, False).detach()
        assert_block_of(actual, expected, own_slices(shape, P_x), "tangent", 1e-10)


@distributed(ranks=3, transports=["host"])
def test_parameters(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2], [2, 0])
    whole = random_like_all((2, 2, 9), 1)
    results: list[torch.Tensor] = []
    for module, x in zip(networks(P_x), (whole, own_block(whole, P_x)), strict=True):
        parameters = dict(module.named_parameters())
        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}

        def of_parameters(
            parameters: dict[str, torch.Tensor],
            module: torch.nn.Module = module,
            x: torch.Tensor = x,
        ) -> torch.Tensor:
            return torch.func.functional_call(module, parameters, (x,))

        results.append(torch.func.jvp(of_parameters, (parameters,), (tangents,))[1].detach())
    expected, actual = results
    assert_block_of(actual, expected, own_slices(expected.shape, P_x), "tangent", 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        (torch.nn.MaxPool1d, nn.DistributedMaxPool1d, (3, 2, 1)),
        (torch.nn.MaxPool1d, nn.DistributedMaxPool1d, (2, 1)),
        (torch.nn.AvgPool1d, nn.DistributedAvgPool1d, (3, 2, 1, False, False)),
        (torch.nn.AdaptiveMaxPool1d, nn.DistributedAdaptiveMaxPool1d, (2,)),
        (torch.nn.AdaptiveAvgPool1d, nn.DistributedAdaptiveAvgPool1d, (2,)),
    ],
)
@distributed(ranks=3, transports=["host"])
def test_backward_of_a_tangent_where_a_rank_has_no_output(
    P_world: Partition, make: tuple[Any, Any, tuple[Any, ...]]
) -> None:
    """The last rank, of three cells; of nine, the ranks differ in the padding that they read."""
    P_x, (of, own, arguments) = grid(P_world, [1, 1, 3]), make
    for cells in (3, 9):
        whole, tangent = random_like_all((2, 2, cells), 1), random_like_all((2, 2, cells), 2)
        block, block_tangent = own_block(whole, P_x), own_block(tangent, P_x, requires_grad=False)
        whole.requires_grad_()
        sequential, distributed = of(*arguments), own(P_x, *arguments)
        for module, x, t in ((sequential, whole, tangent), (distributed, block, block_tangent)):
            jvp(lambda x, of=module: of(torch.tanh(x)), x, t, True).pow(2).sum().backward()
        assert whole.grad is not None
        assert_block_of(block.grad, whole.grad, own_slices(whole.shape, P_x), "gradient", 1e-12)
        P_world.barrier()  # No rank has sent more than the others received.


@distributed(ranks=3, transports=["host"])
def test_backward_of_a_tangent(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2], [2, 0])
    whole, tangent = random_like_all((2, 2, 9), 1), random_like_all((2, 2, 9), 2)
    block, block_tangent = own_block(whole, P_x), own_block(tangent, P_x, requires_grad=False)
    whole.requires_grad_()
    sequential, distributed = networks(P_x)
    for module, x, t in ((sequential, whole, tangent), (distributed, block, block_tangent)):
        jvp(module, x, t, True).pow(2).sum().backward()
    assert whole.grad is not None
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, whole.grad, where, "gradient of the tangent", 1e-12)


@pytest.mark.parametrize("kind", ["classes", "squares"])
@distributed(ranks=3, transports=["host"])
def test_loss(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 2], [2, 0])
    whole, tangent, target = (random_like_all((4, 5), seed) for seed in (1, 2, 3))
    classes = torch.arange(4) % 5
    entropy, squares = nn.DistributedCrossEntropyLoss(P_x), nn.DistributedMSELoss(P_x)
    own_target = own_block(target, P_x, requires_grad=False)

    def sequential(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, classes) if kind == "classes" else F.mse_loss(x, target)

    def distributed(x: torch.Tensor) -> torch.Tensor:
        return entropy(x, classes) if kind == "classes" else squares(x, own_target)

    x, t = (own_block(y, P_x, requires_grad=False) for y in (whole, tangent))
    for transform in (True, False):
        expected = jvp(sequential, whole, tangent, transform)
        torch.testing.assert_close(jvp(distributed, x, t, transform), expected)
    gradient = torch.func.grad(sequential)(whole)
    where = own_slices(whole.shape, P_x)
    assert_block_of(torch.func.grad(distributed)(x), gradient, where, "torch.func.grad")


@distributed(ranks=3, transports=["host"])
def test_linear(P_world: Partition) -> None:
    P_x, P_w = grid(P_world, [1, 1], [2]), grid(P_world, [2, 1], [0, 1])
    layer = nn.DistributedLinear(P_x, grid(P_world, [1, 2], [1, 2]), P_w, 4, 3, dtype=F64)
    x, t = (own_block(random_like_all((5, 4), seed), P_x, requires_grad=False) for seed in (1, 2))
    # y(t) - y(0): the bias has no part in the tangent.
    expected = layer(t) - layer(torch.zeros_like(t))
    torch.testing.assert_close(jvp(layer, x, t, True), expected)


@distributed(ranks=4, transports=["host"])
def test_copied_padding(P_world: Partition) -> None:
    """Blocks that copy cells of others, one of them empty."""
    P_x = grid(P_world, [1, 1, 3], [2, 0, 3])
    options = {"padding_mode": "reflect", "dtype": F64}
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.ReplicationPad1d((4, 1)), torch.nn.Conv1d(2, 3, 3, padding=4, **options)
    )
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        nn.DistributedReplicationPad1d(P_x, (4, 1)),
        nn.DistributedConv1d(P_x, 2, 3, 3, padding=4, **options),
    )
    whole, tangent = random_like_all((2, 2, 2), 1), random_like_all((2, 2, 2), 2)
    x, t = (own_block(y, P_x, requires_grad=False) for y in (whole, tangent))
    for transform in (True, False):
        expected = jvp(sequential, whole, tangent, transform).detach()
        actual = jvp(layers, x, t, transform).detach()
        assert_block_of(actual, expected, own_slices(expected.shape, P_x), "tangent", 1e-12)
