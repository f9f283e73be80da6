"""A small GPT in plain torch: it knows of no other worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Of a GPT.

    Attributes:
        vocabulary: tokens that there are.
        longest: tokens of a sequence, at most.
        width: features; ``heads`` divides it.
        heads: of each attention.
        layers: blocks.
    """

    vocabulary: int
    longest: int
    width: int = 64
    heads: int = 4
    layers: int = 2


class QKV(nn.Module):
    """Queries, keys and values of the heads, ``[B, heads, L, head_dim]`` each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected]


class Attention(nn.Module):
    """Causal: padding behind a sample's end is seen by no token of it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = QKV(width, heads)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(*self.qkv(x), is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Logits ``[B, L, vocabulary]`` of the next token for tokens ``[B, L]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.tokens = nn.Embedding(sizes.vocabulary, width)
        self.positions = nn.Embedding(sizes.longest, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
