"""Pooling of the block in place, its faces apart, is the sequential pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.in_place import blocks_of_any_size, has_faces
from tests.nn.pool.test_pool import DISTRIBUTED, SEQUENTIAL
from tests.pool import distributed

KINDS = list(DISTRIBUTED)


def check(
    kind: str,
    P_x: CartesianPartition,
    *arguments: Any,
    shape: Sequence[int],
    x: torch.Tensor | None = None,
    expected: bool = True,
    batches: Sequence[int] = (),
    **options: Any,
) -> None:
    dims, layers = len(shape) - 2, []

    def make() -> torch.nn.Module:
        layers.append(DISTRIBUTED[kind][dims](P_x, *arguments, **options))
        return layers[0]

    with blocks_of_any_size():
        assert_same_as_sequential(
            lambda: SEQUENTIAL[kind][dims](*arguments, **options),
            make, P_x, P_x, shape, x=x, batches=batches, tolerance=1e-12,
        )  # fmt: skip
    assert not P_x.active or has_faces(layers[0]) == expected


@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), ((3, 5), 1, (1, 2)), ((3, 1), 1, (1, 0))])
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=6, transports=["loopback"])
def test_windows_2d(P_world: Partition, kind: str, window: tuple[Any, ...]) -> None:
    for grid_shape in ([1, 1, 2, 2], [1, 1, 2, 3], [2, 1, 2, 1], [1, 2, 1, 3]):
        P_x = grid(P_world, grid_shape)
        expected = grid_shape[2] > 1 or window[0] != (3, 1)
        check(kind, P_x, *window, shape=(2, 3, 12, 18), expected=expected)
        if kind == "average":
            variants: list[dict[str, Any]] = [{"count_include_pad": False}, {"divisor_override": 5}]
            for options in variants:
                check(
                    kind, P_x, *window, shape=(2, 3, 12, 18), expected=expected, **options
                )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=5)
def test_on_every_transport(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2], [4, 2, 1, 0])
    check(kind, P_x, 3, 2, 1, shape=(2, 3, 12, 8), batches=[1, 2])


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_blocks_that_torch_does_not_pool_are_copied(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 4])
    check(kind, P_x, 3, 1, 1, shape=(2, 2, 8), expected=False)
    check(kind, P_x, 3, 1, 0, shape=(2, 2, 16), expected=False)
    check(kind, P_x, 3, 1, 1, shape=(2, 2, 3), expected=False)


@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (3, 1, 1, 1)])
@distributed(ranks=4, transports=["loopback"])
def test_ties_go_to_the_same_cell(P_world: Partition, window: tuple[int, ...]) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 2, (2, 2, 12, 8), generator=generator).double()
    for x in (few, torch.zeros_like(few)):
        check("max", P_x, *window, shape=few.shape, x=x)


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4)
def test_double_backward(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    whole = random_like_all((2, 2, 12, 8), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential, layer = SEQUENTIAL[kind][2](3, 2, 1), DISTRIBUTED[kind][2](P_x, 3, 2, 1)
    with blocks_of_any_size():
        for model, x in ((sequential, whole), (layer, block)):
            (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
            gradient.pow(2).sum().backward()
    assert has_faces(layer)
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "gradient of the penalty")


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=2)
def test_overlap_can_be_refused_and_is_for_large_blocks(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    results: list[torch.Tensor] = []
    for size, overlap, expected in ((8, True, False), (512, True, True), (512, False, False)):
        x = random_like_all((1, 1, size, 512), P_world.rank or 0).requires_grad_()
        layer = DISTRIBUTED[kind][2](P_x, 3, 2, 1, overlap=overlap)
        y = layer(x)
        assert has_faces(layer) == expected
        y.pow(2).sum().backward()
        results.append(gradient_of(x))
        with torch.no_grad():
            assert_equal_to(layer(x), y.detach(), 0, "without gradients")
    assert_equal_to(results[1], results[2], 1e-12, "with and without overlap")
