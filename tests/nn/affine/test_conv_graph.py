"""The distributed convolution in a graph: messages, batches, checkpoints, double backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.nn import DistributedConv1d, DistributedConv2d
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.affine.conv_cases import F64, owner, placed
from tests.nn.compare import (
    Slices,
    assert_block_of,
    assert_parameter_gradients,
    assert_same_as_sequential,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed


def operations(P: Partition) -> int:
    """How many groups of messages this rank has begun so far."""
    return P.wire.recorder.count


@distributed(ranks=4)
def test_forward_of_a_feature_conv_is_one_group_of_messages(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DistributedConv2d(P_x, 3, 4, 3, padding=1, global_shape=(2, 3, 6, 6))
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    before = operations(P_world)
    y = layer(x)
    assert operations(P_world) == before + 1
    y.sum().backward()
    assert operations(P_world) == before + 2


@distributed(ranks=4)
def test_a_smaller_batch_needs_no_new_agreement(P_world: Partition) -> None:
    layer = DistributedConv2d(grid(P_world, [1, 1, 2, 2]), 3, 4, 3, padding=1)
    layer(torch.randn(5, 3, 3, 3))
    for batch in (5, 2, 1, 5, 2):
        before = operations(P_world)
        assert layer(torch.randn(batch, 3, 3, 3)).shape == (batch, 4, 3, 3)
        assert operations(P_world) == before + 1


@distributed(ranks=5, transports=["loopback"])
def test_a_placeholder_that_tells_no_batch_stands_for_the_agreed_one(P_world: Partition) -> None:
    P_x, P_w = grid(P_world, [1, 1, 2]), grid(P_world, [1, 1, 2], [2, 3])
    first, second = (DistributedConv1d(P_x, P_x, P_w, 2, 2, 3, padding=1) for _ in range(2))
    block = torch.randn(3, 2, 4)
    second(block if P_x.active else torch.empty(3, 0))
    y = second(first(block if P_x.active else torch.empty(0)))
    assert y.shape == ((3, 2, 4) if P_x.active else (0,))


@pytest.mark.parametrize("case", ["features", "all"])
@distributed(ranks=9, transports=["loopback"])
def test_without_gradients(P_world: Partition, case: str) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(5, 4, 3, dtype=F64),
        lambda: DistributedConv2d(P_x, P_y, P_w, 5, 4, 3, dtype=F64),
        owner(P_w, (P_w.shape[0], P_w.shape[1])),
    )
    whole = random_like_all((2, 5, 6, 7), 1)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = layer.eval()(own_block(whole, P_x))
            assert not y.requires_grad and y.grad_fn is None
            y_whole = sequential(whole)
            assert_block_of(y, y_whole, own_slices(y_whole.shape, P_y), "output")


@pytest.mark.parametrize("case", ["features", "features, moved", "all", "disjoint"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "weight and bias", "input"])
@distributed(ranks=9, transports=["loopback"])
def test_frozen(P_world: Partition, case: str, frozen: str) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    owned = owner(P_w, (P_w.shape[0], P_w.shape[1]))
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(5, 4, 3, dtype=F64),
        lambda: DistributedConv2d(P_x, P_y, P_w, 5, 4, 3, dtype=F64),
        owned,
    )
    for model in (sequential, layer):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    learns = frozen != "input"
    whole = random_like_all((2, 5, 6, 7), 1).requires_grad_(learns)
    block = own_block(whole, P_x, requires_grad=learns)
    y_whole, y = sequential(whole), layer(block)
    y_whole.pow(2).sum().backward()
    if y.requires_grad:
        y.pow(2).sum().backward()
    if learns:
        where = own_slices(whole.shape, P_x)
        assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    for name, parameter in layer.named_parameters():
        reference = sequential.get_parameter(name)
        if reference.grad is None:
            assert parameter.grad is None
        elif owned(name, reference.shape) is not None:
            where = owned(name, reference.shape)
            assert_block_of(parameter.grad, reference.grad, where, f"gradient of {name}")


def two_layers(
    P_world: Partition,
) -> tuple[torch.nn.Module, torch.nn.Module, CartesianPartition, Callable[..., Slices | None]]:
    """Two convolutions in a row whose blocks do not fit, and the second of which has empty ones."""
    P_x = grid(P_world, [1, 1, 4], [4, 2, 1, 0])

    def owned(name: str, shape: torch.Size) -> Slices | None:
        return owner(P_x, (1, 1))(name.split(".")[1], shape)

    sequential, layers = build_both(
        lambda: torch.nn.Sequential(
            torch.nn.Conv1d(2, 3, 3, stride=2, padding=1, dtype=F64),
            torch.nn.Tanh(),
            torch.nn.Conv1d(3, 2, 3, dtype=F64),
        ),
        lambda: torch.nn.Sequential(
            DistributedConv1d(P_x, 2, 3, 3, stride=2, padding=1, dtype=F64),
            torch.nn.Tanh(),
            DistributedConv1d(P_x, 3, 2, 3, dtype=F64),
        ),
        owned,
    )
    return sequential, layers, P_x, owned


@distributed(ranks=5)
def test_two_in_a_row(P_world: Partition) -> None:
    sequential, layers, P_x, owned = two_layers(P_world)
    assert_same_as_sequential(
        lambda: sequential, lambda: layers, P_x, P_x, (2, 2, 9), owned, batches=[1]
    )


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=5)
def test_checkpoint(P_world: Partition, reentrant: bool) -> None:
    sequential, layers, P_x, owned = two_layers(P_world)
    whole = random_like_all((2, 2, 9), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential(whole).pow(2).sum().backward()
    y = checkpoint(layers, block, use_reentrant=reentrant)
    assert isinstance(y, torch.Tensor)
    y.pow(2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    assert_parameter_gradients(sequential, layers, owned)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=9, transports=["loopback"])
def test_checkpoint_with_split_channels(P_world: Partition, reentrant: bool) -> None:
    P_x, P_y, P_w = placed(P_world, "disjoint")
    owned = owner(P_w, (2, 2))
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(5, 4, 3, dtype=F64),
        lambda: DistributedConv2d(P_x, P_y, P_w, 5, 4, 3, dtype=F64),
        owned,
    )
    whole = random_like_all((2, 5, 6, 7), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential(whole).pow(2).sum().backward()
    y = checkpoint(layer, block, use_reentrant=reentrant)
    assert isinstance(y, torch.Tensor)
    y.pow(2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    assert_parameter_gradients(sequential, layer, owned)


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize(
    "case", ["features", "inputs", "both", "disjoint", "features, moved", "all"]
)
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, of: str, power: int) -> None:
    """A gradient penalty, with empty outputs: a block of two rows has one for two workers."""
    P_x, P_y, P_w = placed(P_world, case)
    owned = owner(P_w, (P_w.shape[0], P_w.shape[1]))
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(5, 4, (2, 3), dtype=F64),
        lambda: DistributedConv2d(P_x, P_y, P_w, 5, 4, (2, 3), dtype=F64),
        owned,
    )
    whole = random_like_all((2, 5, 2, 7), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        leaves = [x] if of == "input" else list(model.parameters())
        gradients = torch.autograd.grad(
            model(x).pow(power).sum(), leaves, create_graph=True, allow_unused=True
        )
        penalty = torch.zeros((), dtype=F64)
        for gradient in gradients:
            penalty = penalty if gradient is None else penalty + gradient.pow(2).sum()
        if penalty.requires_grad:
            penalty.backward()
    if of == "parameters" or power > 1:
        where = own_slices(whole.shape, P_x)
        if where is not None or block.grad is not None:
            assert_block_of(block.grad, gradient_of(whole), where, "input")
    for name, reference in sequential.named_parameters():
        where, actual = owned(name, reference.shape), layer.get_parameter(name).grad
        if reference.grad is not None and (where is not None or actual is not None):
            assert_block_of(actual, reference.grad, where, name)


@distributed(ranks=4)
def test_double_backward_on_every_transport(P_world: Partition) -> None:
    P_x, P_y, P_w = (
        grid(P_world, [1, 2, 1], [0, 3]),
        grid(P_world, [1, 1, 1], [1]),
        grid(P_world, [1, 2, 1]),
    )
    owned = owner(P_w, (1, 2))
    sequential, layer = build_both(
        lambda: torch.nn.Conv1d(4, 2, 3, dtype=F64),
        lambda: DistributedConv1d(P_x, P_y, P_w, 4, 2, 3, dtype=F64),
        owned,
    )
    whole = random_like_all((2, 4, 6), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        if gradient.requires_grad:
            gradient.pow(2).sum().backward()
    assert_parameter_gradients(sequential, layer, owned)


@distributed(ranks=2, transports=["loopback"])
def test_options_reach_the_parameters(P_world: Partition) -> None:
    layer = DistributedConv1d(grid(P_world, [1, 1, 2]), 2, 3, 3, dtype=torch.bfloat16, device="cpu")
    assert layer.weight.dtype == torch.bfloat16
    assert layer.bias is not None and layer.bias.dtype == torch.bfloat16
    x = torch.randn(2, 2, 5, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert "2, 3, kernel_size=(3,)" in repr(layer)
