"""Losses over nothing: values and gradients are those of torch, zero or not a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.nn.loss.loss_cases import own_part, values, where_of
from tests.pool import distributed

pytestmark = pytest.mark.filterwarnings("ignore")
Case = tuple[str, dict[str, Any], list[torch.Tensor]]

X, SHARES = values("any", (4, 3), 1), values("any", (4, 3), 2).softmax(1)
IGNORED, CLASSES = torch.full((4,), -100), torch.tensor([1, 0, 2, 1])
NOTHING, WEIGHTS = torch.zeros(3, dtype=X.dtype), torch.tensor([0.5, 1, 2], dtype=X.dtype)
ELEMENTS = ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss",
            "KLDivLoss", "PoissonNLLLoss", "SoftMarginLoss", "HingeEmbeddingLoss"]  # fmt: skip


def cases() -> list[Case]:
    infinite = X.masked_fill(torch.eye(4, 3, dtype=torch.bool), -torch.inf)
    some = torch.tensor([-100, 0, 1, -100])
    found: list[Case] = []
    for mean in ("mean", "sum"):
        for smoothing in (0.0, 0.1):
            how = {"reduction": mean, "label_smoothing": smoothing}
            found += [
                ("CrossEntropyLoss", how, [X, IGNORED]),
                ("CrossEntropyLoss", how, [infinite, some]),
                ("CrossEntropyLoss", how, [X[:0], IGNORED[:0]]),
                ("CrossEntropyLoss", how, [X, torch.zeros_like(X)]),
                ("CrossEntropyLoss", {**how, "weight": WEIGHTS}, [X, IGNORED]),
                ("CrossEntropyLoss", {**how, "weight": NOTHING}, [X, CLASSES]),
                ("CrossEntropyLoss", {**how, "weight": NOTHING}, [X, SHARES]),
            ]
        how = {"reduction": mean}
        found += [("NLLLoss", how, [X, IGNORED]), ("NLLLoss", how, [infinite, some])]
        found += [("NLLLoss", {**how, "weight": NOTHING}, [X, CLASSES])]
        for x in (X[:0], X[:, :0]):
            found += [(name, how, [x, x.clone()]) for name in ELEMENTS]
            found += [("GaussianNLLLoss", how, [x, x.clone(), x.clone()])]
            signs = torch.ones(len(x), dtype=X.dtype)
            found += [("CosineEmbeddingLoss", how, [x, x.clone(), signs])]
        signs = torch.ones(4, dtype=X.dtype)
        found += [("CosineEmbeddingLoss", how, [torch.zeros_like(X), X, signs])]
    return found + [("KLDivLoss", {"reduction": "batchmean"}, [x, x]) for x in (X[:0], X[:, :0])]


@distributed(ranks=5, transports=["loopback"])
def test_losses_over_nothing(P_world: Partition) -> None:
    """Also where some workers have no cells, and with second derivatives."""
    grids = [grid(P_world, shape) for shape in ([2, 1], [1, 2], [5, 1], [1, 5], [1, 1])]
    wrong: list[str] = []
    for number, case in enumerate(cases()):
        for P_x in (grids[number % 5], grids[(number + 2) % 5]):
            wrong += _differences(case, P_x)
    assert not wrong, "\n".join(wrong)


def _differences(case: Case, P_x: Any) -> list[str]:
    name, options, xs = case
    shape = xs[0].shape
    whole = [x.clone().requires_grad_(i == 0) for i, x in enumerate(xs)]
    blocks = [own_part(x, shape, P_x).requires_grad_(i == 0) for i, x in enumerate(xs)]
    expected = getattr(torch.nn, name)(**options)(*whole)
    found = getattr(nn, f"Distributed{name}")(P_x, **options)(*blocks)
    wrong = [] if _equal(found, expected) else [f"{case}: {found}, torch's {expected}"]
    where = where_of(xs[0], shape, P_x)
    for order in ("gradient", "second gradient"):
        how: Any = {"create_graph": True, "allow_unused": True}
        (expected,) = torch.autograd.grad(expected.sum(), whole[0], **how)
        (found,) = torch.autograd.grad(found.sum(), blocks[0], **how)
        if expected is None or found is None:
            break
        if where is not None and not _equal(found, expected[where]):
            wrong.append(f"{order} of {case}: {found}, torch's {expected[where]}")
        if not expected.requires_grad or not found.requires_grad:
            break
    return wrong


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.allclose(x.detach(), y.detach(), equal_nan=True)
