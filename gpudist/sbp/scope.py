"""Scopes of converted networks, within which plain tensors count as replicated."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch

from gpudist.geometry.layout import Layout
from gpudist.nn.random.replays import Replays
from gpudist.sbp.placement import Placement
from gpudist.world.partition import Partition

if TYPE_CHECKING:
    from gpudist.sbp.pins import Pins

Unknown = Literal["gather", "refuse"]


class PlanRow(NamedTuple):
    """A function that was executed on global tensors.

    Attributes:
        path: path of the module whose forward called it.
        function: name of the function.
        inputs: layouts of its inputs, as text.
        outputs: layouts of its results, as text.
        cells: number of cells of the global results.
        sent_bytes: bytes sent by this rank.
        is_gathered: whether its inputs were gathered because it has no rule.
        is_redundant: whether every worker computed the whole result.
        called: function of the forward that called it, if it is another one; pins name that one.
    """

    path: str
    function: str
    inputs: str
    outputs: str
    cells: int
    sent_bytes: int
    is_gathered: bool
    is_redundant: bool
    called: str = ""


@dataclass
class Record:
    """Rows recorded for one call of a network.

    Attributes:
        sent_bytes: returns the number of bytes that this rank has sent so far.
        rows: one row per function.
        function: short name of the function that the forward is calling.
    """

    sent_bytes: Callable[[], int]
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    function: str = ""

    def add(self, row: PlanRow) -> None:
        """Append a row."""
        is_called = self.function == row.function.rpartition(".")[2]
        self.rows.append(row if is_called else row._replace(called=self.function))


@dataclass(eq=False)
class Draws:
    """State of random numbers that do not depend on a layout.

    Attributes:
        seed: seed of the numbers.
        draws: number of draws so far.
        replays: counters of the replays of CUDA graphs, by device.
        binds: whether modules may call what their forwards were bound to.
    """

    seed: int = field(default=0, kw_only=True)
    draws: int = field(default=0, kw_only=True)
    replays: dict[torch.device, Replays] = field(
        default_factory=dict[torch.device, Replays], kw_only=True
    )
    binds: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        scopes.made.add(self)

    def number(self) -> int:
        """Return the seed of the next draw, the same on every worker."""
        self.draws += 1
        return mix(self.seed, self.draws)


def counts_of_draws() -> dict[Draws, int]:
    """Return the number of draws of every state that this rank has made."""
    return {draws: draws.draws for draws in scopes.made}


def restore_draws(counts: dict[Draws, int]) -> None:
    """Let states go on from these numbers of draws, after work that was undone."""
    for draws, count in counts.items():
        draws.draws = count


@dataclass(eq=False)
class Scope(Draws):
    """State of a network that computes on global tensors.

    Attributes:
        placement: placement of tensors created in the scope.
        home: dims that the axes split, for tensors with ``dims`` dims; a replicated tensor passed
            to a windowed function is split this way.
        dims: number of dims of the inputs that are blocks.
        unknown: treatment of functions without a rule.
        gather_limit_bytes: maximum number of bytes gathered for such a function; ``None`` for twice
            the largest block so far, times the workers.
        largest_block_bytes: size of the largest block of a split tensor so far.
        paths: returns the paths of the network's modules by identity.
        substitutes: tensors that replace the network's parameters, by identity.
        holders: workers over which gradients of further parameters are summed; ``None`` if there
            is only this one.
        learns: whether parameters without a copy are to get one.
        originals: parameters by the identity of the tensors that replace them, also of those that
            are not listed by the network and have got a copy.
        leaves: other leaves that the forward has used with global tensors, by identity.
        name_of: returns the name of a parameter, given the parameter and its copy.
        warned: functions without a rule that have been warned about, with the lines that called
            them.
        record: receives a row for each function, if given.
        applying: number of functions of the user, on full tensors, whose forward is running.
        checkpoint: the outermost activation checkpoint whose forward is running, if any.
        plain_backwards: number of backwards from plain tensors, whose gradients are full.
        pins: layouts that a plan prescribes for functions; ``None`` if it prescribes no layouts.
        calls: number of calls so far of the modules and functions that have pins.
        moves: number of tensors moved so far to their pinned layouts.
        fresh: tensors by identity that nothing has used so far.
        modes: number of torch's function modes in which calls may be bound.
    """

    placement: Placement
    home: tuple[int, ...] = ()
    dims: int = 0
    unknown: Unknown = "gather"
    gather_limit_bytes: int | None = None
    largest_block_bytes: int = 0
    paths: Callable[[], dict[int, str]] = dict
    substitutes: dict[int, Any] = field(default_factory=dict[int, Any])
    holders: Partition | None = None
    learns: bool = False
    originals: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    leaves: dict[int, ref[torch.Tensor]] = field(default_factory=dict[int, "ref[torch.Tensor]"])
    name_of: Callable[[torch.Tensor, Any], str] = lambda x, copy: repr(x)
    warned: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])
    record: Record | None = None
    applying: int = 0
    checkpoint: object | None = None
    plain_backwards: int = 0
    pins: Pins | None = None
    calls: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    moves: int = 0
    fresh: dict[int, Any] = field(default_factory=dict[int, Any])
    modes: int = 0

    def count_call(self, place: tuple[str, str]) -> int:
        """Count a call of a pinned module or function, and return its number in this forward."""
        number = self.calls.get(place, 0)
        self.calls[place] = number + 1
        return number

    def note_block(self, layout: Layout, itemsize: int) -> None:
        """Update the largest block by the first worker's block, which every rank can compute."""
        cells = layout.box((0,) * len(layout.grid)).volume * itemsize
        self.largest_block_bytes = max(self.largest_block_bytes, cells)


