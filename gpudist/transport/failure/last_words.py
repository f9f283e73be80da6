"""Final output of ranks that end with an exception: one traceback, one line per other rank."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpudist import errors
from gpudist.checks.digest import digest_of
from gpudist.errors import GpudistError, PlanMismatch, RemoteError, TransportError
from gpudist.transport.background import Background, BackgroundCall
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.store import second_connection
from gpudist.transport.report import report, write_error_file

# Time for a failed rank to print its traceback, and for the store to answer. Torch queries the name
# server at each connection, which takes 5 s if the server is missing.
_PATIENCE_S = 10.0
_POLL_S = 0.005
_LINE = 300
# Prefixes of files that are not part of the user's program.
_FOREIGN = (str(Path(errors.__file__).resolve().parent), os.path.dirname(os.__file__), "<")


@dataclass(frozen=True)
class Ending:
    """Exception that ends a rank.

    Attributes:
        rank: world rank.
        kind: name of the exception type.
        line: first line of the message.
        stack: digest of the source lines in the traceback.
        is_echo: whether it only reports the failure of another rank.
    """

    rank: int
    kind: str
    line: str
    stack: str
    is_echo: bool

    @classmethod
    def of(
        cls, error: BaseException, trace: TracebackType | None, rank: int, is_echo: bool
    ) -> Ending:
        passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
        stack = digest_of(repr(passed).encode()).hex()
        return cls(rank, type(error).__name__, _first_line(str(error)), stack, is_echo)

    def is_as(self, other: Ending) -> bool:
        """Return whether both ranks raised the same kind of error at the same place."""
        return not other.is_echo and (self.kind, self.stack) == (other.kind, other.stack)


class Endings:
    """Agreement, through the store, that the first rank to fail prints its traceback.

    Args:
        store: rendezvous store; ``None`` if there are no other ranks.
        prefix: prefix of the store keys, unique per world.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._given_store = store
        self._first, self._announced = f"{prefix}/ended", f"{prefix}/told"
        self._background = Background("gpudist last words")
        if store is not None:
            # Start it now: Python cannot start threads during interpreter shutdown.
            self._background.start()

    def first(self, mine: Ending) -> Ending | None:
        """Return the ending of the first rank, ``mine`` if it is the first, ``None`` if unknown."""
        text = json.dumps(asdict(mine))
        said = self._ask(lambda: self._store().compare_set(self._first, "", text))
        try:
            return None if said is None else Ending(**json.loads(said))
        except (ValueError, TypeError, RecursionError):
            return None

    def await_first(self) -> None:
        """Wait briefly until the rank that failed has registered as the first."""
        self._await(self._first)

    def announce(self) -> None:
        """Record that the first rank has printed its traceback."""
        self._ask(lambda: self._store().set(self._announced, ""))

    def are_announced(self) -> bool:
        """Wait briefly for the first rank's traceback and return whether it was printed.

        The launcher kills the other ranks when one has ended, so this rank must not end earlier.
        """
        return self._await(self._announced)

    def _store(self) -> Any:
        return second_connection(self._given_store)

    def _await(self, key: str) -> bool:
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            there = self._ask(lambda: self._store().check([key]))
            if there is None or there:
                return bool(there)
            time.sleep(_POLL_S)
        return False

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Run a request to the store; return ``None``, and stop asking, if it does not answer."""
        if self._given_store is None:
            return None
        job: BackgroundCall[Any] = self._background.submit(call)
        with suppress(RuntimeError, OSError):
            if job.wait(_PATIENCE_S):
                return job.result()
        self._given_store = None
        return None


def report_uncaught_errors(
    wire: Transport,
    path: str,
    note: Callable[[], None],
    endings: Endings,
    prints_all: bool,
) -> None:
    """Install an exception hook that posts the error that ends this process to its peers.

    Args:
        wire: transport of this rank.
        path: path of torchrun's error file; empty for none.
        note: called first.
        endings: agreement about which rank prints its traceback.
        prints_all: whether to print the traceback even if another rank prints the cause.
    """
    previous, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A forked child's errors are not this rank's. One that no Python code let through was
        # printed and forgotten by C code, such as a warning made an error beside another error.
        if os.getpid() != owner or trace is None:
            previous(kind, error, trace)
            return
        note()
        line = ""
        try:
            if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
                line = _end(wire, path, endings, error, trace)
        finally:
            # Print the user's error even if posting it failed.
            if line and not prints_all:
                sys.stderr.write(line)
            else:
                previous(kind, error, trace)
                if isinstance(error, (TransportError, PlanMismatch)):
                    sys.stderr.write(report(wire, "has failed"))
                sys.stderr.flush()
                endings.announce()

    sys.excepthook = hook


def _end(
    wire: Transport,
    path: str,
    endings: Endings,
    error: BaseException,
    trace: TracebackType | None,
) -> str:
    """Fail the world with ``error``; return the line to print instead of the traceback, if any."""
    rank = wire.rank
    failure = wire.failures.peek()
    is_echo = _is_echo(error, failure, rank)
    mine = Ending.of(error, trace, rank, is_echo)
    # Register before aborting, so that the other ranks find that this rank failed first.
    first = None if is_echo else endings.first(mine)
    wire.abort(Failure.from_exception(error, rank))
    if isinstance(error, GpudistError):
        write_error_file(path, error, rank, report(wire, "has failed"))
    if is_echo:
        # A dead rank prints nothing, and torchrun soon kills the ranks that are waiting for it.
        if failure is None or failure.kind != "PeerFailure":
            endings.await_first()
        first = endings.first(mine)
    if first is None or first.rank == rank:
        return ""
    where, shown = _place(trace), first.rank
    if is_echo and (failure is None or first.is_echo or failure.rank == first.rank):
        who = f"rank {first.rank}" if not first.is_echo else "another rank"
        line = f"ended{where} because {who} failed with {first.kind}: {first.line}"
    elif mine.is_as(first):
        line = f"ended{where} with the same {mine.kind} as rank {first.rank}: {mine.line}"
    elif is_echo and failure and failure.rank is not None and _prints_traceback(failure):
        # Two ranks failed independently, and this one received the other failure first.
        line, shown = f"ended{where} because {_first_line(failure.message)}", failure.rank
    else:
        return ""
    return (
        f"gpudist: rank {rank} {line}; see rank {shown}'s traceback\n"
        if endings.are_announced()
        else ""
    )


def _is_echo(error: BaseException, failure: Failure | None, rank: int) -> bool:
    if isinstance(error, RemoteError):
        return True
    if failure is None or failure.rank == rank or not isinstance(error, GpudistError):
        return False
    return str(error).startswith(failure.message)


def _prints_traceback(failure: Failure) -> bool:
    return failure.kind != "PeerFailure" or failure.message.startswith(
        f"rank {failure.rank} raised "
    )


def _place(trace: TracebackType | None) -> str:
    """Return the innermost source line of the user's program in the traceback."""
    places = [
        f" at {os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith(_FOREIGN)
        and "site-packages" not in frame.f_code.co_filename
    ]
    return places[-1] if places else ""


def _first_line(text: str) -> str:
    line, *rest = text.splitlines() or [""]
    return line[:_LINE] + " ..." * bool(rest or len(line) > _LINE)
