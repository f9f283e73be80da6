"""Column- and row-parallel linear layers against torch's, outputs and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.geometry.blocks import Blocks
from gpudist.nn import ColumnParallelLinear, RowParallelLinear, sequence_lengths
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import (
    F64,
    assert_parameter_gradients,
    block_of,
    cotangent_of_copies,
    drawn_alike,
    gradient_of_copies,
    leaf,
)


def check_column(
    P: Partition,
    convention: Convention,
    sizes: Sequence[int] | None = None,
    features: tuple[int, int] = (5, 7),
    **options: Any,
) -> None:
    sequential, layer = drawn_alike(
        lambda: torch.nn.Linear(*features, dtype=F64),
        lambda: ColumnParallelLinear(
            P, *features, dtype=F64, out_sizes=sizes, convention=convention, **options
        ),
    )
    gathers, rank = options.get("gather_output", False), P.rank
    assert rank is not None
    cut = sizes or Blocks(features[1], P.size).lengths
    for batch in (2, 3):
        whole, x = (leaf(random_like_all((batch, 4, features[0]), batch)) for _ in range(2))
        y_whole, y = sequential(whole), layer(x)
        gradient = random_like_all(y_whole.shape, 1)
        layer.zero_grad()
        sequential.zero_grad()
        y_whole.backward(gradient)
        if gathers:
            assert_equal_to(y.detach(), y_whole.detach(), 1e-10, "output")
            y.backward(cotangent_of_copies(gradient, convention, P, 9))
        else:
            assert_equal_to(y.detach(), block_of(y_whole, 2, cut, rank).detach(), 1e-10, "output")
            y.backward(block_of(gradient, 2, cut, rank))
        found = gradient_of_copies(x, convention, P)
        assert_equal_to(found, gradient_of(whole), 1e-10, "input gradient")
        assert_parameter_gradients(sequential, layer)


def check_row(
    P: Partition,
    convention: Convention,
    sizes: Sequence[int] | None = None,
    features: tuple[int, int] = (7, 5),
    parallel: bool = True,
) -> None:
    sequential, layer = drawn_alike(
        lambda: torch.nn.Linear(*features, dtype=F64),
        lambda: RowParallelLinear(
            P, *features, dtype=F64, in_sizes=sizes, convention=convention,
            input_is_parallel=parallel,
        ),
    )  # fmt: skip
    assert P.rank is not None
    cut = sizes or Blocks(features[0], P.size).lengths
    for batch in (2, 3):
        whole = leaf(random_like_all((batch, 4, features[0]), batch))
        x = leaf(block_of(whole, 2, cut, P.rank) if parallel else whole)
        y_whole, y = sequential(whole), layer(x)
        assert_equal_to(y.detach(), y_whole.detach(), 1e-10, "output")
        layer.zero_grad()
        sequential.zero_grad()
        gradient = random_like_all(y_whole.shape, 1)
        y_whole.backward(gradient)
        y.backward(cotangent_of_copies(gradient, convention, P, 9))
        expected = gradient_of(whole)
        if parallel:
            found, expected = gradient_of(x), block_of(expected, 2, cut, P.rank)
        else:
            found = gradient_of_copies(x, convention, P)
        assert_equal_to(found, expected, 1e-10, "input gradient")
        assert_parameter_gradients(sequential, layer)


class Two(torch.nn.Module):
    """Columns, a nonlinearity, rows."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, *lengths: Sequence[int]) -> torch.Tensor:
        return self.second(self.first(x, *lengths).tanh(), *lengths)


def check_sequence(
    P: Partition,
    dim: int,
    convention: Convention,
    steps: Sequence[Sequence[int]],
    **options: Any,
) -> None:
    sequential, layer = drawn_alike(
        lambda: Two(torch.nn.Linear(3, 7, dtype=F64), torch.nn.Linear(7, 2, dtype=F64)),
        lambda: Two(
            ColumnParallelLinear(
                P, 3, 7, dtype=F64, sequence_dim=dim, convention=convention, **options
            ),
            RowParallelLinear(P, 7, 2, dtype=F64, sequence_dim=dim, convention=convention),
        ),
    )
    assert P.rank is not None
    for lengths in steps:
        shape = [2, 4, 3]
        shape[dim] = sum(lengths)
        whole = leaf(random_like_all(shape, sum(lengths)))
        x = leaf(block_of(whole, dim, lengths, P.rank))
        known = () if options else (sequence_lengths(x, P, dim),)
        y_whole, y = sequential(whole), layer(x, *known)
        expected = block_of(y_whole, dim, lengths, P.rank)
        assert_equal_to(y.detach(), expected.detach(), 1e-10, "output")
        layer.zero_grad()
        sequential.zero_grad()
        gradient = random_like_all(y_whole.shape, 1)
        y_whole.backward(gradient)
        y.backward(block_of(gradient, dim, lengths, P.rank))
        expected = block_of(gradient_of(whole), dim, lengths, P.rank)
        assert_equal_to(gradient_of(x), expected, 1e-10, "input gradient")
        assert_parameter_gradients(sequential, layer)
