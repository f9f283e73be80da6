"""The normalization kernels over the doubles: results of the composition, launches and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import gpudist
from gpudist import nn
from gpudist.nn import distributed_module
from gpudist.nn.norm import kernels, lines
from gpudist.nn.norm.normalization import Normalization
from gpudist.nn.norm.passes import BoundNorm
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.world import runtime
from gpudist.world.partition import CartesianPartition, Partition
from tests.doubles.nccl import count
from tests.nn.compare import grid, own_block, random_like_all
from tests.nn.norm.norm_cases import NEEDS_CORE
from tests.nn.norm.test_norm_lines import LargeTensors
from tests.pool import distributed
from tests.transport import worlds

pytestmark = NEEDS_CORE
SHAPE, AXES = (3, 8, 6, 12), (1, 1, 2, 1)
Make = Callable[[CartesianPartition], torch.nn.Module]
LAYERS: dict[str, Make] = {
    "batch": lambda P: nn.DistributedBatchNorm2d(P, 8, momentum=0.25),
    "batch, average": lambda P: nn.DistributedBatchNorm2d(P, 8, momentum=None),
    "group": lambda P: nn.DistributedGroupNorm(P, 2, 8),
    "instance": lambda P: nn.DistributedInstanceNorm2d(P, 8, affine=True),
    "layer": lambda P: nn.DistributedLayerNorm(P, SHAPE[2:]),
    "RMS": lambda P: nn.DistributedRMSNorm(P, SHAPE[2:], eps=1e-5),
}
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "NATIVE_FLOATS", {})
        yield


def made(
    kind: str, P_world: Partition, axes: Sequence[int] = AXES, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Return a layer for blocks of ``dtype``, with parameters of float64 for that alone."""
    layer = LAYERS[kind](grid(P_world, axes))
    if dtype == torch.float64:
        layer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(random_like_all(parameter.shape, seed))
    return layer


def own(
    P_world: Partition, seed: int, dtype: torch.dtype, axes: Sequence[int] = AXES
) -> torch.Tensor:
    """Return this worker's block of random numbers."""
    return own_block(random_like_all(SHAPE, seed).to(dtype), grid(P_world, axes), None, False)


def block_like(x: torch.Tensor, layout: str) -> torch.Tensor:
    by_columns = layout == "channels_last"
    return x.contiguous(memory_format=torch.channels_last) if by_columns else x.contiguous()


