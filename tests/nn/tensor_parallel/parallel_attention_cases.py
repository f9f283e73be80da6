"""Attention split over heads, against unsplit attention made of torch's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.nn import ParallelAttention, fuse_parameter_movements
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import (
    F64,
    assert_parameter_gradients,
    block_of,
    cotangent_of_copies,
    drawn_alike,
    gradient_of_copies,
    leaf,
)

EMBED, HEAD = 6, 2


class QKV(torch.nn.Module):
    """Three projections, as torch has them."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(EMBED, num_heads * HEAD, dtype=F64)
        self.k_proj = torch.nn.Linear(EMBED, num_kv_heads * HEAD, dtype=F64)
        self.v_proj = torch.nn.Linear(EMBED, num_kv_heads * HEAD, dtype=F64)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        layers = self.q_proj, self.k_proj, self.v_proj
        return [layer(x).unflatten(-1, (-1, HEAD)) for layer in layers]


class Attention(torch.nn.Module):
    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.qkv = QKV(num_heads, num_kv_heads)
        self.out_proj = torch.nn.Linear(num_heads * HEAD, EMBED, dtype=F64)

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        q, k, v = (part.transpose(-3, -2) for part in self.qkv(x))
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        return self.out_proj(y.transpose(-3, -2).flatten(-2))


def check_attention(
    P: Partition,
    convention: Convention,
    heads: tuple[int, int],
    shape: Sequence[int] = (2, 4),
    lengths: Sequence[int] | None = None,
    fused: bool = False,
    **given: Any,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Compare both, and return them with their gradients."""
    sequential, layer = drawn_alike(
        lambda: Attention(*heads),
        lambda: ParallelAttention(
            P, EMBED, *heads, head_dim=HEAD, dtype=F64, convention=convention,
            split_sequence=lengths is not None,
        ),
    )  # fmt: skip
    if fused:
        fuse_parameter_movements(layer)
    assert P.rank is not None
    whole = leaf(random_like_all((*shape, EMBED), 3))
    dim = len(shape) - 1
    x = leaf(whole if lengths is None else block_of(whole, dim, lengths, P.rank))
    y_whole = sequential(whole, **given)
    y = layer(x, **given) if lengths is None else layer(x, **given, lengths=lengths)
    gradient = random_like_all(y_whole.shape, 1)
    y_whole.backward(gradient)
    if lengths is None:
        assert_equal_to(y.detach(), y_whole.detach(), 1e-10, "output")
        y.backward(cotangent_of_copies(gradient, convention, P, 9))
        found = gradient_of_copies(x, convention, P)
        assert_equal_to(found, gradient_of(whole), 1e-10, "input gradient")
    else:
        own = block_of(y_whole, dim, lengths, P.rank).detach()
        assert_equal_to(y.detach(), own, 1e-10, "output")
        y.backward(block_of(gradient, dim, lengths, P.rank))
        expected = block_of(gradient_of(whole), dim, lengths, P.rank)
        assert_equal_to(gradient_of(x), expected, 1e-10, "input gradient")
    assert_parameter_gradients(sequential, layer)
    return sequential, layer
