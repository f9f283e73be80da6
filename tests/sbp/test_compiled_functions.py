"""torch.compile of functions that the user writes on global tensors runs them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import gpudist
from gpudist.sbp import split
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.pool import distributed


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        return (x * 2).sum(1)


@distributed(ranks=2, transports=["host"])
def test_functions_of_global_tensors_run_as_they_are(P_world: Any) -> None:
    torch.compiler.reset()
    placement = gpudist.placement.of(P_world)
    block = torch.arange(6.0).view(2, 3) + 6 * P_world.rank
    whole = torch.arange(12.0).view(4, 3)
    x = gpudist.to_global(block, placement, [split(0)])

    def f(x: Any) -> Any:
        return torch.relu(x * 2).sum()

    def mixed(y: torch.Tensor) -> torch.Tensor:
        return y + gpudist.to_global(y, placement, [split(0)]).full_tensor().sum()

    def compiled(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend="eager", **options)

    assert torch.equal(compiled(f)(x).full_tensor(), f(whole))
    assert torch.equal(compiled(Rows())(x).full_tensor(), Rows()(whole))
    assert torch.equal(compiled(mixed)(block), block + whole.sum())
    leaf: Any = gpudist.to_global(block, placement, [split(0)]).detach().requires_grad_()
    compiled(f)(leaf).backward()
    assert torch.equal(leaf.grad.full_tensor(), 2.0 * (whole > 0))


@distributed(ranks=1, transports=["loopback"])
def test_a_graph_of_all_names_what_to_use(P_world: Any) -> None:
    placement, block = gpudist.placement.of(P_world), torch.ones(2, 3)
    x = gpudist.to_global(block, placement, [split(0)])
    for function, given in (
        (lambda y: torch.relu(y), x),
        (lambda y: gpudist.to_global(y, placement, [split(0)]), block),
    ):
        with pytest.raises(Unsupported, match=r"gpudist\.compiled\(network\) runs a network as"):
            torch.compile(function, backend="eager", fullgraph=True)(given)


class Helped(nn.Module):
    """A network that compiles one of its own functions, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(1, 2, 6) / 7)
        self.mixed = torch.compile(self._mixed, backend="eager")

    def _mixed(self, x: Any, weight: Any) -> Any:
        return torch.einsum("bchw,bcw->bhw", torch.relu(x), weight)

    def forward(self, x: Any) -> Any:
        return self.mixed(x, self.weight).cos()


@distributed(ranks=2, transports=["host"])
def test_functions_that_a_converted_network_compiles_run_as_they_are(P_world: Any) -> None:
    torch.compiler.reset()
    assert_as_alone(Helped, grid(P_world, [1, 1, 2, 1]), [(2, 2, 5, 6)])
