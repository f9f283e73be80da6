"""The native passes of normalizations: accuracy, memory, and ranks that cannot use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.exchange.tracing import Watching
from gpudist.nn.norm.lines import fits
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    assert_block_of,
    assert_parameter_gradients,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.norm.norm_cases import F64, NEEDS_CORE, make_both, owner
from tests.pool import distributed

Make = Callable[[CartesianPartition, torch.dtype], torch.nn.Module]
# The input's lines are longer than a chunk of the native core, and no multiple of its lanes.
SHAPE = (3, 4, 2, 2301)
WHOLE: dict[str, Callable[[torch.dtype], torch.nn.Module]] = {
    "batch": lambda dtype: torch.nn.BatchNorm2d(4, dtype=dtype),
    "group": lambda dtype: torch.nn.GroupNorm(2, 4, dtype=dtype),
    "instance": lambda dtype: torch.nn.InstanceNorm2d(4, affine=True, dtype=dtype),
    "layer": lambda dtype: torch.nn.LayerNorm(list(SHAPE[2:]), dtype=dtype),
    "RMS": lambda dtype: torch.nn.RMSNorm(list(SHAPE[2:]), eps=1e-5, dtype=dtype),
}
CUT: dict[str, Make] = {
    "batch": lambda P, dtype: nn.DistributedBatchNorm2d(P, 4, dtype=dtype),
    "group": lambda P, dtype: nn.DistributedGroupNorm(P, 2, 4, dtype=dtype),
    "instance": lambda P, dtype: nn.DistributedInstanceNorm2d(P, 4, affine=True, dtype=dtype),
    "layer": lambda P, dtype: nn.DistributedLayerNorm(P, SHAPE[2:], dtype=dtype),
    "RMS": lambda P, dtype: nn.DistributedRMSNorm(P, SHAPE[2:], eps=1e-5, dtype=dtype),
}


def parameter_axes(kind: str) -> Sequence[int]:
    return [2, 3] if kind in ("layer", "RMS") else [1]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("last", ["contiguous", "strided"])
@pytest.mark.parametrize("kind", WHOLE)
@NEEDS_CORE
@distributed(ranks=3, transports=["loopback"])
def test_same_as_sequential(P_world: Partition, kind: str, last: str, dtype: torch.dtype) -> None:
    """The last worker's block may need the composition, which moves the same sums."""
    P_x = grid(P_world, [1, 1, 1, 3])
    owned = owner(P_x, parameter_axes(kind))
    sequential, layer = make_both(lambda: WHOLE[kind](dtype), lambda: CUT[kind](P_x, dtype), owned)
    whole = random_like_all(SHAPE, 1).to(dtype).requires_grad_()
    tolerance = 1e-10 if dtype == F64 else 1e-3
    x = own_block(whole, P_x, requires_grad=False)
    if last == "strided" and P_world.rank == 2:
        x = x.mT.contiguous().mT
    x.requires_grad_()
    weights = random_like_all(SHAPE, 2).to(dtype)
    expected = sequential(whole)
    (expected.square() * weights).sum().backward()
    y, where = layer(x), own_slices(SHAPE, P_x)
    assert where is not None
    (y.square() * weights[where]).sum().backward()
    assert_block_of(y, expected, where, "output", tolerance)
    assert_block_of(x.grad, gradient_of(whole), where, "input gradient", tolerance)
    assert_parameter_gradients(sequential, layer, owned, tolerance)


