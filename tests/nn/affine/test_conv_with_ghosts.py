"""Convolutions as on a GPU give the numbers of the composition, and keep no copy of the block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from examples.networks import UNet3d
from gpudist.exchange.tracing import Watching
from gpudist.nn.affine import conv_with_ghosts
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.planning.hardware import profile_of
from gpudist.planning.rehearsal import DryNetwork, KeptForBackward
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import DISTRIBUTED
from tests.nn.compare import grid
from tests.nn.in_place import blocks_of_any_size, has_faces
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
    in_place = blocks_of_any_size() if way == "in place" else nullcontext()
    with in_place, _made_again(0 if way == "with ghosts" else 1 << 40):
        y = layer(x.clone(memory_format=torch.preserve_format))
        learning = [x, *layer.parameters()]
        seed = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).requires_grad_()
        first = torch.autograd.grad(y, learning, seed, create_graph=True)
        plain = torch.autograd.grad(layer(x), learning, seed.detach())
        assert _keeps_ghosts(layer) == (way == "with ghosts")
        assert has_faces(layer) == (way == "in place")
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
    # In place, a 16-bit output and gradient are rounded before ghosts are added, and after that.
    narrow = 2e-2 if x.dtype.itemsize == 2 else None
    for way, bound in (("with ghosts", None), ("in place", narrow)):
        found = _results(P_x, x, arguments, options, way)
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z, rtol=bound, atol=bound)


@distributed(ranks=4, transports=["nccl"])
def test_slabs_are_sent_before_the_gradients_of_the_block(P_world: Partition) -> None:
    """On a GPU, one gradient of the weight is computed, from a copy of the block."""
    P_x = grid(P_world, [1, 1, 4, 1])
    x = torch.randn(2, 3, 6, 8, requires_grad=True)
    runs: list[list[torch.Tensor]] = []
    with blocks_of_any_size(), as_on_gpu():
        layer = _layer(P_x, (3, 4, 3, 1, 1), {"replicate_parameters": True})
        parameters = list(layer.parameters())
        for _ in range(2):
            y = layer(x)
            with _Backwards(P_world) as seen:
                runs.append(list(torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))))
    faces = 1 if P_world.rank in (0, 3) else 2
    sent = seen.found[0][2] + 1
    assert seen.found == [
        *[((2, 3, 3, 10), [True, False], sent - 1)] * faces,
        ((2, 3, 8, 10), [True, True], sent),
    ]
    for once, again in zip(*runs, strict=True):
        assert torch.equal(once, again)


class _Backwards(Watching):
    """Notes the shapes of convolutions' inputs, their gradients, and the messages before."""

    def __init__(self, P_world: Partition) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], list[bool], int]] = []
        self._recorder = P_world.wire.recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ == "convolution_backward":
            self.found.append((tuple(args[1].shape), args[-1][:2], self._recorder.count))
        return func(*args, **(kwargs or {}))


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
