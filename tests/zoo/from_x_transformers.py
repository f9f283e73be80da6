"""Networks of x-transformers."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import nn
from x_transformers import (
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
)

from tests.zoo.network import Input, Inputs, Network, Size, tokens

_WORDS = 50


def _decoder(size: Size) -> nn.Module:
    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_flash=False)
    return TransformerWrapper(num_tokens=_WORDS, max_seq_len=32, attn_layers=layers)


def _series(size: Size) -> nn.Module:
    layers = Encoder(dim=32, depth=2, heads=4, alibi_pos_bias=True, use_rmsnorm=True, ff_glu=True)
    return ContinuousTransformerWrapper(dim_in=8, dim_out=4, max_seq_len=64, attn_layers=layers)


def _vit(size: Size) -> nn.Module:
    layers = Encoder(dim=32, depth=2, heads=4)
    return ViTransformerWrapper(
        image_size=size[0], patch_size=16, num_classes=10, attn_layers=layers
    )


def _words(size: Size) -> Inputs:
    return {"x": tokens(size, _WORDS)}


def _numbers(size: Size) -> Inputs:
    return {"x": Input(torch.randn(2, *size, 8), (1,))}


NETWORKS = [
    Network("x-transformers/decoder", _decoder, (24,), (23,), _words),
    Network("x-transformers/series", _series, (24,), (23,), _numbers),
    Network("x-transformers/vit", _vit, (64, 64), (80, 80), classes=10),
]
