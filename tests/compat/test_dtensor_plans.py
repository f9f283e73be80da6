"""Plans for DTensor, carried out by tensor-parallel layers, against the sequential network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from gpudist import nn
from gpudist.compat.dtensor import parallelize_module
from gpudist.errors import ConversionError
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
from tests.pool import distributed

LOCAL = ("loopback", "host")
TOKENS, FEATURES = 11, 6


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.up = torch.nn.Linear(FEATURES, 10)
        self.down = torch.nn.Linear(10, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = torch.nn.Embedding(TOKENS, FEATURES)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.head = torch.nn.Linear(FEATURES, TOKENS, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TENSOR = {
    "words": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@pytest.mark.parametrize("split", ["features", "sequence"])
@distributed(ranks=3, transports=LOCAL)
def test_plan_of_a_network(P_world: Partition, split: str) -> None:
    network, sequential = Network(), Network()
    plan = TENSOR if split == "features" else SEQUENCE
    assert parallelize_module(network, P_world, plan) is network
    first: Any = network.blocks[0]
    assert isinstance(network.words, nn.VocabParallelEmbedding)
    assert isinstance(first.up, nn.ColumnParallelLinear)
    assert isinstance(first.down, nn.RowParallelLinear)
    assert type(first.norm) is torch.nn.LayerNorm
    x, y = torch.randint(TOKENS, (2, 4, 7)).unbind()
    losses = []
    for made in (network, sequential):
        loss = torch.nn.functional.cross_entropy(made(x).flatten(0, 1), y.flatten())
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    placed, whole = placements(network), dict(sequential.named_parameters())
    for name, parameter in network.named_parameters():
        expected = whole[name].grad
        assert expected is not None and parameter.grad is not None
        box = placed[name].own_box if name in placed else None
        cells = box.slices if box is not None else ()
        torch.testing.assert_close(parameter.grad, expected[cells], rtol=1e-10, atol=1e-12)


@distributed(ranks=2, transports=("loopback",))
def test_plan_of_one_layer(P_world: Partition) -> None:
    linear = torch.nn.Linear(4, 6)
    linear.bias.requires_grad_(False)
    made: Any = parallelize_module(linear, P_world, RowwiseParallel(input_layouts=Replicate()))
    assert isinstance(made, nn.RowParallelLinear) and not made.input_is_parallel
    assert made.weight.requires_grad and made.bias is not None and not made.bias.requires_grad
    x = torch.randn(3, 4)
    torch.testing.assert_close(made(x), linear(x))


WHOLE = RowwiseParallel(input_layouts=Replicate())
PREPARED = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))


@pytest.mark.parametrize(
    "layer, style, text",
    [
        (torch.nn.Conv1d(1, 1, 1), ColwiseParallel(), "of a Conv1d has no counterpart"),
        (torch.nn.Embedding(4, 2), ColwiseParallel(), "of a Embedding has no counterpart"),
        (torch.nn.Embedding(4, 2, max_norm=1.0), WHOLE, "no counterpart"),
        (torch.nn.Linear(2, 2), PREPARED, "no counterpart"),
        (torch.nn.Linear(2, 2), ColwiseParallel(input_layouts=Shard(-1)), "no counterpart"),
        (torch.nn.Linear(2, 2), ColwiseParallel(output_layouts=Shard(0)), "no counterpart"),
        (torch.nn.Linear(2, 2), RowwiseParallel(input_layouts=Shard(0)), "no counterpart"),
        (torch.nn.Linear(2, 2), RowwiseParallel(output_layouts=Partial()), "no counterpart"),
        (torch.nn.Linear(2, 2), ColwiseParallel(use_local_output=False), "asks for a DTensor"),
    ],
)  # fmt: skip
@distributed(ranks=2, transports=("loopback",))
def test_styles_without_a_counterpart(
    P_world: Partition, layer: Any, style: Any, text: str
) -> None:
    network = torch.nn.Sequential(layer)
    with pytest.raises(ConversionError, match=f"parallelize_module, 0: .*{text}"):
        parallelize_module(network, P_world, {"0": style})
    assert network[0] is layer
    with pytest.raises(ConversionError, match="the plan names 'w1', but Sequential has no"):
        parallelize_module(network, P_world, {"w1": style})