@pytest.mark.parametrize("kind", ["batch", "group", "instance", "layer"])
@distributed(ranks=2, transports=["loopback"])
def test_large_means_in_float64(P_world: Partition, kind: str) -> None:
    """Only the digits are lost that the mean takes from the values themselves."""
    P_x, shape = grid(P_world, [1, 1, 1, 2]), (2, 4, 3, 6)
    owned = owner(P_x, parameter_axes(kind))
    kinds = {**WHOLE, "layer": lambda dtype: torch.nn.LayerNorm(list(shape[2:]), dtype=dtype)}
    cut = {**CUT, "layer": lambda P, dtype: nn.DistributedLayerNorm(P, shape[2:], dtype=dtype)}
    sequential, layer = make_both(lambda: kinds[kind](F64), lambda: cut[kind](P_x, F64), owned)
    # Binary fractions: adding the mean rounds nothing.
    small = (random_like_all(shape, 1) * 64).round() / 64
    whole = (small + 2.0**20).requires_grad_()
    centred = small.requires_grad_()
    x = own_block(whole, P_x)
    g = random_like_all(shape, 2)
    where = own_slices(shape, P_x)
    assert where is not None
    expected = sequential(centred)
    expected.backward(g)
    layer(x).backward(g[where])
    for _ in range(2):  # a warm call too
        assert_block_of(layer(x), expected, where, "output", 1e-9)
    assert_block_of(x.grad, gradient_of(centred), where, "input gradient", 1e-9)
    assert_parameter_gradients(sequential, layer, owned, 1e-8)


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("kind", ["batch", "group", "instance", "layer"])
@distributed(ranks=2, transports=["loopback", "nccl"])
def test_as_accurate_as_torch(P_world: Partition, kind: str, mean: float) -> None:
    """Errors in float32 are at most twice those of torch's layer, forward and backward."""
    P_x = grid(P_world, [1, 1, 1, 2])
    x = (random_like_all(SHAPE, 1) + mean).float()
    g = random_like_all(SHAPE, 2).float()
    results: list[list[torch.Tensor]] = []
    for dtype in (F64, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        y = WHOLE[kind](dtype)(leaf)
        results.append([y, *torch.autograd.grad(y, leaf, g.to(dtype))])
    where = own_slices(SHAPE, P_x)
    leaf = own_block(x, P_x)
    y = CUT[kind](P_x, torch.float32)(leaf)
    found = [y, *torch.autograd.grad(y, leaf, g[where])]
    for name, mine, exact, theirs in zip(("output", "gradient"), found, *results, strict=True):
        error = (mine.double() - exact[where]).abs().max()
        allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6 * exact.abs().max()
        assert error <= allowed, f"{name}: {error} but torch's is {allowed / 2}"


class LargeTensors(Watching):
    """How many tensors of at least some size operators make."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells, self.made = cells, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        result = func(*args, **kwargs or {})
        is_new = isinstance(result, torch.Tensor) and not func.is_view
        self.made += int(is_new and result.numel() >= self.cells)
        return result


@pytest.mark.parametrize("kind", WHOLE)
@NEEDS_CORE
@distributed(ranks=2, transports=["loopback"])
def test_memory(P_world: Partition, kind: str) -> None:
    """Forward allocates only the output, backward only the gradient, each of the block's size."""
    P_x = grid(P_world, [1, 1, 2, 1])
    layer = CUT[kind](P_x, torch.float32)
    x = own_block(random_like_all(SHAPE, 1).float(), P_x)
    g = torch.ones_like(x)
    with LargeTensors(x.numel()) as large:
        y = layer(x)
        assert large.made == 1
        torch.autograd.grad(y, [x, *layer.parameters()], g)
        assert large.made == 2


@NEEDS_CORE
@distributed(ranks=2, transports=["loopback"])
def test_which_blocks_fit(P_world: Partition) -> None:
    P_x, shape = grid(P_world, [1, 1, 2, 1]), (2, 4, 6, 8)
    layer = nn.DistributedGroupNorm(P_x, 2, 4)
    x = own_block(random_like_all(shape, 1).float(), P_x, requires_grad=False)
    bound = layer._bindings(x, layer._agree_and_bind, layer.way_of(x))
    parameters = layer.own_parameters()
    assert fits(bound, x, parameters)
    assert not fits(bound, x.mT.contiguous().mT, parameters)
    assert not fits(bound, x.to(memory_format=torch.channels_last), parameters)
    assert not fits(bound, x.bfloat16(), parameters)
    assert not fits(bound, x, [p.double() for p in parameters])
    assert not fits(bound, x[:0], parameters)
    assert not fits(bound, x[..., :2].contiguous(), parameters)
    assert not fits(replace(bound, total=None), x, parameters)
