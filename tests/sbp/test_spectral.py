"""Every function of ``torch.fft`` over split dims, on torch's own samples; their adjoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gpudist
from gpudist.exchange import all_reduce
from gpudist.geometry.blocks import Blocks
from gpudist.sbp import Placement, broadcast, explain, to_global
from gpudist.sbp.registry import signatures
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches
from tests.sbp.parts import P, S, random
from tests.sbp.samples import operators, samples_of
from tests.sbp.tables import assert_table

# They take no tensor, so there is nothing to split.
WITHOUT_TENSORS = {"fftfreq", "rfftfreq"}
NAMES = {name for name in dir(torch.fft) if "fft" in name and not name.startswith("_")}
TRANSFORMS = sorted(NAMES - WITHOUT_TENSORS)
SAMPLES = 60


def test_every_function_has_an_entry() -> None:
    assert len(TRANSFORMS) == 20
    assert all(getattr(torch.fft, name) in signatures for name in TRANSFORMS)
    with_samples = {op.name.removeprefix("fft.") for op in operators() if "fft." in op.name}
    assert with_samples >= set(TRANSFORMS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMS)
@distributed(ranks=3, transports=("loopback",))
def test_samples(P_world: Partition, name: str) -> None:
    """Values and gradients, with each dim split in turn, and with two of them split."""
    line = Placement("cpu", [0, 1, 2], P_world)
    op = next(one for one in operators() if one.name == f"fft.{name}")
    _, samples = samples_of(op, SAMPLES)
    count = 0
    for sample in samples:
        x, args, kwargs = sample.input.detach(), sample.args, sample.kwargs

        def function(
            x: torch.Tensor, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs
        ) -> torch.Tensor:
            return op.op(x, *args, **kwargs)

        try:
            with warnings.catch_warnings():
                function(x)
        except RuntimeError:
            continue
        for d in range(x.dim()):
            assert_matches(function, [x], line, [(S(d),)])
            count += 1
    assert count >= 4


OPTIONS: list[dict[str, Any]] = [
    {"norm": "backward"}, {"norm": "ortho"}, {"norm": "forward"},
    {"size": -2}, {"size": 3}, {"dim": 0},
]  # fmt: skip


def call_of(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Callable[..., Any]:
    """Return the transform with one option, in its own words."""
    function = getattr(torch.fft, name)
    if "shift" in name:
        return lambda x: function(x, dim=options.get("dim", (1, 2)))
    given: dict[str, Any] = {"norm": options["norm"]} if "norm" in options else {}
    has_one = not name.endswith(("2", "n"))
    if "size" in options:
        sizes = [n + options["size"] for n in shape[-2:]]
        given |= {"n": sizes[-1]} if has_one else {"s": sizes, "dim": (-2, -1)}
    if "dim" in options:
        given["dim"] = 0 if has_one else (2, 0)
    return lambda x: function(x, **given)


def input_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a complex input, or a real one for the transforms of real numbers."""
    if name.startswith(("rfft", "ihfft")):
        return random(shape)
    return torch.complex(random(shape, 1), random(shape, 2))


@pytest.mark.parametrize("name", TRANSFORMS)
@distributed(ranks=4, transports=("loopback",))
def test_dot(P_world: Partition, name: str) -> None:
    """Backward is the adjoint, with all transformed dims split and with every option."""
    shape = (4, 7, 6)
    x = input_of(name, shape)
    for options in OPTIONS:
        function = call_of(name, options, shape)
        for ranks, sbp in (([0, 1, 2, 3], (S(2),)), ([[0, 1], [2, 3]], (S(1), S(2)))):
            placement = Placement("cpu", ranks, P_world)
            assert placement.index is not None
            block = x[placement.layout(sbp, shape).box(placement.index).slices]

            def transform(
                block: torch.Tensor, placement: Any = placement, sbp: Any = sbp, f: Any = function
            ) -> torch.Tensor:
                return f(to_global(block, placement, sbp)).to_local()

            assert_adjoint(transform, block.contiguous(), P_world)


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    """Dims that are not transformed stay split, and terms stay terms: all transforms are linear."""
    x = random((6, 4, 7))
    rows = [([S(0)], S(0)), ([S(1)], S(1)), ([P], P)]
    for name in ("fft", "rfft", "ihfft"):
        assert_table(P_world, getattr(torch.fft, name), [x], rows)
    rows = [([S(0)], S(0)), ([P], P)]
    for name in ("fft2", "rfft2", "ihfft2"):
        assert_table(P_world, getattr(torch.fft, name), [x], rows)
    assert_table(P_world, lambda t: torch.fft.rfftn(t, dim=(0, 2)), [x], [([S(1)], S(1)), ([P], P)])


@distributed(ranks=4, transports=("loopback",))
def test_workers_share_the_work(P_world: Partition) -> None:
    """The dim to split instead is one with cells for every worker, if there is one."""
    placement = Placement("cpu", range(4), P_world)
    rank = P_world.rank or 0
    x = to_global(random((1, 8, 4, 6))[:, :, rank : rank + 1], placement, S(2))
    with explain() as lines:
        y = torch.fft.rfft2(x)
    assert y.sbp == (S(1),), lines


