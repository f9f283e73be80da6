"""Converted transformers over a split sequence compute the same as the networks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gpudist import distribute
from gpudist.world.partition import Partition
from tests.convert import transformers
from tests.convert.training import assert_as_alone, assert_gradients, assert_whole, loss_of
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

GRIDS = [(1, 4, 1), (2, 2, 1)]
BLOCKS = ["Split", "Packed", "Shared", "Chunks"]


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("block", BLOCKS)
@distributed(ranks=4, transports=["loopback"])
def test_blocks_of_linears(P_world: Partition, block: str, shape: Sequence[int]) -> None:
    assert_as_alone(getattr(transformers, block), grid(P_world, shape), [(3, 7, 8)])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "norm last": lambda: nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True),
    "norm first": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
    ),
    "module for activation": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, nn.SiLU(), batch_first=True
    ),
    "causal": lambda: transformers.Causal(7, dropout=0.0),
    "causal, norm first": lambda: transformers.Causal(7, dropout=0.0, norm_first=True),
}


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("layer", LAYERS)
@distributed(ranks=4, transports=["loopback"])
def test_encoders(P_world: Partition, layer: str, shape: Sequence[int]) -> None:
    assert_as_alone(LAYERS[layer], grid(P_world, shape), [(3, 7, 8)])


@distributed(ranks=4, transports=["loopback"])
def test_sequence_first_and_paper_placement(P_world: Partition) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2, enable_nested_tensor=False
        )

    assert_as_alone(make, grid(P_world, (4, 1, 1)), [(7, 3, 8)], replicate_parameters=False)
    assert_as_alone(make, grid(P_world, (2, 2, 1)), [(7, 3, 8)])


@pytest.mark.parametrize("option", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@distributed(ranks=4, transports=["loopback"])
def test_attention_to_another_tensor(P_world: Partition, option: dict[str, Any]) -> None:
    def make() -> nn.Module:
        return transformers.Attending(batch_first=True, **option)

    assert_as_alone(make, grid(P_world, (1, 3, 1)), [(2, 7, 8), (2, 5, 8)])


@distributed(ranks=4, transports=["loopback"])
def test_decoder(P_world: Partition) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        return nn.TransformerDecoder(layer, 2, nn.LayerNorm(8))

    assert_as_alone(make, grid(P_world, (2, 2, 1)), [(3, 7, 8), (3, 5, 8)])
    assert_as_alone(
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True),
        grid(P_world, (1, 3, 1)),
        [(2, 4, 8), (2, 9, 8)],
    )


@distributed(ranks=4, transports=["host", "gloo"])
def test_on_other_transports(P_world: Partition) -> None:
    assert_as_alone(LAYERS["causal"], grid(P_world, (1, 3, 1)), [(2, 7, 8)])
    assert_as_alone(transformers.Split, grid(P_world, (2, 2, 1)), [(3, 7, 8)])


@distributed(ranks=4, transports=["loopback"])
def test_padding_from_the_input(P_world: Partition) -> None:
    torch.manual_seed(2)
    alone = transformers.Masked().double()
    words = torch.tensor([[3, 1, 4, 1, 5, 9, 0], [2, 6, 0, 0, 0, 0, 0]])
    P_x = grid(P_world, (2, 2))
    net: Any = distribute(copy.deepcopy(alone), P_x)
    y_whole, y = alone(words), net(own_block(words, P_x, requires_grad=False))
    assert_whole(y, y_whole, "output")
    cotangent = random_like_all(y_whole.shape, 1)
    (y_whole * cotangent).sum().backward()
    loss_of(y, cotangent).backward()
    assert_gradients(net, alone, active=True)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.full((6, 6), -2.0), 1))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _attended(x: torch.Tensor, **options: Any) -> torch.Tensor:
    y = x.unsqueeze(1)
    return nn.functional.scaled_dot_product_attention(y, y, y, **options).squeeze(1)


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "weights of all heads": lambda m, x: m.attention(x, x, x, need_weights=True)[1],
    "any mask": lambda m, x: m.attention(x, x, x, attn_mask=m.mask)[0],
    "any mask of a function": lambda m, x: _attended(x, attn_mask=m.mask),
    "sizes in numbers": lambda m, x: x.view(2, 6, 2, 4).transpose(1, 2).sum(-1),
    "split dims joined": lambda m, x: x.reshape(2, -1).tanh(),
    "product": lambda m, x: x @ x.transpose(1, 2),
    "called twice": lambda m, x: m.attention(m.attention(x, x, x)[0], x, x)[0],
}


@pytest.mark.parametrize("case", FUNCTIONS)
@distributed(ranks=2, transports=["loopback"])
def test_functions_of_a_split_sequence(P_world: Partition, case: str) -> None:
    def make() -> nn.Module:
        return _Function(FUNCTIONS[case])

    assert_as_alone(make, grid(P_world, (1, 2, 1)), [(2, 6, 8)])
