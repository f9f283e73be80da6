"""A layer of any name against torch's, for tests of cases that other libraries get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import gpudist
from gpudist import nn
from gpudist.world.partition import Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_block_of,
    assert_equal_to,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)

F64 = torch.float64


def same(
    P_world: Partition,
    layer: str,
    shape: Sequence[int],
    grid_shape: Sequence[int],
    *arguments: Any,
    ranks: Sequence[int] | None = None,
    sizes: Cut | None = None,
    parameter_dims: Sequence[int] = (1,),
    **options: Any,
) -> torch.nn.Module | None:
    """Assert that the layer is torch's: output, input gradient and parameter gradients.

    Args:
        layer: its name without "Distributed".
        shape: of the global input, which is random.
        grid_shape, ranks: of ``P_x``; the first ranks unless given.
        arguments, options: of both layers.
        sizes: of the input's blocks, where they are not balanced; the output's are kept where the
            layer has no window, in the dims of batch and channels.
        parameter_dims: of the input, along which a parameter is cut as the input is, if at all.

    Returns:
        The distributed layer.
    """
    P_x = grid(P_world, grid_shape, ranks)
    made: list[torch.nn.Module] = []

    def distributed() -> torch.nn.Module:
        made.append(getattr(nn, f"Distributed{layer}")(P_x, *arguments, **options))
        return made[-1]

    def owned(name: str, whole: torch.Size) -> Slices | None:
        cells = made[-1].get_parameter(name).numel()
        if cells in (0, whole.numel()):
            return tuple(slice(0, n) for n in whole) if cells else None
        where = own_slices(shape, P_x, sizes)
        assert where is not None, f"{name}: cells on a rank outside the partition"
        return tuple(where[d] for d in parameter_dims)

    assert_same_as_sequential(
        lambda: getattr(torch.nn, layer)(*arguments, **options),
        distributed,
        P_x,
        P_x,
        shape,
        owned,
        sizes=sizes,
        output_sizes={d: blocks for d, blocks in (sizes or {}).items() if d < 2},
    )
    for name, parameter in made[-1].named_parameters():
        held = P_world.allgather_data([parameter.numel()])
        assert any(cells for (cells,) in held), f"no rank has the parameter {name}"
    return made[-1]


def same_loss(
    P_world: Partition,
    loss: str,
    grid_shape: Sequence[int],
    input: torch.Tensor,
    target: torch.Tensor,
    **options: Any,
) -> None:
    """Assert that every rank has torch's value, and its blocks of the gradient."""
    P_x = grid(P_world, grid_shape)
    whole = input.detach().clone().requires_grad_()
    expected = getattr(torch.nn, loss)(**options)(whole, target)
    expected.backward()
    block = own_block(input, P_x)
    where = own_slices(input.shape, P_x)
    where_target = where
    if where is not None and target.dim() < input.dim():
        where_target = where[0], *where[2:]
    mine = target[:0] if where_target is None else target[where_target]
    value = getattr(nn, f"Distributed{loss}")(P_x, **options)(block, mine)
    value.backward()
    assert_equal_to(value.detach(), expected.detach(), 1e-12, "value")
    assert_block_of(block.grad, gradient_of(whole), where, "gradient", 1e-12)


def received_bytes(P_world: Partition, call: Callable[[], Any]) -> int:
    """Count the bytes that this rank receives while ``call`` runs."""
    before = sum(row.received_bytes for row in gpudist.stats(P_world=P_world))
    call()
    return sum(row.received_bytes for row in gpudist.stats(P_world=P_world)) - before


def moves_less_than_a_block(
    P_world: Partition, layer: str, *arguments: Any, **options: Any
) -> None:
    """Assert that no rank of 4 receives half a block, forward and backward together."""
    shape = (2, 4, 64, 16)
    P_x = grid(P_world, [1, 1, 4, 1])
    distributed = getattr(nn, f"Distributed{layer}")(P_x, *arguments, **options)
    block = own_block(random_like_all(shape, 1), P_x)
    moved = received_bytes(P_world, lambda: distributed(block).sum().backward())
    assert block.grad is not None
    assert moved < block.nbytes / 2, f"{moved} bytes for a block of {block.nbytes}"
