from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpudist.geometry import (
    Box,
    Collective,
    Decomposition,
    Halo,
    HaloWidths,
    Message,
    Move,
    Plan,
    Stage,
    plan_all_gather,
    plan_all_sum_reduce,
    plan_halo,
)
from gpudist.geometry.boxes import (
    boxes_outside,
    contiguous_strides,
    intersection,
    messages_by_peer,
)
from tests.geometry.oracle import carry_out


def test_a_box_knows_its_shape_volume_and_slices():
    box = Box((1, 2), (4, 4))
    assert (box.shape, box.volume) == ((3, 2), 6)
    assert np.arange(20).reshape(4, 5)[box.slices].tolist() == [[7, 8], [12, 13], [17, 18]]
    assert box.relative_to((1, -1)) == Box((0, 3), (3, 5))
    assert Box.whole((3, 2)) == Box((0, 0), (3, 2))


def test_empty_boxes_have_no_volume_and_scalars_have_one_cell():
    assert Box((2, 0), (2, 5)).volume == 0
    assert Box((3,), (1,)).volume == 0
    assert Box.whole(()).volume == 1


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 1, 3, 2)], ids=str)
def test_contiguous_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == np.empty(shape, np.int8).strides


def test_what_boxes_have_in_common_and_leave():
    left, right = Box((0, 0), (2, 3)), Box((2, 0), (4, 3))
    assert intersection(left, right) is None
    assert intersection(left, Box((1, 1), (3, 9))) == Box((1, 1), (2, 3))
    assert boxes_outside((4, 3), [left]) == (right,)
    assert boxes_outside((4, 3), [left, right]) == ()
    assert boxes_outside((4, 0), []) == ()


def test_an_adjoint_plan_is_told_by_what_it_does():
    plan = Plan(("a test",), 0, (Stage((2,), (5,)),))
    assert plan.T.T is plan
    assert Plan(("a test",), 0, (Stage((5,), (2,)),), True) == plan.T
    assert "_original" not in repr(plan.T)


def test_transposes_swap_ends_and_verbs():
    here, there = Box((0,), (2,)), Box((3,), (5,))
    assert Move(there, here) == Move(here, there).T
    broadcast = Collective("broadcast", (0, 2, 3), 2, False)
    assert Collective("reduce", (0, 2, 3), 2, False) == broadcast.T
    assert broadcast == broadcast.T.T
    stage = Stage(
        (2,),
        (5,),
        (Move(here, there),),
        (Message(1, (here,)),),
        (Message(2, (there,)),),
        (broadcast,),
        sources_overlap=True,
    )
    assert (
        Stage(
            (5,),
            (2,),
            (Move(there, here),),
            (Message(2, (there,)),),
            (Message(1, (here,)),),
            (broadcast.T,),
            destinations_overlap=True,
        )
        == stage.T
    )
    assert stage == stage.T.T


def test_a_transposed_plan_runs_its_stages_backwards():
    plan = Plan(("two",), 0, (Stage((1,), (2,)), Stage((2,), (3,))))
    assert (plan.input_shape, plan.output_shape) == ((1,), (3,))
    assert (plan.T.input_shape, plan.T.output_shape) == ((3,), (1,))
    assert [stage.input_shape for stage in plan.T.stages] == [(3,), (2,)]
    assert plan.T.transposed and not plan.transposed
    assert plan.T is plan.T
    assert plan.T.T is plan


def test_output_is_covered_only_if_each_cell_is_written_once():
    first, second = Box((0,), (2,)), Box((2,), (5,))
    stage = Stage((2,), (5,), (Move(first, first),), receives=(Message(1, (second,)),))
    assert stage.covers_output
    assert not replace(stage, receives=()).covers_output
    assert not replace(stage, destinations_overlap=True).covers_output
    assert not replace(stage, output_shape=None).covers_output
    assert Stage((2,), (0,)).covers_output


def test_identity_on_one_rank_is_an_identity_of_boxes():
    block = Box.whole((2,))
    same = Stage((2,), (2,), (Move(block, block),))
    ones = Box((0,), (1,)), Box((1,), (2,))
    swapped = Stage((2,), (2,), (Move(*ones), Move(*reversed(ones))))
    assert Plan((), 0, (same,)).is_identity
    assert Plan((), 0, (Stage(None, None),)).is_identity
    assert not Plan((), 0, (swapped,)).is_identity
    assert not Plan((), 0, (same, swapped)).is_identity
    assert not Plan((), 0, (replace(same, sends=(Message(1, (block,)),)),)).is_identity
    assert not Plan((), 0, (Stage((2,), (2,)),)).is_identity
    assert not Plan((), 0, (Stage((2,), None),)).is_identity
    assert not Plan((), 0, (Stage(None, (2,)),)).is_identity


def test_messages_go_by_peer_and_keep_the_order_of_their_boxes():
    a, b, c = (Box((i,), (i + 1,)) for i in range(3))
    assert messages_by_peer([(3, c), (1, b), (3, a)]) == (Message(1, (b,)), Message(3, (c, a)))
    assert Message(3, (c, a)).volume == 2


def test_identities_are_16_bytes_that_survive_the_process():
    plan = Plan(("copy", (2, 3)), 0, (Stage((2,), (2,)),))
    assert plan.identity.hex() == "6317ee69a7ed2eea391a1d2f617dc043"
    assert plan.identity == replace(plan, rank=1).identity
    assert plan.identity != plan.T.identity


def test_different_operators_have_different_identities():
    cut = Decomposition.balanced((4, 4), (2, 2))
    plans = [
        plan_halo(cut, Halo((HaloWidths(),) * 2), (0, 0)),
        plan_all_gather(cut, [], (0, 0)),
        plan_all_sum_reduce(0, [0, 1], (2, 2), ("all_sum_reduce", cut)),
        Plan((), 0, ()),
    ]
    assert len({p.identity for plan in plans for p in (plan, plan.T)}) == 2 * len(plans)


@pytest.mark.parametrize("broken", ["no receive", "wrong shape", "wrong peer", "unannounced sum"])
def test_the_oracle_notices_plans_that_do_not_fit(broken: str):
    block, half = Box.whole((2,)), Box.whole((1,))
    sender = Stage((2,), None, sends=(Message(1, (block,)),))
    receiver = Stage(None, (2,), receives=(Message(0, (block,)),))
    match broken:
        case "no receive":
            receiver = replace(receiver, receives=())
        case "wrong shape":
            receiver = replace(receiver, receives=(Message(0, (half,)),))
        case "wrong peer":
            sender = replace(sender, sends=(Message(0, (block,)),))
        case _:
            receiver = replace(receiver, receives=(Message(0, (block, block)),))
            sender = replace(sender, sends=(Message(1, (block, block)),), sources_overlap=True)
    plans = [Plan((), rank, (stage,)) for rank, stage in enumerate((sender, receiver))]
    with pytest.raises(AssertionError):
        carry_out(plans, [np.array([1, 2]), None])
