"""A few experiments of each fault over each transport; bad outcomes are detected as bad."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpudist.errors import CollectiveTimeout, PeerFailure
from tests.doubles import use_doubles
from tests.faults.chaos.experiment import (
    DEADLINE_S,
    SMALL,
    Experiment,
    experiments,
)
from tests.faults.chaos.judge import conduct, judge
from tests.faults.ranks import Answer

TEXT = "rank 1 raised Mistake: x; the last operation of rank 0 was 'gather on [1, 3]'"
RAISED = Experiment("gather", "host", "raised", "before", 3, 1, 0, SMALL, None, 1)

# Deadlines take seconds: those of which survivors know the cause at once are in this short form.
SHORT = [
    ("halo_exchange", "host", "killed", "message"),
    ("repartition", "host", "crashed", "unpacking"),
    ("broadcast", "host", "raised", "backward"),
    ("sum_reduce", "host", "slow", "packing"),
    ("all_gather", "host", "killed", "message"),
    ("conv layer", "host", "raised", "split"),
    ("broadcast_batch", "host", "slow", "backward"),
    ("scatter", "nccl", "killed", "message"),
    ("ring attention", "nccl", "crashed", "packing"),
    ("send_recv", "nccl", "raised", "before"),
    ("sum_scatter", "nccl", "crashed", "split"),
    ("gather", "loopback", "raised", "message"),
    ("sum_scatter", "loopback", "slow", "message"),
    ("halo_exchange", "loopback", "raised", "packing"),
    ("all_sum_reduce", "host", "stopped", "before"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cell", SHORT, ids=[", ".join(cell) for cell in SHORT])
def test_survivors_raise_what_they_should(cell: tuple[str, str, str, str]) -> None:
    use_doubles()
    tried = next(experiments(1, [cell]))
    verdict = conduct(tried)
    good = "survived" if tried.fault == "slow" else "detected"
    assert verdict.how == good, f"{tried.words()}\n{verdict.text}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_a_store_that_stands_still_while_ranks_join_hangs_nobody(transport: str) -> None:
    """The store's host is stopped while ranks join, and never answers again."""
    tried = Experiment("gather", transport, "stopped", "init", 3, 0, 1, 1024, 0, 5)
    verdict = conduct(tried)
    assert verdict.how == "detected", verdict.text


def test_a_failure_ends_the_wait_for_a_wire_beside() -> None:
    """A rank fails before it joins the host's wire of a world over NCCL."""
    use_doubles()
    tried = Experiment("broadcast_batch", "nccl", "raised", "message", 3, 1, 0, 4096, None, 7)
    verdict = conduct(tried)
    assert verdict.how == "detected", verdict.text


def answers(error: BaseException | None, after_s: float = 0.1, **other: object) -> dict:
    mistake = RuntimeError("Mistake: x")
    each = {rank: Answer(error=error, end_s=10.0 + after_s) for rank in (0, 2)}
    each[1] = Answer(error=mistake, end_s=10.0)
    return {rank: replace(answer, **other) for rank, answer in each.items()}


@pytest.mark.parametrize(
    ("how", "error", "after_s", "other"),
    [
        ("lost", None, 0.1, {}),
        ("late", PeerFailure(TEXT, 1), DEADLINE_S + 1.1, {}),
        ("late", PeerFailure(TEXT, 1), 0.1, {"closing_s": DEADLINE_S + 1.1}),
        ("misnamed", PeerFailure(TEXT, 2), 0.1, {}),
        ("misnamed", PeerFailure("rank 1 raised Mistake: x", 1), 0.1, {}),
        ("misnamed", PeerFailure(TEXT.replace("Mistake", "Other"), 1), 0.1, {}),
        ("misnamed", CollectiveTimeout(TEXT), 0.1, {}),
        ("misnamed", RuntimeError(TEXT), 0.1, {}),
        ("wrong", RuntimeError("WrongNumbers: 3, not 2"), 0.1, {}),
        ("left", PeerFailure(TEXT, 1), 0.1, {"leftovers": ["socket"]}),
    ],
)
def test_what_is_bad(
    how: str, error: BaseException | None, after_s: float, other: dict[str, object]
) -> None:
    assert judge(RAISED, answers(error, after_s, **other), 10.0).how == how
