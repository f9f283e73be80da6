"""Helpers that the tests of the normalization layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_block_of,
    assert_same_as_sequential,
    build_both,
    gradient_of,
    own_block,
    own_slices,
    random_like_all,
)

F64 = torch.float64
Owned = Callable[[str, torch.Size], Slices | None]
Made = tuple[torch.nn.Module, torch.nn.Module]
NEEDS_CORE = pytest.mark.skipif(not is_built(), reason=what_is_missing())
# Shapes of partitions of four axes, and their ranks.
GRIDS: dict[str, tuple[list[int], list[int] | None]] = {
    "one": ([1, 1, 1, 1], [2]),
    "batch": ([3, 1, 1, 1], None),
    "channels": ([1, 3, 1, 1], None),
    "features": ([1, 1, 2, 2], [4, 0, 3, 1]),
    "mixed": ([2, 2, 1, 2], None),
}


def owner(P_x: CartesianPartition, axes: Sequence[int]) -> Owned:
    """Balanced blocks of the parameters on the workers at index 0 of all other axes."""
    axes = [axis % P_x.dim for axis in axes]

    def owned(name: str, shape: torch.Size) -> Slices | None:
        if P_x.index is None or any(i for axis, i in enumerate(P_x.index) if axis not in axes):
            return None
        cut = Decomposition.balanced(shape, [P_x.shape[axis] for axis in axes])
        return cut.block([P_x.index[axis] for axis in axes]).slices

    return owned


def make_both(
    make_sequential: Callable[[], torch.nn.Module],
    make_distributed: Callable[[], torch.nn.Module],
    owned: Owned,
) -> Made:
    """Return both layers, compared when new, with equal random parameters."""
    sequential, layer = build_both(make_sequential, make_distributed, owned)
    for seed, (name, whole) in enumerate(sequential.named_parameters()):
        value, where = random_like_all(whole.shape, 100 + seed), owned(name, whole.shape)
        with torch.no_grad():
            whole.copy_(value)
            if where is not None:
                layer.get_parameter(name).copy_(value[where])
    return sequential, layer


def check(
    made: Made,
    P_x: CartesianPartition,
    shape: Sequence[int],
    owned: Owned,
    sizes: Cut | None = None,
    **options: Any,
) -> None:
    """Outputs, gradients and running statistics of a batch or several."""
    sequential, layer = made
    assert_same_as_sequential(
        lambda: sequential, lambda: layer, P_x, P_x, shape, owned, sizes, sizes, **options
    )
    assert_same_buffers(sequential, layer, P_x)


def assert_same_buffers(
    sequential: torch.nn.Module, layer: torch.nn.Module, P_x: CartesianPartition
) -> None:
    """Each worker has the running statistics of its channels; all with the same bits."""
    assert set(dict(layer.named_buffers())) == set(dict(sequential.named_buffers()))
    for name, whole in sequential.named_buffers():
        actual = layer.get_buffer(name)
        if whole.dim() == 0:
            assert torch.equal(actual, whole), name
            continue
        cut = Decomposition.balanced(whole.shape, [P_x.shape[1]])
        where = None if P_x.index is None else cut.block(P_x.index[1:2]).slices
        assert_block_of(actual, whole, where, name, 1e-12)
        if P_x.active:
            P_same = P_x.along([axis for axis in range(P_x.dim) if axis != 1])
            bits = actual.contiguous().view(torch.int64).tolist()
            others = P_same.allgather_data(bits)
            assert all(other == bits for other in others), f"{name} differs between workers"


def check_penalty(
    made: Made,
    P_x: CartesianPartition,
    shape: Sequence[int],
    owned: Owned,
    of: str,
    sizes: Cut | None = None,
) -> None:
    """Gradients of a gradient penalty, of the gradients by the input or by the parameters."""
    sequential, layer = made
    whole = random_like_all(shape, 1).requires_grad_()
    block = own_block(whole, P_x, sizes)
    cotangent = random_like_all(shape, 2)
    where = own_slices(shape, P_x, sizes)
    own = cotangent.new_zeros(block.shape) if where is None else cotangent[where]
    for model, x, weights in ((sequential, whole, cotangent), (layer, block, own)):
        leaves = [x] if of == "input" else list(model.parameters())
        y = model(x)
        gradients = torch.autograd.grad(
            (y.pow(2) * weights).sum(), leaves, create_graph=True, allow_unused=True
        )
        penalty = torch.zeros((), dtype=F64)
        for gradient in gradients:
            penalty = penalty if gradient is None else penalty + gradient.pow(3).sum()
        if penalty.requires_grad:
            penalty.backward()
    if where is not None:
        assert_block_of(block.grad, gradient_of(whole), where, "input", 1e-8)
    for name, reference in sequential.named_parameters():
        place, actual = owned(name, reference.shape), layer.get_parameter(name).grad
        if place is not None:
            assert_block_of(actual, gradient_of(reference), place, name, 1e-8)


def assert_groups(P: Partition, layer: torch.nn.Module, shape: Sequence[int], count: int) -> None:
    """Forward and backward each begin ``count`` groups of messages on this rank."""
    before = P.wire.recorder.count
    y = layer(torch.randn(*shape, requires_grad=True))
    assert P.wire.recorder.count == before + count
    y.square().sum().backward()
    assert P.wire.recorder.count == before + 2 * count
