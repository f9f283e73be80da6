"""Elementwise arithmetic and matrix products: all attributes of inputs, values and gradients."""

# Operators of global tensors are typed as torch types them: their results are Tensors.
# pyright: reportAttributeAccessIssue=false
# pyright: reportUnusedExpression=false

from __future__ import annotations

import random as python_random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError
from gpudist.geometry.layout import NdSbp
from gpudist.sbp import GlobalTensor, Placement, explain
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, random


def sbps(axes: int, dims: int) -> list[NdSbp]:
    return list(product((*map(S, range(dims)), B, P), repeat=axes))


def sin(x: Any) -> Any:
    return (x * 0.5 + 1).sin()


OPERATORS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "add": (lambda x, y: torch.add(x, y, alpha=3), [(5, 3), (3,)]),
    "sub": (lambda x, y: x - y, [(5, 1), (5, 3)]),
    "rsub": (lambda x: 2 - x, [(5, 3)]),
    "mul": (lambda x, y: x * y, [(1, 3), (5, 1)]),
    "div": (lambda x, y: x / (y * y + 1), [(5, 3), (5, 3)]),
    "rdiv": (lambda x: 1 / (x * x + 1), [(5, 3)]),
    "neg": (lambda x: -x, [(5,)]),
    "number": (sin, [()]),
    "point-wise": (sin, [(5, 3)]),
    "matmul": (lambda x, y: x @ y, [(5, 3), (3, 4)]),
    "batched matmul": (lambda x, y: x @ y, [(2, 5, 3), (3, 4)]),
    "broadcast matmul": (lambda x, y: x @ y, [(3, 1, 2, 3), (2, 3, 2)]),
    "mv": (lambda x, y: x @ y, [(5, 3), (3,)]),
    "vm": (lambda x, y: x @ y, [(3,), (2, 3, 4)]),
    "dot": (lambda x, y: x @ y, [(5,), (5,)]),
    "bmm": (torch.bmm, [(2, 5, 3), (2, 3, 4)]),
    "linear": (F.linear, [(5, 2, 3), (4, 3)]),
    "linear with bias": (F.linear, [(5, 3), (4, 3), (4,)]),
}
every_operator = pytest.mark.parametrize("name", OPERATORS)


@every_operator
@distributed(ranks=3, transports=("loopback",))
def test_one_axis(P_world: Partition, name: str) -> None:
    """Inputs with any attributes on three ranks; illegal ones are boxed."""
    function, shapes = OPERATORS[name]
    placement = Placement("cpu", [0, 1, 2], P_world)
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    for given in product(*(sbps(1, len(shape)) for shape in shapes)):
        assert_matches(function, xs, placement, given, double=len(xs) < 3)


@every_operator
@pytest.mark.parametrize("grid", [[[0, 1, 2], [3, 4, 5]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]])
@distributed(ranks=8, transports=("loopback",))
def test_many_axes(P_world: Partition, name: str, grid: list[Any]) -> None:
    """A sample of the attributes on two axes of uneven size, and on three."""
    function, shapes = OPERATORS[name]
    placement = Placement("cpu", grid, P_world)
    chosen = python_random.Random(name)
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    for _ in range(4 if placement.axes == 2 else 2):
        given = [chosen.choice(sbps(placement.axes, len(shape))) for shape in shapes]
        assert_matches(function, xs, placement, given)


@distributed(ranks=4, transports=("loopback", "host", "gloo"))
def test_some_ranks(P_world: Partition) -> None:
    """A placement that leaves ranks out, which take part in backward all the same."""
    placement = Placement("cpu", [3, 1], P_world)
    xs = [random((5, 3)), random((3, 4), 1)]
    for given in product(sbps(1, 2), repeat=2):
        assert_matches(lambda x, y: sin(x @ y), xs, placement, given)


@distributed(ranks=4, transports=("loopback",))
def test_product_on_two_axes(P_world: Partition) -> None:
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = global_of(random((5, 3)), placement, (B, S(0)))
    y = global_of(random((3, 4)), placement, (S(1), B))
    with explain() as lines:
        z = x @ y
    assert z.sbp == (S(1), S(0))
    assert lines == [
        "torch.Tensor.matmul: (broadcast, split(0)), (split(1), broadcast) -> "
        "(split(1), split(0)); 0 bytes boxed"
    ]


@distributed(ranks=4, transports=("loopback",))
def test_cheapest_boxing(P_world: Partition) -> None:
    """A product by columns leaves the larger matrix in place and boxes the smaller one."""
    placement = Placement("cpu", range(4), P_world)
    large = global_of(random((64, 32)), placement, (S(1),))
    small = global_of(random((32, 2)), placement, (S(1),))
    with explain() as lines:
        z = large @ small
    assert z.sbp == (P,)
    assert "(split(1),), (split(1),) boxed to (split(0),) -> (partial_sum,)" in lines[0]


@distributed(ranks=2, transports=("loopback",))
def test_terms_only_through_linear_maps(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x = random((4, 3))
    terms = global_of(x, placement, (P,))
    assert (terms + terms).sbp == (P,) and (2 * terms).sbp == (P,) and (-terms).sbp == (P,)
    for y, expected in ((terms + 1, x + 1), (terms * terms, x * x), (terms.exp(), x.exp())):
        assert y.sbp != (P,)
        assert_global(y, expected)


@distributed(ranks=2, transports=("loopback",))
def test_in_place(P_world: Partition) -> None:
    """The first tensor keeps its attributes; what is added to it is boxed."""
    placement = Placement("cpu", [0, 1], P_world)
    x, y = random((5, 3)), random((3,), 1)
    for a, b in product(sbps(1, 2), sbps(1, 1)):
        z = global_of(x, placement, a)
        memory = z.data_ptr()
        same = z.add_(global_of(y, placement, b), alpha=2)
        assert same is z and z.sbp == a and z.data_ptr() == memory
        assert_global(z, x + 2 * y)
        z.mul_(3)
        assert_global(z, 3 * (x + 2 * y))
        z += 1
        assert z.sbp == a and z.data_ptr() == memory
        assert_global(z, 3 * (x + 2 * y) + 1)
        assert F.relu(z, inplace=True) is z and z.data_ptr() == memory
        assert_global(z, (3 * (x + 2 * y) + 1).relu())


@distributed(ranks=2, transports=("loopback",))
def test_refusals(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x = global_of(random((4,)), placement, (S(0),))
    with pytest.raises(NotImplementedError, match=r"torch.Tensor.histc has no signatures"):
        x.histc(3)
    with pytest.raises(PartitionError, match="plain tensor of shape"):
        x + torch.ones(4)
    with pytest.raises(PartitionError, match="move one to the other's placement"):
        x + global_of(random((4,)), Placement("cpu", [1, 0], P_world), (S(0),))
    with pytest.raises(NotImplementedError, match="out="):
        torch.add(x, x, out=x[None])
    assert isinstance(x * torch.tensor(2.0), GlobalTensor)


@distributed(ranks=2, transports=("loopback",))
def test_mixed_dtypes(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x, y = random((4, 3)), torch.arange(3)
    z = global_of(x, placement, (S(0),)) * global_of(y, placement, (B,))
    assert_global(z, x * y)
