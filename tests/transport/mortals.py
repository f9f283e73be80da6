"""Processes for tests in which ranks end or hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpudist.transport.base import Transport
from tests.transport.worlds import Outcome, ProcessRanks


class Mortals:
    """Ranks of one world after another; those that end, or do not answer, are replaced."""

    def __init__(self, count: int) -> None:
        self._ranks = ProcessRanks(count)
        self._ranks.run(count, Transport.check, timeout_s=60.0, kind="nccl")

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout_s: float,
        kind: str = "nccl",
        dead: int | None = None,
    ) -> list[Any]:
        """Return the results of ``body(transport, *args)`` on every rank but ``dead``."""
        ended = self._ranks.run(size, body, *args, timeout_s=timeout_s, kind=kind)
        self._replace(ended)
        for rank, outcome in enumerate(ended):
            if rank == dead:
                continue
            assert outcome.answered, f"rank {rank} gave no answer: it hangs, or has ended"
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for rank, outcome in enumerate(ended) if rank != dead]

    def _replace(self, ended: list[Outcome]) -> None:
        if all(outcome.answered for outcome in ended):
            return
        for rank, outcome in enumerate(ended):
            if not outcome.answered:
                self._ranks.processes[rank].kill()
                self._ranks.processes[rank].join()
        self._ranks.revive()

    def kill(self) -> None:
        self._ranks.kill()
