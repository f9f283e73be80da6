"""The scan of a split sequence equals the one step by step, and moves states only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

import gpudist
from gpudist.errors import GpudistError, PartitionError, ShapeError
from gpudist.exchange import all_reduce
from gpudist.testing import assert_adjoint
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_block_of, assert_equal_to, grid, own_block, own_slices
from tests.nn.scan.scan_cases import FORMS, Form, ids_of, step_by_step
from tests.pool import distributed

# Sizes of the blocks along the sequence, by the number of workers.
SIZES = {1: [11], 2: [11, 0], 3: [0, 6, 5], 4: [4, 0, 1, 6], 5: [2, 1, 0, 0, 8]}


def random_of(shape: Sequence[int], form: Form, seed: int) -> torch.Tensor:
    """Return the same random tensor on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=form.dtype, generator=generator).requires_grad_()


def line_of(P_world: Partition, form: Form) -> CartesianPartition:
    shape = [1] * len(form.b)
    shape[form.dim] = P_world.size
    return grid(P_world, shape)


def block_of(x: torch.Tensor, P_x: CartesianPartition, dim: int) -> torch.Tensor:
    """Return this rank's block as a leaf; a tensor of extent 1 is whole on every rank."""
    if x.shape[dim] == 1:
        return x.detach().clone().requires_grad_()
    return own_block(x, P_x, {dim % x.dim(): SIZES[P_x.size]})