def both_ways(
    layer: torch.nn.Module, x: torch.Tensor, g: torch.Tensor
) -> tuple[list[torch.Tensor], list[int]]:
    """Return results and running moments, and the launches of forward and backward."""
    x = x.detach().requires_grad_()
    counts = [count("launch_norm")]
    y = layer(x)
    counts.append(count("launch_norm"))
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], g)
    counts.append(count("launch_norm"))
    results = [y.detach(), *gradients, *(b.clone().double() for b in layer.buffers())]
    return results, [counts[1] - counts[0], counts[2] - counts[1]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("axes", [(1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 1)])
@pytest.mark.parametrize("kind", LAYERS)
@distributed(ranks=2, transports=["nccl"])
def test_same_as_the_composition(
    P_world: Partition, kind: str, axes: Sequence[int], dtype: torch.dtype
) -> None:
    """Without kernels, the core for CPUs normalizes contiguous float32 blocks."""
    x, g = (own(P_world, seed, torch.float64, axes) for seed in (1, 2))
    layouts = ["contiguous"] if kind in ("layer", "RMS") else ["contiguous", "channels_last"]
    for layout in layouts:
        block, gradient = (block_like(t.to(dtype), layout) for t in (x + 3, g))
        with without_kernels():
            expected, none = both_ways(made(kind, P_world, axes, dtype), block, gradient)
        found, launches = both_ways(made(kind, P_world, axes, dtype), block, gradient)
        is_split = axes[2] > 1 or (axes[0] > 1 and kind.startswith("batch"))
        assert none == [0, 0]
        most = [5 if dtype == torch.float64 else 3, 3]  # float64 is summed twice
        assert all(1 <= many <= most[i] for i, many in enumerate(launches)) or not is_split
        assert is_split or launches == [0, 0]
        if is_split:
            assert found[0].stride() == block.stride() == found[1].stride()
        for mine, other in zip(found, expected, strict=True):
            scale = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
            difference = (mine.double() - other.double()).abs()
            assert (difference <= TOLERANCES[dtype] * scale).all(), float(difference.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["group", "layer"])
@distributed(ranks=2, transports=["nccl"])
def test_memory_and_derivatives_beyond_the_first(
    P_world: Partition, kind: str, dtype: torch.dtype
) -> None:
    """Kernels allocate only results; the composition computes second derivatives and tangents."""
    layer = made(kind, P_world, AXES, dtype)
    x, g = own(P_world, 1, dtype).requires_grad_(), own(P_world, 2, dtype)
    layer(x)
    with LargeTensors(x.numel()) as large:
        y = layer(x)
        assert large.made == 1
        torch.autograd.grad(y, [x, *layer.parameters()], g)
        assert large.made == 2

    def second(layer: torch.nn.Module) -> torch.Tensor:
        (first,) = torch.autograd.grad(layer(x), x, g, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def tangent(layer: torch.nn.Module) -> torch.Tensor:
        return torch.func.jvp(layer, (x.detach(),), (g,))[1]

    for derivative in (second, tangent):
        found = derivative(layer)
        with without_kernels():
            expected = derivative(made(kind, P_world, AXES, dtype))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@distributed(ranks=2, transports=["nccl"])
def test_hooks_that_save_another_layout(P_world: Partition) -> None:
    x, g = (block_like(own(P_world, seed, torch.float32), "channels_last") for seed in (1, 2))
    expected, _ = both_ways(made("batch", P_world), x, g)
    with saved_tensors_hooks(lambda saved: saved.contiguous(), lambda saved: saved):
        found, _ = both_ways(made("batch", P_world), x, g)
    assert all(map(torch.equal, found, expected))


class _Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch, self.group = torch.nn.BatchNorm2d(8), torch.nn.GroupNorm(2, 8)
        self.plain = torch.nn.InstanceNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.group(self.batch(x)))


@distributed(ranks=2, transports=["nccl"])
def test_a_warm_norm_calls_two_functions_and_one_in_backward(P_world: Partition) -> None:
    network = gpudist.distribute(_Norms(), grid(P_world, AXES), inputs={"x": "block"})
    x = own(P_world, 1, torch.float32).requires_grad_()

    def frames(call: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor | None, list[str]]:
        names: list[str] = []

        def note(frame: FrameType, event: str, argument: Any) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.parent.name in ("norm", "exchange", "transport"):
                names.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            return call(), names
        finally:
            sys.setprofile(None)

    for _ in range(3):
        y, forward = frames(lambda: network(x).sum())
        assert y is not None
        _, backward = frames(y.backward)
    assert forward[-6:] == ["__call__", "forward"] * 3, forward
    assert backward[:3] == ["backward"] * 3, backward


@contextmanager
def autocast_in_single(low: torch.dtype) -> Iterator[None]:
    """Autocast that computes every layer in float32, as that of GPUs computes group norm."""
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", low):
        patch.setattr(distributed_module, "is_single", lambda *_: True)
        yield


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["group", "layer", "RMS"])
@distributed(ranks=2, transports=["nccl"])
def test_autocast_in_single_precision_converts_no_block(
    P_world: Partition, kind: str, low: torch.dtype
) -> None:
    """The output and its gradient are float32; kernels read and write 16 bits of the block."""
    x, g = own(P_world, 1, low), own(P_world, 2, torch.float32)

    def second(layer: torch.nn.Module) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(leaf), leaf, g, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), leaf)[0]

    with autocast_in_single(low):
        with without_kernels():
            expected, _ = both_ways(made(kind, P_world), x, g)
            expected.append(second(made(kind, P_world)))
        layer = made(kind, P_world)
        layer(x)
        before = count("kernel_bytes")
        with LargeTensors(x.numel()) as large:
            found, launches = both_ways(layer, x, g)
        kernel_bytes = count("kernel_bytes") - before
        found.append(second(layer))
    assert found[0].dtype == torch.float32 and found[1].dtype == low
    assert large.made == 2 and all(many <= 3 for many in launches)
    # Sums, the output, sums of gradients, the gradient.
    assert kernel_bytes - x.numel() * (2 + 6 + 6 + 8) in range(8000)
    for mine, other in zip(found, expected, strict=True):
        tolerance = TOLERANCES[mine.dtype] * max([1.0, *other.abs().flatten().tolist()])
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@distributed(ranks=2, transports=["nccl"])
def test_no_launch_only_looks_for_a_failure(P_world: Partition) -> None:
    """The kernels that read the sums look themselves; those of float64 are moved alone first."""
    for dtype, launches in ((torch.float32, 0), (torch.float64, 1)):
        layer = nn.DistributedInstanceNorm2d(grid(P_world, AXES), 8).to(dtype)
        x = own(P_world, 1, dtype)
        both_ways(layer, x, x)
        before = [count(call) for call in ("launch_combine", "launch_that_only_looks")]
        both_ways(layer, x, x)
        after = [count(call) for call in ("launch_combine", "launch_that_only_looks")]
        assert [b - a for a, b in zip(before, after, strict=True)] == [launches, launches]


