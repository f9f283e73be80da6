"""Convolution by oneDNN where torch's own kernel is slower; the results are torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import gpudist
from gpudist.geometry.layout import Sbp
from gpudist.geometry.windows import TransposedWindow
from gpudist.nn import DistributedConv3d
from gpudist.nn.affine.conv_transpose_block import transposed_block
from gpudist.nn.affine.local_conv import SMALLEST_INPUT, LocalConvolution
from gpudist.nn.utils import use_onednn
from gpudist.sbp import broadcast, split
from gpudist.world.partition import Partition
from tests.pool import distributed

ARGUMENTS = [
    LocalConvolution((1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    LocalConvolution((2, 1, 1), (0, 2, 1), (1, 1, 1), 1),
    LocalConvolution((1, 1, 2), (2, 0, 1), (2, 1, 1), 1),
    LocalConvolution((1, 1, 1), (0, 0, 0), (1, 2, 2), 1),
]


def of_torch(c: LocalConvolution, *tensors: torch.Tensor | None) -> torch.Tensor:
    x, weight, bias = tensors
    assert x is not None and weight is not None
    return torch.nn.functional.conv3d(x, weight, bias, c.stride, c.padding, c.dilation, c.groups)


def tensors(*shape: int, kernel: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    channels, dims = shape[1], len(shape) - 2
    shapes = [shape, (4, channels, *(kernel,) * dims), (4,)]
    made = [torch.randn(each, generator=generator, dtype=dtype) for each in shapes]
    return [x.requires_grad_() for x in made]


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum()


def is_replaced(convolution: LocalConvolution, x: torch.Tensor, weight: torch.Tensor) -> bool:
    name = type(convolution(x, weight).grad_fn).__name__
    assert name in ("_ConvolveBackward", "ConvolutionBackward0")
    return name == "_ConvolveBackward"


@pytest.mark.parametrize("convolution", ARGUMENTS)
def test_output_and_gradients_are_those_of_torch(convolution: LocalConvolution) -> None:
    mine = tensors(1, 4, 12, 11, 13)
    wide = [t.detach().double().requires_grad_() for t in mine]
    assert is_replaced(convolution, *mine[:2])
    ours, theirs = convolution(*mine), of_torch(convolution, *wide)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(convolution(*mine), ours)
    first = torch.autograd.grad(ours.square().sum(), mine, create_graph=True)
    expected = torch.autograd.grad(theirs.square().sum(), wide, create_graph=True)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    # Without create_graph, oneDNN's kernel gives them.
    plain = torch.autograd.grad(convolution(*mine).square().sum(), mine)
    for a, b in zip(plain, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    second = torch.autograd.grad(sum_of_squares(first), mine)
    expected = torch.autograd.grad(sum_of_squares(expected), wide)
    for a, b in zip(second, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_what_is_needed(wanted: int) -> None:
    convolution = ARGUMENTS[0]
    mine = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors(1, 4, 12, 12, 12))]
    convolution(*mine).sum().backward()
    assert [t.grad is not None for t in mine] == [i == wanted for i in range(3)]


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:.torch.jit.script. is")
def test_what_is_left_to_torch() -> None:
    convolution = ARGUMENTS[0]
    x, weight, _ = tensors(1, 4, 12, 12, 12)
    assert x.numel() > SMALLEST_INPUT and is_replaced(convolution, x, weight)
    assert not is_replaced(convolution, *tensors(1, 4, 10, 10, 10)[:2])
    assert not is_replaced(convolution, *tensors(1, 4, 12, 12, 12, dtype=torch.float64)[:2])
    assert not is_replaced(convolution, *tensors(1, 4, 12, 12, 12, kernel=1)[:2])
    assert not is_replaced(convolution, *tensors(2, 4, 12, 12, 12)[:2])
    assert not is_replaced(convolution, x.to(memory_format=torch.channels_last_3d), weight)
    flat = LocalConvolution((1, 1), (1, 1), (1, 1), 1)
    assert not is_replaced(flat, *tensors(1, 4, 48, 48)[:2])
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_replaced(convolution, x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(x, weight).dtype == of_torch(convolution, x, weight, None).dtype
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(convolution(dual, weight)).tangent
    assert tangent is not None
    expected = of_torch(convolution, torch.ones_like(x), weight, None)
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sbp", [broadcast, split(1)], ids=["copies", "output channels"])
@distributed(ranks=2, transports=["loopback"])
def test_copies_and_channels_take_it_too(P_world: Partition, sbp: Sbp) -> None:
    placement = gpudist.placement.of(P_world.create_cartesian_topology_partition([2]))
    x, weight, bias = (t.detach() for t in tensors(1, 4, 12, 11, 13))
    of_weight = split(0) if sbp.is_split else broadcast
    given: list[Any] = [
        gpudist.to_global(t, placement, broadcast).to_global(sbp=one).requires_grad_()
        for t, one in ((x, broadcast), (weight, of_weight), (bias, of_weight))
    ]
    convolve: Any = torch.nn.functional.conv3d
    y = convolve(*given, padding=1)
    assert y.sbp == (sbp,)
    assert type(y._local.grad_fn).__name__ == "_ConvolveBackward"
    torch.testing.assert_close(
        y.full_tensor(), convolve(x, weight, bias, padding=1), rtol=1e-4, atol=1e-4
    )
    for padding in ("same", 0, (1, 0, 2)):
        y = convolve(*given[:2], padding=padding)
        expected = convolve(x, weight, padding=padding)
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def left_to_torch() -> Iterator[None]:
    use_onednn(False)
    yield
    use_onednn(True)


@pytest.mark.parametrize("convolution", ARGUMENTS)
def test_without_onednn_bits_are_those_of_torch(
    left_to_torch: None, convolution: LocalConvolution
) -> None:
    mine, alone = tensors(1, 4, 12, 11, 13), tensors(1, 4, 12, 11, 13)
    assert not is_replaced(convolution, *mine[:2])
    ours, theirs = convolution(*mine), of_torch(convolution, *alone)
    assert torch.equal(ours, theirs)
    gradients = [
        torch.autograd.grad(y.square().sum(), x) for y, x in ((ours, mine), (theirs, alone))
    ]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def output_and_gradients(layer: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, 8, 20, 20, 20, requires_grad=True)
    y = layer(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@distributed(ranks=[1], transports=("loopback",))
@pytest.mark.parametrize("dilation", [1, 2])
def test_bits_of_a_layer(P_world: Partition, dilation: int) -> None:
    """Equal those of the layer of torch if torch chooses the kernel, and differ otherwise."""
    P_x = P_world.create_cartesian_topology_partition((1, 1, 1, 1, 1))
    layers: list[torch.nn.Module] = []
    for make in (partial(DistributedConv3d, P_x), torch.nn.Conv3d):
        torch.manual_seed(0)
        layers.append(make(8, 8, 3, padding=2, dilation=dilation))
    expected = output_and_gradients(layers[1])
    assert not all(map(torch.equal, output_and_gradients(layers[0]), expected))
    use_onednn(False)
    try:
        found = output_and_gradients(layers[0])
    finally:
        use_onednn(True)
    assert all(map(torch.equal, found, expected))


@distributed(ranks=[2], transports=("loopback",))
@pytest.mark.parametrize("extent", [16, 48])
def test_layer(P_world: Partition, extent: int) -> None:
    """Convolve a small block beside its ghosts, and a large one in place."""
    P_x = P_world.create_cartesian_topology_partition((1, 1, 2, 1, 1))
    torch.manual_seed(0)
    layer = DistributedConv3d(P_x, 8, 8, 3, padding=1)
    torch.manual_seed(0)
    sequential = torch.nn.Conv3d(8, 8, 3, padding=1).double()
    whole = torch.randn(1, 8, *(extent,) * 3)
    x = whole.chunk(2, 2)[P_world.rank or 0].clone().requires_grad_()
    whole = whole.double().requires_grad_()
    y, expected = layer(x), sequential(whole)
    gx, gw = torch.autograd.grad(y.square().sum(), [x, layer.weight])
    of_whole, of_weight = torch.autograd.grad(expected.square().sum(), [whole, sequential.weight])
    own = [t.chunk(2, 2)[P_world.rank or 0] for t in (expected, of_whole)]
    for a, b in zip((y, gx), own, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    if P_world.rank == 0:
        torch.testing.assert_close(gw.double(), of_weight, rtol=1e-4, atol=1e-1)


def fill_freed_memory() -> None:
    """Let whatever reads memory that is not its own read large numbers."""
    sizes = (64, 256, 1024, 4096, 13824, 65536)
    del [torch.full((n,), 1e37) for n in sizes for _ in range(12)][:]


def require_close_to_float64(
    convolve: Any, alone: Any, x: torch.Tensor, weight: torch.Tensor
) -> None:
    """Compare the output and both gradients; ``alone`` gives the gradients of ``convolve``."""
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    expected = convolve(*exact)
    gradient = torch.randn(expected.shape).to(x.dtype)
    wanted = (expected, *torch.autograd.grad(expected, exact, gradient.double()))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    fill_freed_memory()
    y = convolve(*leaves)
    fill_freed_memory()
    results = [(y, *torch.autograd.grad(y, leaves, gradient))]
    if alone is not None:
        with torch.no_grad():
            fill_freed_memory()
            results.append((y, *alone(gradient, x, weight, (True, True))))
    for found in results:
        for mine, its in zip(found, wanted, strict=True):
            assert mine.dtype == x.dtype
            # Each sum is rounded once, by at most 2**-9; a wrong kernel is off by ones to 1e37.
            assert (mine - its).norm() <= 2**-7 * its.norm() + 1e-6


def drawn(draw: Random, dims: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return small extents, and kernels, strides and dilations."""
    extents = [draw.choice((1, 1, 2, 3, 4, 7)) for _ in range(dims)]
    return extents, [
        (draw.choice((1, 2, 3, 3, 5)), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2)))
        for _ in range(dims)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_small_blocks_of_16_bits(dims: int, dtype: torch.dtype) -> None:
    """torch's own kernels give numbers of other memory, forward on CPUs with AMX alone."""
    draw = Random(dims)
    for _ in range(60):
        extents, windows = drawn(draw, dims)
        padding = [
            max(draw.randint(0, 2), -(-(d * (k - 1) + 1 - n) // 2))
            for n, (k, _, d) in zip(extents, windows, strict=True)
        ]
        kernel, stride, dilation = zip(*windows, strict=True)
        convolution = LocalConvolution(stride, tuple(padding), dilation, 1)
        channels = draw.choice((1, 3, 16))
        x = torch.randn(draw.choice((1, 2)), channels, *extents, dtype=dtype)
        weight = torch.randn(draw.choice((1, 4, 16)), channels, *kernel, dtype=dtype)
        if dims > 1 and draw.random() < 0.3:
            x = x.to(memory_format=(torch.channels_last, torch.channels_last_3d)[dims - 2])
        require_close_to_float64(convolution, convolution.gradients, x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_small_transposed_blocks_of_16_bits(dims: int, dtype: torch.dtype) -> None:
    draw = Random(dims)
    for _ in range(60):
        extents, windows = drawn(draw, dims)
        transposed: list[TransposedWindow] = []
        outputs: list[tuple[int, int]] = []
        for n, (k, s, d) in zip(extents, windows, strict=True):
            most = min(2, d * (k - 1), ((n - 1) * s + d * (k - 1)) // 2)
            window = TransposedWindow(k, s, d, padding=draw.randint(0, most))
            stop = window.output_extent(n)
            transposed.append(window)
            outputs.append((draw.randint(0, (stop - 1) // 2), stop))
        cells = [(0, n) for n in extents]
        channels = draw.choice((1, 4, 16))
        x = torch.randn(2, channels, *extents, dtype=dtype)
        block = transposed_block(transposed, outputs, cells, (2, 3), 1)
        weight = torch.randn(channels, 3, *(k for k, _, _ in windows), dtype=dtype)
        require_close_to_float64(block, None, x, weight)


@pytest.mark.parametrize("transposed", [False, True])
@distributed(ranks=3, transports=["loopback"])
def test_rules_of_small_blocks_of_16_bits(P_world: Partition, transposed: bool) -> None:
    """Blocks of one to three cells, split in space or in samples, equal float64 rounded."""
    draw = Random(transposed)
    placement = gpudist.placement.of(P_world.create_cartesian_topology_partition([3]))
    for dims in (1, 2, 3):
        name = f"conv{'_transpose' * transposed}{dims}d"
        function = getattr(torch.nn.functional, name)
        for dim in (0, 2, dims + 1):
            torch.manual_seed(draw.randrange(100))
            extents = [draw.choice((3, 4, 6)) for _ in range(dims)]
            cells = torch.randn(3, 16, *extents, dtype=torch.bfloat16)
            weight = torch.randn(16, 16, *(3,) * dims, dtype=torch.bfloat16)
            options: dict[str, Any] = {"stride": draw.choice((1, 2)), "padding": 1}
            x = gpudist.to_global(cells, placement, broadcast).to_global(sbp=split(dim))
            w = gpudist.to_global(weight, placement, broadcast)
            leaves = [x.requires_grad_(), w.requires_grad_()]
            exact = [cells.double().requires_grad_(), weight.double().requires_grad_()]
            expected = function(*exact, **options)
            gradient = torch.randn(expected.shape, dtype=torch.bfloat16)
            fill_freed_memory()
            y = function(*leaves, **options)
            fill_freed_memory()
            found = torch.autograd.grad(
                y, leaves, gpudist.to_global(gradient, placement, broadcast).to_global(sbp=y.sbp)
            )
            wanted = torch.autograd.grad(expected, exact, gradient.double())
            for mine, its in zip((y, *found), (expected, *wanted), strict=True):
                whole: Any = mine
                error = (whole.full_tensor() - its).norm() / its.norm()
                assert error < 2**-6, (name, dim, extents, options, error)
