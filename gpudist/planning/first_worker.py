"""Let the first worker plan for all."""

from __future__ import annotations

from collections.abc import Callable

from gpudist.errors import GpudistError, ShapeError
from gpudist.world.partition import Partition


def from_first(P_world: Partition, make: Callable[[], str]) -> str:
    """Return on every worker the text that the first one makes.

    Raises:
        ShapeError: on every worker, if the first one cannot make it.
    """
    text, error = "", ""
    if P_world.rank == 0:
        try:
            text = make()
        # Other workers wait, whatever it is.
        except Exception as raised:
            is_ours = isinstance(raised, GpudistError)
            error = str(raised) if is_ours else f"{type(raised).__name__}: {raised}"
    sizes = [len(part.encode()) for part in (text, error)]
    data = [*sizes, *f"{text}{error}".encode()]
    size, _, *received = map(int, P_world.broadcast_data(data if P_world.rank == 0 else None))
    if len(received) > size:
        raise ShapeError(bytes(received).decode())
    return bytes(received).decode()
