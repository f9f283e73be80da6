"""Attention against torch, with gradients and the boxing it needs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.sbp import Placement, explain
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.world.partition import Partition
from tests.nn.compare import own_block, own_slices
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import Row, assert_everywhere, assert_table

Q, K, V = random((2, 4, 5, 3)), random((2, 4, 6, 3), 1), random((2, 4, 6, 2), 2)
FEWER, FEWER_V = random((2, 2, 6, 3), 1), random((2, 2, 6, 2), 2)
SQUARE, SQUARE_V = random((2, 4, 5, 3), 3), random((2, 4, 5, 2), 4)
BIAS, SHARED = random((2, 1, 5, 6), 5), random((5, 6), 6)

attend = F.scaled_dot_product_attention
ALIKE: list[Row] = [([S(0)] * 3, S(0)), ([S(1)] * 3, S(1)), ([S(2), B, B], S(2))]
ATTENTIONS: dict[str, tuple[Any, list[torch.Tensor], list[Row]]] = {
    "plain": (attend, [Q, K, V], [*ALIKE, ([B, B, S(3)], S(3)), ([B, B, P], P)]),
    "causal": (partial(attend, is_causal=True), [Q, K, V], ALIKE),
    "causal square": (partial(attend, is_causal=True, scale=0.3), [Q, SQUARE, SQUARE_V], ALIKE),
    "mask": (
        attend,
        [Q, K, V, BIAS],
        [([S(0)] * 4, S(0)), ([S(1)] * 3 + [B], S(1)), ([S(2), B, B, S(2)], S(2))],
    ),
    "shared mask": (attend, [Q, K, V, SHARED], [([S(2), B, B, S(0)], S(2))]),
    "groups": (
        partial(attend, enable_gqa=True), [Q, FEWER, FEWER_V], [ALIKE[0], ALIKE[2]],
    ),
    "three dims": (attend, [Q[0], K[0], V[0]], [([S(0)] * 3, S(0)), ([S(1), B, B], S(1))]),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
@distributed(ranks=8, transports=("loopback",))
def test_attention(P_world: Partition, name: str) -> None:
    function, xs, rows = ATTENTIONS[name]
    assert_table(P_world, function, xs, rows)
    assert_everywhere(P_world, function, xs, (1, 1, 1), double=False)


@distributed(ranks=2, transports=("loopback",))
def test_groups_of_heads(P_world: Partition) -> None:
    """Blocks of whole groups stay where they are."""
    placement = Placement("cpu", [0, 1], P_world)
    function = partial(attend, enable_gqa=True)
    with explain() as lines:
        (y,) = assert_matches(function, [Q, FEWER, FEWER_V], placement, [(S(1),)] * 3)
    assert y.sbp == (S(1),) and all(line.endswith("; 0 bytes boxed") for line in lines)


@pytest.mark.parametrize("need_weights", [False, True])
@distributed(ranks=4, transports=("loopback",))
def test_layers_of_torch(P_world: Partition, need_weights: bool) -> None:
    """Call it as ``torch.nn.MultiheadAttention`` does, with masks; parameters are plain."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True).double()
    x, memory = random((4, 5, 6)), random((4, 7, 6), 1)
    padding = torch.arange(7) >= torch.tensor([7, 5, 6, 4]).unsqueeze(1)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    calls: list[Any] = [
        lambda x, m: layer(x, m, m, key_padding_mask=padding, need_weights=need_weights),
        lambda x, m: layer(x, x, x, attn_mask=causal, is_causal=True, need_weights=need_weights),
        lambda x, m: layer(x, x, x, average_attn_weights=False, need_weights=need_weights),
    ]
    for call in calls:
        for sbp in ((S(0), B), (S(1), S(0)), (S(1), S(1)), (S(2), P)):
            x_global: Any = global_of(x, placement, sbp, True)
            with enter_scope(Scope(placement)):
                y, weights = call(x_global, global_of(memory, placement, sbp))
            leaf = x.clone().requires_grad_()
            expected, expected_weights = call(leaf, memory)
            assert_global(y, expected)
            if need_weights:
                assert_global(weights, expected_weights)
            (own,) = torch.autograd.grad(y, [x_global], [torch.ones_like(expected)])
            (other,) = torch.autograd.grad(expected, leaf, torch.ones_like(expected))
            assert_global(own, other)


