"""Reductions against torch, with gradients, and their table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import Row, assert_everywhere, assert_table

NUMBERS = random((7, 5, 2))
# Blocks of one cell, and empty ones.
FEW = random((2, 5))
EQUAL = torch.tensor([[1.0, 3, 3], [3, 0, 3], [2, 3, 3], [3, 3, 3]], dtype=torch.float64)
TRUE = torch.arange(14).view(7, 2) % 5 > 0

SUM: list[Row] = [([S(0)], P), ([S(1)], S(0)), ([S(2)], S(1)), ([P], P), ([B], B)]
SHARED: list[Row] = [([S(0)], B), ([S(1)], S(0)), ([S(2)], S(1)), ([B], B)]
KEPT: list[Row] = [([S(0)], B), ([S(1)], S(1)), ([S(2)], S(2)), ([B], B)]

OPERATORS: dict[str, tuple[Any, list[Row]]] = {
    "sum": (lambda x: x.sum(0), SUM),
    "mean": (lambda x: torch.mean(x, (0,)), SUM),
    "var": (lambda x: x.var(0), SHARED),
    "std": (lambda x: torch.std(x, 0, correction=0, keepdim=True), KEPT),
    "biased": (lambda x: x.var(0, False), SHARED),
    "var_mean": (lambda x: torch.var_mean(x, 0), SHARED),
    "amax": (lambda x: x.amax(0), SHARED),
    "amin": (lambda x: torch.amin(x, (0,), True), KEPT),
    "max": (lambda x: x.max(0).values, SHARED),
    "min": (lambda x: torch.min(x, 0, keepdim=True)[0], KEPT),
    "argmax": (lambda x: x.argmax(0), SHARED),
    "argmin": (lambda x: x.argmin(0, True), KEPT),
    "prod": (lambda x: x.prod(0), SHARED),
    "logsumexp": (lambda x: x.logsumexp(0), SHARED),
    "norm": (lambda x: x.norm(dim=0), SHARED),
    "norm 1": (lambda x: torch.norm(x, 1, 0), SHARED),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 0, True), KEPT),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, torch.inf, 0), SHARED),
    "norm -inf": (lambda x: torch.linalg.vector_norm(x, -torch.inf, 0), SHARED),
    "cumsum": (
        lambda x: x.cumsum(0),
        [([S(0)], S(0)), ([S(1)], S(1)), ([S(2)], S(2)), ([P], P), ([B], B)],
    ),
}
ALL: dict[str, Any] = {
    "sum": torch.sum,
    "mean": lambda x: x.mean(),
    "mean without nan": lambda x: x.nanmean(),
    "mean of last": lambda x: x.mean((0, -1), keepdim=True),
    "var": lambda x: x.var(),
    "std": lambda x: x.std(unbiased=False),
    "amax": lambda x: x.amax((0, 1)),
    "max": lambda x: x.max(),
    "min": torch.min,
    "norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
}


@distributed(ranks=3, transports=("loopback",))
def test_layouts_of_one_dim(P_world: Partition) -> None:
    for function, rows in OPERATORS.values():
        assert_table(P_world, function, [NUMBERS], rows)


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=8, transports=("loopback",))
def test_one_dim(P_world: Partition, name: str) -> None:
    function, _ = OPERATORS[name]
    assert_everywhere(P_world, function, [NUMBERS], (2, 2, 1))
    assert_everywhere(P_world, function, [FEW], (2, 1, 0))


@pytest.mark.parametrize("name", ALL)
@distributed(ranks=8, transports=("loopback",))
def test_all_dims(P_world: Partition, name: str) -> None:
    assert_everywhere(P_world, ALL[name], [NUMBERS], (2, 2, 2))


@distributed(ranks=3, transports=("loopback",))
def test_equal_cells(P_world: Partition) -> None:
    """If all cells are equal, the largest is all of them, or the first."""
    placement = Placement("cpu", [0, 1, 2], P_world)
    for function in (
        lambda x: x.amax(0), lambda x: x.amin((0, 1)), lambda x: x.max(), lambda x: x.max(0).values,
        lambda x: x.argmax(0), lambda x: x.max(1).indices, lambda x: x.std((0, 1)) * 0 + x.prod(0),
        lambda x: (x * 0).std(0), lambda x: (x * 0).norm(),
    ):  # fmt: skip
        for sbp in ((S(0),), (S(1),)):
            (y,) = assert_matches(function, [EQUAL], placement, [sbp])
            assert y.sbp[0] != P


@distributed(ranks=3, transports=("loopback",))
def test_exact_value_of_a_shared_largest_cell(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1, 2], P_world)
    for value in (0.1, torch.inf):
        x = torch.full((7, 3), value, dtype=torch.float64)
        y: Any = global_of(x, placement, (S(0),)).amax(0)
        assert y.to_local().tolist() == [value] * 3


@distributed(ranks=8, transports=("loopback",))
def test_truths_and_counts(P_world: Partition) -> None:
    rows: list[Row] = [([S(0)], B), ([S(1)], S(0)), ([B], B)]
    for function in (lambda x: x.any(0), lambda x: torch.all(x, 0), lambda x: x.amax(0)):
        assert_table(P_world, function, [TRUE], rows)
        assert_everywhere(P_world, function, [TRUE], (2, 2, 1))
    counted: list[Row] = [([S(0)], P), ([S(1)], S(0)), ([B], B)]
    assert_table(P_world, lambda x: x.sum(0), [TRUE], counted)
    assert_table(P_world, lambda x: x.count_nonzero(0), [TRUE], counted)
    assert_everywhere(P_world, lambda x: x.all(), [TRUE], (2, 2, 1))


@distributed(ranks=2, transports=("loopback",))
def test_names_of_results(P_world: Partition) -> None:
    x = global_of(NUMBERS, Placement("cpu", [0, 1], P_world), (S(0),))
    found: Any = x.max(0)
    assert type(found) is torch.return_types.max and found.indices.dtype == torch.int64
    with pytest.raises(NotImplementedError, match="nuc"):
        x.norm("nuc", dim=(0, 1))


@distributed(ranks=2, transports=("loopback",))
def test_no_cells_have_no_extreme(P_world: Partition) -> None:
    x = global_of(torch.empty(0, 2), Placement("cpu", [0, 1], P_world), (S(0),))
    for function in (torch.Tensor.amax, torch.Tensor.max, lambda t: t.amin(0)):
        with pytest.raises(RuntimeError, match="zero-size dimension"):
            function(x)
    for function in (lambda t: t.max(0), lambda t: t.argmin(0), torch.Tensor.argmin):
        with pytest.raises((RuntimeError, IndexError), match=r"-zero size|zero-size|to be spec"):
            function(x)
    norm = torch.linalg.vector_norm
    for function in (lambda t: norm(t, torch.inf), lambda t: norm(t, -torch.inf, 0)):
        with pytest.raises(RuntimeError, match=r"cannot compute the -?inf norm"):
            function(x)
