"""What ranks on GPUs learn when one of them dies, raises or disagrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpudist.errors import PeerFailure
from gpudist.rank_pool import RanksFailed
from tests.gpu.devices import require_gpu
from tests.gpu.failures import disagreed, killed, raised
from tests.gpu.worlds import SEVERAL, SeveralRanks, why_there_is_no

require_gpu()

DEADLINE_S = 20.0


@pytest.fixture(params=SEVERAL)
def ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SeveralRanks]:
    """Processes of the test's own, which outlive the first of them until the deadline is over."""
    reason = why_there_is_no(request.param)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr("gpudist.rank_pool.pool.GRACE_S", DEADLINE_S + 2)
    world = SeveralRanks(request.param, DEADLINE_S)
    yield world
    world.close()


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


def test_ranks_that_disagree(ranks: SeveralRanks) -> None:
    texts = ranks.run(disagreed)
    assert len(set(texts)) == 1
    assert "all_sum_reduce over axes" in texts[0] and "broadcast" in texts[0]
