"""Means over nothing: values and gradients are those of torch, zero or not a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.geometry.layout import Sbp
from gpudist.sbp import Placement
from gpudist.sbp.trees import tensors_in
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random

pytestmark = pytest.mark.filterwarnings("ignore")
Case = tuple[Callable[..., Any], list[torch.Tensor]]

X, SHARES = random((4, 3)), random((4, 3), 1).softmax(1)
IGNORED, CLASSES = torch.full((4,), -100), torch.tensor([1, 0, 2, 1])
# Weights and targets that do not learn are numbers without a gradient.
UNLEARNED = torch.tensor(1.0, dtype=torch.float64)
NONE = [torch.zeros(0, 3, dtype=torch.float64), torch.zeros(4, 0, dtype=torch.float64)]
_MSE: Any = F.mse_loss
PAIRS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits,
         F.kl_div, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss)  # fmt: skip


def losses() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for mean in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            how: Any = {"reduction": mean, "label_smoothing": smoothing}
            entropy = _with(F.cross_entropy, how)
            weighed = _weighed(F.cross_entropy, how)
            minus_infinity = X[:2].masked_fill(torch.eye(2, 3, dtype=torch.bool), -torch.inf)
            found |= {
                f"ignored, {how}": (entropy, [X, IGNORED]),
                f"ignored and weighed, {how}": (weighed, [X, IGNORED, torch.tensor([1, 2, 3])]),
                f"images, {how}": (entropy, [random((2, 3, 2)), torch.full((2, 2), -100)]),
                f"no weight, {how}": (weighed, [X, CLASSES, torch.zeros(3, dtype=torch.int64)]),
                f"shares, no weight, {how}": (
                    lambda x, w, call=weighed: call(x, x.detach().softmax(1), w),
                    [X, torch.zeros(3, dtype=torch.int64)],
                ),
                f"no samples, {how}": (entropy, [NONE[0], IGNORED[:0]]),
                f"infinity ignored, {how}": (entropy, [minus_infinity, torch.tensor([-100, 0])]),
            }
        for name, x in zip(("no rows", "no columns"), NONE, strict=True):
            for loss in PAIRS:
                found[f"{loss.__name__}, {name}, {mean}"] = _of_pair(loss, mean), [x, x]
            gauss = _with(F.gaussian_nll_loss, {"reduction": mean})
            found[f"gauss, {name}, {mean}"] = gauss, [x, x, x]
            triplet = _with(F.triplet_margin_loss, {"reduction": mean})
            found[f"triplet, {name}, {mean}"] = triplet, [x, x, x]
        nll = _with(F.nll_loss, {"reduction": mean})
        found |= {
            f"nll, ignored, {mean}": (nll, [X, IGNORED]),
            f"nll, no weight, {mean}": (
                _weighed(F.nll_loss, {"reduction": mean}),
                [X, CLASSES, torch.zeros(3, dtype=torch.int64)],
            ),
            f"weighed by nothing, {mean}": (
                lambda x, y, w, mean=mean: _MSE(x, y, weight=w, reduction=mean),
                [X, SHARES, torch.zeros_like(X)],
            ),
            f"weighed, {mean}": (
                lambda x, y, w, mean=mean: _MSE(x, y, weight=w, reduction=mean),
                [X, SHARES, SHARES + 1],
            ),
            f"cosine, {mean}": (
                _with(F.cosine_embedding_loss, {"reduction": mean}),
                [torch.zeros_like(X), X, torch.tensor([1, -1, 1, -1])],
            ),
        }
    for x in NONE:
        found[f"batchmean {list(x.shape)}"] = _with(F.kl_div, {"reduction": "batchmean"}), [x, x]
    return found


def _of_pair(loss: Any, mean: str) -> Callable[..., Any]:
    return lambda x, y: loss(x, y.detach(), reduction=mean)


def _with(function: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *xs: function(*xs, **options)


def _weighed(function: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return lambda x, y, w: function(x, y, w * UNLEARNED, **options)


def reductions() -> dict[str, Case]:
    found: dict[str, Case] = {}
    missing = X.clone()
    missing[:, 1] = missing[2] = torch.nan
    for x in (*NONE, missing, torch.full_like(X, torch.nan)):
        for name in ("mean", "sum", "nanmean", "nansum"):
            for dim in (0, 1, (0, 1)):
                what = f"{name} over {dim} of {x.isnan().sum()} of {list(x.shape)}"
                found[what] = _with(getattr(torch, name), {"dim": dim}), [x]
    for name in ("var", "std_mean"):
        for rows, columns in ((1, 3), (3, 1), (1, 1), (2, 2)):
            for correction in (0, 1, 5):
                for dim in (0, 1, (0, 1)):
                    how = {"dim": dim, "correction": correction}
                    case = _with(getattr(torch, name), how), [X[:rows, :columns].contiguous()]
                    found[f"{name} of {[rows, columns]}, {how}"] = case
    mask = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1]], dtype=torch.float64)
    return found | {
        "masked mean": (lambda x, m: (x * m).sum() / m.sum(), [X, torch.zeros_like(X)]),
        "masked rows": (lambda x, m: (x * m).sum(1) / m.sum(1), [X, mask]),
        "clamped mean": (lambda x, m: (x * m).sum() / m.sum().clamp(min=1), [X, 0 * X]),
        "layer norm of one": (lambda x: F.layer_norm(x, [1]), [X[:, :1].contiguous()]),
        "layer norm of equals": (lambda x: F.layer_norm(x, [3], eps=0.0), [torch.ones_like(X)]),
        "rms norm of zeros": (lambda x: F.rms_norm(x, [3], eps=0.0), [torch.zeros_like(X)]),
        "group norm of none": (lambda x: F.group_norm(x, 1), [random((4, 3, 0))]),
        "batch norm of none": (_with(F.batch_norm, _TRAINING), [random((2, 3, 0))]),
        "instance norm of two": (F.instance_norm, [random((2, 3, 2))]),
        "pool of none": (lambda x: F.adaptive_avg_pool1d(x, 1), [random((0, 3, 4))]),
    }


_TRAINING: dict[str, Any] = {"running_mean": None, "running_var": None, "training": True}


@distributed(ranks=5, transports=("loopback",))
def test_losses(P_world: Partition) -> None:
    assert_as_torch(P_world, losses())


@distributed(ranks=[2, 5], transports=("loopback",))
def test_reductions(P_world: Partition) -> None:
    assert_as_torch(P_world, reductions())


def assert_as_torch(P_world: Partition, cases: dict[str, Case]) -> None:
    """Compare value, gradient and second gradient; a dim is split, in blocks some of them empty."""
    placement = Placement("cpu", range(P_world.size), P_world)
    wrong: list[str] = []
    for number, (name, (function, xs)) in enumerate(cases.items()):
        # Every case with one of its layouts; the next world tries another.
        dims = xs[0].dim() + 1
        dim = (number + P_world.size) % dims
        sbps = [_sbp(x, xs[0], dim) for x in xs]
        wrong += _differences(f"{name}, {sbps}", function, xs, placement, sbps)
    assert not wrong, "\n".join(wrong)


def _sbp(x: torch.Tensor, first: torch.Tensor, dim: int) -> Sbp:
    if dim == first.dim():
        return B
    if x.dim() == first.dim():
        return S(dim) if x.shape == first.shape else B
    is_target = x.dim() == first.dim() - 1 and len(x) == len(first) and dim != 1
    return S(max(dim - 1, 0)) if is_target else B


def _differences(
    what: str, function: Any, xs: list[torch.Tensor], placement: Placement, sbps: list[Sbp]
) -> list[str]:
    needs = [x.is_floating_point() for x in xs]
    whole = [x.clone().requires_grad_(n) for x, n in zip(xs, needs, strict=True)]
    parts = [global_of(x, placement, (one,), n) for x, one, n in zip(xs, sbps, needs, strict=True)]
    ys: list[Any] = tensors_in(function(*parts))
    expected = tensors_in(function(*whole))
    wrong = _unequal(f"value of {what}", ys, expected)
    leaves, starts = [x for x in whole if x.requires_grad], [x for x in parts if x.requires_grad]
    for order in ("gradient", "second gradient"):
        ends = [i for i, y in enumerate(expected) if y is not None and y.requires_grad]
        # Functions that are linear here have no second gradient, where torch's is zero.
        ends = [i for i in ends if order == "gradient" or _learns(ys[i])]
        if not ends:
            break
        how: Any = {"create_graph": True, "allow_unused": True}
        seeds = [torch.ones_like(expected[i].detach()) for i in ends]
        ys = list(torch.autograd.grad([ys[i] for i in ends], starts, seeds, **how))
        expected = list(torch.autograd.grad([expected[i] for i in ends], leaves, seeds, **how))
        wrong += _unequal(f"{order} of {what}", ys, expected)
    return wrong


def _learns(y: Any) -> bool:
    return y is not None and y.requires_grad


def _unequal(what: str, ys: list[Any], expected: list[Any]) -> list[str]:
    wrong: list[str] = []
    for y, x in zip(ys, expected, strict=True):
        if y is None and x is None:
            continue
        found = None if y is None else y.full_tensor().detach()
        found = torch.zeros_like(x) if found is None else found
        x = torch.zeros_like(found) if x is None else x.detach()
        if found.dtype != x.dtype or not torch.allclose(found, x, equal_nan=True):
            wrong.append(f"{what}: {found.tolist()}, torch's {x.tolist()}")
    return wrong
