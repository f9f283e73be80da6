"""Check at connection time that all ranks run the same version with the same options."""

from __future__ import annotations

import time
from typing import Any

from gpudist.errors import PlanMismatch, side_by_side
from gpudist.transport.background import BackgroundCall
from gpudist.transport.failure.asker import StoreAsker

_LOOK_EVERY_S = 0.5
# The store answers requests of roughly ten thousand ranks per second.
_RANKS_PER_LOOK = 1000


class WorldAgreement:
    """Description of each rank, exchanged through the rendezvous store and compared.

    Args:
        ask: runs a store request with a deadline.
        store: any ``torch.distributed.Store``.
        prefix: prefix of the store keys, unique per world.
        rank, size: rank of this process and number of ranks.
    """

    def __init__(self, ask: StoreAsker, store: Any, prefix: str, rank: int, size: int) -> None:
        self._ask = ask
        self._store: Any = store
        self._rank = rank
        self._size = size
        self._looking: BackgroundCall[None] | None = None
        self._looked_s = time.monotonic()
        self._key = f"{prefix}/said"
        self._alike = ""
        self._all = f"{self._key}/all"

    def say(self, said: str) -> None:
        """Publish the text that must be equal on all ranks. Call once, before the others."""
        self._alike = f"{self._key}/of/{said}"

        def leave() -> None:
            self._store.set(f"{self._key}/{self._rank}", said)
            self._store.add(self._alike, 1)
            self._store.add(self._all, 1)

        self._ask(leave)

    def compare(self, store: Any) -> None:
        """Raise if the ranks that have published so far disagree.

        If they agree, this takes two store requests, regardless of the number of ranks.

        Raises:
            PlanMismatch: lists the text of every rank.
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
        """Compare periodically while waiting for other ranks. Never blocks.

        Raises:
            PlanMismatch: see :meth:`compare`.
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
        """Stop comparing and release the store."""
        self._store = self._looking = None
