"""The cause of a failure, and the channel on which it reaches every rank of a world."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass

from gpudist import errors


@dataclass(frozen=True)
class Failure:
    """The cause of a failure, as it travels over the failure channel.

    Attributes:
        kind: name of the class in ``gpudist.errors`` that every survivor raises.
        rank: world rank where it happened (the dead rank, for a death), or ``None``.
        message: the text of the error.
    """

    kind: str
    rank: int | None
    message: str

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "rank": self.rank, "message": self.message})

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read what ``to_json`` wrote; anything else is a failure of its own."""
        try:
            fields = json.loads(text)
            kind, rank, message = str(fields["kind"]), fields["rank"], str(fields["message"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("TransportError", None, f"a failure that cannot be read: {text[:200]!r}")
        return cls(kind, rank if type(rank) is int else None, message)

    @classmethod
    def from_exception(cls, error: BaseException, rank: int) -> Failure:
        """The failure that ``error``, raised on ``rank``, means for the other ranks."""
        if isinstance(error, errors.PeerFailure):
            return cls("PeerFailure", error.rank, str(error))
        if isinstance(error, errors.GpudistError):
            return cls(type(error).__name__, rank, str(error))
        return cls("PeerFailure", rank, f"rank {rank} raised {type(error).__name__}: {error}")

    def to_exception(self) -> errors.GpudistError:
        if self.kind == "PeerFailure":
            return errors.PeerFailure(self.message, self.rank)
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, errors.GpudistError):
            return known(self.message)
        return errors.TransportError(self.message)


class FailureChannel(ABC):
    """Where a rank that fails leaves the cause, out of band, for every peer's wait to end with it.

    The first failure posted is the one everybody raises; later ones are dropped.
    """

    @abstractmethod
    def post(self, failure: Failure) -> None:
        """Leave ``failure`` for all ranks unless one is there already. Never raises."""

    @abstractmethod
    def peek(self) -> Failure | None:
        """The failure of this world, if any. May ask a store: call it in waits, not per message."""
