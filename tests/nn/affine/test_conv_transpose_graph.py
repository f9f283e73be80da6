"""The transposed convolution in a graph: messages, networks, double backward, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.nn import DistributedConv1d, DistributedConvTranspose1d, DistributedConvTranspose2d
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.affine.conv_cases import owner as conv_owner, placed
from tests.nn.affine.conv_transpose_cases import F64, owner
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


@pytest.mark.parametrize("window, shape", [((3, 2, 1, 1), (2, 4, 6, 6)), ((2, 2), (2, 4, 6, 6))])
@distributed(ranks=4)
def test_forward_with_split_features_is_one_group_of_messages(
    P_world: Partition, window: Any, shape: Any
) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DistributedConvTranspose2d(P_x, 3, 4, *window, global_shape=(2, 3, 6, 6))
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    before = operations(P_world)
    y = layer(x)
    assert y.shape == shape
    assert operations(P_world) == before + 1
    y.sum().backward()
    assert operations(P_world) == before + 2


@pytest.mark.parametrize("sizes", [None, [5, 1]])
@distributed(ranks=2, transports=["loopback"])
def test_a_block_that_suffices_is_not_copied(P_world: Partition, sizes: list[int] | None) -> None:
    """A kernel as wide as the stride needs no copy, unless input and output are cut differently."""
    P_x = grid(P_world, [1, 1, 2])
    layer = DistributedConvTranspose1d(P_x, 2, 3, 2, 2, dtype=F64)
    x = own_block(random_like_all((1, 2, 6), 1), P_x, {2: sizes} if sizes else None)
    convolved: Any = layer(x).grad_fn
    assert (convolved._saved_input.data_ptr() == x.data_ptr()) == (sizes is None)


@distributed(ranks=4)
def test_a_smaller_batch_needs_no_new_agreement(P_world: Partition) -> None:
    layer = DistributedConvTranspose2d(grid(P_world, [1, 1, 2, 2]), 3, 4, 3, 2, 1)
    layer(torch.randn(5, 3, 3, 3))
    for batch, size in ((5, [11, 11]), (2, [11, 12]), (1, [12, 11]), (5, None)):
        before = operations(P_world)
        assert layer(torch.randn(batch, 3, 3, 3), size).shape[0] == batch
        assert operations(P_world) == before + 1


def two_layers(
    P_world: Partition,
) -> tuple[torch.nn.Module, torch.nn.Module, CartesianPartition, Callable[..., Slices | None]]:
    """Down and up again, with empty blocks between."""
    P_x = grid(P_world, [1, 1, 4], [4, 2, 1, 0])

    def owned(name: str, shape: torch.Size) -> Slices | None:
        layer, name = name.split(".")
        return (owner if layer == "2" else conv_owner)(P_x, (1, 1))(name, shape)

    sequential, layers = build_both(
        lambda: torch.nn.Sequential(
            torch.nn.Conv1d(2, 3, 3, stride=3, dtype=F64),
            torch.nn.Tanh(),
            torch.nn.ConvTranspose1d(3, 2, 4, stride=3, padding=1, output_padding=1, dtype=F64),
        ),
        lambda: torch.nn.Sequential(
            DistributedConv1d(P_x, 2, 3, 3, stride=3, dtype=F64),
            torch.nn.Tanh(),
            DistributedConvTranspose1d(
                P_x, 3, 2, 4, stride=3, padding=1, output_padding=1, dtype=F64
            ),
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
@distributed(ranks=5, transports=["loopback"])
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


def penalize(
    model: torch.nn.Module, x: torch.Tensor, leaves: list[torch.Tensor], power: int
) -> None:
    """Backward of a penalty on gradients."""
    y = model(x).pow(power).sum()
    penalty = torch.zeros((), dtype=F64)
    for gradient in torch.autograd.grad(y, leaves, create_graph=True, allow_unused=True):
        penalty = penalty if gradient is None else penalty + gradient.pow(2).sum()
    if penalty.requires_grad:
        penalty.backward()


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("window", [(2, 2), (3, (2, 3), 1, 1), (1, (7, 1), 0, (6, 0))])
@pytest.mark.parametrize("case", ["features", "both", "disjoint", "features, moved", "all"])
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, window: tuple[Any, ...], of: str) -> None:
    """Double backward also works for blocks that no cell of the input reaches."""
    P_x, P_y, P_w = placed(P_world, case)
    owned = owner(P_w, (P_w.shape[0], P_w.shape[1]))
    sequential, layer = build_both(
        lambda: torch.nn.ConvTranspose2d(5, 4, *window, dtype=F64),
        lambda: DistributedConvTranspose2d(P_x, P_y, P_w, 5, 4, *window, dtype=F64),
        owned,
    )
    whole = random_like_all((2, 5, 1, 3), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        penalize(model, x, [x] if of == "input" else list(model.parameters()), 3)
    where = own_slices(whole.shape, P_x)
    if where is not None or block.grad is not None:
        assert_block_of(block.grad, gradient_of(whole), where, "input")
    assert_parameter_gradients(sequential, layer, owned)


@distributed(ranks=3)
def test_double_backward_on_every_transport(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])
    sequential, layer = build_both(
        lambda: torch.nn.ConvTranspose1d(2, 3, 3, 2, dtype=F64),
        lambda: DistributedConvTranspose1d(P_x, 2, 3, 3, 2, dtype=F64),
        owner(P_x, (1, 1)),
    )
    whole = random_like_all((2, 2, 4), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        penalize(model, x, [x], 3)
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "input")
    assert_parameter_gradients(sequential, layer, owner(P_x, (1, 1)))


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight and bias", "input"])
@pytest.mark.parametrize("case", ["features", "disjoint"])
@distributed(ranks=9, transports=["loopback"])
def test_frozen(P_world: Partition, case: str, frozen: str) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    owned = owner(P_w, (P_w.shape[0], P_w.shape[1]))
    sequential, layer = build_both(
        lambda: torch.nn.ConvTranspose2d(5, 4, 1, 4, output_padding=3, dtype=F64),
        lambda: DistributedConvTranspose2d(P_x, P_y, P_w, 5, 4, 1, 4, output_padding=3, dtype=F64),
        owned,
    )
    for model in (sequential, layer):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    learns = frozen != "input"
    whole = random_like_all((2, 5, 1, 3), 1).requires_grad_(learns)
    block = own_block(whole, P_x, requires_grad=learns)
    sequential(whole).pow(2).sum().backward()
    y = layer(block)
    if y.requires_grad:
        y.pow(2).sum().backward()
    if learns:
        where = own_slices(whole.shape, P_x)
        assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    for name, parameter in layer.named_parameters():
        reference = sequential.get_parameter(name)
        where = owned(name, reference.shape)
        if reference.grad is None:
            assert parameter.grad is None
        elif where is not None:
            assert_block_of(parameter.grad, reference.grad, where, f"gradient of {name}")


@distributed(ranks=4, transports=["loopback"])
def test_weights_that_are_not_finite_spoil_what_they_reach_alone(P_world: Partition) -> None:
    """The third worker's outputs equal the bias, for any weight."""
    P_x = grid(P_world, [1, 1, 4])
    layer = DistributedConvTranspose1d(P_x, 1, 1, 1, 8, output_padding=7)
    with torch.no_grad():
        layer.weight.fill_(torch.inf)
    y = layer(own_block(torch.ones(1, 1, 1), P_x))
    assert torch.isfinite(y).all() == (P_x.rank != 0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@distributed(ranks=4, transports=["loopback"])
def test_autocast_gives_every_block_the_same_dtype(P_world: Partition, dtype: torch.dtype) -> None:
    """Blocks that the cell reaches, that zeros fill, and that are the bias alone."""
    P_x = grid(P_world, [1, 1, 4])
    torch.manual_seed(1)
    sequential = torch.nn.ConvTranspose1d(2, 3, 1, 7, output_padding=6, dtype=dtype)
    torch.manual_seed(1)
    layer = DistributedConvTranspose1d(P_x, 2, 3, 1, 7, output_padding=6, dtype=dtype)
    whole = random_like_all((2, 2, 2), 1).to(dtype)
    block = own_block(whole, P_x)
    with torch.autocast("cpu", torch.bfloat16):
        y_whole, y = sequential(whole), layer(block)
    assert y.dtype == y_whole.dtype == (torch.bfloat16 if dtype == torch.float32 else F64)
    where = own_slices(y_whole.shape, P_x)
    assert_block_of(y.detach(), y_whole.detach(), where, "output", 1e-2)
    y.float().sum().backward()
    assert block.grad is not None and block.grad.shape == block.shape


@distributed(ranks=2, transports=["loopback"])
def test_options_reach_the_parameters(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    layer = DistributedConvTranspose1d(P_x, 2, 3, 3, dtype=torch.bfloat16, device="cpu")
    assert layer.weight.dtype == torch.bfloat16
    assert layer.bias is not None and layer.bias.dtype == torch.bfloat16
    assert layer(torch.randn(2, 2, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert "2, 3, kernel_size=(3,), stride=(1,)" in repr(layer)
    layer = DistributedConvTranspose1d(P_x, 2, 3, 3, bias=False)
    assert list(dict(layer.named_parameters())) == ["weight"]
