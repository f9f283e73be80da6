"""Tokens: attention in its spellings, positions, masks, recurrent layers, einsum."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


@forward(TOKENS)
class SelfAttention(nn.Module):
    """Heads by view and transpose, ``q @ k.transpose``, softmax, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = (q @ k.transpose(-2, -1)) * (c // 2) ** -0.5
        attention = attention.softmax(dim=-1)
        return self.out((attention @ v).transpose(1, 2).reshape(b, n, c))


@forward(TOKENS)
class CausalByTril(nn.Module):
    """minGPT: ``tril`` as a buffer, sliced to the length, ``masked_fill`` with minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.attn(x).split(8, dim=2)
        k = k.view(b, t, 2, c // 2).transpose(1, 2)
        q = q.view(b, t, 2, c // 2).transpose(1, 2)
        v = v.view(b, t, 2, c // 2).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


@forward(TOKENS)
class ScaledDotProduct(nn.Module):
    """``scaled_dot_product_attention``: causal, with a bias, with a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        bias = -(torch.arange(t)[:, None] - torch.arange(t)).abs().to(x) * 0.1
        biased = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril(2)
        masked = F.scaled_dot_product_attention(q, k, v, allowed)
        return tuple(y.transpose(1, 2).flatten(2) for y in (causal, biased, masked))


@forward(TOKENS)
class MultiheadAttentionLayer(nn.Module):
    """``nn.MultiheadAttention``, batch first, with its weights and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        t = x.shape[1]
        mask = torch.triu(torch.full((t, t), float("-inf"), dtype=x.dtype), diagonal=1)
        a, weights = self.attention(x, x, x, attn_mask=mask)
        b, _ = self.attention(a, x, x, need_weights=False)
        return b, weights


@forward(TOKENS, "padding: whole B T bool", T=9)
class KeyPaddingMask(nn.Module):
    """A mask of padded tokens, the first of which is never padded."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x, padding):
        padding = padding.clone()
        padding[:, 0] = False
        y, _ = self.attention(x, x, x, key_padding_mask=padding)
        y = y.masked_fill(padding.unsqueeze(-1), 0.0)
        return y.sum(1) / (~padding).sum(1, keepdim=True).type_as(y)


@forward(TOKENS)
class EncoderLayer(nn.Module):
    """``nn.TransformerEncoderLayer``, norm first, without dropout; it has a fast path in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x)


@forward(TOKENS, "memory: B T D", step=0)
class DecoderLayer(nn.Module):
    """``nn.TransformerDecoderLayer`` with the mask that torch generates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)


