"""Attention over a split sequence is torch's, by a ring and by an all-to-all."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import gpudist
from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.nn.attention.attention_cases import (
    CASES,
    assert_as_torch,
    assert_double_backward,
    tensors_of,
)
from tests.nn.compare import assert_equal_to, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

KINDS: dict[str, Any] = {"ring": nn.RingAttention, "all-to-all": nn.AllToAllAttention}
SEVERAL = ("uneven", "shared heads", "empty blocks", "padding")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_values_and_gradients(P_world: Partition, kind: str, case: str, is_causal: bool) -> None:
    given = CASES[case]
    P_x = grid(P_world, given.grid)
    assert_as_torch(given, P_x, KINDS[kind](P_x, is_causal), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["host", "gloo"])
def test_on_other_transports(P_world: Partition, kind: str, is_causal: bool) -> None:
    for case in SEVERAL:
        P_x = grid(P_world, CASES[case].grid)
        assert_as_torch(CASES[case], P_x, KINDS[kind](P_x, is_causal), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_double_backward(P_world: Partition, kind: str, case: str, is_causal: bool) -> None:
    given = CASES[case]
    P_x = grid(P_world, given.grid)
    assert_double_backward(given, P_x, KINDS[kind](P_x, is_causal), is_causal)


@pytest.mark.parametrize("function", [gpudist.ring_attention, gpudist.all_to_all_attention])
@distributed(ranks=3, transports=["loopback"])
def test_functions_follow_other_lengths(P_world: Partition, function: Any) -> None:
    for case in ("uneven", "other keys than queries", "uneven"):
        P_x = grid(P_world, CASES[case].grid)
        attend = partial(function, P_x=P_x, is_causal=True, shape="dynamic")
        assert_as_torch(CASES[case], P_x, attend, True)


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_dropout_drops_the_same_under_every_partition(P_world: Partition, kind: str) -> None:
    shape, lengths = (2, 4, 7, 3), torch.tensor([7, 4])
    wholes = [random_like_all(shape, seed).requires_grad_() for seed in range(3)]
    P_one, P_x = grid(P_world, (1, 1, 1, 1), [P_world.rank or 0]), grid(P_world, (1, 2, 2, 1))
    alone = KINDS[kind](P_one, True, dropout_p=0.4, seed=5)
    split = KINDS[kind](P_x, True, dropout_p=0.4, seed=5)
    outputs: list[torch.Tensor] = []
    for _ in range(2):
        blocks = [own_block(whole, P_x) for whole in wholes]
        y_whole, y = alone(*wholes, key_lengths=lengths), split(*blocks, key_lengths=lengths)
        where = own_slices(shape, P_x)
        assert where is not None
        assert_equal_to(y.detach(), y_whole.detach()[where], 1e-10, "output")
        gradients = torch.autograd.grad(y_whole, wholes, random_like_all(shape, 9))
        found = torch.autograd.grad(y, blocks, random_like_all(shape, 9)[where])
        for whole, block in zip(gradients, found, strict=True):
            assert_equal_to(block, whole[where], 1e-10, "gradient")
        outputs.append(y_whole.detach())
    assert not torch.equal(*outputs), "each call drops others"
    assert torch.equal(alone.eval()(*wholes), KINDS[kind](P_one, True)(*wholes))


@distributed(ranks=1, transports=["loopback"])
def test_dropped_weights_have_their_mean(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 1, 1, 1))
    query, key = (random_like_all((8, 4, 64, 3), seed) for seed in range(2))
    y = nn.RingAttention(P_x, dropout_p=0.3, seed=1)(query, key, torch.ones_like(query))
    assert 0.99 < float(y.mean()) < 1.01
    assert float(y.std()) > 0.05


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=2, transports=["loopback"])
def test_activation_checkpoint(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, (1, 1, 2, 1))
    blocks = [own_block(random_like_all((1, 2, 5, 3), seed), P_x) for seed in range(3)]
    layer = KINDS[kind](P_x, True, dropout_p=0.2, seed=3)
    checkpointed = KINDS[kind](P_x, True, dropout_p=0.2, seed=3)
    plain = torch.autograd.grad(layer(*blocks).square().sum(), blocks)
    y = torch.utils.checkpoint.checkpoint(checkpointed, *blocks, use_reentrant=False)
    for found, wanted in zip(torch.autograd.grad(y.square().sum(), blocks), plain, strict=True):
        assert_equal_to(found, wanted, 1e-12, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=3, transports=["loopback"])
def test_fewer_digits(P_world: Partition, kind: str, dtype: torch.dtype) -> None:
    P_x = grid(P_world, (1, 1, 3, 1))
    query, key, value = wholes = [random_like_all((1, 2, 8, 4), seed) for seed in range(3)]
    y_whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    blocks = [own_block(whole.to(dtype), P_x) for whole in wholes]
    y = KINDS[kind](P_x, True)(*blocks)
    where = own_slices(y_whole.shape, P_x)
    assert y.dtype == dtype and where is not None
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    assert_equal_to(y.detach().double(), y_whole[where], tolerance, "output")
    gradients = torch.autograd.grad(y.sum(), blocks)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3


@distributed(ranks=2, transports=["loopback"])
def test_heads_move_in_the_dtype_of_autocast(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 1, 2, 1))
    wholes = [random_like_all((1, 2, 6, 4), seed).float() for seed in range(3)]
    query, key, value = (whole.bfloat16() for whole in wholes)
    y_whole = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    where = own_slices(y_whole.shape, P_x)
    assert where is not None
    blocks = [own_block(whole, P_x).detach().requires_grad_() for whole in wholes]
    layer = nn.AllToAllAttention(P_x)
    moved_bytes: list[int] = []
    for is_cast in (False, True):
        gpudist.stats(reset=True, P_world=P_world)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            y = layer(*blocks)
        rows = gpudist.stats(P_world=P_world)
        moved_bytes.append(sum(row.sent_bytes for row in rows if "all-to-all" in row.operator))
    assert y.dtype == torch.bfloat16 and moved_bytes[0] == 2 * moved_bytes[1] > 0
    assert_equal_to(y.detach(), y_whole[where], 1e-2, "output")
    gradients = torch.autograd.grad(y.float().sum(), blocks)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3


@distributed(ranks=3, transports=["loopback"])
def test_dtypes_and_values_under_autocast(P_world: Partition) -> None:
    """On 1, 2 or 3 workers, with or without dropout, masks and cells, and outside of ``P_x``."""
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        wholes = [random_like_all((1, 2, 6, 4), seed).to(dtype) for seed in range(3)]
        leaves = [whole.detach().requires_grad_() for whole in wholes]
        with torch.autocast("cpu", torch.bfloat16):
            expected = sdpa(*leaves)
        of_leaves = torch.autograd.grad(expected.float().square().sum(), leaves)
        for kind, workers, dropout_p in product(KINDS.values(), (1, 2, 3), (0.0, 1e-9)):
            P_x = grid(P_world, (1, 1, workers, 1))
            blocks = [own_block(whole, P_x).detach().requires_grad_() for whole in wholes]
            layer = kind(P_x, dropout_p=dropout_p, seed=1)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(*blocks)
            assert y.dtype == expected.dtype
            where = own_slices(expected.shape, P_x)
            of_blocks = torch.autograd.grad(y.float().square().sum(), blocks)
            if where is None:
                continue
            assert_equal_to(y.detach(), expected[where].detach(), 2e-2, "output")
            for found, wanted in zip(of_blocks, of_leaves, strict=True):
                assert found.dtype == dtype
                assert_equal_to(found, wanted[where], 5e-2, "gradient")


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=2, transports=["loopback"])
def test_refusals(P_world: Partition, kind: str) -> None:
    with pytest.raises(PartitionError, match="with 1 worker along the last"):
        KINDS[kind](grid(P_world, (1, 1, 1, 2)))
    for dropout_p in (-0.5, 1.0):
        with pytest.raises(ShapeError, match=f"dropout_p is {dropout_p}; it must be from 0 to be"):
            KINDS[kind](grid(P_world, (1, 1, 2, 1)), dropout_p=dropout_p)
    layer = KINDS[kind](grid(P_world, (1, 1, 2, 1)))
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ShapeError, match="a multiple of the key"):
        layer(x, x[:, :2], x[:, :2])


@distributed(ranks=2, transports=["loopback"])
def test_split_heads_are_not_shared(P_world: Partition) -> None:
    layer = nn.RingAttention(grid(P_world, (1, 2, 1, 1)))
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ShapeError, match="heads are split"):
        layer(x, x[:, :1], x[:, :1])


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_adjoint_of_the_values(P_world: Partition, kind: str) -> None:
    given = CASES["shared heads"]
    P_x = grid(P_world, given.grid)
    query, key, value = (own_block(x.detach(), P_x, requires_grad=False) for x in tensors_of(given))
    layer = KINDS[kind](P_x, True)
    assert_adjoint(lambda v: layer(query, key, v), value, P_x)


@distributed(ranks=4, transports=["loopback"])
def test_the_ring_keeps_only_own_blocks(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 1, 4, 1))
    blocks = [own_block(random_like_all((1, 2, 32, 8), seed), P_x) for seed in range(3)]
    kept: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = nn.RingAttention(P_x)(*blocks)
    # Query, key, value, output, and a number for each row.
    assert sum(kept) == 4 * blocks[0].numel() + 2 * 8
    y.sum().backward()
