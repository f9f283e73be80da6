"""The vocabulary-parallel cross-entropy is torch's, over blocks of classes of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn import VocabParallelCrossEntropyLoss
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import (
    CONVENTIONS,
    F64,
    block_of,
    cotangent_of_copies,
    leaf,
)
from tests.pool import distributed

WEIGHT = torch.linspace(0.5, 2, 11, dtype=F64)
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "weight": {"weight": WEIGHT},
    "ignored": {"ignore_index": 3},
    "all": {"weight": WEIGHT, "ignore_index": 3, "label_smoothing": 0.3},
    "none": {"reduction": "none"},
    "none, all": {
        "reduction": "none", "weight": WEIGHT, "ignore_index": 3, "label_smoothing": 0.3,
    },
}  # fmt: skip
SIZES = {1: [11], 2: [4, 7], 3: [0, 9, 2], 4: [3, 3, 3, 2]}


def logits_and_targets(seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(11, (batch, 3), generator=generator)
    targets[0, 0] = 3
    return leaf(random_like_all((batch, 3, 11), seed) * 3), targets


def check(
    P: Partition,
    sizes: Sequence[int],
    convention: Convention,
    options: dict[str, Any],
    scale: float = 1.0,
) -> None:
    loss = VocabParallelCrossEntropyLoss(P, **options, convention=convention)
    for seed in (1, 2):
        whole, targets = logits_and_targets(seed)
        whole = leaf(whole * scale)
        expected = F.cross_entropy(whole.movedim(-1, 1), targets, **options)
        if not P.active:
            x, targets = torch.empty(0, dtype=F64), torch.empty(0, dtype=torch.int64)
            loss(x.requires_grad_(), targets).sum().backward()
            continue
        assert P.rank is not None
        x = leaf(block_of(whole, 2, sizes, P.rank))
        value = loss(x, targets)
        assert_equal_to(value.detach(), expected.detach(), 1e-10, "loss")
        if options.get("reduction") == "none":
            gradient = random_like_all(expected.shape, 3)
            expected.backward(gradient)
            value.backward(cotangent_of_copies(gradient, convention, P, 9))
        else:
            expected.backward()
            value.backward()
        assert_equal_to(x.grad, block_of(gradient_of(whole), 2, sizes, P.rank), 1e-10, "gradient")


@pytest.mark.parametrize("case", OPTIONS)
@distributed(ranks=[1, 2, 3, 4], transports=["loopback"])
def test_every_option(P_world: Partition, case: str) -> None:
    for convention in CONVENTIONS:
        check(P_world, SIZES[P_world.size], convention, OPTIONS[case])


@distributed(ranks=3, transports=["host", "gloo"])
def test_on_other_transports(P_world: Partition) -> None:
    for convention in CONVENTIONS:
        for case in ("all", "none, all"):
            check(P_world, SIZES[3], convention, OPTIONS[case])


@distributed(ranks=2, transports=["loopback"])
def test_large_logits_are_stable(P_world: Partition) -> None:
    check(P_world, SIZES[2], "dual", {}, scale=1e4)


@pytest.mark.parametrize("case", ["mean", "all", "sum"])
@distributed(ranks=4, transports=["loopback"])
def test_workers_outside_get_the_value_too(P_world: Partition, case: str) -> None:
    P = P_world.create_partition_inclusive([3, 1])
    for convention in CONVENTIONS:
        check(P, SIZES[2], convention, OPTIONS[case])


@pytest.mark.parametrize("case", ["mean", "all", "sum"])
@distributed(ranks=[4, 5], transports=["loopback"])
def test_copies_for_other_samples(P_world: Partition, case: str) -> None:
    members = P_world.create_partition_inclusive(range(4))
    P = members.create_cartesian_topology_partition([2, 2])
    for axis in (0, 1):
        loss = VocabParallelCrossEntropyLoss(P, **OPTIONS[case], axis=axis)
        whole, targets = logits_and_targets(5, 5)
        expected = F.cross_entropy(whole.movedim(-1, 1), targets, **OPTIONS[case])
        expected.backward()
        if P.index is None:
            none = torch.empty(0, dtype=F64), torch.empty(0, dtype=torch.int64)
            assert_equal_to(loss(*none), expected.detach(), 1e-10, "loss")
            continue
        copy, rank = P.index[1 - axis], P.index[axis]
        samples = block_of(whole, 0, [2, 3], copy)
        x = leaf(block_of(samples, 2, SIZES[2], rank))
        value = loss(x, block_of(targets, 0, [2, 3], copy))
        assert_equal_to(value.detach(), expected.detach(), 1e-10, "loss")
        value.backward()
        gradient = block_of(gradient_of(whole), 0, [2, 3], copy)
        assert_equal_to(x.grad, block_of(gradient, 2, SIZES[2], rank), 1e-10, "gradient")


@distributed(ranks=2, transports=["loopback"])
def test_the_target_is_not_of_the_tokens(P_world: Partition) -> None:
    loss = VocabParallelCrossEntropyLoss(P_world)
    with pytest.raises(ShapeError, match=r"the target has shape \[3\]; for logits of shape"):
        loss(torch.rand(2, 3, 4), torch.zeros(3, dtype=torch.int64))


@distributed(ranks=2, transports=["loopback"])
def test_no_class(P_world: Partition) -> None:
    loss = VocabParallelCrossEntropyLoss(P_world)
    with pytest.raises(ShapeError, match="target 8 is not one of the classes 0 to 7"):
        loss(torch.rand(2, 4), torch.tensor([0, 8]))
