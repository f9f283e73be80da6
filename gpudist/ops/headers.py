"""What a source tells its receivers before a block whose shape is known only at run time.

Nobody else need know it, so no agreement of all ranks is made: a header goes where the block goes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from gpudist.errors import PlanMismatch
from gpudist.exchange import Movement, carry_out
from gpudist.ops.agreement import Agreement, Layout
from gpudist.ops.told import BLOCK, ROW_LENGTH, Told
from gpudist.world.partition import Partition


class _ToldLayout(Layout):
    """The blocks that this rank sends and gets; it knows of no others."""

    def __init__(self, name: str, shapes: dict[int, tuple[int, ...]], told: Told) -> None:
        super().__init__(name, (), told.dtype)
        self._shapes = shapes
        self.requires_grad = told.requires_grad

    def shape_of(self, rank: int) -> tuple[int, ...]:
        return self._shapes[rank]

    @property
    def key(self) -> object:
        return "told to receivers"

    @property
    def identity(self) -> object:
        return tuple(self._shapes.items()), self.dtype


class SourceHeaders(Agreement):
    """Resolves a tensor to the blocks this rank sends and gets, which their sources tell.

    Args:
        name: the operator, for errors.
        P_x: the sources.
        P_all: sources and receivers.
        source: rank in ``P_x`` whose block this rank gets, ``None`` if it gets none.
        bind: makes the movement of a block of so many ``int64`` from sources to receivers.

    Cost:
        One message of 104 bytes from each source to its receivers, which read it; sources do not
        wait for them.
    """

    def __init__(
        self,
        name: str,
        P_x: Partition,
        P_all: Partition,
        source: int | None,
        bind: Callable[[int], Movement],
    ) -> None:
        super().__init__(name, P_x, P_all, None, shape="dynamic")
        self._source = source
        self._bind = bind

    @cached_property
    def _movement(self) -> Movement:
        return self._bind(ROW_LENGTH)

    def _gathered(self, x: torch.Tensor) -> Layout:
        rank, source = self._P_x.rank, self._source
        mine = self._tell(x)
        if mine.problem > BLOCK:
            self.refuse(self._error(mine.problem, self._P_all.rank, mine.shape, x))
        row = torch.tensor(mine.row if rank is not None else [], dtype=torch.int64)
        (came,) = carry_out((self._movement,), (row.to(self._P_x.device),))
        shapes = {rank: mine.shape} if rank is not None else {}
        told = mine
        if source is not None and source != rank:
            self._P_x.wire.wait()
            told = Told.of(came.tolist())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            shapes[source] = told.shape
            if rank is not None:
                self._compare(mine, told)
        self.owners_kind = told.kind
        return _ToldLayout(self._name, shapes, told)

    def _compare(self, mine: Told, theirs: Told) -> None:
        """One movement takes this rank's block away and brings another's, in one dtype."""
        for what in ("dtype", "requires_grad"):
            here, there = getattr(mine, what), getattr(theirs, what)
            if here != there:
                self.refuse(
                    PlanMismatch(
                        f"{self._name}: rank {self._P_x.rank} of {self._P_x!r} sends a block whose "
                        f"{what} is {here} and gets one of rank {self._source} whose {what} is "
                        f"{there}; a worker that does both needs them equal"
                    )
                )
