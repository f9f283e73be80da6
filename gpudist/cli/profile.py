"""``gpudist bench profile``: measure the rates of this machine for ``gpudist plan``."""

from __future__ import annotations

from pathlib import Path

from gpudist.cli.progress import Progress
from gpudist.errors import ShapeError
from gpudist.planning.hardware import Profile
from gpudist.planning.measuring import measured_profile
from gpudist.testing.rank_pool import RankPool
from gpudist.world.partition import Partition
from gpudist.world.runtime import init

_LIMIT_S = 300.0


def measure(ranks: int, output: Path) -> Profile:
    """Measure this machine and write the profile; under torchrun, use all its ranks.

    Args:
        ranks: number of processes to start, unless torchrun has started them.
        output: file to write, on rank 0.

    Raises:
        ShapeError: if there are fewer than two ranks.
    """
    P_world = init()
    if P_world.size > 1:
        profile = _measure_rank(P_world)
    elif ranks < 2:
        raise ShapeError(f"a profile needs at least 2 ranks, but there are {ranks}; pass --ranks 2")
    else:
        Progress()(f"starting {ranks} ranks", 0, 1)
        with RankPool(ranks, _LIMIT_S) as pool:
            profile, *_ = pool.run(ranks, _measure_rank, limit_s=_LIMIT_S, transport="host")
    if P_world.rank == 0:
        profile.save(output)
    return profile


def _measure_rank(P_world: Partition) -> Profile:
    return measured_profile(P_world, progress=Progress(P_world.rank == 0))
