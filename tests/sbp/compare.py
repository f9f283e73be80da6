"""An operator on global tensors against the same operator on whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import GlobalTensor, Placement
from gpudist.sbp.methods import watch
from gpudist.sbp.trees import tensors_in
from tests.sbp.parts import assert_parts, part_of, random

Function = Callable[..., Any]


def global_of(
    x: torch.Tensor, placement: Placement, sbp: NdSbp, requires_grad: bool = False
) -> GlobalTensor:
    """Return a leaf with parts of the whole ``x``, which every rank passes."""
    layout = placement.layout(sbp, tuple(x.shape))
    rank = placement.partition.world.rank
    assert rank is not None
    part = part_of(x.detach(), layout, rank).requires_grad_(requires_grad)
    made = GlobalTensor._wrap(part, placement, sbp, tuple(x.shape))
    if requires_grad:
        watch(made)
    return made


def assert_global(y: torch.Tensor, x: torch.Tensor, what: str = "") -> None:
    """The parts of ``y`` make up the whole ``x``, on every rank."""
    assert isinstance(y, GlobalTensor), what
    assert tuple(y.shape) == tuple(x.shape) and y.dtype == x.dtype, what
    world = y.placement.partition.world
    assert_parts(y.to_local(), x.detach(), y.global_layout, world, f"{what}, {y.sbp}")


def assert_matches(
    function: Function,
    xs: Sequence[torch.Tensor],
    placement: Placement,
    sbps: Sequence[NdSbp],
    double: bool = False,
) -> list[GlobalTensor]:
    """Values and gradients of ``function`` are those of whole tensors; returns the outputs.

    Args:
        function: of as many tensors as ``xs``; its results may be nested.
        xs: whole tensors, the same on all ranks; those of floating point are differentiated.
        placement: of all inputs.
        sbps: one for each input.
        double: compare the gradient of a function of the gradients too.
    """
    what = f"{function} of {[list(x.shape) for x in xs]} by {sbps}"
    needs = [x.is_floating_point() for x in xs]
    whole = [x.clone().requires_grad_(n) for x, n in zip(xs, needs, strict=True)]
    parts = [global_of(x, placement, sbp, n) for x, sbp, n in zip(xs, sbps, needs, strict=True)]
    expected = tensors_in(function(*whole))
    outputs: list[Any] = tensors_in(function(*parts))
    assert len(outputs) == len(expected), what
    for y, x in zip(outputs, expected, strict=True):
        assert_global(y, x, what)
        assert y.requires_grad == x.requires_grad, what
    ends = [i for i, y in enumerate(expected) if y.requires_grad]
    if not ends:
        return outputs
    seeds = [random(tuple(expected[i].shape), 7 + i).to(expected[i].dtype) for i in ends]
    options: dict[str, Any] = {"create_graph": double}
    sequential = torch.autograd.grad(
        [expected[i] for i in ends], [x for x in whole if x.requires_grad], seeds, **options
    )
    starts: list[Any] = [x for x in parts if x.requires_grad]
    found: Any = torch.autograd.grad([outputs[i] for i in ends], starts, seeds, **options)
    for g, e, start in zip(found, sequential, starts, strict=True):
        assert g.sbp == start.sbp, what
        assert_global(g, e, f"gradient of {what}")
    if double:
        _assert_second(found, starts, sequential, whole, what)
    return outputs


def _assert_second(
    found: Sequence[Any],
    starts: list[Any],
    sequential: Sequence[torch.Tensor],
    whole: list[torch.Tensor],
    what: str,
) -> None:
    """The gradient of a sum over the gradients, each weighed by itself."""
    pairs = [(g, e) for g, e in zip(found, sequential, strict=True) if e.requires_grad]
    if not pairs:
        return
    weights = [random(tuple(e.shape), 50).to(e.dtype) for _, e in pairs]
    expected = torch.autograd.grad(
        [e for _, e in pairs], [x for x in whole if x.requires_grad], weights, allow_unused=True
    )
    second: Any = torch.autograd.grad([g for g, _ in pairs], starts, weights, allow_unused=True)
    for g, e in zip(second, expected, strict=True):
        # A boxing of several inputs is one node, whose gradients are zero rather than missing.
        if e is None and g is not None:
            e = torch.zeros(g.shape, dtype=g.dtype)
        assert (g is None) == (e is None), what
        if e is not None and g is not None:
            assert_global(g, e, f"second gradient of {what}")
