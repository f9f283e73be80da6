"""Exceptions raised by gpudist.

Every error says what was wrong, with the numbers, and what to do. Errors about shapes, partitions
and plans are raised on every rank alike, before the first message.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CheckpointError",
    "CollectiveTimeout",
    "ConventionError",
    "ConversionError",
    "GpudistError",
    "NotBuiltError",
    "PartitionError",
    "PeerFailure",
    "PlanMismatch",
    "RemoteError",
    "ShapeError",
    "TransportError",
]

_SHOWN_RANKS = 16


class GpudistError(RuntimeError):
    """Base class of every error that gpudist raises on purpose."""


class PartitionError(GpudistError, ValueError):
    """A partition, rank list or axis is invalid for the operation."""


class ShapeError(GpudistError, ValueError):
    """A tensor, size or other argument does not fit the operator."""


class ConventionError(GpudistError, ValueError):
    """The gradients of a value follow another convention than its operator expects."""


class ConversionError(GpudistError, ValueError):
    """A module cannot be distributed without changing what it computes."""


class PlanMismatch(GpudistError):
    """Ranks disagree about the operation they perform together."""


class TransportError(GpudistError):
    """The transport failed or was used incorrectly."""


class PeerFailure(TransportError):
    """Another rank died or raised while this rank depended on it.

    Args:
        message: error message.

    Attributes:
        rank: world rank of the peer that failed, or ``None`` if it is unknown.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveTimeout(TransportError):
    """An operation did not finish before the deadline given to ``gpudist.init(timeout=...)``."""


class NotBuiltError(GpudistError):
    """This installation lacks a part of gpudist that was requested."""


class CheckpointError(GpudistError):
    """A state dict or checkpoint does not fit the model, or cannot be written or read."""


class RemoteError(TransportError):
    """Another rank raised an error that all ranks report; the world remains usable.

    Args:
        message: error message.

    Attributes:
        rank: rank that raised, in the partition of the operation.
        kind: name of the exception type on that rank.
    """

    def __init__(self, message: str, rank: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


def side_by_side(views: Mapping[int, str]) -> str:
    """Format the text of each rank, one line per rank, each preceded by a line break.

    If there are many ranks, only those that deviate from the majority are listed, and the others
    are summarized.
    """
    counts: dict[str, int] = {}
    for view in views.values():
        counts[view] = counts.get(view, 0) + 1
    ranks = sorted(views, key=lambda rank: (counts[views[rank]], rank))
    shown = sorted(views) if len(views) <= _SHOWN_RANKS else ranks[:_SHOWN_RANKS]
    lines = [f"\n  rank {rank}: {views[rank]}" for rank in shown]
    if len(views) > len(shown):
        others = sorted({views[rank] for rank in ranks[len(shown) :]})
        lines.append(f"\n  {len(views) - len(shown)} more ranks: {', or '.join(others)}")
    return "".join(lines)
