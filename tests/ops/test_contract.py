"""Every operator of ``OPERATORS`` keeps the contract of linear operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import gpudist
from gpudist import ops
from gpudist.errors import TransportError
from gpudist.ops.operators import OPERATORS, OperatorRow
from gpudist.testing import assert_adjoint, run_distributed
from gpudist.world.partition import Partition
from tests.nn.compare import own_block, random_like_all
from tests.pool import distributed

NAMES = [row.name for row in OPERATORS]
by_name = pytest.mark.parametrize("name", NAMES)


def row_of(name: str) -> OperatorRow:
    (row,) = (row for row in OPERATORS if row.name == name)
    return row


def sample(
    P_world: Partition, name: str, shape: tuple[int, ...] | None = None
) -> tuple[Any, torch.Tensor]:
    row = row_of(name)
    made = row.make(P_world)
    x = random_like_all(shape or row.shape, 1)
    return made, own_block(x, made.P_x).detach()


def test_every_operator_is_public_as_a_function_and_a_module() -> None:
    for row in OPERATORS:
        assert row.function is getattr(ops, row.name)
        assert row.kind is getattr(ops, row.kind.__name__)
        # Short forms of most operators.
        assert getattr(gpudist, row.name, row.function) is row.function
        assert getattr(gpudist.nn, row.kind.__name__, row.kind) is row.kind
        assert row.adjoint in NAMES
    public = [name for name in vars(ops) if not name.startswith("_")]
    modules = {name for name in public if isinstance(getattr(ops, name), type)}
    assert modules == {row.kind.__name__ for row in OPERATORS}


@by_name
@distributed(ranks=4)
def test_backward_is_the_adjoint(P_world: Partition, name: str) -> None:
    operator, x = sample(P_world, name)
    assert_adjoint(operator, x, P_world)


@by_name
@distributed(ranks=4, transports=("loopback", "host"))
def test_the_adjoint_of_the_adjoint_is_the_operator(P_world: Partition, name: str) -> None:
    operator, x = sample(P_world, name)
    y = operator(x.requires_grad_())
    w = torch.randn_like(y, requires_grad=True)
    (back,) = torch.autograd.grad(y, x, w, create_graph=True)
    v = torch.randn_like(x)
    (forward,) = torch.autograd.grad(back, w, v)
    torch.testing.assert_close(forward, operator(v), rtol=0, atol=1e-12)


class FailsFirst(Exception):
    """A rank's own error."""


def fail_first(P_world: Partition, name: str) -> None:
    operator, x = sample(P_world, name)
    if P_world.rank == 0:
        raise FailsFirst
    try:
        operator(x)
    except TransportError as error:
        assert "rank 0" in str(error)
        raise


@by_name
def test_a_rank_that_fails_ends_the_wait_of_the_others(name: str) -> None:
    with pytest.raises(FailsFirst):
        run_distributed(partial(fail_first, name=name), 4, timeout=20.0)


@by_name
@distributed(ranks=4, transports=("loopback",))
def test_text_and_copy(P_world: Partition, name: str) -> None:
    operator, _ = sample(P_world, name)
    assert repr(operator).startswith(f"{row_of(name).kind.__name__}(")
    assert str(list(operator.P_x.shape)) in repr(operator)
    assert not list(operator.parameters())