@forward(TOKENS, "context: whole B 5 E")
class CrossAttention(nn.Module):
    """Queries of the image, keys and values of a whole context of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(6, 16)

    def forward(self, x, context):
        k, v = self.kv(context).chunk(2, dim=-1)
        scores = torch.bmm(self.q(x), k.transpose(1, 2)) / math.sqrt(8)
        return torch.bmm(scores.softmax(-1), v) + x


@forward(IMAGE)
class NonLocalBlock(nn.Module):
    """Attention of all pixels to pooled ones, by bmm of flattened maps."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(4, 2, 1) for _ in range(3))
        self.out = nn.Conv2d(2, 4, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        theta = self.theta(x).view(b, 2, -1).permute(0, 2, 1)
        phi = F.max_pool2d(self.phi(x), 2).view(b, 2, -1)
        g = F.max_pool2d(self.g(x), 2).view(b, 2, -1).permute(0, 2, 1)
        y = torch.softmax(torch.bmm(theta, phi), dim=-1).bmm(g)
        return x + self.out(y.permute(0, 2, 1).contiguous().view(b, 2, h, w))


@forward(IMAGE)
class LinearAttention(nn.Module):
    """Linear attention of diffusion models: softmax over pixels of the keys, two einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(4, 24, 1, bias=False), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = (t.reshape(b, 2, 4, h * w) for t in self.qkv(x).chunk(3, dim=1))
        q, k = q.softmax(dim=-2) * 0.5, k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v / (h * w))
        y = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.out(y.reshape(b, 8, h, w))


@forward(IMAGE)
class AxialAttention(nn.Module):
    """Attention along rows, then along columns: other dims join the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(4, 12), nn.Linear(4, 12)

    def attend(self, t, layer):
        q, k, v = layer(t).chunk(3, -1)
        return t + torch.softmax(q @ k.mT, -1) @ v

    def forward(self, x):
        b, c, h, w = x.shape
        t = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
        t = self.attend(t, self.rows).reshape(b, h, w, c)
        t = t.permute(0, 2, 1, 3).reshape(b * w, h, c)
        return self.attend(t, self.columns).reshape(b, w, h, c).permute(0, 3, 2, 1)


@forward(IMAGE, H=8, W=12, step=0)
class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a class token by ``expand`` and cat, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 7, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        x = x + torch.softmax(x @ x.transpose(1, 2), -1) @ x
        return self.head(self.norm(x)[:, 0])


@forward(IMAGE, H=8, W=12)
class ResizedPositions(nn.Module):
    """Learned grid of positions, interpolated to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 8, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 3 * 3, 8))

    def forward(self, x):
        x = self.patch(x)
        h, w = x.shape[-2:]
        grid = self.positions.reshape(1, 3, 3, 8).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(h, w), mode="bicubic", align_corners=False)
        return x.flatten(2).transpose(1, 2) + grid.permute(0, 2, 3, 1).view(1, -1, 8)


@forward(TOKENS)
class SinusoidalPositions(nn.Module):
    """Sines and cosines by arange, exp, and slices with step two."""

    def forward(self, x):
        _, t, d = x.shape
        position = torch.arange(t, device=x.device).unsqueeze(1)
        term = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d)).to(x.device)
        pe = torch.zeros(t, d, dtype=x.dtype, device=x.device)
        pe[:, 0::2] = torch.sin(position * term)
        pe[:, 1::2] = torch.cos(position * term)
        return x * math.sqrt(d) + pe[None]


@forward(TOKENS)
class RotaryPositions(nn.Module):
    """Rotary embedding by halves, and by complex numbers."""

    def forward(self, x):
        t, d = x.shape[1], x.shape[2]
        angles = torch.outer(torch.arange(t).to(x), 1.0 / (10.0 ** (torch.arange(0, d, 2) / d)))
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        x1, x2 = x[..., : d // 2], x[..., d // 2 :]
        halves = x * cos + torch.cat((-x2, x1), dim=-1) * sin
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(2)
        return halves, turned


@forward(TOKENS, T=9, step=0)
class RelativePositionBias(nn.Module):
    """Swin's table of biases read by an index buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(25, 2))
        coords = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
        coords = coords.flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :] + 2).permute(1, 2, 0)
        self.register_buffer("index", (relative * torch.tensor([5, 1])).sum(-1))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(9, 9, -1).permute(2, 0, 1).contiguous()
        return ((q @ k.mT + bias.unsqueeze(0)).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)


@forward(TOKENS)
class AlibiBias(nn.Module):
    """A bias of distances, made in the forward with ``new_tensor`` and ``torch.full_like``."""

    def forward(self, x):
        t = x.size(1)
        slopes = x.new_tensor([0.5, 0.25]).view(2, 1, 1)
        distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
        scores = torch.einsum("btd,bsd->bts", x, x).unsqueeze(1) / 8 + slopes * distance.clamp(
            max=0
        )
        scores = torch.where(distance > 0, torch.full_like(scores, -1e9), scores)
        return scores.softmax(-1).sum(1) @ x


@forward(TOKENS)
class Recurrent(nn.Module):
    """A bidirectional LSTM, then a GRU whose last state is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 3, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y)
        return z, last[-1], h + c


@forward(TOKENS)
class RecurrentByHand(nn.Module):
    """A loop over time with an ``nn.GRUCell``; states stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 5)

    def forward(self, x):
        h = x.new_zeros(x.size(0), 5)
        found = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            found.append(h)
        return torch.stack(found, dim=1), h


@forward(TOKENS)
class EinsumsWithEllipsis(nn.Module):
    """Einsums with ``...``, a trace, a broadcast and three operands."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        a = torch.einsum("...d,de->...e", x, self.w)
        b = torch.einsum("btd,de,e->bt", x, self.w, self.v)
        c = torch.einsum("...td,...sd->...ts", x, x)
        d = torch.einsum("bij->bj", c) + torch.einsum("bii->bi", c)
        return a, b, d


@forward(TOKENS)
class MixerBlock(nn.Module):
    """A convolution of size one over tokens in place of a linear layer, both norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
        self.along = nn.Conv1d(8, 8, 3, padding=1, groups=8)

    def forward(self, x):
        y = x + self.along(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return y + self.mix(F.layer_norm(y, (8,)))


@forward("tokens: whole B T int", TOKENS)
class EmbeddedTokens(nn.Module):
    """An embedding of whole integers, added to blocks; logits by the tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)

    def forward(self, tokens, x):
        y = x + self.embed(tokens)
        return F.linear(y, self.embed.weight), F.log_softmax(y @ self.embed.weight.T, -1)


@forward(TOKENS)
class RMSNormAndSwiGLU(nn.Module):
    """A norm written out, ``nn.RMSNorm``, and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(8)), nn.RMSNorm(8)
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return self.w2(F.silu(self.w1(y)) * self.w3(self.norm(x)))
