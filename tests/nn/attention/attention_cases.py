"""Attention over a split sequence, beside torch's over the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpudist.world.partition import CartesianPartition
from tests.nn.compare import (
    Cut,
    assert_block_of,
    gradient_of,
    own_block,
    own_slices,
    random_like_all,
)


class Case(NamedTuple):
    """Sizes of one attention.

    Attributes:
        grid: of the partition.
        query: its global shape.
        key_heads, keys, features: of keys and values, ``features`` of the latter alone.
        query_sizes, key_sizes: of the blocks along the sequence, where not balanced.
        lengths: how many keys of each sequence are no padding.
    """

    grid: tuple[int, int, int, int]
    query: tuple[int, int, int, int]
    key_heads: int
    keys: int
    features: int
    query_sizes: list[int] | None = None
    key_sizes: list[int] | None = None
    lengths: list[int] | None = None

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self.query[0], self.key_heads, self.keys, self.query[3]


CASES: dict[str, Case] = {
    "one worker": Case((1, 1, 1, 1), (2, 4, 5, 3), 2, 5, 2),
    "one worker, padding": Case((1, 1, 1, 1), (2, 4, 5, 3), 2, 5, 3, lengths=[5, 2]),
    "two workers": Case((1, 1, 2, 1), (2, 2, 6, 4), 2, 6, 4),
    "uneven": Case((1, 1, 3, 1), (1, 3, 8, 4), 3, 8, 4),
    "shared heads": Case((1, 1, 4, 1), (2, 4, 9, 3), 2, 9, 5),
    "three heads of two": Case((1, 1, 2, 1), (1, 6, 5, 3), 2, 5, 3),
    "fewer heads than workers": Case((1, 1, 4, 1), (2, 2, 7, 3), 1, 7, 3),
    "empty blocks": Case((1, 1, 4, 1), (2, 2, 5, 3), 2, 5, 3, [0, 4, 0, 1], [3, 0, 2, 0]),
    "fewer cells than workers": Case((1, 1, 4, 1), (2, 2, 2, 3), 2, 3, 3),
    "other keys than queries": Case((1, 1, 3, 1), (2, 2, 7, 3), 2, 10, 3, [1, 4, 2], [6, 3, 1]),
    "batch too": Case((2, 1, 2, 1), (3, 2, 5, 3), 2, 5, 3, lengths=[5, 0, 3]),
    "heads too": Case((1, 2, 2, 1), (2, 3, 5, 3), 3, 5, 3),
    "padding": Case((1, 1, 3, 1), (3, 2, 7, 3), 2, 7, 3, lengths=[7, 1, 4]),
}


def tensors_of(case: Case) -> list[torch.Tensor]:
    """Queries, keys and values, the same on every rank."""
    values = (*case.key_shape[:3], case.features)
    shapes = (case.query, case.key_shape, values)
    return [random_like_all(shape, seed).requires_grad_() for seed, shape in enumerate(shapes)]


def expected(case: Case, wholes: list[torch.Tensor], is_causal: bool) -> torch.Tensor:
    """Torch's attention, by a composition of differentiable operators."""
    query, key, value = wholes
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if case.lengths is not None:
        unpadded = torch.arange(case.keys) < torch.tensor(case.lengths)[:, None]
        seen = seen & unpadded[:, None, None]
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            query, key, value, seen, enable_gqa=query.shape[1] != key.shape[1]
        )


def cuts_of(case: Case) -> list[Cut | None]:
    """Return the cuts of queries, keys and values."""
    query = {2: case.query_sizes} if case.query_sizes else None
    key = {2: case.key_sizes} if case.key_sizes else None
    return [query, key, key]


def own_lengths(case: Case, P_x: CartesianPartition) -> torch.Tensor | None:
    """Return the lengths of the sequences in this rank's blocks."""
    where = own_slices(case.query, P_x)
    if case.lengths is None or where is None:
        return None
    return torch.tensor(case.lengths)[where[0]]


def assert_as_torch(
    case: Case, P_x: CartesianPartition, attend: Callable[..., torch.Tensor], is_causal: bool
) -> None:
    """``attend`` gives torch's output and gradients, and so does its backward's backward.

    Args:
        case: the sizes.
        P_x: on the case's grid.
        attend: from this rank's blocks and ``key_lengths``.
        is_causal: of torch's attention.
    """
    if not P_x.active:
        return
    wholes, cuts = tensors_of(case), cuts_of(case)
    blocks = [own_block(whole, P_x, cut) for whole, cut in zip(wholes, cuts, strict=True)]
    y_whole = expected(case, wholes, is_causal)
    y = attend(*blocks, key_lengths=own_lengths(case, P_x))
    where = own_slices(y_whole.shape, P_x, cuts[0])
    assert_block_of(y.detach(), y_whole.detach(), where, "output")
    cotangent = random_like_all(y_whole.shape, 9)
    y_whole.backward(cotangent)
    assert where is not None
    y.backward(cotangent[where])
    for name, whole, block, cut in zip("qkv", wholes, blocks, cuts, strict=True):
        where = own_slices(whole.shape, P_x, cut)
        assert_block_of(block.grad, gradient_of(whole), where, f"gradient of {name}")


def assert_double_backward(
    case: Case, P_x: CartesianPartition, attend: Callable[..., Any], is_causal: bool
) -> None:
    """Gradients of a function of the gradients are torch's."""
    if not P_x.active:
        return
    wholes, cuts = tensors_of(case), cuts_of(case)
    blocks = [own_block(whole, P_x, cut) for whole, cut in zip(wholes, cuts, strict=True)]
    cotangent = random_like_all((*case.query[:3], case.features), 9).requires_grad_()
    seeds = [random_like_all(whole.shape, 20 + i) for i, whole in enumerate(wholes)]
    with sdpa_kernel(SDPBackend.MATH):
        own = own_block(cotangent, P_x, cuts[0])
        y = attend(*blocks, key_lengths=own_lengths(case, P_x))
        first = torch.autograd.grad(y, blocks, own, create_graph=True)
        parts = [
            (g * own_block(seed, P_x, cut, False)).sum()
            for g, seed, cut in zip(first, seeds, cuts, strict=True)
        ]
        found = torch.autograd.grad(sum(parts), [*blocks, own])  # pyright: ignore
    y_whole = expected(case, wholes, is_causal)
    first = torch.autograd.grad(y_whole, wholes, cotangent, create_graph=True)
    total = sum((g * seed).sum() for g, seed in zip(first, seeds, strict=True))
    second = torch.autograd.grad(total, [*wholes, cotangent])  # pyright: ignore
    for i, (whole, block, cut) in enumerate(zip(second, found, [*cuts, cuts[0]], strict=True)):
        assert_block_of(block, whole, own_slices(whole.shape, P_x, cut), f"second gradient {i}")
