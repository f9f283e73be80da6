"""Messages of the sizes that networks have, which NCCL sends by other protocols than small ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.devices import require_gpu, scaled
from tests.gpu.large import MOVEMENTS, compared, every_operator, table_beside_others
from tests.gpu.worlds import TWO_OR_MORE, OneRank, SeveralRanks, World, why_there_is_no

require_gpu()

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1 MiB": scaled(MIB, 64 * KIB), "64 MiB": scaled(64 * MIB, MIB)}
EXTENTS = {"repartition": scaled(4096, 256), "3-D halo": scaled(256, 32)}
every_movement = pytest.mark.parametrize("case", MOVEMENTS)


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=list(SIZES))
def test_every_operator(world: World, nbytes: int) -> None:
    assert world.run(every_operator, nbytes=nbytes) == [[]] * world.size


@every_movement
def test_eager(world: World, case: str) -> None:
    found = world.run(compared, case=case, extent=EXTENTS[case], captured=False)
    assert found == [[]] * world.size


@pytest.fixture(scope="module", params=["0", "1"], ids=["not registered", "registered"])
def registering(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Whether NCCL registers the buffers of a captured operation by itself."""
    yield {"NCCL_GRAPH_REGISTER": request.param}


@pytest.fixture(scope="module", params=TWO_OR_MORE)
def ranks(request: pytest.FixtureRequest, registering: dict[str, str]) -> Iterator[SeveralRanks]:
    reason = why_there_is_no(request.param)
    if reason:
        pytest.skip(reason)
    world = SeveralRanks(request.param, more=registering)
    yield world
    world.close()


@every_movement
def test_captured(ranks: SeveralRanks, case: str) -> None:
    found = ranks.run(compared, case=case, extent=EXTENTS[case], captured=True)
    assert found == [[]] * ranks.size


def test_a_table_beyond_a_launchs_arguments(one_rank: OneRank) -> None:
    assert one_rank.run(table_beside_others) == [[]]
