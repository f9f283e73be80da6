"""Every operator in every dtype, on any layout of memory, and recomputed in backward."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, random
from tests.ops.test_contract import NAMES, sample
from tests.pool import distributed

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.int64, torch.bool,
)  # fmt: skip
SUMS = {"sum_reduce", "all_sum_reduce", "sum_scatter"}
# Sums of narrow dtypes are kept in float32.
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
# Equal blocks on six ranks, of which three are summed.
EVEN = (6, 12)
FORMAT = torch.contiguous_format


@distributed(ranks=6)
def test_every_dtype(P_world: Partition) -> None:
    """Values are those of a wide dtype, rounded once; sums refuse bool on every rank."""
    for name, dtype in product(NAMES, DTYPES):
        operator, x = sample(P_world, name, EVEN)
        if dtype == torch.bool and name in SUMS:
            with pytest.raises(ShapeError, match="bool"):
                operator(x > 0)
            continue
        # Integers, so that sums of other dtypes are exact.
        x = x if dtype in WIDE else x.mul(9).round()
        x = (x * (1 + 2j) if dtype.is_complex else x).to(dtype)
        x.requires_grad_(dtype.is_floating_point)
        wide = torch.complex128 if dtype.is_complex else WIDE.get(dtype, torch.float64)
        reference, _ = sample(P_world, name, EVEN)
        other = x.detach().to(wide).requires_grad_(x.requires_grad)
        y, expected = operator(x), reference(other)
        assert_same(y.detach(), expected.detach().to(dtype))
        if x.requires_grad:
            w = random(y.shape, P_world.plan_rank).to(dtype)
            (gradient,) = torch.autograd.grad(y, x, w)
            (wanted,) = torch.autograd.grad(expected, other, w.to(wide))
            assert_same(gradient, wanted.to(dtype))


@distributed(ranks=6)
def test_layouts_of_memory(P_world: Partition) -> None:
    """Inputs and gradients may be strided or expanded; the caller's tensors do not change."""
    for name in NAMES:
        operator, x = sample(P_world, name, EVEN)
        for view in (x.T.contiguous().T, x.repeat_interleave(2, 1)[:, ::2], x[:1].expand_as(x)):
            dense, view = view.clone(memory_format=FORMAT).requires_grad_(), view.requires_grad_()
            y, expected = operator(view), operator(dense)
            assert_same(y.detach(), expected.detach())
            assert y.numel() == 0 or y.data_ptr() != view.data_ptr()
            w = random(y.shape, P_world.plan_rank)
            for strided in (w.T.contiguous().T, w[:1, :1].expand_as(w) if w.numel() else w):
                kept = strided.clone(memory_format=FORMAT)
                (gradient,) = torch.autograd.grad(y, view, strided, retain_graph=True)
                (wanted,) = torch.autograd.grad(expected, dense, kept, retain_graph=True)
                assert_same(gradient, wanted)
                assert_same(strided, kept)
            assert_same(view.detach(), dense.detach())


@distributed(ranks=4)
def test_checkpoint(P_world: Partition) -> None:
    """Ranks without a result recompute too, though they have no tensor of their own to save."""
    for name, use_reentrant in product(NAMES, (True, False)):
        operator, x = sample(P_world, name)
        x.requires_grad_()

        def squares(t: torch.Tensor, operator: Any = operator) -> torch.Tensor:
            y = operator(t)
            return y * y if y.numel() else y + 0

        (expected,) = torch.autograd.grad(squares(x).sum(), x)
        checkpoint(squares, x, use_reentrant=use_reentrant).sum().backward()
        assert x.grad is not None
        assert_same(x.grad, expected)
