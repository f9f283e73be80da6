"""Where a plain tensor among global ones is a whole one: the calls of converted networks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from gpudist.sbp.placement import Placement

Unknown = Literal["gather", "refuse"]


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
    """

    placement: Placement
    home: tuple[int, ...] = ()
    dims: int = 0
    unknown: Unknown = "gather"
    gather_limit_bytes: int | None = None
    largest_block_bytes: int = 0
    seed: int = 0
    draws: int = field(default=0)


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
