"""A small GPT in plain torch, and split over rows of workers, with equal parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from gpudist import CartesianPartition
from gpudist.geometry import Decomposition
from gpudist.nn import (
    AllToAllAttention,
    ColumnParallelLinear,
    ParallelAttention,
    RingAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    fuse_parameter_movements,
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT.

    Attributes:
        vocabulary: number of distinct tokens.
        longest: largest number of tokens in a sequence.
        width: number of features; a multiple of ``heads``.
        heads: number of heads of each attention.
        layers: number of blocks.
    """

    vocabulary: int
    longest: int
    width: int = 64
    heads: int = 4
    layers: int = 2


class QKV(nn.Module):
    """Queries, keys and values of the heads, each ``[B, heads, L, head_dim]``."""

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
    """Causal self-attention: a sample's tokens never attend to the padding after its end."""

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
    """GPT that returns logits ``[B, L, vocabulary]`` of the next token for tokens ``[B, L]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.tokens = nn.Embedding(sizes.vocabulary, width)
        self.positions = nn.Embedding(sizes.longest, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Cut:
    """How the network is split.

    Attributes:
        P: partition of the workers: axis 0 has the copies of the network, axis 1 the workers of a
            copy.
        split_sequence: whether tensors between layers are blocks of the sequence.
        attention: with ``"heads"``, each worker has some heads and all tokens; other kinds keep the
            sequence split.
    """

    P: CartesianPartition
    split_sequence: bool
    attention: Literal["heads", "ring", "all-to-all"]

    @property
    def sequence_dim(self) -> int | None:
        return 1 if self.split_sequence else None

    def own_positions(self, length: int) -> torch.Tensor:
        """Return the positions of this worker's ``length`` tokens."""
        if not self.split_sequence:
            return torch.arange(length, device=self.P.device)
        assert self.P.index is not None
        blocks = Decomposition.balanced((length,), self.P.shape[1:])
        (own,) = blocks.block(self.P.index[1:]).slices
        return torch.arange(own.start, own.stop, device=self.P.device)


class HeadsAttention(ParallelAttention):
    """Causal self-attention over some heads and all tokens."""

    def __init__(self, cut: Cut, width: int, heads: int) -> None:
        super().__init__(cut.P, width, heads, split_sequence=cut.split_sequence)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return super().forward(x, is_causal=True, lengths=length)


class SequenceAttention(nn.Module):
    """Causal self-attention over all heads and a block of tokens.

    Every worker holds all parameters.
    """

    def __init__(self, cut: Cut, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = QKV(width, heads)
        self.out_proj = nn.Linear(width, width)
        copies, workers = cut.P.shape
        P_x = cut.P.grid(copies, 1, workers, 1)
        exchange = RingAttention if cut.attention == "ring" else AllToAllAttention
        self.attend = exchange(P_x, is_causal=True, shape="dynamic")

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        y = self.attend(*self.qkv(x))
        return self.out_proj(y.transpose(1, 2).flatten(2))


class ParallelBlock(nn.Module):
    def __init__(self, cut: Cut, width: int, heads: int) -> None:
        super().__init__()
        dim = cut.sequence_dim
        attention = HeadsAttention if cut.attention == "heads" else SequenceAttention
        self.norm_1 = nn.LayerNorm(width)
        self.attention = attention(cut, width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(cut.P, width, 4 * width, sequence_dim=dim)
        self.down = RowParallelLinear(cut.P, 4 * width, width, sequence_dim=dim)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), length)
        return x + self.down(F.gelu(self.up(self.norm_2(x), length)), length)


class ParallelGPT(nn.Module):
    """GPT that returns logits ``[B, L, block of the vocabulary]`` for tokens ``[B, L]``."""

    def __init__(self, sizes: Sizes, cut: Cut) -> None:
        super().__init__()
        width, dim = sizes.width, cut.sequence_dim
        self.cut = cut
        self.tokens = VocabParallelEmbedding(cut.P, sizes.vocabulary, width, sequence_dim=dim)
        self.positions = nn.Embedding(sizes.longest, width)
        self.blocks = nn.ModuleList(
            ParallelBlock(cut, width, sizes.heads) for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = ColumnParallelLinear(cut.P, width, sizes.vocabulary, sequence_dim=dim)
        # Gradients of norms, positions and full projections are partial sums, which are summed.
        fuse_parameter_movements(self, cut.P)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(self.cut.own_positions(length))
        for block in self.blocks:
            x = block(x, length)
        return self.head(self.norm(x), length)
