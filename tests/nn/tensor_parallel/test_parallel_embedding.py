"""The vocabulary-parallel embedding is the sequential one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import ShapeError
from gpudist.nn import VocabParallelEmbedding
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, random_like_all
from tests.nn.tensor_parallel.parallel_cases import (
    CONVENTIONS,
    F64,
    assert_parameter_gradients,
    block_of,
    cotangent_of_copies,
    drawn_alike,
)
from tests.pool import distributed


def check(
    P: Partition,
    convention: Convention,
    lengths: Sequence[int] | None = None,
    rows: int = 11,
    **options: Any,
) -> None:
    split: dict[str, Any] = {} if lengths is None else {"sequence_dim": 1}
    sequential, layer = drawn_alike(
        lambda: torch.nn.Embedding(rows, 3, **options, dtype=F64),
        lambda: VocabParallelEmbedding(
            P, rows, 3, **options, **split, dtype=F64, convention=convention
        ),
    )
    assert P.rank is not None
    for batch in (2, 3):
        extent = sum(lengths) if lengths else 5
        generator = torch.Generator().manual_seed(batch)
        indices = torch.randint(rows, (batch, extent), generator=generator)
        y_whole = sequential(indices)
        y = layer(indices, lengths) if lengths else layer(indices)
        gradient = random_like_all(y_whole.shape, 1)
        layer.zero_grad()
        sequential.zero_grad()
        y_whole.backward(gradient)
        if lengths:
            expected = block_of(y_whole, 1, lengths, P.rank)
            y.backward(block_of(gradient, 1, lengths, P.rank))
        else:
            expected = y_whole
            y.backward(cotangent_of_copies(gradient, convention, P, 9))
        assert_equal_to(y.detach(), expected.detach(), 1e-12, "output")
        assert_parameter_gradients(sequential, layer)


@pytest.mark.parametrize("convention", CONVENTIONS)
@distributed(ranks=[1, 2, 3, 4], transports=["loopback"])
def test_uneven_vocabulary(P_world: Partition, convention: Convention) -> None:
    check(P_world, convention)
    check(P_world, convention, padding_idx=-2)
    check(P_world, convention, rows=P_world.size)


@distributed(ranks=3, transports=["host", "gloo"])
def test_on_other_transports(P_world: Partition) -> None:
    for convention in CONVENTIONS:
        check(P_world, convention)
        check(P_world, convention, [1, 4, 0])


@pytest.mark.parametrize("convention", CONVENTIONS)
@distributed(ranks=3, transports=["loopback"])
def test_split_sequence(P_world: Partition, convention: Convention) -> None:
    check(P_world, convention, [2, 2, 1])
    check(P_world, convention, [0, 5, 2])


@distributed(ranks=2, transports=["loopback"])
def test_an_index_that_is_none(P_world: Partition) -> None:
    layer = VocabParallelEmbedding(P_world, 4, 3)
    with pytest.raises(ShapeError, match="index 4 must be from 0 to 3"):
        layer(torch.tensor([0, 4]))


@distributed(ranks=3, transports=["loopback"])
def test_refusals(P_world: Partition) -> None:
    with pytest.raises(ShapeError, match="3 blocks but only 2 embeddings"):
        VocabParallelEmbedding(P_world, 2, 3)
    with pytest.raises(ShapeError, match="padding_idx 4 must be from"):
        VocabParallelEmbedding(P_world, 4, 3, padding_idx=4)
    P = P_world.create_partition_inclusive([1])
    layer = VocabParallelEmbedding(P, 4, 3)
    assert layer(torch.tensor([1])).dtype == (torch.float32 if P.active else torch.int64)