def derivatives(
    y: torch.Tensor, inputs: Sequence[torch.Tensor], g: torch.Tensor, seeds: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradients for ``g``, and those of their inner product with ``seeds``."""
    first = torch.autograd.grad(y, inputs, g, create_graph=True)
    dots = [(x * seed).sum().real for x, seed in zip(first, seeds, strict=True)]
    total = torch.stack(dots).sum()
    second = torch.autograd.grad(total, [*inputs, g], materialize_grads=True)
    return [x.detach() for x in (*first, *second)]


@distributed(ranks=[5, 1, 3, 2, 4])
def test_values_and_two_derivatives(P_world: Partition) -> None:
    for form, reverse, packed in product(FORMS.values(), (False, True), (False, True)):
        assert_as_step_by_step(P_world, form, reverse, packed)


def assert_as_step_by_step(P_world: Partition, form: Form, reverse: bool, packed: bool) -> None:
    P_x, dim = line_of(P_world, form), form.dim
    a, b, g = [random_of(s, form, i) for i, s in enumerate((form.a, form.b, form.b))]
    seeds = [random_of(s, form, 8 + i) for i, s in enumerate((form.a, form.b))]
    where = own_slices(form.b, P_x, {dim % len(form.b): SIZES[P_x.size]})
    assert where is not None
    ids = ids_of() if packed else None
    own_ids = None if ids is None else ids[:, where[dim]]
    blocks = [block_of(x, P_x, dim) for x in (a, b)]
    y = gpudist.affine_scan(
        blocks[0], blocks[1], P_x, dim, matrix=form.matrix, reverse=reverse, seq_idx=own_ids
    )
    expected = step_by_step(a, b, form, reverse, ids)
    assert_block_of(y.detach(), expected.detach(), where, "states")
    own_seeds = [block_of(x, P_x, dim) for x in seeds]
    found = derivatives(y, blocks, block_of(g, P_x, dim), own_seeds)
    for i, whole in enumerate(derivatives(expected, (a, b), g, seeds)):
        if whole.shape[dim] == 1:
            # Each rank has a copy, and its own part of the gradient.
            assert_equal_to(all_reduce(found[i], P_world), whole, 1e-9, f"derivative {i}")
        else:
            cells = own_slices(whole.shape, P_x, {dim % len(form.b): SIZES[P_x.size]})
            assert_block_of(found[i], whole, cells, f"derivative {i}", 1e-9)


@pytest.mark.parametrize("name", ["scalar", "matrix"])
@distributed(ranks=[2, 5])
def test_the_adjoint_is_the_scan_in_reverse(P_world: Partition, name: str) -> None:
    form = FORMS[name]
    P_x = line_of(P_world, form)
    a, b, g = [random_of(s, form, i) for i, s in enumerate((form.a, form.b, form.b))]
    own_a, own_b, own_g = [block_of(x, P_x, form.dim).detach() for x in (a, b, g)]

    def scan(b: torch.Tensor) -> torch.Tensor:
        return gpudist.affine_scan(own_a, b, P_x, matrix=form.matrix)

    assert_adjoint(scan, own_b, P_x)
    own_b.requires_grad_()
    (found,) = torch.autograd.grad(scan(own_b), own_b, own_g)
    # Each factor is used one step earlier; the one that enters the last step counts nothing.
    later = (a.mH if form.matrix else a).roll(-1, form.dim)
    reversed_scan = gpudist.affine_scan(
        block_of(later, P_x, form.dim), own_g, P_x, matrix=form.matrix, reverse=True
    )
    torch.testing.assert_close(found, reversed_scan.detach())


@distributed(ranks=4)
def test_batch_and_heads_may_be_split_too(P_world: Partition) -> None:
    form = Form((2, 11, 3, 1), (2, 11, 3, 2))
    a, b = random_of(form.a, form, 0), random_of(form.b, form, 1)
    ids = ids_of()
    for shape in ([2, 2, 1, 1], [1, 2, 2, 1]):
        P_x = grid(P_world, shape)
        where = own_slices(form.b, P_x)
        assert where is not None
        y = gpudist.affine_scan(own_block(a, P_x), own_block(b, P_x), P_x, seq_idx=ids[where[:2]])
        expected = step_by_step(a, b, form, False, ids)
        assert_block_of(y.detach(), expected.detach(), where, "states")


@distributed(ranks=4)
def test_a_kernel_starts_from_the_carried_state(P_world: Partition) -> None:
    """A fused kernel scans from a given state, and returns the last one."""
    form = FORMS["scalar"]
    P_x = line_of(P_world, form)
    a, b = random_of(form.a, form, 0).detach(), random_of(form.b, form, 1).detach()
    where = own_slices(form.b, P_x)
    assert where is not None
    own_a, own_b, own_ids = a[where[:2]], b[where], ids_of()[where[:2]]
    end = step_by_step(own_a, own_b, form, False, own_ids)[:, -1:]
    state = gpudist.carried_state(own_a.prod(1, keepdim=True), end, P_x, seq_idx=own_ids)
    expected = step_by_step(a, b, form, False, ids_of())
    first = where[1].start
    for i, numbers in enumerate(ids_of()):
        goes_on = first > 0 and numbers[first - 1] == numbers[first]
        entering = expected[i, first - 1] if goes_on else torch.zeros_like(expected[i, 0])
        assert_equal_to(state[i, 0], entering, 1e-12, "entering state")


@distributed(ranks=3)
def test_low_precision_is_scanned_in_single(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 3, 1])
    b = torch.full((1, 300, 1), 1.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = gpudist.affine_scan(torch.ones_like(b), b, P_x)
    assert y.dtype == torch.bfloat16
    # Above 256, adding 1 in bfloat16 changes nothing.
    steps = torch.arange(1, 301).float() + 300 * (P_world.rank or 0)
    assert torch.equal(y.flatten(), steps.bfloat16())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@distributed(ranks=2, transports=["host"])
def test_compiled_and_with_tangents(P_world: Partition) -> None:
    form = FORMS["scalar"]
    P_x = line_of(P_world, form)
    blocks = [block_of(random_of(s, form, i), P_x, form.dim) for i, s in enumerate(form[:2])]
    ids = ids_of()[:, own_slices(form.b, P_x, {1: SIZES[2]})[1]]  # pyright: ignore

    def scan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return gpudist.affine_scan(a, b, P_x, seq_idx=ids)

    states = scan(*blocks)
    expected = torch.autograd.grad(states.sum(), blocks)
    compiled: Any = torch.compile(scan, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*blocks).sum(), blocks), expected)
    # Linear in the terms: along them, the derivative is the value.
    tangent = torch.func.jvp(lambda b: scan(blocks[0], b), (blocks[1],), (blocks[1],))[1]
    torch.testing.assert_close(tangent, states)


def sent_bytes(P_world: Partition) -> int:
    return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))


@pytest.mark.parametrize("length", [3, 50])
@distributed(ranks=4, transports=["host", "loopback"])
def test_bytes_do_not_grow_with_the_length(P_world: Partition, length: int) -> None:
    """A worker sends factor, state and document numbers to all workers after it, and back."""
    rank = P_world.rank or 0
    P_x = grid(P_world, [1, 4, 1, 1, 1])
    a = torch.rand(2, length + rank, 3, 1, 1, requires_grad=True)
    b = torch.rand(2, length + rank, 3, 4, 5, requires_grad=True)
    ids = torch.zeros(2, length + rank, dtype=torch.int32)
    before = between = after = 0
    for _ in range(2):  # the first call also agrees on the shapes
        before = sent_bytes(P_world)
        y = gpudist.affine_scan(a, b, P_x, seq_idx=ids)
        between = sent_bytes(P_world)
        torch.autograd.grad(y.sum(), (a, b))
        after = sent_bytes(P_world)
    states = 4 * 2 * 3 * (1 + 4 * 5)
    assert between - before == (3 - rank) * (states + 24 * 2)
    assert after - between == rank * states


@distributed(ranks=3)
def test_workers_outside_and_refusals(P_world: Partition) -> None:
    x = torch.rand(2, 4, 3)
    P_x = grid(P_world, [1, 2, 1])
    if not P_x.active:
        assert torch.equal(gpudist.affine_scan(x, x, P_x), x)
        assert torch.equal(gpudist.carried_state(x, x, P_x), x)
        return
    with pytest.raises(ShapeError, match="dim is 3; it must be one of the 3 dims of the terms"):
        gpudist.affine_scan(x, x, P_x, 3)
    with pytest.raises(ShapeError, match="one of the 1 dims in front of the matrices"):
        gpudist.affine_scan(x, x, P_x, 1, matrix=True)
    with pytest.raises(PartitionError, match="axis 1 must be 1: a matrix multiplies all rows"):
        gpudist.affine_scan(x, x, P_x, 0, matrix=True)


FACTORS, TERMS = torch.rand(2, 4, 1), torch.rand(2, 4, 3)
WRONG: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {
    "dim 2 must have extent 1 in a": (torch.rand(2, 4, 2), TERMS, None),
    "P_x has 3 axes": (FACTORS[0], TERMS[0], None),
    "pass floating-point": (FACTORS, TERMS.long(), None),
    "seq_idx must have 4 cells": (FACTORS, TERMS, torch.zeros(2, 3, dtype=torch.int64)),
    "must be an integer tensor": (FACTORS, TERMS, torch.zeros(2, 4)),
}


@pytest.mark.parametrize("text", WRONG)
@distributed(ranks=2, transports=["loopback"])
def test_one_rank_refuses_for_all(P_world: Partition, text: str) -> None:
    a, b, ids = WRONG[text] if P_world.rank else (FACTORS, TERMS, None)
    with pytest.raises(GpudistError, match=text):
        gpudist.affine_scan(a, b, grid(P_world, [1, 2, 1]), seq_idx=ids)
