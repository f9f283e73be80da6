"""Converted transformers are the networks alone, with a sequence that is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gpudist import distribute
from gpudist.errors import ConversionError, ShapeError
from gpudist.partition import Partition
from tests.convert import transformers
from tests.convert.training import assert_as_alone
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
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


@distributed(ranks=4, transports=["loopback"])
def test_attention_to_another_tensor(P_world: Partition) -> None:
    def make() -> nn.Module:
        return transformers.Attending(batch_first=True)

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
    net: Any = distribute(alone, P_x)
    y_whole, y = alone(words), net(own_block(words, P_x, requires_grad=False))
    where = own_slices(y_whole.shape, net.P_y)
    assert where is not None
    assert_block_of(y.detach(), y_whole.detach(), where, "output")
    cotangent = random_like_all(y_whole.shape, 1)
    y_whole.backward(cotangent)
    y.backward(cotangent[where])
    for own, whole in zip(net.parameters(), alone.parameters(), strict=True):
        assert_block_of(own.grad, whole.grad, (), "gradient")  # pyright: ignore


@pytest.mark.parametrize("block", ["layer", "functions"])
@distributed(ranks=4, transports=["loopback"])
def test_dropout_is_the_same_under_every_partition(P_world: Partition, block: str) -> None:
    def make() -> nn.Module:
        if block == "functions":
            return transformers.Split(dropout=0.3)
        return transformers.Causal(6, dropout=0.3)

    torch.manual_seed(4)
    network, x = make().double(), random_like_all((2, 6, 8), 1)
    outputs: list[torch.Tensor] = []
    net: Any = None
    P_one = grid(P_world, (1, 1, 1), [P_world.rank or 0])
    for P_x in (P_one, grid(P_world, (1, 4, 1))):
        net = distribute(network, P_x)
        torch.manual_seed(6)
        outputs.append(net(own_block(x, P_x)).detach())
    where = own_slices(x.shape, grid(P_world, (1, 4, 1)))
    assert where is not None
    assert_block_of(outputs[1], outputs[0], where, "output")
    alone: Any = network.eval()
    evaluated = alone(x)
    assert not torch.allclose(outputs[0], evaluated)
    net = net.eval()
    assert_block_of(net(own_block(x, net.P_x)).detach(), evaluated.detach(), where, "evaluated")


class _Calls(nn.Module):
    def __init__(self, call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.zeros(6, 6))
        self.__dict__["called"] = call

    def forward(self, x: torch.Tensor) -> Any:
        call: Any = self.called
        return call(self, x)


def _attend(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """One head of torch's function; keys are those of ``x`` unless they are given."""
    y = x.unsqueeze(1)
    tensors = {"query": y, "key": y, "value": y, **options}
    return nn.functional.scaled_dot_product_attention(**tensors)


def _twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y, _ = m.attention(x, x, x)
    z = y.transpose(1, 2).transpose(1, 2)
    return m.attention(z, z, z)[0]


REFUSALS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "weights": (lambda m, x: m.attention(x, x, x, need_weights=True)[0], "need_weights=False"),
    "mask": (lambda m, x: m.attention(x, x, x, attn_mask=m.mask)[0], "pass is_causal=True"),
    "length": (lambda m, x: x.view(2, 6, 2, 4), "one that keeps the dims which are split"),
    "joined": (lambda m, x: x.reshape(2, -1), "one that keeps the dims which are split"),
    "product": (lambda m, x: x @ x.transpose(1, 2), "matmul at .*: it is not known"),
    "dropped": (lambda m, x: _attend(x, dropout_p=0.1), "in training and evaluation"),
    "mask of a function": (lambda m, x: _attend(x, attn_mask=m.mask), "pass is_causal=True"),
    "keys elsewhere": (
        lambda m, x: m.attention(x, x.transpose(0, 1), x)[0],
        "attention: query, key and value are tensors on different partitions",
    ),
    "keys of a function elsewhere": (
        lambda m, x: _attend(x, key=x.unsqueeze(2)),
        "attention at .*: query, key and value are tensors on different partitions",
    ),
    "buffer": (
        lambda m, x: x + m.attention(m.mask, m.mask, m.mask)[0],
        "attention: the query is no tensor of the input",
    ),
    "padding in a buffer": (
        lambda m, x: m.attention(x, x, x, key_padding_mask=m.mask)[0],
        "attention: key_padding_mask is no tensor that follows from the input",
    ),
    "padding elsewhere": (
        lambda m, x: m.attention(x, x, x, key_padding_mask=x[..., 0].transpose(0, 1))[0],
        r"key_padding_mask is on a partition of shape \[2, 1\], .* as \[1, 2, 1\] cuts the keys",
    ),
    "twice": (_twice, "attention_1: called again with other tensors"),
}


@pytest.mark.parametrize("case", REFUSALS)
@distributed(ranks=2, transports=["loopback"])
def test_refusals(P_world: Partition, case: str) -> None:
    call, text = REFUSALS[case]
    with pytest.raises(ConversionError, match=text):
        distribute(_Calls(call), grid(P_world, (1, 2, 1)))


@pytest.mark.parametrize("option", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4}])
@distributed(ranks=2, transports=["loopback"])
def test_options_that_are_refused(P_world: Partition, option: dict[str, Any]) -> None:
    alone = transformers.Attending(batch_first=True, **option)
    with pytest.raises(ConversionError, match="attention: add_bias_kv, add_zero_attn, kdim and"):
        distribute(alone, grid(P_world, (1, 2, 1)))


@distributed(ranks=2, transports=["loopback"])
def test_dropout_that_is_off_is_refused(P_world: Partition) -> None:
    """Of a function, whose probability in training is not known from evaluation."""
    with pytest.raises(ConversionError, match="convert the network in training mode"):
        distribute(transformers.Split(dropout=0.1).eval(), grid(P_world, (1, 2, 1)))


@distributed(ranks=2, transports=["loopback"])
def test_a_reshape_that_joins_a_split_dim_is_refused_when_it_runs(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 2, 1))
    net = distribute(_Calls(lambda m, x: x.reshape(4, -1, 4)), P_x)
    with pytest.raises(ShapeError, match="does not keep dim"):
        net(torch.zeros(2, 3, 8))
