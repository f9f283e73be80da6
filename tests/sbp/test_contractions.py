"""``einsum`` and sums with products: attributes, values and gradients."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.errors import ShapeError
from gpudist.sbp import Placement, explain
from gpudist.sbp.signatures.contractions import names_of
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches, global_of
from tests.sbp.parts import B, P, S, random

Sum = torch.einsum
OPERATORS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "attention": (lambda x, y: Sum("bqhd,bkhd->bhqk", x, y), [(2, 3, 2, 3), (2, 4, 2, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 1, 4), (2, 5, 3), (2, 3, 4)]),
}


@distributed(ranks=8, transports=("loopback",))
def test_each_axis_on_its_own(P_world: Partition) -> None:
    """Heads, the summed dim and queries are on one axis each, which needs no message."""
    placement = Placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], P_world)
    function, shapes = OPERATORS["attention"]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    with explain() as lines:
        (y,) = assert_matches(
            function, xs, placement, [(S(2), S(3), S(1)), (S(2), S(3), B)], double=True
        )
    assert y.sbp == (S(1), P, S(2)) and "boxed to" not in lines[0]
    function, shapes = OPERATORS["baddbmm"]
    xs = [random(shape, i) for i, shape in enumerate(shapes)]
    given = [(S(0), P, S(2)), (S(0), S(2), B), (S(0), S(1), S(2))]
    with explain() as lines:
        (y,) = assert_matches(function, xs, placement, given)
    assert y.sbp == (S(0), P, S(2)) and "boxed to" not in lines[0]


@distributed(ranks=2, transports=("loopback",))
def test_linear_of_a_vector(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    xs = [random(shape, i) for i, shape in enumerate([(2, 5, 3), (3,), ()])]
    for given in ((S(1), B, B), (S(2), S(0), P), (P, B, B)):
        assert_matches(torch.nn.functional.linear, xs, placement, [(one,) for one in given])


@distributed(ranks=2, transports=("loopback",))
def test_in_place(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    a, x, y = random((5, 4)), random((5, 3), 1), random((3, 4), 2)
    z = global_of(a, placement, (S(1),))
    with torch.no_grad():
        z.addmm_(global_of(x, placement, (S(0),)), global_of(y, placement, (S(0),)), beta=0.5)
    assert z.sbp == (S(1),)
    torch.testing.assert_close(z.full_tensor(), torch.addmm(a, x, y, beta=0.5))


def test_names() -> None:
    assert names_of("b...i, ij", (4, 2)) == (
        (("b", "2", "1", "i"), ("i", "j")),
        ("2", "1", "b", "j"),
    )
    assert names_of("ij->", (2,)) == ((("i", "j"),), ())
    with pytest.raises(ShapeError, match="has 2 operands, but 1 tensors are given"):
        names_of("ij,jk", (2,))
