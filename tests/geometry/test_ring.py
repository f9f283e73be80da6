"""Hops round a ring pass every block to every worker once, and back to its owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.boxes import Plan
from gpudist.geometry.ring import held_block, plan_ring_hop
from tests.geometry.oracle import assert_linear_operator, carry_out, exactly, numbered

sizes_of_blocks = st.lists(st.integers(0, 3), min_size=2, max_size=5)


def hops(sizes: list[int], step: int) -> list[Plan]:
    blocks = Blocks.of_sizes(sizes)
    return [
        plan_ring_hop(blocks, 1, (2, blocks.length(rank), 2), rank, step, ())
        for rank in range(len(sizes))
    ]


@exactly
@given(sizes_of_blocks)
def test_every_worker_holds_every_block_once(sizes: list[int]):
    parts, array = len(sizes), numbered((2, sum(sizes), 2))
    own = np.split(array, np.cumsum(sizes)[:-1], axis=1)
    held = list(own)
    for step in range(parts):
        for rank, block in enumerate(held):
            np.testing.assert_array_equal(block, own[held_block(rank, step, parts)])
        plans = hops(sizes, step)
        # The oracle carries dims along that a plan does not have.
        assert [plan.input_shape for plan in plans] == [block.shape for block in held]
        held = carry_out(plans, held)
        assert [plan.output_shape for plan in plans] == [block.shape for block in held]
    for block, first in zip(held, own, strict=True):
        np.testing.assert_array_equal(block, first)
    assert {held_block(0, step, parts) for step in range(parts)} == set(range(parts))


@exactly
@given(sizes_of_blocks, st.integers(0, 4))
def test_the_adjoint_of_a_hop_is_the_hop_back(sizes: list[int], step: int):
    plans = hops(sizes, step)
    assert_linear_operator(plans)
    blocks = [numbered(plan.input_shape or ()) + 100 * rank for rank, plan in enumerate(plans)]
    back = carry_out([plan.T for plan in plans], carry_out(plans, blocks))
    for block, first in zip(back, blocks, strict=True):
        np.testing.assert_array_equal(block, first)


def test_hops_of_different_tensors_have_different_identities():
    blocks = Blocks.of_sizes([2, 1])
    shapes = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 3, 5), (3, 2, 3, 4)]
    identities = {plan_ring_hop(blocks, 1, shape, 0, 0, ()).identity for shape in shapes}
    assert len(identities) == len(shapes)
    other = plan_ring_hop(blocks, 1, shapes[0], 0, 1, ()).identity
    assert (
        other not in identities
        and plan_ring_hop(blocks, 1, (2, 1, 3, 4), 1, 0, ()).identity in identities
    )
