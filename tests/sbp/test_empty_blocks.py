"""Functions of global tensors of which some workers have no cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.sbp import Placement, broadcast, split
from gpudist.world.partition import Partition
from tests.pool import distributed

T = torch.Tensor


def numbers(*shape: int) -> T:
    count = torch.Size(shape).numel()
    return torch.linspace(0, 1 + count, count, dtype=torch.float64).sin().view(shape)


IMAGE, ROWS = (1, 3, 6, 6), (1, 2, 4, 6)
Function = Callable[..., T]
# Each function with the shapes of its tensors, all of which learn.
FUNCTIONS: dict[str, tuple[Function, Sequence[tuple[int, ...]]]] = {
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [IMAGE, (4, 3, 3, 3), (4,)],
    ),
    "strided convolution": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        [IMAGE, (4, 3, 2, 2), (4,)],
    ),
    "depthwise convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=3),
        [IMAGE, (3, 1, 3, 3), (3,)],
    ),
    "transposed convolution": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [IMAGE, (3, 4, 3, 3), (4,)],
    ),
    "convolutions": (
        lambda x, w, b, v, c: F.conv2d(F.conv2d(x, w, b, padding=1).tanh(), v, c, padding=1),
        [IMAGE, (4, 3, 3, 3), (4,), (3, 4, 3, 3), (3,)],
    ),
    "linear": (F.linear, [IMAGE, (5, 6), (5,)]),
    "bilinear": (F.bilinear, [(1, 6), (1, 6), (4, 6, 6), (4,)]),
    "addmm": (torch.addmm, [(5,), (1, 6), (6, 5)]),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [IMAGE, (3,), (3,)],
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [IMAGE, (3,), (3,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, [6], w, b), [IMAGE, (6,), (6,)]),
    "rms norm": (lambda x, w: F.rms_norm(x, [3, 6, 6], w), [IMAGE, (3, 6, 6)]),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [IMAGE]),
    "average pool": (lambda x: F.adaptive_avg_pool2d(x, 2), [IMAGE]),
    "attention": (F.scaled_dot_product_attention, [ROWS, ROWS, ROWS]),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [ROWS, ROWS, ROWS],
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [IMAGE]),
    "cat": (lambda x, y: torch.cat([x, y], 1), [IMAGE, IMAGE]),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"), [IMAGE]),
    "softmax": (lambda x: x.softmax(1), [IMAGE]),
    "prelu": (F.prelu, [IMAGE, (3,)]),
    "affine": (lambda x, w, b: torch.lerp(x, w, b), [IMAGE, (3, 6, 6), (6,)]),
    "loss": (lambda x, y: F.mse_loss(x, y) + F.cosine_similarity(x, y).sum(), [IMAGE, IMAGE]),
    "cumulative sum": (lambda x: x.cumsum(2), [IMAGE]),
    "flat": (lambda x, w: F.linear(x.flatten(1), w), [IMAGE, (4, 108)]),
}
LAYOUTS = {
    (2,): [(split(0),)],
    (5,): [(split(1),)],
    (2, 2): [(split(0), split(2)), (split(1), split(0))],
}


@distributed(ranks=5, transports=("loopback",))
def test_every_function(P_world: Partition) -> None:
    for grid in LAYOUTS:
        assert_every_function(P_world, grid)


def assert_every_function(P_world: Partition, grid: tuple[int, ...]) -> None:
    size = torch.Size(grid).numel()
    P = P_world.create_partition_inclusive(range(size)).create_cartesian_topology_partition(grid)
    placement, copies = Placement.of(P), (broadcast,) * len(grid)
    for name, (function, shapes) in FUNCTIONS.items():
        alone = [numbers(*shape).requires_grad_() for shape in shapes]
        expected = function(*alone)
        (expected.square().mean() + expected.sum()).backward()
        for sbp in LAYOUTS[grid]:
            whole = [gpudist.to_global(x.detach(), placement, copies) for x in alone]
            place = shapes.index(max(shapes, key=len))
            if len(shapes[place]) > max(one.dim for one in sbp if one.is_split):
                whole[place] = whole[place].to_global(sbp=sbp)
            given = [x.detach().requires_grad_() for x in whole]
            y: Any = function(*given)
            (y.square().mean() + y.sum()).backward()
            found: list[Any] = [y, *[x.grad for x in given]]
            wanted: list[Any] = [expected, *[x.grad for x in alone]]
            if placement.active:
                for a, b in zip(found, wanted, strict=True):
                    assert torch.allclose(a.full_tensor(), b), (name, sbp)


class Patches(nn.Module):
    """Weights frequencies of patches of 8 x 8 cells, of which a worker may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).double()
        self.weight = nn.Parameter(torch.view_as_complex(numbers(3, 1, 1, 8, 5, 2)))
        with torch.no_grad():
            for p in self.conv.parameters():
                p.copy_(numbers(*p.shape))

    def forward(self, x: T) -> T:
        b, c, h, w = x.shape
        patches = self.conv(x).view(b, c, h // 8, 8, w // 8, 8).permute(0, 1, 2, 4, 3, 5)
        patches = torch.fft.irfft2(torch.fft.rfft2(patches) * self.weight, s=(8, 8))
        return x * patches.permute(0, 1, 2, 4, 3, 5).reshape(b, c, h, w)


@pytest.mark.parametrize("grid", [(2, 1), (3, 1), (5, 1), (1, 5), (3, 2)])
@distributed(ranks=6, transports=("loopback",))
def test_fourier_patches(P_world: Partition, grid: tuple[int, ...]) -> None:
    size = torch.Size(grid).numel()
    P = P_world.create_partition_inclusive(range(size))
    P_x = P.create_cartesian_topology_partition((1, 1, *grid))
    for shape in ((1, 3, 64, 32), (1, 3, 16, 16)):
        alone, x = Patches(), numbers(*shape)
        expected = alone(x)
        expected.square().mean().backward()
        net: Any = gpudist.distribute(Patches(), P_x)
        y = net(gpudist.scatter(x, P_x))
        y.square().mean().backward()
        if P_x.active:
            torch.testing.assert_close(y.full_tensor(), expected)
            for a, b in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


# Pieces of vectors may be without cells on some ranks alone.
VECTORS: dict[str, Callable[[T], T]] = {
    "cat": lambda x: torch.cat([x.flip(0), x[:1], x]),
    "hstack": lambda x: torch.hstack([x, x.roll(1)]),
    "glu": lambda x: F.glu(torch.cat([x, x]), 0),
}


def second_gradient(function: Callable[[T], T], x: T) -> T:
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


@distributed(ranks=3, transports=("loopback",))
def test_second_gradients_of_vectors(P_world: Partition) -> None:
    P = P_world.grid(3)
    for extent in (8, 3, 1):
        for name, function in VECTORS.items():
            alone = numbers(extent).requires_grad_()
            whole = gpudist.to_global(alone.detach(), Placement.of(P), broadcast)
            x: Any = whole.to_global(sbp=split(0)).detach().requires_grad_()
            found: Any = second_gradient(function, x)
            expected = second_gradient(function, alone)
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{name} of {extent}")
    layer = gpudist.nn.DistributedGLU(P, 0)
    block = gpudist.scatter(numbers(4), P).requires_grad_()
    found = second_gradient(layer, block)
    expected = second_gradient(lambda x: F.glu(x, 0), numbers(4).requires_grad_())
    torch.testing.assert_close(found, gpudist.scatter(expected, P))
