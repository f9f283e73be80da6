"""Comparisons, choices and new tensors like others."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch

from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, random


@distributed(ranks=2, transports=("loopback",))
def test_attributes_of_results(P_world: Partition) -> None:
    """Terms stay terms through linear functions alone, and values that do not matter stay."""
    placement = Placement("cpu", [0, 1], P_world)
    terms = global_of(random((4, 3)), placement, (P,))
    mask = global_of(random((4, 3)) > 0, placement, (B,))
    assert torch.where(mask, terms, terms).sbp == terms.where(mask, terms).sbp == (P,)
    whole = random((4, 3))
    assert_global(terms.where(mask, -terms), whole.where(whole > 0, -whole))
    assert terms.to(torch.float64).sbp == terms.contiguous().sbp == (P,)
    assert torch.zeros_like(terms).sbp == (P,) and torch.ones_like(terms).sbp == (B,)
    for y in ((terms > 0), terms.int(), torch.where(mask, terms, 1.0)):
        assert y.sbp != (P,)
    assert terms.to("cpu") is terms.cpu() is terms
    with pytest.raises(NotImplementedError, match="the device type of its placement"):
        terms.to("meta")
    assert_global(terms.new_full((3, 2), 1.5), torch.full((3, 2), 1.5, dtype=torch.float64))
    assert_global(terms.new_empty((3, 2)).fill_(1.5), torch.full((3, 2), 1.5, dtype=torch.float64))


@distributed(ranks=4, transports=("loopback",))
def test_random_values_do_not_depend_on_the_layout(P_world: Partition) -> None:
    """They are those that torch draws for the whole tensor, on some of the ranks too."""
    x = random((5, 3))
    for grid in ([[0, 1], [2, 3]], [[3, 1]]):
        placement = Placement("cpu", grid, P_world)
        for sbp in ((S(0), S(1)), (S(0), S(0)), (B, S(1)), (P, B), (S(0), S(1, [0, 3]))):
            given = global_of(x, placement, sbp)
            for draw in (torch.randn_like, torch.rand_like, _initial):
                torch.manual_seed(5)
                expected = draw(x.clone()), torch.rand(())
                torch.manual_seed(5)
                if draw is not _initial or P not in sbp:
                    assert_global(draw(given), expected[0])
                    assert torch.rand(()) == expected[1]


@distributed(ranks=2, transports=("loopback",))
def test_limits_of_random_values_are_numbers(P_world: Partition) -> None:
    x = global_of(random((5, 3)), Placement("cpu", [0, 1], P_world), (S(0),))
    with pytest.raises(NotImplementedError, match=r"torch\.randint_like .* is a tensor; pass"):
        torch.randint_like(x, torch.tensor(5))
    with pytest.raises(
        NotImplementedError, match=r"uniform_ of a global tensor: an argument is a tensor"
    ):
        x.uniform_(torch.tensor(0.0), 1.0)  # pyright: ignore


def _initial(x: torch.Tensor) -> torch.Tensor:
    torch.nn.init.kaiming_uniform_(x)
    return torch.nn.init.xavier_normal_(x.clone()) + x


@distributed(ranks=1, transports=("loopback",))
def test_other_operands(P_world: Partition) -> None:
    """A tensor differs from a text, and does not order with it, as in torch."""
    x = global_of(random((5, 3)), Placement("cpu", [0], P_world), (B,))
    assert not x == "first" and x != "first"  # noqa: SIM201
    with pytest.raises(TypeError, match="not supported between"):
        _ = x < "first"  # pyright: ignore[reportOperatorIssue]
