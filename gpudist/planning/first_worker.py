"""Let the first worker plan for all."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from gpudist.errors import CollectiveTimeout, GpudistError, ShapeError
from gpudist.world.partition import Partition


def from_first(P_world: Partition, make: Callable[[], str]) -> str:
    """Return on every worker the text that the first one makes.

    Raises:
        ShapeError: on every worker, if the first one cannot make it.
        CollectiveTimeout: on every worker, if it takes longer than the deadline of the others.
    """
    said, start_s = "", monotonic()
    if P_world.rank == 0:
        try:
            said = f" {make()}"
        # Other workers wait, whatever it is.
        except Exception as raised:
            is_ours = isinstance(raised, GpudistError)
            said = f"!{raised}" if is_ours else f"!{type(raised).__name__}: {raised}"
    try:
        data = P_world.broadcast_data([*said.encode()] if P_world.rank == 0 else None)
    except CollectiveTimeout as late:
        raise CollectiveTimeout(
            f"rank 0 plans for all workers, and has for {monotonic() - start_s:.0f} s, while the "
            f"others wait at most {P_world.wire.timeout_s:g} s: give init() a longer timeout=, or "
            f"search in one process, plan.save(file), and load the plan on every worker; {late}"
        ) from late
    said = bytes(map(int, data)).decode()
    if said.startswith("!"):
        raise ShapeError(said[1:])
    return said[1:]
