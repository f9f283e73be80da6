"""Convolutions as on a GPU give the numbers of the composition, and keep no copy of the block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from examples.networks import UNet3d
from gpudist.nn import DistributedConv2d
from gpudist.nn.affine import conv_with_ghosts
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.planning.hardware import profile_of
from gpudist.planning.rehearsal import DryNetwork, KeptForBackward
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import DISTRIBUTED, F64, owner
from tests.nn.compare import (
    assert_block_of,
    assert_parameter_gradients,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed


@contextmanager
def _made_again(smallest_bytes: int) -> Generator[None, None, None]:
    before = conv_with_ghosts.SMALLEST_BLOCK_BYTES
    conv_with_ghosts.SMALLEST_BLOCK_BYTES = smallest_bytes
    try:
        with as_on_gpu():
            yield
    finally:
        conv_with_ghosts.SMALLEST_BLOCK_BYTES = before


def _layer(P_x: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return DISTRIBUTED[P_x.dim - 2](P_x, *arguments, **options)


def _results(
    P_x: Any, x: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any], way: str
) -> list[torch.Tensor]:
    """Output, gradients, and gradients of gradients."""
    layer = _layer(P_x, arguments, options)
    x = x.detach().requires_grad_()
    with _made_again(0 if way == "with ghosts" else 1 << 40):
        y = layer(x.clone(memory_format=torch.preserve_format))
        learning = [x, *layer.parameters()]
        seed = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).requires_grad_()
        first = torch.autograd.grad(y, learning, seed, create_graph=True)
        plain = torch.autograd.grad(layer(x), learning, seed.detach())
        assert _keeps_ghosts(layer) == (way == "with ghosts")
        squares: Any = sum(g.float().square().sum() for g in first)
        again = torch.autograd.grad(squares, [*learning, seed], materialize_grads=True)
    return [y, *plain, *first, *again]


CASES: dict[str, tuple[list[int], tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "1d": ([1, 1, 4], (2, 3, 6), (3, 4, 3, 1, 1), {}),
    "wide": ([1, 1, 4], (2, 3, 3), (3, 4, 9, 1, 4), {}),
    "strided": ([1, 1, 2, 2], (2, 3, 6, 8), (3, 4, 3, 2, 1), {}),
    "corners": ([1, 1, 2, 2], (2, 4, 5, 6), (4, 6, 3, 1, 1, 1, 2), {"bias": False}),
    "circular": (
        [1, 1, 2, 2], (1, 2, 5, 6), (2, 3, 3), {"padding": 1, "padding_mode": "circular"}
    ),
    "replicated": ([1, 1, 4, 1, 1], (1, 2, 3, 5, 6), (2, 3, 3, 1, 1),
                   {"replicate_parameters": True}),
    "bfloat16": ([1, 1, 4, 1], (2, 3, 6, 8), (3, 4, 3, 1, 1), {"dtype": torch.bfloat16}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@distributed(ranks=4, transports=["host"])
def test_results_are_those_of_the_composition(
    P_world: Partition, name: str, form: torch.memory_format
) -> None:
    shape, block, arguments, options = CASES[name]
    P_x = grid(P_world, shape)
    torch.manual_seed(P_world.rank or 0)
    x = torch.randn(block, dtype=options.get("dtype", torch.float32))
    if len(block) == 4:
        x = x.contiguous(memory_format=form)
    expected = _results(P_x, x, arguments, options, "composed")
    found = _results(P_x, x, arguments, options, "with ghosts")
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize(
    "frozen", ["weight", "bias", "weight and bias", "input", "input and weight"]
)
@distributed(ranks=4, transports=["host"])
def test_frozen(P_world: Partition, frozen: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    owned = owner(P_x, (1, 1))
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1, dtype=F64),
        lambda: DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64),
        owned,
    )
    for model in (sequential, layer):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    whole = random_like_all((2, 3, 6, 7), 1).requires_grad_("input" not in frozen)
    block = own_block(whole, P_x, requires_grad=whole.requires_grad)
    for create_graph in (False, True):
        for t in (whole, block, *sequential.parameters(), *layer.parameters()):
            t.grad = None
        with _made_again(0):
            y_whole, y = sequential(whole), layer(block)
        for out, model, x in ((y_whole, sequential, whole), (y, layer, block)):
            leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
            gradients = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=create_graph)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient.detach()
        if whole.requires_grad:
            where = own_slices(whole.shape, P_x)
            assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
        for name, parameter in layer.named_parameters():
            reference = sequential.get_parameter(name)
            if reference.grad is None:
                assert parameter.grad is None
            else:
                where = owned(name, reference.shape)
                assert_block_of(parameter.grad, reference.grad, where, f"gradient of {name}")
    assert _keeps_ghosts(layer)


@pytest.mark.parametrize("reentrant", [None, False, True])
@distributed(ranks=4, transports=["host"])
def test_two_in_a_row_and_checkpoint(P_world: Partition, reentrant: bool | None) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])

    def owned(name: str, shape: torch.Size) -> Any:
        return owner(P_x, (1, 1))(name.split(".")[1], shape)

    options: dict[str, Any] = {"padding": 1, "dtype": F64}
    sequential, layers = build_both(
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3, stride=2, **options),
            torch.nn.Tanh(),
            torch.nn.Conv2d(3, 2, 3, **options),
        ),
        lambda: torch.nn.Sequential(
            DistributedConv2d(P_x, 2, 3, 3, stride=2, **options),
            torch.nn.Tanh(),
            DistributedConv2d(P_x, 3, 2, 3, **options),
        ),
        owned,
    )
    whole = random_like_all((2, 2, 8, 12), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential(whole).pow(2).sum().backward()
    with _made_again(0):
        y: Any = (
            layers(block)
            if reentrant is None
            else checkpoint(layers, block, use_reentrant=reentrant)
        )
        y.pow(2).sum().backward()
    first, _, last = layers.children()
    assert _keeps_ghosts(first) and _keeps_ghosts(last)
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    assert_parameter_gradients(sequential, layers, owned)


@distributed(ranks=2, transports=["host"])
def test_gradients_of_any_strides(P_world: Partition) -> None:
    """Blocks in channels-last order, and cotangents that are expanded."""
    P_x = grid(P_world, [1, 1, 2, 1])
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1, dtype=F64),
        lambda: DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64),
        owner(P_x, (1, 1)),
    )
    whole = random_like_all((2, 3, 6, 7), 1).requires_grad_()
    sequential(whole).sum().backward()
    where = own_slices(whole.shape, P_x)
    for form in (torch.channels_last, torch.contiguous_format):
        block = own_block(whole, P_x).detach().contiguous(memory_format=form).requires_grad_()
        layer.zero_grad()
        with _made_again(0):
            layer(block).sum().backward()
        assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
        assert_parameter_gradients(sequential, layer, owner(P_x, (1, 1)))
    assert _keeps_ghosts(layer)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=2, transports=["host"])
def test_autocast(P_world: Partition, replicate: bool) -> None:
    """A block is cast to the dtype of the products before its ghosts move.

    If parameters move, they are cast behind their movement, by the composition.
    """
    P_x = grid(P_world, [1, 1, 2])
    torch.manual_seed(P_world.rank or 0)
    x = torch.randn(2, 2, 8)
    for dtype in (torch.bfloat16, torch.float32):
        results: list[list[torch.Tensor]] = []
        for least in (0, 1 << 40):
            layer = _layer(P_x, (2, 3, 3, 1, 1), {"replicate_parameters": replicate})
            block = x.to(dtype).requires_grad_()
            with _made_again(least), torch.autocast("cpu", torch.bfloat16):
                y = layer(block)
            by_hand = "Handwritten" in type(y.grad_fn).__name__
            assert by_hand == (least == 0 and replicate)
            assert y.dtype == torch.bfloat16
            y.sum().backward()
            assert gradient_of(layer.weight).dtype == torch.float32
            results.append([y, gradient_of(block), *map(gradient_of, layer.parameters())])
        for ours, composed in zip(*results, strict=True):
            torch.testing.assert_close(ours, composed, rtol=2e-2, atol=2e-2)


@distributed(ranks=4, transports=["host"])
def test_ghosts_and_parameters_are_one_group_each_way(P_world: Partition) -> None:
    def operations() -> int:
        return P_world.wire.recorder.count

    P_x = grid(P_world, [1, 1, 2, 2])
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    with _made_again(0):
        layer = DistributedConv2d(P_x, 3, 4, 3, padding=1, global_shape=(2, 3, 6, 6))
        y: Any = layer(x)
        assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
        y.sum().backward()
        before = operations()
        y = layer(x)
        assert operations() == before + 1
        y.sum().backward()
        assert operations() == before + 2
        with torch.no_grad():
            assert layer(x).grad_fn is None


@distributed(ranks=2, transports=["host"])
def test_tangents_are_those_of_the_composition(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    layer = _layer(P_x, (3, 4, 3, 1, 1), {})
    found: list[torch.Tensor] = []
    for least in (0, 1 << 40):
        with _made_again(least), forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2, 3, 6, 8), torch.arange(288.0).view(2, 3, 6, 8))
            found += [part for part in forward_ad.unpack_dual(layer(x)) if part is not None]
    assert len(found) == 4
    for y, z in zip(found[:2], found[2:], strict=True):
        assert torch.equal(y, z)


@distributed(ranks=2, transports=["nccl", "host"])
def test_copies_are_not_kept(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    arguments = (3, 4, 3, 1, 1)
    x = torch.randn(2, 3, 16, 8).relu_().requires_grad_()
    kept: list[int] = []
    for least in (0, 1 << 40):
        layer = _layer(P_x, arguments, {"replicate_parameters": True})
        counting = KeptForBackward([x, *layer.parameters()])
        with _made_again(least), counting:
            y = layer(x)
        assert _keeps_ghosts(layer) == (least == 0)
        y.sum().backward()
        kept.append(counting.nbytes)
    # The copy has a row of ghosts on one side, and one of zeros on the other.
    assert kept == [2 * 3 * 1 * 8 * 4, 2 * 3 * 18 * 8 * 4]


def test_a_large_unet_keeps_what_the_sequential_network_keeps() -> None:
    """Half of a volume of 128 x 128 x 128, without data."""
    with torch.device("meta"):
        network = UNet3d(1, 2, width=8, levels=3)
    counting = KeptForBackward(network.parameters())
    with counting:
        y = network(torch.empty(1, 1, 64, 128, 128, device="meta"))
        loss = y.square().mean()
    assert loss.requires_grad
    dry = DryNetwork(network, (1, 1, 128, 128, 128), profile_of("h100"))
    kept = dry.rehearse([1, 1, 2, 1, 1], 0).memory.activations
    assert kept <= 1.02 * counting.nbytes


def _keeps_ghosts(layer: Any) -> bool:
    return list(layer._bindings._results.values())[-1].with_ghosts is not None
