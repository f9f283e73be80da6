"""Inputs without a statement: equal blocks, errors of the forward, networks that nothing splits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.world.texts import gather_texts
from tests.pool import distributed


class Sums(nn.Module):
    """Adds the sums of other inputs, alone, in a list or in a dict, to the rows."""

    def forward(self, x: torch.Tensor, others: Any = (), error: Any = None) -> torch.Tensor:
        if error is not None:
            raise error
        others = [others] if isinstance(others, torch.Tensor) else others
        others = list(others.values()) if isinstance(others, dict) else others
        return x + sum(y.to(x.dtype).sum() for y in others)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def rows(P_world: Any) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + P_world.rank


def context(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, 4).tril().to(dtype)


def refusal(P_world: Any, net: Any, *args: Any) -> str:
    """Return the text of the error of a call, which must be the same on all ranks."""
    with pytest.raises(gpudist.ShapeError) as caught:
        net(*args)
    texts = gather_texts(P_world, str(caught.value).encode())
    assert len(set(texts)) == 1
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
@distributed(ranks=[2, 3])
def test_equal_blocks_raise_at_every_call(P_world: Any, dtype: torch.dtype) -> None:
    net: Any = gpudist.distribute(Sums(), P_world.grid(P_world.size, 1))
    for _ in range(2):
        text = refusal(P_world, net, rows(P_world), context(dtype))
        assert "input 'others'" in text and "of shape [4, 4]" in text
        for remedy in ("inputs={'others': 'whole'}", "'split'", "'block'"):
            assert remedy in text
    fresh = gpudist.distribute(Sums(), net.P_x)
    assert "input 'x'" in refusal(P_world, fresh, context(dtype))
    assert net(rows(P_world)).shape == (2 * P_world.size, 3)


@pytest.mark.parametrize(
    ("kind", "total"), [("whole", 10), ("split", 10), ("block", 20), ("dynamic", 20)]
)
@distributed(ranks=2)
def test_a_statement_decides(P_world: Any, kind: Any, total: int) -> None:
    net = gpudist.distribute(Sums(), P_world.grid(2, 1), inputs={"others": kind})
    y = net(rows(P_world), context())
    torch.testing.assert_close(y.to_local(), rows(P_world) + total)


@distributed(ranks=2)
def test_constants_and_different_blocks_are_blocks(P_world: Any) -> None:
    last = context(torch.bool)
    last[0, 3] = P_world.rank == 1
    for other in (torch.ones(4, 4), torch.full((2, 2), float("nan")), torch.zeros(3, 1), last):
        net = gpudist.distribute(Sums(), P_world.grid(2, 1))
        y = net(rows(P_world), other)
        total = other.float().sum() * 2 - (P_world.rank if other is last else 0)
        total += other is last and P_world.rank == 0
        torch.testing.assert_close(y.to_local(), rows(P_world) + total, equal_nan=True)


@distributed(ranks=2)
def test_only_new_agreements_are_compared(P_world: Any) -> None:
    net = gpudist.distribute(Sums(), P_world.grid(2, 1))
    net(rows(P_world), torch.ones(4, 4))
    y = net(rows(P_world), context())
    torch.testing.assert_close(y.to_local(), rows(P_world) + 20)


@pytest.mark.parametrize("kind", [list, dict])
@distributed(ranks=2)
def test_nested_tensors_are_compared_separately(P_world: Any, kind: type) -> None:
    def nested(other: torch.Tensor) -> Any:
        pair = [rows(P_world), other]
        return pair if kind is list else dict(zip("ab", pair, strict=True))

    net = gpudist.distribute(Sums(), P_world.grid(2, 1))
    text = refusal(P_world, net, rows(P_world), nested(context()))
    assert "input 'others'" in text and "[4, 4]" in text
    y = net(rows(P_world), nested(context() + P_world.rank))
    torch.testing.assert_close(y.to_local(), rows(P_world) + 15 + 21 + 10 + 26)


@distributed(ranks=[1, 3])
def test_ranks_outside_and_single_workers(P_world: Any) -> None:
    P_one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    net = gpudist.distribute(Sums(), P_one)
    assert net(context() if P_one.active else torch.empty(0)).shape == (4, 4)
    if P_world.size == 3:
        members = P_world.create_partition_inclusive([0, 2])
        P_x = members.create_cartesian_topology_partition([2, 1])
        net = gpudist.distribute(Sums(), P_x)
        refusal(P_world, net, context() if P_x.active else torch.empty(0))


@distributed(ranks=2)
def test_error_of_the_forward_lists_blocks(P_world: Any) -> None:
    class Own(Exception):
        pass

    P_x, x = P_world.grid(2, 1), rows(P_world)
    net = gpudist.distribute(Sums(), P_x, inputs={"others": "whole"})
    with pytest.raises(
        ValueError,
        match=r"^no \(inputs taken as blocks, .*: 'x' of .* \[4, 3\]; if .*\{'x': 'split'\}\)\)$",
    ):
        net(x, error=ValueError("no"))
    for error in (Own("no"), KeyError("no"), ValueError("no", 1), ValueError()):
        with pytest.raises(type(error)) as caught:
            net(x, error=error)
        assert "blocks" not in str(caught.value)
    net = gpudist.distribute(Sums(), P_x)
    with pytest.raises(
        RuntimeError, match=r"'others' of global shape \[8, 4\]; .*'others': 'whole'"
    ):
        net(x, context() + P_world.rank, RuntimeError("no"))
    net = gpudist.distribute(Sums(), P_x, inputs={"x": "block"})
    with pytest.raises(ValueError, match=r"^no$"):
        net(x, error=ValueError("no"))


@distributed(ranks=2, transports=["host", "gloo"])
def test_blocks_of_integers_are_to_be_converted(P_world: Any) -> None:
    layers = nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 3), nn.GroupNorm(1, 1), nn.Linear(9, 1)
    x = torch.arange(9 * (4 + P_world.rank), dtype=torch.int16).reshape(1, 1, -1, 9)
    text = (
        r"the input has dtype torch.int16, expected torch.float32; pass x.float\(\)( \(in '0'\))?$"
    )
    for layer in layers:
        net = gpudist.distribute(
            nn.Sequential(layer), P_world.grid(1, 1, 2, 1), broadcast_parameters=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((RuntimeError, NotImplementedError), match=text):
                net(x)
        assert net(x.float()).dtype == torch.float32


@distributed(ranks=2, transports=["host", "gloo"])
def test_network_that_nothing_splits_warns_once(P_world: Any) -> None:
    P_x = P_world.grid(2, 1)
    net = gpudist.distribute(Sums(), P_x, methods=("forward", "encode"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net(torch.ones(3))
            net.encode(torch.ones(3))
    assert len(caught) == (P_world.rank == 0)
    for warning in caught:
        text = str(warning.message)
        assert "'x' of shape [3] has 1 dims, but P_x of shape [2, 1] has 2 axes" in text
        assert warning.filename == __file__
    # Warnings are errors here.
    net = gpudist.distribute(Sums(), P_x, inputs={"x": "whole"})
    assert net(torch.ones(3)).shape == (3,)
    net = gpudist.distribute(Sums(), P_x)
    assert net(rows(P_world), [torch.ones(3)]).shape == (4, 3)
