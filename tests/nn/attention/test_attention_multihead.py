"""The distributed multi-head attention is torch's, in value, gradients and initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedMultiheadAttention
from gpudist.world.partition import Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_block_of,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

F64 = torch.float64
Placed = tuple[Sequence[int], Sequence[int], bool, Cut | None]
# Partition, input, whether the batch comes first, sizes of blocks.
CASES: dict[str, Placed] = {
    "one worker": ((1, 1, 1), (2, 5, 8), True, None),
    "sequence": ((1, 4, 1), (2, 9, 8), True, None),
    "uneven": ((1, 3, 1), (2, 9, 8), True, {1: [1, 6, 2]}),
    "empty": ((1, 4, 1), (2, 3, 8), True, None),
    "sequence first": ((3, 1, 1), (7, 2, 8), False, {0: [4, 1, 2]}),
    "both": ((2, 2, 1), (3, 5, 8), True, None),
    "both, sequence first": ((2, 2, 1), (5, 3, 8), False, None),
}


class OfItself(torch.nn.Module):
    """Self-attention alone."""

    def __init__(self, attention: Any, is_causal: bool) -> None:
        super().__init__()
        self.attention, self._is_causal = attention, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = None
        if self._is_causal:
            length = x.shape[1 if self.attention.batch_first else 0]
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.attention(
            x, x, x, need_weights=False, attn_mask=mask, is_causal=self._is_causal
        )[0]


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("case", CASES)
@distributed(ranks=4, transports=["loopback"])
def test_as_torch(P_world: Partition, case: str, replicate: bool, exchange: Any) -> None:
    shape, x_shape, batch_first, sizes = CASES[case]
    P_x = grid(P_world, shape)

    def owned(name: str, whole: torch.Size) -> Slices | None:
        has = P_x.active if replicate else P_x.rank == 0
        return (slice(None),) * len(whole) if has else None

    options: dict[str, Any] = {"bias": replicate, "batch_first": batch_first, "dtype": F64}
    assert_same_as_sequential(
        lambda: OfItself(torch.nn.MultiheadAttention(8, 4, **options), replicate),
        lambda: OfItself(
            DistributedMultiheadAttention(
                P_x, 8, 4, **options, exchange=exchange, replicate_parameters=replicate
            ),
            replicate,
        ),
        P_x,
        P_x,
        x_shape,
        owned,
        sizes=sizes,
        output_sizes=sizes,
    )


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
@distributed(ranks=3)
def test_other_keys_and_padding(P_world: Partition, exchange: Any) -> None:
    P_x = grid(P_world, (1, 3, 1))
    torch.manual_seed(1)
    alone = torch.nn.MultiheadAttention(6, 3, batch_first=True, dtype=F64)
    torch.manual_seed(1)
    layer = DistributedMultiheadAttention(
        P_x, 6, 3, batch_first=True, dtype=F64, exchange=exchange, replicate_parameters=True
    )
    query, key = (
        random_like_all(shape, seed).requires_grad_()
        for seed, shape in enumerate([(2, 5, 6), (2, 8, 6)])
    )
    padding = torch.arange(8) >= torch.tensor([8, 3])[:, None]
    y_whole, _ = alone(query, key, key, key_padding_mask=padding, need_weights=False)
    blocks = [own_block(x, P_x) for x in (query, key)]
    own_keys = own_slices((2, 8), grid(P_world, (1, 3)))
    y, weights = layer(blocks[0], blocks[1], blocks[1], key_padding_mask=padding[own_keys])
    assert weights is None
    where = own_slices(y_whole.shape, P_x)
    assert where is not None
    assert_block_of(y.detach(), y_whole.detach(), where, "output")
    cotangent = random_like_all(y_whole.shape, 5)
    y_whole.backward(cotangent)
    y.backward(cotangent[where])
    for whole, block in zip((query, key), blocks, strict=True):
        assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "gradient")
    for whole, own in zip(alone.parameters(), layer.parameters(), strict=True):
        assert_block_of(own.grad, gradient_of(whole), (), "gradient of a parameter")


@distributed(ranks=2, transports=["loopback"])
def test_refusals(P_world: Partition) -> None:
    with pytest.raises(PartitionError, match="1 worker along the last"):
        DistributedMultiheadAttention(grid(P_world, (1, 1, 2)), 4, 2)
    P_x = grid(P_world, (1, 2, 1))
    with pytest.raises(ShapeError, match="embed_dim 4 must be divisible by num_heads 3"):
        DistributedMultiheadAttention(P_x, 4, 3)
    with pytest.raises(ShapeError, match="exchange is 'star'; use 'ring' or 'all_to_all'"):
        DistributedMultiheadAttention(P_x, 4, 2, exchange="star")  # pyright: ignore
    with pytest.raises(ShapeError, match="kdim is not supported"):
        DistributedMultiheadAttention(P_x, 4, 2, kdim=3)
    layer = DistributedMultiheadAttention(P_x, 4, 2, batch_first=True)
    x = torch.zeros(1, 3, 4)
    with pytest.raises(ShapeError, match="need_weights=False"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(ShapeError, match="only with is_causal=True"):
        layer(x, x, x, attn_mask=torch.zeros(6, 6))
