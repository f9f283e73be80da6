"""The worlds, each for all tests that run on it one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.worlds import ONE_RANK, SEVERAL, OneRank, SeveralRanks, World, why_there_is_no


@pytest.fixture(scope="session")
def one_rank() -> Iterator[OneRank]:
    world = OneRank()
    yield world
    world.close()


@pytest.fixture(scope="session", params=[ONE_RANK, *SEVERAL])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == ONE_RANK:
        yield request.getfixturevalue("one_rank")
        return
    reason = why_there_is_no(request.param)
    if reason:
        pytest.skip(reason)
    ranks = SeveralRanks(request.param)
    yield ranks
    ranks.close()
