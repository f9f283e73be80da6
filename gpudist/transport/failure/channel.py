"""Cause of a failure, and the channel that reports it to every rank of a world."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass

from gpudist import errors


@dataclass(frozen=True)
class Failure:
    """Cause of a failure, as sent over the failure channel.

    Attributes:
        kind: name of the class in ``gpudist.errors`` that every surviving rank raises.
        rank: world rank that failed or died, or ``None`` if unknown.
        message: error message.
    """

    kind: str
    rank: int | None
    message: str

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "rank": self.rank, "message": self.message})

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Parse the output of :meth:`to_json`; return a ``TransportError`` for any other text."""
        try:
            fields = json.loads(text)
            kind, rank, message = str(fields["kind"]), fields["rank"], str(fields["message"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("TransportError", None, f"a failure that cannot be read: {text[:200]!r}")
        return cls(kind, rank if type(rank) is int else None, message)

    @classmethod
    def from_exception(cls, error: BaseException, rank: int) -> Failure:
        """Return the failure that other ranks report after ``rank`` raised ``error``."""
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
    """Out-of-band channel on which a failing rank posts the cause, to end the waits of its peers.

    All ranks raise the first failure that was posted; later failures are ignored.
    """

    @abstractmethod
    def post(self, failure: Failure) -> None:
        """Post ``failure`` for all ranks unless one was posted before. Never raises."""

    @abstractmethod
    def peek(self) -> Failure | None:
        """Return the failure of this world, if any.

        May send a request to the store, so call it in waits, not per message.
        """
