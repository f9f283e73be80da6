"""The version of this package, and whether all ranks have the same."""

from __future__ import annotations

from typing import Any

from gpudist.errors import PlanMismatch, side_by_side

__version__ = "0.1.0"


class Versions:
    """What the ranks of a world that meet in a store say of their versions.

    Args:
        store: any ``torch.distributed.Store``.
        prefix: first part of the keys; one per world.
        rank, size: this process in the world.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self._size = size
        self._key = f"{prefix}/version"
        store.set(f"{self._key}/{rank}", __version__)
        store.add(f"{self._key}/of/{__version__}", 1)

    def compare(self, store: Any) -> None:
        """Refuse different ones, of the ranks that have come so far, as ``store`` has them.

        Raises:
            PlanMismatch: with every rank's.
        """
        # One question where all is well, however many ranks there are.
        if store.add(f"{self._key}/of/{__version__}", 0) == self._size:
            return
        keys = {rank: f"{self._key}/{rank}" for rank in range(self._size)}
        said = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        if len(set(said.values())) > 1:
            views = {rank: f"gpudist {version}" for rank, version in said.items()}
            raise PlanMismatch(
                f"ranks disagree about the library:{side_by_side(views)}\n"
                "install the same gpudist on every node"
            )
