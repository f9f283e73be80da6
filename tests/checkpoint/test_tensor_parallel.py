"""Tensor-parallel layers round-trip through the sequential state dict and through checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpudist import checkpoint
from gpudist.nn import ParallelAttention, VocabParallelEmbedding
from gpudist.world.partition import Partition
from tests.nn.compare import SEED
from tests.nn.tensor_parallel.parallel_attention_cases import EMBED, HEAD, Attention
from tests.nn.tensor_parallel.parallel_cases import F64, drawn_alike
from tests.pool import distributed


class Both(torch.nn.Module):
    def __init__(self, embedding: torch.nn.Module, attention: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.attention = embedding, attention


def sequential_network() -> Both:
    return Both(torch.nn.Embedding(7, EMBED, dtype=F64), Attention(4, 2))


def network(P: Partition) -> Both:
    """Uneven heads and rows; key heads on several workers; dropout, which has state of its own."""
    embedding = VocabParallelEmbedding(P, 7, EMBED, dtype=F64)
    attention = ParallelAttention(P, EMBED, 4, 2, head_dim=HEAD, dtype=F64, dropout=0.5, seed=1)
    return Both(embedding, attention)


def drawn(P: Partition) -> tuple[torch.nn.Module, torch.nn.Module]:
    return drawn_alike(sequential_network, lambda: network(P))


@distributed(ranks=[3, 4], transports=["loopback"])
def test_the_sequential_state_dict_and_back(P_world: Partition) -> None:
    sequential, layers = drawn(P_world)
    found, expected = checkpoint.full_state_dict(layers, to_all=True), sequential.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(3)
    other = network(P_world)
    checkpoint.load_full_state_dict(other, expected)
    for a, b in zip(other.parameters(), layers.parameters(), strict=True):
        assert torch.equal(a, b)


@distributed(ranks=4, transports=["loopback"])
def test_a_checkpoint_on_another_number_of_workers(P_world: Partition, tmp_path: Path) -> None:
    _, layers = drawn(P_world)
    checkpoint.save(layers, tmp_path / "saved")
    P = P_world.create_partition_inclusive(range(3))
    torch.manual_seed(SEED)
    expected = network(P)
    torch.manual_seed(3)
    other = network(P)
    checkpoint.load(other, tmp_path / "saved")
    for a, b in zip(other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("axis", [0, 1])
@distributed(ranks=4, transports=["loopback"])
def test_copies_for_other_samples(P_world: Partition, axis: int) -> None:
    P = P_world.create_cartesian_topology_partition([2, 2])
    torch.manual_seed(0)
    layer = VocabParallelEmbedding(P, 7, EMBED, axis=axis)
    torch.manual_seed(0)
    expected = torch.nn.Embedding(7, EMBED).weight
    found = checkpoint.full_state_dict(layer, to_all=True)
    assert torch.equal(found["weight"], expected)
