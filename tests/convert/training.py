"""A converted network beside the original, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gpudist
from gpudist import Plan, distribute, sequential
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.sbp.global_parameter import block_of
from gpudist.world.partition import CartesianPartition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    gradient_of,
    own_block,
    own_slices,
    random_like_all,
)

Make = Callable[[], torch.nn.Module]
TOLERANCE = 1e-8


def assert_as_alone(
    make: Make,
    P_x: CartesianPartition,
    shapes: Sequence[Sequence[int]],
    edit: Callable[[Plan], None] | None = None,
    steps: int = 2,
    optimizer_of: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> Any:
    """Outputs, gradients, buffers and trained weights are those of the network alone.

    Gradients come by turns from a loss of global tensors and from one of the whole output.

    Args:
        make: the network, drawn under one seed.
        P_x: owns the inputs.
        shapes: of the inputs.
        edit: of the plan that is followed.
        steps: of training.
        optimizer_of: makes an optimizer of parameters and a rate.
        options: of ``distribute``.

    Returns:
        The converted network.
    """
    torch.manual_seed(3)
    alone = make().double()
    plan = None
    if edit is not None:
        plan = Plan()
        edit(plan)
    drawn = torch.get_rng_state()
    net: Any = distribute(copy.deepcopy(alone), P_x, plan, **options)
    assert torch.equal(torch.get_rng_state(), drawn), "the conversion drew random numbers"
    assert isinstance(net, type(alone))
    assert list(net.state_dict()) == list(alone.state_dict())
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in alone.named_parameters()]
    optimizers = [optimizer_of(m.parameters(), lr=0.05) for m in (alone, net)]
    for step in range(steps):
        wholes = [random_like_all(s, 10 * step + i).requires_grad_() for i, s in enumerate(shapes)]
        blocks = [own_block(whole, P_x) for whole in wholes]
        expected, found = outputs_of(alone(*wholes)), outputs_of(net(*blocks))
        assert len(expected) == len(found) == len(outputs_of(net.P_y))
        total_alone: Any = 0
        total: Any = 0
        for i, (whole, y) in enumerate(zip(expected, found, strict=True)):
            assert_whole(y, whole, f"output {i} of step {step}")
            cotangent = random_like_all(whole.shape, step + 9) / whole.numel()
            total_alone = total_alone + (whole * cotangent).sum()
            total = total + loss_of(y, cotangent, is_global=step % 2 == 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total_alone.backward()
        total.backward()
        for whole, block in zip(wholes, blocks, strict=True):
            where = own_slices(whole.shape, P_x)
            assert_block_of(block.grad, gradient_of(whole), where, "input gradient", TOLERANCE)
        assert_gradients(net, alone, P_x.active)
        for optimizer in optimizers:
            optimizer.step()
    back = sequential(net)
    assert (back is not None) == P_x.active
    if back is not None:
        assert type(back) is type(alone)
        for key, value in back.state_dict().items():
            assert_equal_to(value, alone.state_dict()[key], TOLERANCE, f"trained {key}")
    return net


def loss_of(y: Any, cotangent: torch.Tensor, is_global: bool = True) -> Any:
    """Return the whole output times a tensor, summed: of global tensors, or on each worker."""
    if is_global:
        copies = (broadcast,) * y.placement.axes
        return (y * gpudist.to_global(cotangent, y.placement, copies)).sum()
    copies = (broadcast,) * y.placement.axes
    whole = y.full_tensor(grad_sbp=copies)
    return (whole * (cotangent if y.placement.active else 0)).sum()


def assert_whole(y: Any, whole: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """``y`` is ``whole``, and each worker has its block of it."""
    assert isinstance(y, gpudist.GlobalTensor), f"{what}: a {type(y).__name__}"
    assert y.shape == whole.shape, f"{what}: {list(y.shape)}, expected {list(whole.shape)}"
    assert y.dtype == whole.dtype
    found = y.full_tensor().detach()
    if y.placement.active:
        assert_equal_to(found, whole.detach(), tolerance, what)
        index = y.placement.index
        assert index is not None
        if partial_sum in y.sbp:
            return
        where = y.global_layout.box(index).slices
        assert_equal_to(y.to_local().detach(), whole.detach()[where], tolerance, what)
    else:
        assert not found.numel() and not y.to_local().numel()


def assert_gradients(
    net: torch.nn.Module, alone: torch.nn.Module, active: bool, tolerance: float = TOLERANCE
) -> None:
    """Compare the gradient of every parameter with its block of the original's gradient."""
    placed, blocks = placements(net), dict(net.named_parameters())
    for key, whole in alone.named_parameters():
        what = f"gradient of {key}"
        if whole.grad is None:
            assert blocks[key].grad is None, f"{what}: alone it has none"
        elif key not in placed:
            if active:
                assert_equal_to(blocks[key].grad, whole.grad, tolerance, what)
        elif (box := placed[key].own_box) is not None:
            gradient = blocks[key].grad
            own = None if gradient is None else block_of(gradient, placed[key])
            assert_block_of(own, whole.grad, box.slices, what, tolerance)


def outputs_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]
