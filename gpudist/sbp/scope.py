"""Where a plain tensor among global ones is a whole one: the calls of converted networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal, NamedTuple

import torch

from gpudist.sbp.layout import Layout
from gpudist.sbp.placement import Placement

Unknown = Literal["gather", "refuse"]


class Row(NamedTuple):
    """A function that was carried out on global tensors.

    Attributes:
        path: of the module whose forward called it.
        function: its name.
        inputs, outputs: how its tensors lie, as text.
        cells: of the results, as wholes.
        sent_bytes: by this rank.
        is_gathered: it has no rule: its inputs were gathered.
        is_redundant: every worker computed the whole.
    """

    path: str
    function: str
    inputs: str
    outputs: str
    cells: int
    sent_bytes: int
    is_gathered: bool
    is_redundant: bool


@dataclass
class Record:
    """The rows of a call.

    Attributes:
        sent_bytes: how many this rank has sent so far.
    """

    sent_bytes: Callable[[], int]
    rows: list[Row] = field(default_factory=list[Row])


@dataclass
class Scope:
    """What holds while a network computes on global tensors.

    Attributes:
        placement: of tensors that are made within.
        home: dims that its axes split of a tensor with as many dims as ``dims``: where a whole one
            meets a windowed function it is cut like that.
        dims: of the inputs that are blocks.
        unknown: what is done with a function that has no rule.
        gather_limit_bytes: the most that may be gathered for such a function; ``None`` for twice
            the largest block so far, times the workers.
        largest_block_bytes: of the blocks of split tensors seen so far.
        seed: of the random numbers that are drawn within.
        draws: how many draws there were.
        paths: gives those of the network's modules, by identity.
        lent: what is used in place of the network's parameters, by identity.
        warned: where a function without a rule was met.
        record: gets what is carried out, if anybody asks.
    """

    placement: Placement
    home: tuple[int, ...] = ()
    dims: int = 0
    unknown: Unknown = "gather"
    gather_limit_bytes: int | None = None
    largest_block_bytes: int = 0
    seed: int = 0
    draws: int = 0
    paths: Callable[[], dict[int, str]] = dict
    lent: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    warned: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])

    record: Record | None = None

    def seen(self, layout: Layout, itemsize: int) -> None:
        """Remember how large blocks are: that of the first worker, which all ranks know."""
        cells = layout.box((0,) * len(layout.grid)).volume * itemsize
        self.largest_block_bytes = max(self.largest_block_bytes, cells)

    def number(self) -> int:
        """What seeds the next draw, the same on every worker."""
        self.draws += 1
        return mixed(self.seed, self.draws)


def mixed(seed: int, draw: int) -> int:
    """A number of 63 bits for a draw."""
    digest = blake2b(f"{seed}/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def resumed(scope: Scope, draws: int) -> Scope:
    """The same scope after so many draws, for what is computed once more."""
    return replace(scope, draws=draws)


class _Scopes(threading.local):
    """Those of a thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Scope] = []


_scopes = _Scopes()


def current_scope() -> Scope | None:
    """That of the converted network that this thread is in, if it is in one."""
    return _scopes.open[-1] if _scopes.open else None


@contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Hold ``scope`` on this thread."""
    _scopes.open.append(scope)
    try:
        yield scope
    finally:
        _scopes.open.pop()