@pytest.mark.parametrize("movement", ["move", "move_gradients"])
@pytest.mark.parametrize("kind", LAYERS)
def test_sums_that_were_not_moved_make_no_number(kind: str, movement: str) -> None:
    for results in worlds.results("nccl", 2, fail_behind, kind, movement):
        assert results and all(results.values()), results


def fail_behind(transport: Transport, kind: str, movement: str) -> dict[str, bool]:
    """End the world before a kernel reads the moved sums; return which results are NaN."""
    P_world = runtime.world_of(transport)
    axes = (2, 1, 1, 1) if kind.startswith("batch") else AXES
    layer = made(kind, P_world, axes)
    x = own(P_world, 1, torch.float32, axes).requires_grad_()
    torch.autograd.grad(layer(x).sum(), x)
    results = dict[str, torch.Tensor]()

    def ending(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*arguments: Any) -> Any:
            tensors = move(*arguments)
            P_world.barrier()
            transport.abort(Failure("TransportError", transport.rank, "gives up"))
            if movement == "move":
                results["sums"] = tensors[0]
            return tensors

        return moved

    with pytest.MonkeyPatch.context() as patch:
        # With parameters that move, and alone.
        patch.setattr(Normalization, movement, ending(getattr(Normalization, movement)))
        name = "carry" if movement == "move" else "carry_back"
        run = vars(BoundNorm)[name].func
        patch.setattr(BoundNorm, name, property(lambda bound: run(bound) and ending(run(bound))))
        y = layer(x)
        if movement == "move":
            results |= {"y": y, **dict(layer.named_buffers())}
        else:
            (results["gradient"],) = torch.autograd.grad(y, x, y.detach().square())
    results.pop("num_batches_tracked", None)
    return {name: bool(tensor.isnan().all()) for name, tensor in results.items()}


@distributed(ranks=2, transports=["nccl"])
def test_which_blocks_fit(P_world: Partition) -> None:
    layer, x = nn.DistributedGroupNorm(grid(P_world, AXES), 2, 8), own(P_world, 1, torch.float32)
    bound = layer._bindings(x, layer._agree_and_bind, layer.way_of(x))
    parameters = layer.own_parameters()
    assert lines.fits(bound, x, parameters)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kernels.fits(bound, x.to(dtype), parameters)
    assert kernels.fits(bound, x.to(memory_format=torch.channels_last), parameters)
    assert not kernels.fits(bound, x.mT.contiguous().mT, parameters)
    assert kernels.fits(bound, x.half(), parameters, torch.float32)
    assert not kernels.fits(bound, x, parameters, torch.float64)
    assert not kernels.fits(bound, x.double(), parameters)
    assert kernels.fits(bound, x.double(), [p.double() for p in parameters])
    assert not kernels.fits(bound, x.double(), [p.double() for p in parameters], torch.float32)
    assert not kernels.fits(bound, x[:0], parameters)
    assert not kernels.fits(bound, x, [p.double() for p in parameters])
