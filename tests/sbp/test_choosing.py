"""Embedding and indexing against torch, with gradients, and their tables; dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import Row, assert_everywhere, assert_table

X = random((5, 4))
WORDS = torch.tensor([[3, 0, 1], [2, 4, 4]])
ROWS = torch.tensor([4, 0, 0, 2])
CELLS = torch.tensor([[3, 0, 1, 2], [2, 4, 4, 0]])
ADDED = random((2, 4), 1)

CHOSEN: list[Row] = [([B, S(0)], S(0)), ([S(1), B], S(1)), ([S(0), B], P), ([P, B], P), ([B, B], B)]
OPERATORS: dict[str, tuple[Any, list[torch.Tensor], list[Row]]] = {
    "embedding": (
        F.embedding,
        [WORDS, X],
        [([S(0), B], S(0)), ([S(1), B], S(1)), ([B, S(1)], S(2)), ([B, S(0)], P), ([B, P], P)],
    ),
    "padding": (partial(F.embedding, padding_idx=-1), [WORDS, X], [([B, S(0)], P), ([B, B], B)]),
    "by frequency": (
        partial(F.embedding, scale_grad_by_freq=True), [WORDS, X], [([B, S(1)], S(2))],
    ),
    "index_select": (lambda x, i: torch.index_select(x, 0, i), [X, ROWS], CHOSEN),
    "last dim": (
        lambda x, i: x.index_select(-1, i),
        [X, ROWS.clamp(0, 3)],
        [([B, S(0)], S(1)), ([S(0), B], S(0)), ([S(1), B], P)],
    ),
    "gather": (
        lambda x, i: x.gather(0, i),
        [X, CELLS],
        [([B, S(0)], S(0)), ([S(1), S(1)], S(1)), ([S(0), B], P), ([P, B], P), ([B, B], B)],
    ),
    "scatter_add": (
        lambda x, i, y: x.scatter_add(0, i, y),
        [X, CELLS, ADDED],
        [([S(1), S(1), S(1)], S(1)), ([P, S(0), S(0)], P), ([P, B, P], P), ([B, B, B], B)],
    ),
    "one_hot": (
        lambda i: F.one_hot(i, 5), [WORDS], [([S(0)], S(0)), ([S(1)], S(1)), ([B], B)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=8, transports=("loopback",))
def test_operators(P_world: Partition, name: str) -> None:
    function, xs, rows = OPERATORS[name]
    assert_table(P_world, function, xs, rows)
    assert_everywhere(P_world, function, xs, (2, 1, 1), double=False)


@distributed(ranks=2, transports=("loopback",))
def test_refusals(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x: Any = global_of(X, placement, (S(0),))
    i: Any = global_of(WORDS, placement, (B,))
    with pytest.raises(NotImplementedError, match="num_classes is not given"):
        F.one_hot(i)
    with pytest.raises(NotImplementedError, match="max_norm"):
        F.embedding(i, x, max_norm=1.0)
    with pytest.raises(RuntimeError, match="out of range"):
        F.embedding(i + 5, x)


@distributed(ranks=4, transports=("host",))
def test_dropout(P_world: Partition) -> None:
    """One seed of the first rank gives the same cells in all layouts, and new ones at each call."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((9, 50)).abs() + 1
    found: list[torch.Tensor] = []
    cut = (S(1, [0, 50]), S(0, [7, 2]))
    for sbp in ((B, B), (S(0), S(1)), (S(1), B), (S(0), S(0)), (B, P), cut):
        torch.manual_seed(5 if P_world.rank == 0 else P_world.rank or 0)
        part: Any = global_of(x, placement, sbp, True)
        y: Any = F.dropout(part, 0.25)
        assert y.sbp == sbp
        y.sum().backward()
        again: Any = F.dropout(part, 0.25)
        found.append(torch.stack([y.full_tensor(), again.full_tensor()]).detach())
        gradient = part.grad.full_tensor()
        torch.testing.assert_close(gradient, (found[-1][0] != 0) * (1 / 0.75), check_dtype=False)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])
    kept = found[0][0] != 0
    torch.testing.assert_close(found[0][0], x * kept / 0.75)
    assert (found[0][0] != found[0][1]).any() and 0.7 < kept.double().mean() < 0.8


@distributed(ranks=2, transports=("loopback",))
def test_dropout_that_drops_nothing(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    for sbp in (S(0), P, B):
        for function in (partial(F.dropout, training=False), partial(F.dropout, p=0.0)):
            (y,) = assert_matches(function, [X], placement, [(sbp,)])
            assert y.sbp == (sbp,)
