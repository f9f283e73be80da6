"""Errors of ranks on GPUs when one of them dies, raises or disagrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpudist.errors import PeerFailure
from gpudist.testing.rank_pool import RanksFailed
from tests.gpu.devices import require_gpu, scaled
from tests.gpu.failures import (
    disagreed,
    keep_a_graph,
    killed,
    killed_beside_a_graph,
    killed_while_read,
    raised,
)
from tests.gpu.worlds import SEVERAL, TWO_OR_MORE, SeveralRanks, why_there_is_no

require_gpu()

DEADLINE_S = 20.0


@contextmanager
def own_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch, more: Mapping[str, str] | None = None
) -> Iterator[SeveralRanks]:
    """Processes of the test's own, which outlive the first of them until the deadline is over."""
    reason = why_there_is_no(kind)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr("gpudist.testing.rank_pool.pool.GRACE_S", DEADLINE_S + 2)
    world = SeveralRanks(kind, DEADLINE_S, more)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(params=SEVERAL)
def ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SeveralRanks]:
    with own_ranks(request.param, monkeypatch) as world:
        yield world


@dataclass(frozen=True)
class Death:
    """Activity of the other ranks when one dies.

    Attributes:
        body: function that all ranks run.
        params: the body's parameters, besides the victim and the deadline.
        more: additional environment variables of all ranks.
    """

    body: Callable[..., None]
    params: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)


DEATHS = {
    "reading a result": Death(killed_while_read),
    "one connection to the GPU": Death(
        killed_while_read, more={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ),
    "many operators queued": Death(killed_while_read, {"queued": scaled(2000, 50)}),
    "before the first message": Death(killed_while_read, {"warm": False}),
    "a graph alive": Death(killed_beside_a_graph),
}


@pytest.mark.parametrize("body, kind", [(killed, PeerFailure), (raised, ZeroDivisionError)])
def test_the_others_know_who_it_was(
    ranks: SeveralRanks, body: Callable[..., None], kind: type[BaseException]
) -> None:
    victim = ranks.size - 1
    with pytest.raises(RanksFailed) as caught:
        ranks.run_raising(body, victim=victim, deadline_s=DEADLINE_S)
    # The survivors have checked theirs themselves.
    assert [outcome.rank for outcome in caught.value.outcomes] == [victim], str(caught.value)
    assert isinstance(caught.value.root.error, kind)


@pytest.mark.parametrize("kind", TWO_OR_MORE)
@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_is_killed(death: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks end in time, naming the killed rank, in any state."""
    given = DEATHS[death]
    with own_ranks(kind, monkeypatch, given.more) as ranks:
        victim = ranks.size - 1
        with pytest.raises(RanksFailed) as caught:
            ranks.run_raising(given.body, victim=victim, deadline_s=DEADLINE_S, **given.params)
    assert [outcome.rank for outcome in caught.value.outcomes] == [victim], str(caught.value)


@pytest.mark.parametrize("kind", TWO_OR_MORE)
def test_processes_end_with_a_graph_alive(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, and by themselves."""
    with own_ranks(kind, monkeypatch) as ranks:
        ranks.run(keep_a_graph)
        processes = ranks.processes()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def test_ranks_that_disagree(ranks: SeveralRanks) -> None:
    texts = ranks.run(disagreed)
    assert len(set(texts)) == 1
    assert "all_sum_reduce over axes" in texts[0] and "broadcast" in texts[0]