@distributed(ranks=2, transports=("loopback",))
def test_no_message_along_samples(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True).double()
    x = random((4, 5, 6))
    with enter_scope(Scope(placement)), explain() as lines:
        y = layer(global_of(x, placement, (S(0),)))
    assert all(line.endswith("; 0 bytes boxed") for line in lines), lines
    assert_global(y, layer(x))


@distributed(ranks=4, transports=("loopback",))
def test_one_sample_is_not_collected(P_world: Partition) -> None:
    """One sample and one head, which would move fewer bytes, leave no work to the others."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((1, 1, 8, 4))
    tokens = [(S(2), S(2))] * 3
    (y,) = assert_matches(attend, [x, x + 1, x + 2], placement, tokens)
    assert y.sbp == (S(2), S(2))


HEADS = 4


class Attention(torch.nn.Module):
    """Attention of tokens with a residual, as a transformer writes it."""

    def __init__(self, heads: int, is_causal: bool = False, key_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.is_causal, self.key_heads = heads, is_causal, key_heads or heads
        self.projection = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        keys = x if memory is None else memory
        q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2)
                   for y, n in ((x, self.heads), (keys.sin(), self.key_heads),
                                (keys.cos(), self.key_heads)))  # fmt: skip
        if self.key_heads != self.heads:
            k, v = (y[..., : q.shape[-1]] for y in (k, v))
        y = attend(q, k, v, is_causal=self.is_causal, enable_gqa=self.key_heads != self.heads)
        return x + self.projection(y.transpose(1, 2).flatten(2))


# Heads, tokens, and the bytes that move between 4 workers for tokens of 8 floats: 3/4 of queries,
# keys, values and results, or 3 times keys and values.
EXCHANGED = [(HEADS, 32, 4 * 24 * 32), (8, 32, 4 * 24 * 32), (1, 32, 2 * 96 * 32)]


@pytest.mark.parametrize(("heads", "tokens", "expected"), EXCHANGED, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_bytes_of_split_tokens(heads: int, tokens: int, expected: int, is_causal: bool) -> None:
    """Sequences become heads where every worker gets some; else keys and values are gathered."""
    shape = (1, tokens, 8)
    plan = gpudist.plan_of(Attention(heads, is_causal), (1, 4, 1), shape, ranks=range(4))
    assert sum(row.sent_bytes for row in plan.rows) == expected
    assert plan.rows[-1].outputs == "(split(1),)"


def test_bytes_of_few_keys() -> None:
    """A short memory is gathered, for its keys and values, instead of exchanging long queries."""
    shapes = (1, 64, 8), (1, 8, 8)
    plan = gpudist.plan_of(Attention(HEADS), (1, 4, 1), *shapes, ranks=range(4))
    assert sum(row.sent_bytes for row in plan.rows) == 2 * 3 * 8 * 8 * 4


CONVERTED: list[tuple[int, bool, int | None, list[int]]] = [
    (4, False, None, [1, 4, 1]), (4, True, None, [1, 4, 1]), (2, True, None, [1, 4, 1]),
    (4, True, None, [2, 2, 1]), (8, False, None, [1, 2, 2]), (8, True, 4, [1, 4, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "is_causal", "key_heads", "grid"), CONVERTED, ids=str)
@distributed(ranks=4, transports=("loopback",))
def test_split_tokens(
    P_world: Partition, heads: int, is_causal: bool, key_heads: int | None, grid: list[int]
) -> None:
    """Results and gradients equal the sequential ones, for blocks that differ."""
    P_x = P_world.create_cartesian_topology_partition(grid)
    torch.manual_seed(0)
    alone = Attention(heads, is_causal, key_heads).double()
    network = gpudist.distribute(copy.deepcopy(alone), P_x)
    x = random((2, 13, 8)).requires_grad_()
    expected = alone(x)
    (expected * expected.detach().cos()).sum().backward()
    block = own_block(x, P_x)
    y = network(block)
    torch.testing.assert_close(y.full_tensor(), expected)
    (y * y.detach().cos()).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(block.grad, x.grad[own_slices(x.shape, P_x) or ()])
