"""Operators that move dims, reshape, join and cut: attributes, values and gradients."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import Placement, explain
from gpudist.sbp.signatures.reshape import groups
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import assert_everywhere

# Function, shape, and what the splits of each dim become; None is boxed.
OPERATORS: dict[str, tuple[Any, tuple[int, ...], list[Any]]] = {
    "transpose": (lambda x: x.transpose(0, -1), (5, 2, 4), [S(2), S(1), S(0)]),
    "t": (lambda x: x.t(), (5, 4), [S(1), S(0)]),
    "T": (lambda x: x.T, (5, 4), [S(1), S(0)]),
    "mT": (lambda x: x.mT, (3, 5, 4), [S(0), S(2), S(1)]),
    "permute": (lambda x: x.permute(2, 0, 1), (5, 2, 4), [S(1), S(2), S(0)]),
    "movedim": (lambda x: torch.movedim(x, 0, 1), (5, 2, 4), [S(1), S(0), S(2)]),
    "flatten": (lambda x: x.flatten(1), (5, 4, 3), [S(0), S(1), None]),
    "flatten even": (lambda x: x.flatten(), (8, 3), [S(0), None]),
    "unflatten": (lambda x: x.unflatten(0, (-1, 2)), (16, 3), [S(0), S(2)]),
    "unflatten uneven": (lambda x: x.unflatten(0, (3, 2)), (6, 3), [None, S(2)]),
    "reshape": (lambda x: x.reshape(5, -1, 2), (5, 8), [S(0), S(1)]),
    "view": (lambda x: x.view(-1, 4), (5, 2, 4), [S(0, [4, 2, 2, 2]), None, S(1)]),
    "view_as": (lambda x: x.view_as(x.flatten(1)), (5, 2, 3), [S(0), S(1, [3, 3, 0, 0]), None]),
    "squeeze": (lambda x: x.squeeze(), (5, 1, 4), [S(0), None, S(1)]),
    "unsqueeze": (lambda x: x.unsqueeze(1), (5, 4), [S(0), S(2)]),
    "expand": (lambda x: x.expand(3, -1, 4), (5, 1), [S(1), None]),
    "repeat": (lambda x: x.repeat(2, 1, 3), (5, 2), [S(1), S(2)]),
    "stack": (lambda x: torch.stack([x, 2 * x], 1), (5, 4), [S(0), S(2)]),
    "cat": (lambda x: torch.cat([x, x, 3 * x], -1), (5, 4), [S(0), S(1)]),
    "split": (lambda x: x.split(2, 1)[0], (5, 4), [S(0), S(1, [1, 1, 0, 0])]),
    "split by sizes": (
        lambda x: torch.split(x, [1, 3], dim=-1)[1],
        (5, 4),
        [S(0), S(1, [0, 1, 1, 1])],
    ),
    "chunk": (lambda x: x.chunk(3)[2], (5, 4), [S(0, [0, 0, 0, 1]), S(1)]),
    "unbind": (lambda x: x.unbind(1), (5, 3, 4), [S(0), None, S(1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=4, transports=("loopback",))
def test_one_axis(P_world: Partition, name: str) -> None:
    """Splits are mapped as in the table, and boxed only if it says so."""
    function, shape, expected = OPERATORS[name]
    placement = Placement("cpu", range(4), P_world)
    rows = [*zip(map(S, range(len(shape))), expected, strict=True), (B, B), (P, P)]
    for given, result in rows:
        with explain() as lines:
            outputs = assert_matches(function, [random(shape)], placement, [(given,)], double=True)
        boxed = [line for line in lines if "boxed to" in line]
        assert bool(boxed) == (result is None), lines
        if result is not None:
            assert {y.sbp for y in outputs} == {(result,)}


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=6, transports=("loopback",))
def test_two_axes(P_world: Partition, name: str) -> None:
    """Blocks of blocks of uneven size, some of them of one cell or none."""
    function, shape, _ = OPERATORS[name]
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], P_world)
    last = S(len(shape) - 1)
    sbps: list[NdSbp] = [(S(0), S(0)), (S(0), last), (last, S(0)), (P, S(0)), (last, B)]
    for given in sbps:
        assert_matches(function, [random(shape)], placement, [given])


@distributed(ranks=8, transports=("loopback",))
def test_three_axes(P_world: Partition) -> None:
    placement = Placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], P_world)
    x = random((6, 3, 4))
    for sbp in product((S(0), S(2), P), repeat=3):
        (y,) = assert_matches(lambda t: t.transpose(0, 2).unsqueeze(1), [x], placement, [sbp])
        moved = {S(0): S(3), S(2): S(0), P: P}
        assert y.sbp == tuple(moved[one] for one in sbp)


@distributed(ranks=2, transports=("loopback",))
def test_join_of_different_attributes(P_world: Partition) -> None:
    """Inputs of any attributes are converted to the cheapest common one."""
    placement = Placement("cpu", [0, 1], P_world)
    xs = [random((5, 3), i) for i in range(2)]
    for given in product([(S(0),), (S(1),), (B,), (P,)], repeat=2):
        assert_matches(lambda *x: torch.stack(x), xs, placement, given)
        assert_matches(lambda *x: torch.cat(x), xs, placement, given)
    x = global_of(xs[0], placement, (S(1),))
    with pytest.raises(NotImplementedError, match="pass sizes and dims as numbers"):
        x.view(torch.int64)


def test_groups() -> None:
    found = [(list(a), list(b)) for a, b in groups((2, 3, 4, 5), (6, 2, 10))]
    assert found == [([0, 1], [0]), ([2, 3], [1, 2])]
    assert [(list(a), list(b)) for a, b in groups((1, 2, 3), (2, 3))] == [([0, 1], [0]), ([2], [1])]
    assert [(list(a), list(b)) for a, b in groups((0, 4), (0, 2, 2))] == [([0], [0]), ([1], [1, 2])]


RESHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tokens of an image": (lambda x: x.flatten(2).transpose(1, 2), (2, 3, 5, 4)),
    "image of tokens": (lambda x: x.view(2, 5, 4, 3), (2, 20, 3)),
    "windows": (lambda x: x.view(1, 3, 3, 2, 4, 2), (1, 9, 8, 2)),
    "windows in one": (
        lambda x: x.view(1, 3, 3, 2, 4, 2).transpose(2, 3).reshape(6, -1, 2),
        (1, 9, 8, 2),
    ),
    "windows back": (
        lambda x: x.view(2, 3, 2, 3, 4, 2).transpose(2, 3).reshape(2, 9, 8, 2),
        (12, 12, 2),
    ),
    "heads": (lambda x: x.reshape(2, 7, 3, 4, 2), (2, 7, 24)),
    "no common border": (lambda x: x.view(4, 6), (3, 8)),
    "cat": (lambda x: torch.cat([x[:2], 2 * x, x[1:]]), (5, 4)),
    "pieces": (lambda x: [*x.tensor_split((1, 4), 1), *x.chunk(2)], (5, 7)),
    "ones": (lambda x: x[:, :1].squeeze(1).unsqueeze(-1), (5, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPES)
@distributed(ranks=8, transports=("loopback",))
def test_reshape_of_any_cut(P_world: Partition, name: str) -> None:
    function, shape = RESHAPES[name]
    assert_everywhere(P_world, function, [random(shape)])


@distributed(ranks=3, transports=("loopback",))
def test_the_nearest_cut_that_both_shapes_have(P_world: Partition) -> None:
    """Neighbours exchange the cells between, and blocks stay blocks."""
    placement = Placement("cpu", range(3), P_world)
    rows = [
        (lambda x: x.view(2, 7, 4, 3), (2, 28, 3), S(1), S(1)),
        (lambda x: x.view(2, 7, 4, 3), (2, 28, 3), S(1, [9, 9, 10]), S(1, [2, 3, 2])),
        (lambda x: x.view(1, 4, 3, 8), (1, 12, 8), S(1), S(1, [1, 2, 1])),
        (lambda x: x.flatten(1, 2), (2, 7, 4), S(1), S(1, [12, 8, 8])),
    ]
    for function, shape, given, made in rows:
        (y,) = assert_matches(function, [random(shape)], placement, [(given,)])
        assert y.sbp == (made,)
