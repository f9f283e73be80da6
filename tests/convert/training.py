"""A converted network beside the one it was made of, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpudist import Plan, distribute, sequential
from gpudist.checkpoint.sequential import names_beyond_sequential
from gpudist.nn.placement import placements
from gpudist.partition import CartesianPartition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    gradient_of,
    own_block,
    own_slices,
    random_like_all,
)

Make = Callable[[], torch.nn.Module]
TOLERANCE = 1e-9


def assert_as_alone(
    make: Make,
    P_x: CartesianPartition,
    shapes: Sequence[Sequence[int]],
    edit: Callable[[Plan], None] | None = None,
    steps: int = 2,
    **options: Any,
) -> Any:
    """Outputs, gradients and trained weights are those of the network alone; the converted one.

    Args:
        make: the network, drawn under one seed.
        P_x: owns the inputs.
        shapes: of the inputs.
        edit: of the plan that is followed.
        steps: of training.
        options: of ``distribute``.
    """
    torch.manual_seed(3)
    alone = make().double()
    plan = None
    if edit is not None:
        plan = Plan()
        edit(plan)
    net: Any = distribute(alone, P_x, plan, **options)
    beyond = names_beyond_sequential(net)
    assert [name for name in net.state_dict() if name not in beyond] == list(alone.state_dict())
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in alone.named_parameters()]
    for step in range(steps):
        wholes = [random_like_all(s, 10 * step + i).requires_grad_() for i, s in enumerate(shapes)]
        blocks = [own_block(whole, P_x) for whole in wholes]
        expected, found = _outputs(alone(*wholes)), _outputs(net(*blocks))
        partitions = _outputs(net.P_y)
        assert len(expected) == len(found) == len(partitions)
        total_alone, total = torch.zeros(()).double(), torch.zeros(()).double()
        for i, (whole, y, P_y) in enumerate(zip(expected, found, partitions, strict=True)):
            where = own_slices(whole.shape, P_y)
            assert_block_of(y.detach(), whole.detach(), where, f"output {i}", TOLERANCE)
            cotangent = random_like_all(whole.shape, step + 9) / whole.numel()
            total_alone = total_alone + (whole * cotangent).sum()
            total = total + (y.sum() if where is None else (y * cotangent[where]).sum())
        for network, value in ((alone, total_alone), (net, total)):
            network.zero_grad()
            value.backward()
        for whole, block in zip(wholes, blocks, strict=True):
            where = own_slices(whole.shape, P_x)
            assert_block_of(block.grad, gradient_of(whole), where, "input gradient", TOLERANCE)
        assert_gradients(net, alone, P_x.active)
        with torch.no_grad():
            for parameter in (*alone.parameters(), *net.parameters()):
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    back = sequential(net)
    if back is not None:
        for key, value in back.state_dict().items():
            assert_equal_to(value, alone.state_dict()[key], TOLERANCE, f"trained {key}")
    return net


def assert_gradients(net: torch.nn.Module, alone: torch.nn.Module, active: bool) -> None:
    """Of every parameter, the block of that of the network alone."""
    placed, blocks = placements(net), dict(net.named_parameters())
    for key, whole in alone.named_parameters():
        what = f"gradient of {key}"
        if key not in placed:
            if active:
                assert_equal_to(blocks[key].grad, gradient_of(whole), TOLERANCE, what)
        elif (box := placed[key].own_box) is not None:
            assert_block_of(blocks[key].grad, gradient_of(whole), box.slices, what, TOLERANCE)


def _outputs(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]
