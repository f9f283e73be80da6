"""Headers from sources to receivers, sent before blocks whose shapes are known only at run time.

Only the receivers need to know a shape, so a header replaces the agreement of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from gpudist.errors import PlanMismatch
from gpudist.exchange import Movement, carry_out
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement
from gpudist.ops.tensor_facts import BLOCK, ROW_LENGTH, TensorFacts
from gpudist.world.partition import Partition


class _SourceLayout(BlockLayout):
    """Layout of only the blocks that this rank sends and receives."""

    def __init__(self, name: str, shapes: dict[int, tuple[int, ...]], facts: TensorFacts) -> None:
        super().__init__(name, (), facts.dtype)
        self._shapes = shapes
        self.requires_grad = facts.requires_grad

    def shape_of(self, rank: int) -> tuple[int, ...]:
        return self._shapes[rank]

    @property
    def key(self) -> object:
        return "told to receivers"

    @property
    def identity(self) -> object:
        return tuple(self._shapes.items()), self.dtype


class SourceHeaders(ShapeAgreement):
    """Resolve a tensor to the blocks that this rank sends and receives, from the sources' headers.

    Args:
        name: name of the operator, for errors.
        P_x: partition of the sources.
        P_all: partition of sources and receivers.
        source: rank in ``P_x`` whose block this rank receives, ``None`` if it receives none.
        bind: function that binds the movement of a number of ``int64`` from sources to receivers.

    Cost:
        One message of 104 bytes from each source to its receivers. Receivers wait for it; sources
        do not wait for them.
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

    def _gather_layout(self, x: torch.Tensor) -> BlockLayout:
        rank, source = self._P_x.rank, self._source
        mine = self._facts_of(x)
        if mine.problem > BLOCK:
            self.refuse(self._error(mine.problem, self._P_all.rank, mine.shape, x))
        row = torch.tensor(mine.row if rank is not None else [], dtype=torch.int64)
        (header,) = carry_out((self._movement,), (row.to(self._P_x.device),))
        shapes = {rank: mine.shape} if rank is not None else {}
        facts = mine
        if source is not None and source != rank:
            self._P_x.wire.wait()
            facts = TensorFacts.of(header.tolist())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            shapes[source] = facts.shape
            if rank is not None:
                self._compare(mine, facts)
        self.owners_kind = facts.kind
        return _SourceLayout(self._name, shapes, facts)

    def _compare(self, mine: TensorFacts, theirs: TensorFacts) -> None:
        """Raise if the block sent and the block received in one movement differ in dtype."""
        for what in ("dtype", "requires_grad"):
            here, there = getattr(mine, what), getattr(theirs, what)
            if here != there:
                self.refuse(
                    PlanMismatch(
                        f"{self._name}: rank {self._P_x.rank} of {self._P_x!r} sends a block whose "
                        f"{what} is {here} and receives one from rank {self._source} whose {what} "
                        f"is {there}; on a worker that does both they must be equal"
                    )
                )
