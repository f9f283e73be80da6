"""Blocks of transformers as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Split(nn.Module):
    """Projections together, cut up by sizes read off the tensor, as in nanoGPT."""

    def __init__(self, features: int = 8, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.c_attn = nn.Linear(features, 3 * features)
        self.c_proj = nn.Linear(features, features)
        self.n_head, self.n_embd, self.dropout = heads, features, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(self.norm(x)).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return x + self.c_proj(y)


class Packed(nn.Module):
    """One tensor of queries, keys and values, as in timm."""

    def __init__(self, features: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Shared(nn.Module):
    """Fewer heads of keys, sizes left to torch and joined, as in Llama."""

    def __init__(self, features: int = 8, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        size = features // heads
        self.q = nn.Linear(features, features, bias=False)
        self.k = nn.Linear(features, key_heads * size, bias=False)
        self.v = nn.Linear(features, key_heads * size, bias=False)
        self.o = nn.Linear(features, features, bias=False)
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[:-1] + (-1, self.size)  # noqa: RUF005
        q, k = self.q(x).view(shape).transpose(1, 2), self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Chunks(nn.Module):
    """Chunks, and a length that is left to torch."""

    def __init__(self, features: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.features, self.heads = nn.Linear(features, 3 * features), features, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B = x.shape[0]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (p.reshape(B, -1, self.heads, 4).permute(0, 2, 1, 3) for p in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(B, -1, self.features)


class Masked(nn.Module):
    """Indices of words of which 0 is padding, through an encoder of torch."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(words), src_key_padding_mask=words == 0)
        return self.head(x)


class Attending(nn.Module):
    """Multi-head attention between two tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, other, other)
        return x + y


class Causal(nn.Module):
    """An encoder with the causal mask in a buffer, and the hint that it is one."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), False)
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, mask=self.mask, is_causal=True)
