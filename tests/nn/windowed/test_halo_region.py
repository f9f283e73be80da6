"""A region is the chain of its layers, with one halo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.affine.test_conv_graph import operations
from tests.nn.compare import (
    assert_block_of,
    assert_same_as_sequential,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.test_forward_mode import jvp
from tests.nn.windowed.halo_region_cases import (
    CHAINS_2D,
    F64,
    check,
    conv,
    layers_of,
    owner,
    region,
    sequential,
)
from tests.pool import distributed

NETWORK = (conv(1, (2, 3)), ("Tanh", {}), ("MaxPool1d", {"kernel_size": 2}), conv(1, (3, 2), 4))


@distributed(ranks=4, transports=["loopback"])
def test_pools_over_split_channels(P_world: Partition) -> None:
    pool = {"kernel_size": 3, "stride": 1, "padding": 1}
    chain = [("MaxPool2d", pool), ("Mish", {}), ("AvgPool2d", pool)]
    check(grid(P_world, [1, 2, 2, 1]), chain, (2, 3, 7, 6), {1: [1, 2], 2: [2, 5]})


@distributed(ranks=2, transports=["loopback"])
def test_maxima_that_are_padding_or_tie_are_in_the_same_cells(P_world: Partition) -> None:
    x = torch.full((1, 2, 6, 5), -torch.inf, dtype=F64)
    x[0, 1] = random_like_all((6, 5), 1).round()
    pool = {"kernel_size": 3, "stride": 1, "padding": 1}
    chain = [("MaxPool2d", pool), ("Identity", {}), ("MaxPool2d", pool)]
    check(grid(P_world, [1, 1, 2, 1]), chain, (1, 2, 6, 5), x=x)


@pytest.mark.parametrize(
    "options",
    [{"nested": True}, {"nested": None}, {"shape": "dynamic"}, {"global_shape": (2, 2, 13, 12)}],
)
@distributed(ranks=4, transports=["loopback"])
def test_options(P_world: Partition, options: dict[str, Any]) -> None:
    check(grid(P_world, [1, 1, 2, 2]), CHAINS_2D["pools"], (2, 2, 13, 12), agreement=options)


@distributed(ranks=2, transports=["loopback"])
def test_an_unused_edge_of_a_split_batch_moves_parameters_alone(P_world: Partition) -> None:
    """Only parameters move, or nothing without parameters; the input does not change."""
    P_x = grid(P_world, [2, 1, 1, 1])
    check(P_x, CHAINS_2D["convolutions"], (3, 2, 6, 5))
    pool = {"kernel_size": 2}
    layer = region(P_x, [("MaxPool2d", pool), ("ReLU", {"inplace": True}), ("AvgPool2d", pool)])
    x = torch.randn(1, 2, 8, 8)
    layer(x)
    before, kept = operations(P_world), x.clone()
    layer(x)
    assert operations(P_world) == before and torch.equal(x, kept)


@distributed(ranks=4)
def test_a_chain_is_one_group_of_messages(P_world: Partition) -> None:
    """Forward and backward, where the layers one after the other need one each."""
    P_x = grid(P_world, [1, 1, 2, 2])
    chain = [*CHAINS_2D["convolutions"], ("MaxPool2d", {"kernel_size": 3, "stride": 1})]
    layers = layers_of(P_x, chain)
    x = torch.randn(2, 2, 7, 6, dtype=F64, requires_grad=True)
    for module, groups in ((nn.HaloRegion(P_x, layers), 1), (torch.nn.Sequential(*layers), 4)):
        module(x)
        before = operations(P_world)
        y = module(x)
        assert operations(P_world) == before + groups
        y.sum().backward()
        assert operations(P_world) == before + 2 * groups


@distributed(ranks=2, transports=["loopback"])
def test_parameters_have_the_names_of_a_sequential(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    layers = layers_of(P_x, NETWORK)
    named = torch.nn.Sequential()
    for name, layer in zip("abcd", layers, strict=True):
        named.add_module(name, layer)
    for chain in (torch.nn.Sequential(*layers), named):
        made = nn.HaloRegion(P_x, layers if chain is not named else named)
        assert list(made.state_dict()) == list(chain.state_dict())
        assert list(made.children()) == layers


@distributed(ranks=3, transports=["loopback"])
def test_a_layer_that_is_in_the_chain_twice(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])

    def twice(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        return [*layers, *layers]

    chain = [conv(1, (2, 2)), ("Tanh", {})]
    assert_same_as_sequential(
        lambda: torch.nn.Sequential(*twice(list(sequential(chain)))),
        lambda: nn.HaloRegion(P_x, twice(layers_of(P_x, chain))),
        P_x, P_x, (2, 2, 10), owner(P_x),
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [None, {2: [0, 5, 4]}])
@pytest.mark.parametrize("name", ["convolutions", "pools", "transposed", "padding alone"])
@distributed(ranks=4, transports=["loopback"])
def test_double_backward(P_world: Partition, name: str, sizes: Any) -> None:
    P_x, chain = grid(P_world, [1, 1, 3, 1], [3, 1, 0]), CHAINS_2D[name]
    chain = [layer for layer in chain if layer[0] != "ReLU"]
    owned = owner(P_x)
    both = build_both(lambda: sequential(chain), lambda: region(P_x, chain), owned)
    whole = random_like_all((2, 2, 9, 8), 1).requires_grad_()
    block = own_block(whole, P_x, sizes)
    for model, x in zip(both, (whole, block), strict=True):
        leaves = [x, *model.parameters()]
        y = model(x).pow(2).sum()
        gradients = torch.autograd.grad(y, leaves, create_graph=True, allow_unused=True)
        penalties = [gradient.pow(2).sum() for gradient in gradients if gradient is not None]
        torch.stack(penalties).sum().backward()
    where = own_slices(whole.shape, P_x, sizes)
    if where is not None:
        assert_block_of(block.grad, gradient_of(whole), where, "input", 1e-8)
    for key, reference in both[0].named_parameters():
        if P_x.rank == 0:
            assert_block_of(
                both[1].get_parameter(key).grad,
                gradient_of(reference),
                owned(key, reference.shape),
                key,
                1e-8,
            )


@distributed(ranks=3, transports=["host"])
def test_compiled(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2], [2, 0])
    _, module = build_both(lambda: sequential(NETWORK), lambda: region(P_x, NETWORK), owner(P_x))
    torch.compiler.reset()
    results: list[list[torch.Tensor | None]] = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        x = own_block(random_like_all((2, 2, 9), 1), P_x, {2: [1, 8]})
        function(x).pow(2).sum().backward()
        tensors = [x, *module.parameters()]
        results.append([None if t.grad is None else t.grad.clone() for t in tensors])
    for eager, compiled in zip(*results, strict=True):
        assert (eager is None) == (compiled is None)
        if eager is not None:
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", [True, False])
@distributed(ranks=3, transports=["host"])
def test_forward_mode(P_world: Partition, transform: bool) -> None:
    P_x = grid(P_world, [1, 1, 2], [2, 0])
    both = build_both(lambda: sequential(NETWORK), lambda: region(P_x, NETWORK), owner(P_x))
    whole, tangent = random_like_all((2, 2, 9), 1), random_like_all((2, 2, 9), 2)
    expected = jvp(both[0], whole, tangent, transform).detach()
    block = own_block(tangent, P_x, requires_grad=False)
    actual = jvp(both[1], own_block(whole, P_x), block, transform).detach()
    assert_block_of(actual, expected, own_slices(expected.shape, P_x), "tangent", 1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(ranks=3, transports=["loopback"])
def test_checkpoint(P_world: Partition, use_reentrant: bool) -> None:
    P_x = grid(P_world, [1, 1, 3])

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in region(P_x, NETWORK).named_children():
                self.add_module(name, layer)
            self.region = [nn.HaloRegion(P_x, list(self.children()))]

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.region[0], x, use_reentrant=use_reentrant)

    assert_same_as_sequential(
        lambda: sequential(NETWORK), Checkpointed, P_x, P_x, (2, 2, 9), owner(P_x),
        sizes={2: [0, 8, 1]},
    )  # fmt: skip


@distributed(ranks=2, transports=["loopback"])
def test_frozen_parameters_and_channels_last(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    whole = random_like_all((2, 2, 8, 6), 1)
    both = build_both(
        lambda: sequential(CHAINS_2D["convolutions"]),
        lambda: region(P_x, CHAINS_2D["convolutions"]),
        owner(P_x),
    )
    block = own_block(whole, P_x, requires_grad=False).to(memory_format=torch.channels_last)
    y = both[1].requires_grad_(False)(block)
    assert not y.requires_grad and y.is_contiguous(memory_format=torch.channels_last)
    assert_block_of(y, both[0](whole).detach(), own_slices((2, 2, 8, 6), P_x), "output")


def refused_chain(
    P_x: CartesianPartition, P_other: CartesianPartition
) -> dict[str, tuple[list[torch.nn.Module], type[Exception], str]]:
    own = nn.DistributedConv1d(P_x, 2, 2, 3)
    return {
        "random": ([own, torch.nn.Dropout()], ShapeError, r"layer 1 \(Dropout\)"),
        "parameters": ([torch.nn.PReLU(), own], ShapeError, r"layer 0 \(PReLU\)"),
        "norm": ([own, nn.DistributedBatchNorm1d(P_x, 2)], ShapeError, "DistributedBatchNorm1d"),
        "whole dims": ([nn.DistributedAdaptiveAvgPool1d(P_x, 1)], ShapeError, "AdaptiveAvgPool1d"),
        "softmax": ([own, torch.nn.Softmax(1)], ShapeError, r"layer 1 \(Softmax\)"),
        "plain layer": ([own, torch.nn.Conv1d(2, 2, 3)], ShapeError, r"layer 1 \(Conv1d\)"),
        "region": ([own, nn.HaloRegion(P_x, [own])], ShapeError, r"layer 1 \(HaloRegion\)"),
        "none": ([torch.nn.ReLU()], ShapeError, "none of the layers is distributed"),
        "indices": (
            [nn.DistributedMaxPool1d(P_x, 2, return_indices=True)], ShapeError, "return_indices"
        ),
        "copies": ([nn.DistributedReflectionPad1d(P_x, 1)], ShapeError, "copied padding"),
        "padding mode": (
            [nn.DistributedConv1d(P_x, 2, 2, 3, padding=1, padding_mode="circular")],
            ShapeError,
            "padding_mode 'circular'",
        ),
        "other partition": (
            [own, nn.DistributedConv1d(P_other, 2, 2, 3)],
            PartitionError,
            r"layer 1 \(DistributedConv1d\)",
        ),
    }  # fmt: skip


@distributed(ranks=3, transports=["loopback"])
def test_refused_at_construction_on_every_rank(P_world: Partition) -> None:
    P_x, P_other = grid(P_world, [1, 1, 2]), grid(P_world, [1, 1, 2], [1, 0])
    for layers, error, words in refused_chain(P_x, P_other).values():
        with pytest.raises(error, match=words):
            nn.HaloRegion(P_x, layers)
    grouped = nn.DistributedConv1d(grid(P_world, [1, 2, 1]), 4, 4, 3, groups=2)
    with pytest.raises(PartitionError, match=r"DistributedConv1d, dim 1.*must not split channels"):
        nn.HaloRegion(grid(P_world, [1, 2, 1]), [grouped])


@pytest.mark.parametrize(
    "chain, shape, words",
    [
        ([conv(1, (3, 2))], (2, 2, 8), "layer 0.*DistributedConv1d, dim 1: the input has 2"),
        ([conv(1, (2, 3)), conv(1, (2, 2))], (2, 2, 8), "layer 1.*the input has 3 channels, not 2"),
        ([conv(1, (2, 2), 4), ("AvgPool1d", {"kernel_size": 6})], (2, 2, 8), "layer 1.*kernel 6"),
        (
            [("MaxPool1d", {"kernel_size": 2, "padding": 1, "dilation": 9})],
            (2, 2, 8),
            "layer 0.*padding only",
        ),
        ([("ZeroPad1d", {"padding": (-5, -5)})], (2, 2, 8), "layer 0.*crops more cells"),
    ],
)
@distributed(ranks=2, transports=["loopback"])
def test_refused_at_the_first_call(
    P_world: Partition, chain: Any, shape: Sequence[int], words: str
) -> None:
    P_x = grid(P_world, [1, 1, 2])
    with pytest.raises(ShapeError, match=f"HaloRegion, {words}"):
        region(P_x, chain)(own_block(random_like_all(shape, 1), P_x))
