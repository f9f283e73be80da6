"""One family of errors.

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
    """Base of every error gpudist raises on purpose."""


class PartitionError(GpudistError, ValueError):
    """A partition, rank list or axis that makes no sense for the operation, or is none."""


class ShapeError(GpudistError, ValueError):
    """A tensor, size or other argument that does not fit the operator."""


class ConventionError(GpudistError, ValueError):
    """A value whose gradients follow another convention than the operator that takes it."""


class ConversionError(GpudistError, ValueError):
    """A module that cannot be made distributed without changing what it computes."""


class PlanMismatch(GpudistError):
    """Ranks disagree about the operation they are carrying out together."""


class TransportError(GpudistError):
    """The wire failed, or was used wrongly."""


class PeerFailure(TransportError):
    """Another rank died or raised while this rank depended on it.

    Attributes:
        rank: world rank of the peer that failed, or ``None`` when it could not be told.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveTimeout(TransportError):
    """An operation did not finish before the deadline given to ``gpudist.init(timeout=...)``."""


class NotBuiltError(GpudistError):
    """A part of gpudist that this installation was built without."""


class CheckpointError(GpudistError):
    """A state dict or checkpoint that does not fit the model, or cannot be written or read."""


class RemoteError(TransportError):
    """Another rank raised where all ranks depended on it; the world can go on.

    Attributes:
        rank: position, in the partition of the operation, of the rank that raised.
        kind: name of the exception's type there.
    """

    def __init__(self, message: str, rank: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


def side_by_side(views: Mapping[int, str]) -> str:
    """What each rank says, one line a rank, each after a line break; of many, some of every view.

    Ranks that differ from most come first.
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
