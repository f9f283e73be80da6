"""Affine recurrence over the first dim of a tensor on one worker."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

# Sequences of at most this length are scanned step by step, longer ones in chunks.
_STEPS = 32


class Product(NamedTuple):
    """Bilinear product of a factor ``a`` and a state ``h``, with its two adjoints.

    Attributes:
        of: the product.
        adjoint: from ``a``, the factor whose product is the adjoint in ``h``.
        gradient: from a gradient and ``h``, the gradient of ``a``, not summed over broadcast dims.
        one: from a shape, dtype and device, the factor that keeps every state.
    """

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    adjoint: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    one: Callable[[torch.Tensor], torch.Tensor]


CELLS = Product(
    torch.mul, torch.conj, lambda g, h: g * h.conj(), lambda a: torch.ones_like(a).detach()
)
MATRICES = Product(
    torch.matmul,
    lambda a: a.mH,
    lambda g, h: g @ h.mH,
    lambda a: torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a),
)


def block_scan(
    a: torch.Tensor, b: torch.Tensor, before: torch.Tensor, product: Product
) -> torch.Tensor:
    """Return all states ``h[t] = a[t] h[t - 1] + b[t]``, where ``h[-1]`` is ``before``.

    Args:
        a: factors, one per step along dim 0; other dims of extent 1 may be broadcast.
        b: terms, of the same number of dims.
        before: state before the first step, of the shape of ``b[0]``.
        product: product of a factor and a state.

    Adjoint:
        In ``b`` and ``before``, the scan in reverse with the adjoint factors. Gradients of any
        order, and tangents, are scans.

    Cost:
        Two products per step, in about ``2 sqrt(T)`` operations for ``T`` steps.
    """
    node = _BlockScan if is_dynamo_compiling() else _BlockScanWithTangents
    return node.apply(a, b, before, product)  # pyright: ignore


class _BlockScan(torch.autograd.Function):
    @staticmethod
    def forward(
        a: torch.Tensor, b: torch.Tensor, before: torch.Tensor, product: Product
    ) -> torch.Tensor:
        return _states(a, b, before, product.of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, _, before, ctx.product = inputs
        ctx.save_for_backward(a, before, output)
        ctx.save_for_forward(a, before, output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, before, states = ctx.saved_tensors
        (g,), product = gradients, ctx.product
        adjoint = product.adjoint(a)
        later = torch.cat([adjoint[1:], torch.zeros_like(adjoint[:1])]).flip(0)
        of_b = block_scan(later, g.flip(0), torch.zeros_like(before), product).flip(0)
        of_a = of_before = None
        if ctx.needs_input_grad[0]:
            of_a = product.gradient(of_b, _earlier(before, states)).sum_to_size(a.shape)
        if ctx.needs_input_grad[2]:
            of_before = product.of(adjoint[:1], of_b[:1]).sum(0)
        return of_a, of_b, of_before, None


class _BlockScanWithTangents(_BlockScan):
    # Dynamo records no function that has a jvp.

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        (a, before, states), product = ctx.saved_tensors, ctx.product
        of_a, of_b, of_before, _ = tangents
        terms = torch.zeros_like(states) if of_b is None else of_b
        if of_a is not None:
            terms = terms + product.of(of_a, _earlier(before, states))
        of_before = torch.zeros_like(before) if of_before is None else of_before
        return block_scan(a, terms, of_before, product)


def _earlier(before: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return torch.cat([before.unsqueeze(0), states])[:-1]


def _states(
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    steps = b.shape[0]
    if steps <= _STEPS:
        states_in_chunks = torch.empty_like(b, memory_format=torch.contiguous_format)
        for t in range(steps):
            state = torch.add(of(a[t], state), b[t], out=states_in_chunks[t])
        return states_in_chunks
    length = isqrt(steps)
    count = steps // length
    whole = count * length
    # Scan all chunks at once from a zero state, then their ends, then add what enters each chunk.
    chunks = b[:whole].unflatten(0, (count, length)).transpose(0, 1)
    factors = a[:whole].unflatten(0, (count, length)).transpose(0, 1)
    states_in_chunks, products = [chunks[0]], [factors[0]]
    for t in range(1, length):
        states_in_chunks.append(of(factors[t], states_in_chunks[-1]) + chunks[t])
        products.append(of(factors[t], products[-1]))
    ends = _states(products[-1], states_in_chunks[-1], state, of)
    entering = torch.cat([state.unsqueeze(0), ends[:-1]])
    states = torch.empty_like(b, memory_format=torch.contiguous_format)
    corrected = states[:whole].unflatten(0, (count, length)).transpose(0, 1)
    for t in range(length):
        torch.add(of(products[t], entering), states_in_chunks[t], out=corrected[t])
    states[whole:] = _states(a[whole:], b[whole:], ends[-1], of)
    return states
