"""Attention split over heads is the sequential one, however many workers there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.nn import ParallelAttention, ParallelQKV
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.nn.utils import clip_grad_norm_
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_attention_cases import EMBED, HEAD, QKV, check_attention
from tests.nn.tensor_parallel.parallel_cases import (
    CONVENTIONS,
    F64,
    block_of,
    cotangent_of_copies,
    drawn_alike,
    gradient_of_copies,
    leaf,
)
from tests.pool import distributed


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (6, 3), (5, 1), (2, 1)])
@distributed(ranks=[1, 2, 3, 4], transports=["loopback"])
def test_heads(P_world: Partition, heads: tuple[int, int], convention: Convention) -> None:
    """Uneven heads, shared keys, keys on several workers, workers without heads."""
    sequential, layer = check_attention(P_world, convention, heads)
    norm = torch.nn.utils.clip_grad_norm_(sequential.parameters(), 0.5)
    assert_equal_to(clip_grad_norm_(layer, 0.5).to(F64), norm, 1e-10, "norm")


@distributed(ranks=3, transports=["loopback"])
def test_masks(P_world: Partition) -> None:
    per_head = random_like_all((4, 4, 4), 5)
    check_attention(P_world, "dual", (4, 2), is_causal=True)
    check_attention(P_world, "dual", (4, 2), (4,), is_causal=True)
    check_attention(P_world, "invariant", (4, 2), attn_mask=per_head[0] > -0.5)
    check_attention(P_world, "dual", (4, 2), attn_mask=per_head)
    check_attention(P_world, "dual", (4, 2), attn_mask=per_head[:1].expand(2, 1, 4, 4))
    check_attention(P_world, "dual", (2, 1), attn_mask=per_head[:2].expand(2, 2, 4, 4))


@distributed(ranks=3, transports=["host", "gloo"])
def test_on_other_transports(P_world: Partition) -> None:
    check_attention(P_world, "dual", (5, 1), fused=True)
    check_attention(P_world, "invariant", (4, 2), (2, 6), [1, 0, 5], fused=True)


@distributed(ranks=3, transports=["loopback"])
def test_lengths_of_the_input_are_those_of_the_output(P_world: Partition) -> None:
    layer = ParallelAttention(P_world, 6, 3, split_sequence=True, shape="dynamic")
    for step in range(3):
        x = torch.rand(2, 1 + step * (P_world.rank or 0), 6)
        assert layer(x).shape == x.shape


@distributed(ranks=3, transports=["loopback"])
def test_queries_keys_and_values(P_world: Partition) -> None:
    sequential, layer = drawn_alike(
        lambda: QKV(6, 2),
        lambda: ParallelQKV(P_world, EMBED, 6, 2, head_dim=HEAD, dtype=F64),
    )
    assert isinstance(layer, ParallelQKV) and P_world.rank is not None
    x = random_like_all((2, 4, EMBED), 1)
    whole = sequential(x)
    q, k, v = layer(x)
    keys = [slice(0, 1), slice(0, 2), slice(1, 2)][P_world.rank]
    expected = block_of(whole[0], 2, Blocks(6, 3).lengths, P_world.rank)
    assert_equal_to(q, expected, 1e-12, "queries")
    assert_equal_to(k, whole[1][:, :, keys], 1e-12, "keys")
    assert_equal_to(v, whole[2][:, :, keys], 1e-12, "values")


@distributed(ranks=3, transports=["loopback"])
def test_the_dual_convention_is_the_adjoint(P_world: Partition) -> None:
    """Check the projection to the values, which is linear."""
    layer = ParallelQKV(P_world, 6, 6, 2, False, dtype=F64, convention="dual")
    assert_adjoint(lambda x: layer(x)[2], random_like_all((4, 6), 0), P_world)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
@distributed(ranks=[2, 4], transports=["loopback"])
def test_dropout_is_the_same_on_one_worker(P_world: Partition, mask: str | None) -> None:
    assert P_world.rank is not None
    alone = P_world.create_partition_inclusive([P_world.rank])
    sequential, layer = drawn_alike(
        lambda: ParallelAttention(alone, 6, 3, dtype=F64, dropout=0.4, seed=11),
        lambda: ParallelAttention(P_world, 6, 3, dtype=F64, dropout=0.4, seed=11),
    )
    scores = random_like_all((4, 4), 5)
    scores_or_none = scores > 0 if mask == "bool" else scores if mask == "float" else None
    given: dict[str, Any] = {"attn_mask": scores_or_none, "is_causal": mask == "causal"}
    outputs: list[torch.Tensor] = []
    for _ in range(2):
        whole, x = (leaf(random_like_all((2, 4, 6), 1)) for _ in range(2))
        y_whole, y = sequential(whole, **given), layer(x, **given)
        assert_equal_to(y.detach(), y_whole.detach(), 1e-12, "output")
        gradient = random_like_all(y.shape, 2)
        y_whole.backward(gradient)
        y.backward(cotangent_of_copies(gradient, "invariant", P_world, 9))
        found = gradient_of_copies(x, "invariant", P_world)
        assert_equal_to(found, gradient_of(whole), 1e-10, "input gradient")
        outputs.append(y.detach())
    assert not torch.equal(*outputs)
    layer.eval()
    sequential.eval()
    torch.testing.assert_close(layer(x.detach(), **given), sequential(x.detach(), **given))


@distributed(ranks=2, transports=["loopback"])
def test_without_dropout_weights_are_torchs(P_world: Partition) -> None:
    """If almost nothing is dropped, masks and rows without a key match torch's."""
    mask = random_like_all((4, 4), 5) > 0
    mask[1] = False
    layers: list[ParallelAttention] = []
    for dropout in (0.0, 1e-12):
        torch.manual_seed(0)
        layers.append(ParallelAttention(P_world, 6, 3, dtype=F64, dropout=dropout, seed=1))
    hiding = torch.zeros(4, 4, dtype=F64).masked_fill(~mask, -torch.inf)
    masks = [{"attn_mask": one} for one in (mask, mask.double(), hiding)]
    for given in ({"is_causal": True}, *masks):
        expected, found = (leaf(random_like_all((4, 6), 1)) for _ in layers)
        layers[0](expected, **given).sum().backward()
        layers[1](found, **given).sum().backward()
        assert_equal_to(found.grad, gradient_of(expected), 1e-9, "input gradient")


@distributed(ranks=2, transports=["loopback"])
def test_refusals(P_world: Partition) -> None:
    with pytest.raises(ShapeError, match="embed_dim 6 is not a multiple of num_heads 4"):
        ParallelAttention(P_world, 6, 4)
    with pytest.raises(ShapeError, match="num_heads 3 must be a multiple of num_kv_heads 2"):
        ParallelAttention(P_world, 6, 3, 2)
    layer = ParallelAttention(P_world, 6, 3)
    with pytest.raises(ShapeError, match="its dim -3 must be 1 or 3"):
        layer(torch.rand(4, 6), torch.rand(2, 4, 4))
