"""Count calls, messages, bytes and seconds of every operator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from gpudist.checks.arguments import Checked, checked
from gpudist.checks.columns import columns
from gpudist.transport.flight_recorder import OperatorTotals
from gpudist.world import runtime
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts

_HEADINGS = ("operator", "partition", "calls", "messages", "sent MB", "received MB", "seconds")
_LONGEST = 48


@dataclass(frozen=True)
class Stat(Checked):
    """Totals of one operator over one partition.

    Attributes:
        operator: name, such as ``"halo_exchange"`` or ``"adjoint of halo_exchange"``.
        partition: shape of the partition, or shapes of both, such as ``"[1, 1, 2, 2]"``; may be
            empty.
        calls: number of completed calls.
        messages: number of messages sent; a native collective of NCCL counts as one.
        sent_bytes, received_bytes: bytes of the cells in messages, without headers.
        seconds: seconds inside the calls, on the host. Over NCCL, where calls return before the GPU
            is done, they are measured only during a :func:`~gpudist.profile`,
            :func:`~gpudist.record_ranges` or with ``GPUDIST_DEBUG=1``.
    """

    operator: str
    partition: str
    calls: int
    messages: int
    sent_bytes: int
    received_bytes: int
    seconds: float


class Stats(Checked, Sequence[Stat]):
    """Rows by operator and partition; printed as a table."""

    def __init__(self, rows: Iterable[Stat]) -> None:
        self._rows = tuple(sorted(rows, key=lambda row: (row.operator, row.partition)))

    def __getitem__(self, i: int) -> Stat:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._rows[i]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def total(self) -> Stat:
        """Sums over all rows."""
        return _sum("total", "", self._rows)

    def __str__(self) -> str:
        return columns([_HEADINGS, *map(_cells, (*self._rows, self.total))], left=2)

    __repr__ = __str__


@checked()
def stats(reset: bool = False, all_ranks: bool = False, P_world: Partition | None = None) -> Stats:
    """Return totals of this worker's movements since the start, or since the last reset.

    Args:
        reset: whether to reset the totals afterwards.
        all_ranks: whether to return sums over all workers, and the seconds of the slowest.
            Collective over the world; the same on every worker.
        P_world: world to count, by default the one of :func:`gpudist.init`.

    Returns:
        One row for each operator and partition shape; movements of backward have their own rows.

    Cost:
        Counting is always on, and costs less than 0.1 us per movement. With ``all_ranks``, two
        small all-gathers.

    Raises:
        TransportError: if :func:`gpudist.init` was not called.
    """
    P = P_world if P_world is not None else runtime.world()
    rows = [_stat(row) for wire in P.wire.wires for row in wire.recorder.rows()]
    if all_ranks:
        said = gather_texts(P, json.dumps([asdict(row) for row in rows]).encode())
        by_rank = [_merge([Stat(**row) for row in json.loads(text)]) for text in said]
        rows = _sum_over_ranks(by_rank)
    else:
        rows = _merge(rows)
    if reset:
        for wire in P.wire.wires:
            wire.recorder.clear()
    return Stats(rows)


def _stat(row: OperatorTotals) -> Stat:
    return Stat(
        row.operator, row.partition, row.calls, row.messages,
        row.sent_bytes, row.received_bytes, row.seconds,
    )  # fmt: skip


def _merge(rows: Sequence[Stat]) -> list[Stat]:
    # Several transports may have counted the same operator and partition.
    by_operator: dict[tuple[str, str], list[Stat]] = {}
    for row in rows:
        by_operator.setdefault((row.operator, row.partition), []).append(row)
    return [_sum(*key, some) for key, some in by_operator.items()]


def _sum_over_ranks(by_rank: Sequence[Sequence[Stat]]) -> list[Stat]:
    every = [row for rows in by_rank for row in rows]
    slowest: dict[tuple[str, str], float] = {}
    for row in every:
        key = row.operator, row.partition
        slowest[key] = max(slowest.get(key, 0.0), row.seconds)
    return [replace(row, seconds=slowest[row.operator, row.partition]) for row in _merge(every)]


def _sum(operator: str, partition: str, rows: Sequence[Stat]) -> Stat:
    return Stat(
        operator,
        partition,
        sum(row.calls for row in rows),
        sum(row.messages for row in rows),
        sum(row.sent_bytes for row in rows),
        sum(row.received_bytes for row in rows),
        sum(row.seconds for row in rows),
    )


def _cells(row: Stat) -> tuple[str, ...]:
    name = row.operator
    return (
        name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "...",
        row.partition,
        f"{row.calls}",
        f"{row.messages}",
        f"{row.sent_bytes / 1e6:.3f}",
        f"{row.received_bytes / 1e6:.3f}",
        f"{row.seconds:.4f}",
    )
