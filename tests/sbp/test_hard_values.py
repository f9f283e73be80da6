"""Reductions and losses of NaN, infinities, ties, constants and empty blocks, in four dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.sbp import broadcast, split
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.pool import distributed
from tests.sbp.compare import global_of

T = torch.Tensor
SHAPE = (6, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


def values() -> dict[str, T]:
    """Return the cells of each kind, in float64; all are exact in 16 bits."""
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(SHAPE, generator=draw).to(torch.float16).double()
    ties = torch.randint(-2, 3, SHAPE, generator=draw).double()

    def changed(value: float, *rows: int) -> T:
        x = plain.clone()
        x[list(rows), ::2] = value
        return x

    masked, late = plain.clone(), plain.clone()
    masked[:3], late[3:] = -INF, -INF
    return {
        "plain": plain,
        "NaN": changed(NAN, 1),
        "NaN in the last block": changed(NAN, 5),
        "infinity": changed(INF, 4),
        "infinities": changed(INF, 1, 4),
        "minus infinity": changed(-INF, 0, 3),
        "a block of minus infinity": masked,
        "the last block of minus infinity": late,
        "ties": ties,
        "constant": torch.full(SHAPE, 1.5, dtype=torch.float64),
        "zeros": torch.zeros(SHAPE, dtype=torch.float64),
        "large": plain * 2**12,
    }


REDUCTIONS: dict[str, Callable[[T], Any]] = {
    **{
        f"{name}({dim})": lambda x, name=name, dim=dim: getattr(torch, name)(x, dim)
        for name in (
            "sum", "nansum", "mean", "nanmean", "amax", "amin", "max", "min", "argmax", "argmin",
            "logsumexp", "prod", "any", "all", "count_nonzero", "var", "std", "cumsum",
            "cumprod", "logcumsumexp", "softmax", "log_softmax",
        )
        for dim in (0, 1)
    },
    **{name: getattr(torch, name) for name in ("sum", "mean", "max", "min", "prod", "var", "norm")},
    "logsumexp((0, 1))": lambda x: x.logsumexp((0, 1)),
    **{
        f"norm of order {order}": partial(torch.linalg.vector_norm, ord=order)
        for order in (INF, -INF, 0, 1, 2, 3, -1)
    },
    "norm of columns": lambda x: torch.linalg.vector_norm(x, INF, 0),
}  # fmt: skip


def _loss(name: str, reduction: str, x: T, y: T) -> T:
    if name.startswith("binary"):
        x = x.sigmoid() if name == "binary_cross_entropy" else x
        y = y.sigmoid().detach()
    if name in ("soft_margin_loss", "hinge_embedding_loss"):
        y = y.sign()
    if name == "cross_entropy" or name == "nll_loss":
        classes = (y[:, 0].detach().nan_to_num(0, 0, 0).abs() % 4).long()
        return getattr(F, name)(x, classes, reduction=reduction)
    return getattr(F, name)(x, y, reduction=reduction)


LOSSES: dict[str, Callable[[T, T], T]] = {
    f"{name}, {reduction}": partial(_loss, name, reduction)
    for name in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
        "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss",
        "hinge_embedding_loss", "cross_entropy", "nll_loss",
    )
    for reduction in ("mean", "sum")
}  # fmt: skip


def results(call: Callable[..., Any], *xs: T) -> tuple[list[T], list[T | None]] | str:
    """Return the results and the gradients of the sum of the first, or what is refused."""
    try:
        y = call(*xs)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    ys = list(y) if isinstance(y, tuple) else [y]
    first = ys[0]
    if not first.requires_grad:
        return ys, []
    leaves = [x for x in xs if x.requires_grad]
    return ys, list(torch.autograd.grad(first.sum(), leaves, allow_unused=True))


def whole(x: Any) -> T:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def differs(found: T, expected: T) -> bool:
    found = whole(found)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return True
    if not expected.is_floating_point():
        return not torch.equal(found, expected)
    # Sums in another order; torch's gradient of logcumsumexp loses 12 of 53 bits.
    eps = max(64 * torch.finfo(expected.dtype).eps, 2**-40)
    return not torch.allclose(found, expected, rtol=eps, atol=eps, equal_nan=True)


def is_wrong(
    found: list[T | None], expected: list[T | None], may_be_nan: bool, may_be_zero: bool
) -> bool:
    """Compare gradients; of a result that is infinite or NaN they may be NaN where torch's are not.

    The other way round they may only be 0, and only of logarithms of nothing.
    """
    for mine, its in zip(found, expected, strict=True):
        if mine is None or its is None:
            if mine is not its:
                return True
            continue
        mine = whole(mine)
        lost = ~mine.isfinite() if may_be_nan else torch.zeros_like(mine, dtype=torch.bool)
        if may_be_zero:
            lost |= (mine == 0) & its.isnan()
        if differs(torch.where(lost, 0, mine), torch.where(lost, 0, its)):
            return True
    return False


@pytest.mark.filterwarnings("ignore")
@distributed(ranks=2, transports=["loopback"], timeout_s=200)
def test_hard_values(P_world: Partition) -> None:
    """Values and gradients are torch's on every layout, with thin and empty blocks."""
    placement = gpudist.placement("cpu", [0, 1])
    plain, wrong, number, count = values()["plain"].flip(0), [], 0, 0
    layouts = [
        broadcast, split(0), split(1), split(0, sizes=[1, 5]), split(0, sizes=[0, 6]),
        split(0, sizes=[6, 0]), split(1, sizes=[4, 0]),
    ]  # fmt: skip

    for dtype in DTYPES:
        for kind, cells in values().items():
            for name, call in {**REDUCTIONS, **LOSSES}.items():
                xs = [cells.to(dtype).requires_grad_()]
                if name in LOSSES:
                    xs.append(plain.to(dtype))
                expected = results(call, *xs)
                if isinstance(expected, str):
                    continue
                may_be_nan = not all(y.isfinite().all() for y in expected[0])
                # The norm of a block of infinities is 0, where the power has no derivative.
                may_be_nan |= name == "norm of order -1"
                for sbp in layouts:
                    number += 1
                    # Thinned alike on all ranks; 101 has no factor of the counts above.
                    if not EVERY and number % 101 % 25:
                        continue
                    count += 1
                    parts = [global_of(x, placement, (sbp,), x.requires_grad) for x in xs]
                    found = results(call, *parts)
                    where = f"{name} of {kind} in {dtype}, {sbp}"
                    if isinstance(found, str):
                        wrong.append(f"{where}: {found[:200]}")
                    elif any(map(differs, found[0], expected[0])):
                        wrong.append(f"{where}: {[*map(whole, found[0])]}, not {expected[0]}")
                    # torch's logarithmic gradients lose most of few bits.
                    elif name in REDUCTIONS and (dtype.itemsize == 2 or kind == "large"):
                        continue
                    elif is_wrong(found[1], expected[1], may_be_nan, name.startswith("log")):
                        wrong.append(f"{where}: gradients {found[1]}, not {expected[1]}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:10])
