"""What the ranks of a world must have alike, said when they meet."""

from __future__ import annotations

import time
from typing import Any

from gpudist.errors import PlanMismatch, side_by_side
from gpudist.transport.background import Job
from gpudist.transport.failure.asker import StoreAsker

_LOOK_EVERY_S = 0.5
# The store answers some ten thousand ranks' questions a second.
_RANKS_PER_LOOK = 1000


class Agreement:
    """What each rank says of itself in the store where the ranks meet.

    Args:
        ask: for the store, which may not answer.
        store: any ``torch.distributed.Store``.
        prefix: first part of the keys; one per world.
        rank, size: this process in the world.
    """

    def __init__(self, ask: StoreAsker, store: Any, prefix: str, rank: int, size: int) -> None:
        self._ask = ask
        self._store: Any = store
        self._rank = rank
        self._size = size
        self._looking: Job[None] | None = None
        self._looked_s = time.monotonic()
        self._key = f"{prefix}/said"
        self._alike = ""
        self._all = f"{self._key}/all"

    def say(self, said: str) -> None:
        """Leave what is to be the same on all ranks, in words; once, before all else."""
        self._alike = f"{self._key}/of/{said}"

        def leave() -> None:
            self._store.set(f"{self._key}/{self._rank}", said)
            self._store.add(self._alike, 1)
            self._store.add(self._all, 1)

        self._ask(leave)

    def compare(self, store: Any) -> None:
        """Refuse what differs, of the ranks that have come so far, as ``store`` has them.

        Two questions where all is well, however many ranks there are.

        Raises:
            PlanMismatch: with what every rank has said.
        """
        if store.add(self._alike, 0) == store.add(self._all, 0):
            return
        keys = {rank: f"{self._key}/{rank}" for rank in range(self._size)}
        come = [rank for rank, key in keys.items() if store.check([key])]
        said = {rank: store.get(keys[rank]).decode(errors="replace") for rank in come}
        if len(set(said.values())) > 1:
            raise PlanMismatch(
                f"ranks disagree about what they run:{side_by_side(said)}\n"
                "install the same gpudist on every node, and start every rank with the same "
                "variables and arguments of init()"
            )

    def look(self) -> None:
        """Compare now and then while others are waited for; does not wait itself.

        Raises:
            PlanMismatch: as :meth:`compare`.
        """
        if self._looking is not None and self._looking.wait(0.0):
            found, self._looking = self._looking, None
            if found.failed_with(PlanMismatch):
                found.result()
        if self._store is None:
            return
        due_s = self._looked_s + max(_LOOK_EVERY_S, self._size / _RANKS_PER_LOOK)
        if self._looking is None and time.monotonic() > due_s:
            self._looked_s = time.monotonic()
            store = self._store
            self._looking = self._ask.submit(lambda: self.compare(store))

    def close(self) -> None:
        """Look no more, however long somebody holds this."""
        self._store = self._looking = None
