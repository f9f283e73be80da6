"""What ranks print when exceptions end them: one traceback, and a line for each other rank."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpudist import errors
from gpudist.checks.digest import digest_of
from gpudist.errors import GpudistError, PlanMismatch, RemoteError, TransportError
from gpudist.transport.background import Background, Job
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.store import own_connection
from gpudist.transport.report import report, write_error_file

# In which a rank that has failed comes to print its traceback, and a store answers. Torch asks the
# name server at each connection, and one that is not there takes 5 s.
_PATIENCE_S = 10.0
_POLL_S = 0.005
_LINE = 300
# What is not the user's own program.
_FOREIGN = (str(Path(errors.__file__).resolve().parent), os.path.dirname(os.__file__), "<")


@dataclass(frozen=True)
class Ending:
    """The exception that ends a rank.

    Attributes:
        rank: in the world.
        kind: name of the exception's type.
        line: the first line of its text.
        stack: digest of the lines of the program that it passed through.
        is_echo: it says that another rank has failed.
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
        """Whether it is the mistake that the other rank found by itself, by kind and place."""
        return not other.is_echo and (self.kind, self.stack) == (other.kind, other.stack)


class Endings:
    """Which rank prints its traceback: the first that fails, as the ranks' store has it.

    Args:
        store: where the ranks met; ``None`` where there are no others.
        prefix: first part of the keys; one per world.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._given = store
        self._first, self._told = f"{prefix}/ended", f"{prefix}/told"
        self._background = Background("gpudist last words")
        if store is not None:
            # Later the process may be about to exit, in which Python starts no thread.
            self._background.start()

    def first(self, mine: Ending) -> Ending | None:
        """The ending of the first rank, which is this one if none was; ``None`` if unknown."""
        text = json.dumps(asdict(mine))
        said = self._ask(lambda: self._store().compare_set(self._first, "", text))
        try:
            return None if said is None else Ending(**json.loads(said))
        except (ValueError, TypeError, RecursionError):
            return None

    def await_first(self) -> None:
        """Let a rank that has failed come first, if it soon does."""
        self._await(self._first)

    def tell(self) -> None:
        """Say that the first rank has printed its traceback."""
        self._ask(lambda: self._store().set(self._told, ""))

    def are_told(self) -> bool:
        """Whether it soon has: its launcher ends the other ranks when one has ended."""
        return self._await(self._told)

    def _store(self) -> Any:
        return own_connection(self._given)

    def _await(self, key: str) -> bool:
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            there = self._ask(lambda: self._store().check([key]))
            if there is None or there:
                return bool(there)
            time.sleep(_POLL_S)
        return False

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What the store says; ``None`` if it does not."""
        if self._given is None:
            return None
        job: Job[Any] = self._background.submit(call)
        try:
            if job.wait(_PATIENCE_S):
                return job.result()
        except (RuntimeError, OSError):
            pass
        self._given = None
        return None


def tell_uncaught_errors(
    transport: Transport,
    path: str,
    note: Callable[[], None],
    endings: Endings,
    prints_all: bool,
) -> None:
    """An exception that ends this process ends its peers' waits with its text.

    Args:
        path: of torchrun's error file; empty where there is none.
        note: called first.
        endings: of the ranks of this world.
        prints_all: also print the traceback where another rank prints the cause.
    """
    previous, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A forked child's errors are not this rank's.
        if os.getpid() != owner:
            previous(kind, error, trace)
            return
        note()
        line = ""
        try:
            if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
                line = _end(transport, path, endings, error, trace)
        finally:
            # The user's own error is shown whatever becomes of telling the others.
            if line and not prints_all:
                sys.stderr.write(line)
            else:
                previous(kind, error, trace)
                if isinstance(error, (TransportError, PlanMismatch)):
                    sys.stderr.write(report(transport, "has failed"))
                sys.stderr.flush()
                endings.tell()

    sys.excepthook = hook


def _end(
    transport: Transport,
    path: str,
    endings: Endings,
    error: BaseException,
    trace: TracebackType | None,
) -> str:
    """End the world with ``error``; the line to print where another rank prints its traceback."""
    rank = transport.rank
    failure = transport.failures.peek()
    is_echo = _is_echo(error, failure, rank)
    mine = Ending.of(error, trace, rank, is_echo)
    # The others, who hear of it by the abort, are to find that this rank was before them.
    first = None if is_echo else endings.first(mine)
    transport.abort(Failure.from_exception(error, rank))
    if isinstance(error, GpudistError):
        write_error_file(path, error, rank, report(transport, "has failed"))
    if is_echo:
        # A dead rank prints nothing, and torchrun soon ends those that wait for it.
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
    elif is_echo and failure and failure.rank is not None and _tells(failure):
        # Another mistake at the same time, of which this rank heard first.
        line, shown = f"ended{where} because {_first_line(failure.message)}", failure.rank
    else:
        return ""
    return (
        f"gpudist: rank {rank} {line}; see rank {shown}'s traceback\n" if endings.are_told() else ""
    )


def _is_echo(error: BaseException, failure: Failure | None, rank: int) -> bool:
    if isinstance(error, RemoteError):
        return True
    if failure is None or failure.rank == rank or not isinstance(error, GpudistError):
        return False
    return str(error).startswith(failure.message)


def _tells(failure: Failure) -> bool:
    """Whether its rank lives to print its traceback."""
    return failure.kind != "PeerFailure" or failure.message.startswith(
        f"rank {failure.rank} raised "
    )


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own program that the exception passed through."""
    own = [
        f" at {os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith(_FOREIGN)
        and "site-packages" not in frame.f_code.co_filename
    ]
    return own[-1] if own else ""


def _first_line(text: str) -> str:
    line, *rest = text.splitlines() or [""]
    return line[:_LINE] + " ..." * bool(rest or len(line) > _LINE)