def mix(seed: int, draw: int) -> int:
    """Mix seed and draw number into a number of 63 bits."""
    digest = blake2b(f"{seed}/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


AnyDraws = TypeVar("AnyDraws", bound=Draws)


def resume(
    scope: AnyDraws, draws: int, calls: dict[tuple[str, str], int] | None = None
) -> AnyDraws:
    """Return a copy of the scope with ``draws`` draws and ``calls`` done, for a recomputation."""
    if isinstance(scope, Scope):
        return replace(scope, draws=draws, calls=dict(calls or {}))
    return replace(scope, draws=draws)


class Repeatable:
    """A function that checkpointing calls again in backward, outside of converted networks.

    The networks that it calls draw the same numbers again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.starts: list[int] = []
        # Number of the next call of a network, in a repetition.
        self.next: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.run():
            return self.function(*args, **kwargs)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Note the draws of the networks called in this context, or repeat the noted ones."""
        scopes.repeatable.append(self)
        try:
            yield
        finally:
            # A generator that a failed forward left behind may end anywhere.
            if self in scopes.repeatable:
                scopes.repeatable.remove(self)
            self.next = 0


def start_call(scope: Scope) -> Scope:
    """Return the scope of a call of a network, which repeats the draws of a repeated call."""
    draws, noting = scope.draws, list[Repeatable]()
    for function in scopes.repeatable:
        if function.next is None:
            noting.append(function)
        elif function.next < len(function.starts):
            draws = function.starts[function.next]
            function.next += 1
    for function in noting:
        function.starts.append(draws)
    scope.calls = {}
    return scope if draws == scope.draws else resume(scope, draws)


class _Scopes(threading.local):
    """State of a thread, which may be a rank.

    Attributes:
        open, repeatable: scopes, and functions to repeat, innermost last.
        made: states of random numbers that it has made.
    """

    def __init__(self) -> None:
        self.made: WeakSet[Draws] = WeakSet()
        self.open: list[Draws] = []
        self.repeatable: list[Repeatable] = []


scopes = _Scopes()


def current_draws() -> Draws | None:
    """Return the state of the random numbers of this thread, or ``None`` for torch's."""
    return scopes.open[-1] if scopes.open else None


def current_scope() -> Scope | None:
    """Return the scope of the converted network that this thread is running, or ``None``."""
    draws = scopes.open[-1] if scopes.open else None
    return draws if isinstance(draws, Scope) else None


class ScopeEntry(Generic[AnyDraws]):
    """Context in which ``scope`` is the current scope of this thread."""

    def __init__(self, scope: AnyDraws) -> None:
        self._scope = scope

    def __enter__(self) -> AnyDraws:
        scopes.open.append(self._scope)
        return self._scope

    def __exit__(self, *error: object) -> None:
        scopes.open.pop()


enter_scope = ScopeEntry


def path_of_call(scope: Scope, skipped: int = 1) -> str:
    """Return the path of the calling module; ``""`` for the network itself.

    Args:
        scope: scope of the network.
        skipped: number of innermost frames that are not of the network.
    """
    frame, paths = sys._getframe(skipped), scope.paths()
    while frame is not None:
        code = frame.f_code
        # The dict of locals of every frame would take longest.
        if "self" in code.co_varnames or "self" in code.co_freevars:
            path = paths.get(id(frame.f_locals.get("self")))
            if path:
                return path
        frame = frame.f_back
    return ""


def place_of_call(scope: Scope) -> tuple[str, str, int]:
    """Return the path of the calling module, and the file and line of the call in its forward."""
    frame = sys._getframe(1)
    path, file, line = "", "", 0
    while frame is not None and not (path and file):
        room = frame.f_globals.get("__name__", "").partition(".")[0]
        if not file and room not in ("torch", "gpudist", "contextlib"):
            file, line = frame.f_code.co_filename, frame.f_lineno
        path = path or scope.paths().get(id(frame.f_locals.get("self")), "")
        frame = frame.f_back
    return path, file, line


def where_called(scope: Scope) -> str:
    """Return the calling module with the file and line of the call, for a message."""
    path, file, line = place_of_call(scope)
    room = "outside of a network" if current_scope() is None else "the network"
    return f"{path or room} ({file}, line {line})" if file else path or room


def path_of_error(scope: Scope, error: Exception) -> str:
    """Return the path of the module whose code raised ``error``, unless its text has it."""
    path, frame = "", error.__traceback__
    while frame is not None:
        path = scope.paths().get(id(frame.tb_frame.f_locals.get("self")), path)
        frame = frame.tb_next
    has_path = any(form in str(error) for form in (f"{path!r}", f"{path} ("))
    return f"in {path!r}" if path and not has_path else ""
