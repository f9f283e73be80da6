"""Softmax and losses against torch, with gradients, and their tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import Row, assert_everywhere, assert_table

X = random((5, 7))
IMAGES = random((2, 5, 3))
SHARES = random((5, 7), 1).softmax(1)
# Torch has no gradient of weights: here they are numbers, in a unit.
WEIGHT = torch.tensor([3, 1, 4, 1, 5, 9, 2])
UNIT = torch.tensor(0.1, dtype=torch.float64)
CLASSES = torch.tensor([6, 0, -100, 3, 3])
PLACES = torch.tensor([[4, 0, 1], [2, -100, 4]])

ALONG: list[Row] = [([S(0)], S(0)), ([S(1)], S(1)), ([B], B)]
CELLS: list[Row] = [([S(0), S(0)], P), ([S(1), S(1)], P), ([B, B], B)]
SMALL: list[Row] = [([S(0), B], P), ([S(1), S(0)], P), ([B, B], B)]


SOFTMAXES = [F.softmax, torch.log_softmax, torch.special.log_softmax, F.softmin]


@pytest.mark.parametrize("function", SOFTMAXES)
@distributed(ranks=8, transports=("loopback",))
def test_softmax(P_world: Partition, function: Any) -> None:
    """Softmax runs along empty blocks, and on numbers whose exponential overflows."""
    for dim in (0, -1):
        assert_table(P_world, partial(function, dim=dim), [X], ALONG)
        assert_everywhere(P_world, partial(function, dim=dim), [X], (1, 2, 1))
    assert_everywhere(P_world, lambda x: function(1000 * x, dim=1), [X], (1, 1, 0), double=False)
    x = global_of(X, Placement("cpu", [0, 1], P_world), (S(1),))
    with pytest.raises(IndexError, match=r"Dimension out of range .*but got 3"):
        function(x, dim=3)


@distributed(ranks=2, transports=("loopback",))
def test_softmax_of_another_dtype(P_world: Partition) -> None:
    """Also along a split dim, wherever the dtype is among the arguments."""
    x = global_of(X.float(), Placement("cpu", [0, 1], P_world), (S(1),))
    functions: list[Any] = [F.softmax, F.log_softmax, F.softmin]
    for function in functions:
        for y in (function(x, 1, dtype=torch.float64), function(x, 1, 3, torch.float64)):
            assert y.dtype == torch.float64
            expected = function(X.float(), 1, dtype=torch.float64)
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    assert torch.softmax(x, 1, torch.float64).dtype == torch.float64


# The types of torch 2.13 have no weight.
L1: Any = F.l1_loss
LOSSES: dict[str, tuple[Any, list[torch.Tensor], list[Row]]] = {
    "mse": (F.mse_loss, [X, SHARES], CELLS),
    "mse sum": (partial(F.mse_loss, reduction="sum"), [X, SHARES], CELLS),
    "l1": (F.l1_loss, [X, SHARES], CELLS),
    "l1 weighed": (lambda x, y: L1(x, y, weight=y.exp()), [X, SHARES], CELLS),
    "l1 weighed sum": (
        lambda x, y: L1(x, y, None, None, "sum", y.exp()),
        [X, SHARES],
        CELLS,
    ),
    "smooth l1": (partial(F.smooth_l1_loss, beta=0.5), [X, SHARES], CELLS),
    "huber": (partial(F.huber_loss, delta=0.5), [X, SHARES], CELLS),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), [X, SHARES], CELLS),
    "bce of logits": (
        lambda x, w: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=w * UNIT),
        [X, WEIGHT],
        SMALL,
    ),
    "kl": (partial(F.kl_div, reduction="batchmean"), [X, SHARES], CELLS),
    "none": (
        partial(F.mse_loss, reduction="none"),
        [X, SHARES],
        [([S(0), S(0)], S(0)), ([S(1), S(1)], S(1)), ([B, B], B)],
    ),
}


@distributed(ranks=3, transports=("loopback",))
def test_layouts_of_losses_of_cells(P_world: Partition) -> None:
    for function, xs, rows in LOSSES.values():
        assert_table(P_world, function, xs, rows)


@pytest.mark.parametrize("name", LOSSES)
@distributed(ranks=8, transports=("loopback",))
def test_losses_of_cells(P_world: Partition, name: str) -> None:
    function, xs, _ = LOSSES[name]
    assert_everywhere(P_world, function, xs, (1, 1, 1), double=False)


TERMS: list[Row] = [([S(0), S(0)], P), ([S(1), B], P), ([P, B], P), ([B, B], B)]
ENTROPIES: dict[str, tuple[Any, list[torch.Tensor], list[Row]]] = {
    "nll": (F.nll_loss, [X, CLASSES], TERMS),
    "nll sum": (partial(F.nll_loss, reduction="sum"), [X, CLASSES], TERMS),
    "nll none": (
        partial(F.nll_loss, reduction="none"),
        [X, CLASSES],
        [([S(0), S(0)], S(0)), ([S(1), B], P), ([P, B], P), ([B, B], B)],
    ),
    "nll weighed": (
        lambda x, y, w: F.nll_loss(x, y, w * UNIT),
        [X, CLASSES, WEIGHT],
        [([S(0), S(0), B], P), ([S(1), B, S(0)], P), ([P, B, B], P), ([B, B, B], B)],
    ),
    "one sample": (F.nll_loss, [X[0], CLASSES[3]], [([S(0), B], P), ([P, B], P)]),
    "cross-entropy": (F.cross_entropy, [X, CLASSES], [([S(0), S(0)], P), ([S(1), B], P)]),
    "images": (F.cross_entropy, [IMAGES, PLACES], [([S(2), S(1)], P), ([S(1), B], P)]),
    "not ignored": (
        partial(F.cross_entropy, ignore_index=3, reduction="none"),
        [X, CLASSES.abs() % 7],
        [([S(0), S(0)], S(0)), ([S(1), B], P)],
    ),
    "smoothed": (
        lambda x, y, w: F.cross_entropy(x, y, w * UNIT, label_smoothing=0.2),
        [X, CLASSES, WEIGHT],
        [([B, B, B], B)],
    ),
    "probabilities": (
        partial(F.cross_entropy, label_smoothing=0.2),
        [X, SHARES],
        [([S(0), S(0)], P), ([S(1), S(1)], P)],
    ),
    "weighed": (
        lambda x, y, w: F.cross_entropy(x, y, w * UNIT, reduction="sum"),
        [X, SHARES, WEIGHT],
        [([B, B, B], B)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTROPIES)
@distributed(ranks=8, transports=("loopback",))
def test_losses_of_classes(P_world: Partition, name: str) -> None:
    function, xs, rows = ENTROPIES[name]
    assert_table(P_world, function, xs, rows)
    assert_everywhere(P_world, function, xs, (1, 1, 1), double=False)


@distributed(ranks=2, transports=("loopback",))
def test_refusals(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x: Any = global_of(X, placement, (S(1),))
    wrong: Any = global_of(CLASSES + 1, placement, (B,))
    with pytest.raises(RuntimeError, match="target"):
        F.nll_loss(x, wrong)
    with pytest.raises(NotImplementedError, match="size_average and reduce; use reduction"):
        F.cross_entropy(x, wrong, reduce=False)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@distributed(ranks=3, transports=("loopback",))
def test_values_that_one_worker_refuses(P_world: Partition, reduction: str) -> None:
    shares = torch.tensor([0.5, 0.5, 2.0], dtype=torch.float64)
    x: Any = global_of(shares, Placement("cpu", [0, 1, 2], P_world), (S(0),))
    with pytest.raises(ShapeError, match="binary_cross_entropy: all elements of input should"):
        y: Any = F.binary_cross_entropy(x, x.clamp(0, 1), reduction=reduction)
        y.full_tensor()


@distributed(ranks=2, transports=("loopback",))
def test_cosines_of_split_pairs(P_world: Partition) -> None:
    """One message with the three sums of each pair."""
    placement = Placement("cpu", [0, 1], P_world)
    pairs, signs = (random((4, 6)), random((4, 6), 1)), torch.tensor([1.0, -1.0, 1.0, -1.0])
    xs = [global_of(x, placement, (S(1),)) for x in pairs]
    before = P_world.wire.recorder.count
    targets = global_of(signs, placement, (B,))
    losses = F.cosine_embedding_loss(xs[0], xs[1], targets, 0.1, reduction="none")
    assert P_world.wire.recorder.count == before + 1
    assert_global(losses, F.cosine_embedding_loss(*pairs, signs, 0.1, reduction="none"))