def bytes_of(call: Callable[[], Any], P_world: Partition) -> tuple[Any, int]:
    """Return the result of a call, and the bytes that all ranks sent for it."""
    before = sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))
    result = call()
    sent = sum(row.sent_bytes for row in gpudist.stats(P_world=P_world)) - before
    return result, int(all_reduce(torch.tensor([sent]), P_world))


def moved_cells(shape: tuple[int, ...], source: int, target: int, parts: int) -> int:
    """Return the cells that leave their worker if ``target`` is split instead of ``source``.

    Worker ``i`` keeps the cells that are in its blocks of both dims: ``1 / parts`` of the tensor if
    both extents are divisible by ``parts``.
    """
    rest = math.prod(shape) // shape[source] // shape[target]
    pairs = [(Blocks(shape[source], parts), Blocks(shape[target], parts))]
    kept = sum(a.length(i) * b.length(i) for a, b in pairs for i in range(parts))
    return math.prod(shape) - rest * kept


@pytest.mark.parametrize("shape", [(4, 3, 8, 16), (5, 2, 9, 7)])
@distributed(ranks=[2, 4], transports=("loopback",))
def test_bytes_of_a_transform(P_world: Partition, shape: tuple[int, ...]) -> None:
    """A transform over a split dim moves N (P - 1) / P cells of its input, and nothing else."""
    parts = P_world.size
    placement = Placement("cpu", range(parts), P_world)
    x = random(shape)
    given = to_global(x, placement, broadcast).to_global(sbp=S(2))
    y, sent = bytes_of(lambda: torch.fft.rfft2(given), P_world)
    # The dim with the fewest cells to move is split instead.
    assert sent == 8 * min(moved_cells(shape, 2, d, parts) for d in (0, 1))
    if not any(shape[d] % parts for d in (0, 2)):
        assert y.sbp == (S(0),)
        assert sent == 8 * math.prod(shape) * (parts - 1) // parts
    _, sent = bytes_of(lambda: torch.fft.irfft2(y, s=shape[2:]), P_world)
    assert sent == 0


@distributed(ranks=[2, 4], transports=("loopback",))
def test_bytes_of_kept_modes(P_world: Partition) -> None:
    """Transformed and sliced dim by dim, whole dims first, only the kept modes of these move."""
    parts, kept = P_world.size, 3
    placement = Placement("cpu", range(parts), P_world)
    x = random((4, 3, 8, 16))
    given = to_global(x, placement, broadcast).to_global(sbp=S(2))

    def modes(t: Any) -> Any:
        return torch.fft.fft(torch.fft.rfft(t, dim=3)[..., :kept], dim=2)[:, :, :2]

    found, sent = bytes_of(lambda: modes(given), P_world)
    assert sent == 16 * moved_cells((4, 3, 8, kept), 2, 0, parts)
    torch.testing.assert_close(found.full_tensor(), modes(x))

    def back(t: Any, rows: Any) -> Any:
        """Zeros that pad a dim are added where the dim is whole, after the modes have moved."""
        return torch.fft.irfft(rows(torch.fft.ifft(t, n=8, dim=2)), n=16, dim=3)

    y, sent = bytes_of(lambda: back(found, lambda t: t.to_global(sbp=S(2))), P_world)
    assert sent == 16 * moved_cells((4, 3, 8, kept), 0, 2, parts)
    torch.testing.assert_close(y.full_tensor(), back(modes(x), lambda t: t))


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize(("extents", "kept"), [((16, 16), (6, 6)), ((8, 8, 8), (4, 4, 4))])
@distributed(ranks=[2, 4], transports=("loopback",))
def test_bytes_of_a_spectral_convolution(
    P_world: Partition, extents: tuple[int, ...], kept: tuple[int, ...], batch: int
) -> None:
    """neuralop's layer moves the kept modes of whole dims there and back, as dfno's partitions do.

    Each worker multiplies its part of the modes. Backward moves the adjoints, and sums the
    gradients of the parameters.
    """
    layers = pytest.importorskip("neuralop.layers.spectral_convolution")
    parts, channels = P_world.size, 4
    last = kept[-1] // 2 + 1
    modes, partly = math.prod(kept[:-1]) * last, extents[0] * math.prod(kept[1:-1]) * last
    P_x = P_world.create_cartesian_topology_partition([1, 1, parts, *[1] * (len(extents) - 1)])
    layer = layers.SpectralConv(channels, channels, kept)
    layer = gpudist.distribute(layer, P_x)
    block = torch.ones(batch, channels, extents[0] // parts, *extents[1:], requires_grad=True)
    # The first call also agrees on the shape.
    layer(block).sum().backward()
    y, sent = bytes_of(lambda: layer(block), P_world)
    there = 2 * 8 * batch * channels * partly * (parts - 1) // parts
    assert sent == there and y.sbp == (S(2),)
    assert y.shape == (batch, channels, *extents)
    _, sent = bytes_of(lambda: y.sum().backward(), P_world)
    summed = 8 * channels**2 * modes + 4 * channels
    # Every worker sends its whole gradients to all others, since they are small.
    assert sent == there + parts * (parts - 1) * summed
