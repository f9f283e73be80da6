"""Counts of what backward needs, and the graphs they leave behind."""

from __future__ import annotations

import gc
from weakref import ref

import torch
from torch import nn

from gpudist.planning.rehearsal import KeptForBackward


def test_kept_results_are_counted_and_freed() -> None:
    """``exp`` keeps its own result, whose graph must end without a backward."""
    weight = nn.Parameter(torch.ones(3))
    kept = KeptForBackward([weight])
    with kept:
        y = (weight * 2).exp()
    assert kept.nbytes == y.nbytes
    (slope,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), weight)
    assert torch.allclose(curvature, 4 * y)
    with kept:
        z = (weight * 3).exp()
    gone = ref(weight)
    del weight, y, z, slope, kept
    gc.collect()
    assert gone() is None
