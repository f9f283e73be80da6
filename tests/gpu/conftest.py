"""The worlds, each shared by all tests that run on it one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.worlds import ONE_RANK, SEVERAL, OneRank, SeveralRanks, World, why_there_is_no

WORLDS = (ONE_RANK, *SEVERAL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--world", choices=WORLDS, help="only the tests of this world")
    parser.addoption("--smallest", action="store_true", help="one test of each function and world")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests that ``--world`` and ``--smallest`` ask for."""
    asked = config.getoption("--world", None)
    if asked is None and not config.getoption("--smallest", False):
        return
    kept = [item for item in items if asked is None or asked in _worlds_of(item)]
    if config.getoption("--smallest", False):
        # The last: cases of a table begin with the plainest, but its sizes descend.
        kept = list({(item.path, _name(item), *_worlds_of(item)): item for item in kept}.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)


def _worlds_of(item: pytest.Item) -> list[str]:
    call = getattr(item, "callspec", None)
    given = call.params.values() if call is not None else ()
    return [value for value in given if value in WORLDS] or [ONE_RANK]


@pytest.fixture(scope="session")
def one_rank() -> Iterator[OneRank]:
    world = OneRank()
    yield world
    world.close()


@pytest.fixture(scope="session", params=WORLDS)
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
