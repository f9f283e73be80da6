"""Agreement of the ranks on the blocks and dtype of a distributed tensor, before they plan.

The ranks agree once, by a small all-gather, or the user gives ``global_shape``. Later changes need
no communication if every rank can see them; otherwise they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Literal, NoReturn

import torch

from gpudist.checks.digest import digest_of
from gpudist.errors import GpudistError, PlanMismatch, ShapeError, side_by_side
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.cartesian import index_of, pad_left
from gpudist.ops.arrays import TENSOR
from gpudist.ops.given_shape import wrong_block
from gpudist.ops.tensor_facts import (
    BLOCK,
    TensorFacts,
    problem_error,
    problem_of,
    shape_of,
)
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts

ShapeMode = Literal["static", "dynamic"]


class BlockLayout:
    """Blocks of a distributed tensor by rank of the owning partition, and their dtype.

    It holds either a decomposition of a global tensor or a table of shapes, which need not form
    one.

    Attributes:
        requires_grad: whether any rank needs the gradient, if the ranks have exchanged it.
        has_equal_blocks: whether the ranks have exchanged digests of their blocks, and several
            blocks are all equal and not constant.
    """

    requires_grad: bool | None = None
    has_equal_blocks: bool = False

    def __init__(
        self,
        name: str,
        grid: tuple[int, ...],
        dtype: torch.dtype,
        cut: Decomposition | None = None,
        table: tuple[tuple[int, ...], ...] | None = None,
        placed: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        self._name = name
        self._placed = placed
        self.grid = grid
        self.dtype = dtype
        self._cut = cut
        self._table = table

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the block of ``rank``."""
        if self._table is not None:
            return self._table[rank]
        index = self._placed(rank) if self._placed is not None else index_of(rank, self.grid)
        return self.decomposition.block(pad_left(index, len(self.grid), 0)).shape

    @property
    def dims(self) -> int:
        return len(self.shape_of(0))

    @property
    def key(self) -> object:
        """Key of the layout, the same on all ranks."""
        return self._table if self._table is not None else self._cut

    @property
    def identity(self) -> object:
        """Key by which this rank distinguishes layouts."""
        return self.key, self.dtype

    def with_extents(self, extents: dict[int, int], dtype: torch.dtype) -> BlockLayout:
        """Return the layout with other extents in dims that are not split, and another dtype."""
        if self._table is None:
            cut = self.decomposition.with_extents(extents)
            return BlockLayout(self._name, self.grid, dtype, cut, placed=self._placed)
        table = tuple(
            tuple(extents.get(d, n) for d, n in enumerate(shape)) for shape in self._table
        )
        return BlockLayout(self._name, self.grid, dtype, table=table)

    @cached_property
    def decomposition(self) -> Decomposition:
        """Decomposition of the global tensor: the product of one list of blocks per dim.

        Raises:
            ShapeError: on every rank alike, if the blocks' shapes are not such a product.
        """
        if self._cut is not None:
            return self._cut
        assert self._table is not None
        dims: list[Blocks] = []
        for d, parts in enumerate(self.grid):
            sizes = [0] * parts
            for rank, shape in enumerate(self._table):
                sizes[index_of(rank, self.grid)[d]] = shape[d]
            dims.append(Blocks.of_sizes(sizes))
        cut = Decomposition(tuple(dims))
        for rank, shape in enumerate(self._table):
            expected = cut.block(index_of(rank, self.grid)).shape
            if shape != expected:
                raise ShapeError(
                    f"{self._name}: the blocks do not form one tensor: rank {rank} has "
                    f"{list(shape)}, but its neighbours in the grid {list(self.grid)} imply "
                    f"{list(expected)}; pass matching blocks"
                )
        return cut


class ShapeAgreement:
    """Resolve a rank's tensor, or its placeholder, to the layout shared by all ranks.

    Args:
        name: name of the operator, for errors.
        P_x: partition of the blocks.
        P_all: partition of all workers that need to know the blocks; contains ``P_x``.
        dims: number of dims the blocks must have, ``None`` for any.
        global_shape: shape of the balanced global tensor; saves the all-gather.
        shape: ``"static"`` agrees once, ``"dynamic"`` at every call.
        grid: grid that splits the tensor, by default ``P_x``'s shape; axes are counted from the
            last dim.
        placed: function that returns the index of a rank's block on that grid, if it is not the
            rank's own index.
        digest: digest of a block, 0 for a constant one, to exchange if all blocks have one shape.
        remedy: what to do where a block changes in a way its peers cannot know.
        partitions: partitions that must be equal on all ranks, such as that of a gather's root.
        alike: further arguments that must be.
        differing: error for ranks on which they differ, with ``{}`` for a line of each.

    Attributes:
        kind: kind of this rank's input at this call: a tensor, or an array of another library.
        owners_kind: kind of the input of the first rank of ``P_x`` when the ranks last agreed.
    """

    def __init__(
        self,
        name: str,
        P_x: Partition,
        P_all: Partition,
        dims: int | None,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        grid: Sequence[int] | None = None,
        placed: Callable[[int], tuple[int, ...]] | None = None,
        digest: Callable[[torch.Tensor], int] | None = None,
        remedy: str = "pass global_shape=, or shape='dynamic' to agree at every call",
        partitions: Sequence[Partition] = (),
        alike: str = "",
        differing: str = "the ranks pass different partitions or roots:{}\npass the same on all",
    ) -> None:
        if shape not in ("static", "dynamic"):
            raise ShapeError(f"{name}: shape is {shape!r}; it must be 'static' or 'dynamic'")
        if global_shape is not None and shape == "dynamic":
            raise ShapeError(
                f"{name}: global_shape={list(global_shape)} and shape='dynamic' are both given, "
                "but 'dynamic' agrees on the shape at every call; pass only one"
            )
        self._name = name
        self._P_x = P_x
        self._P_all = P_all
        self._is_seen_by_all = set(P_all.ranks) == set(P_x.ranks)
        self._dims = dims
        self._cut = tuple(grid) if grid is not None else P_x.shape
        self._placed = placed
        self._digest = digest
        self._remedy = remedy
        self._partitions, self._alike, self._differing = partitions, alike, differing
        self._number_alike = int.from_bytes(
            digest_of(alike.encode(), *(P.digest for P in partitions))[:7], "little"
        )
        self._dynamic = shape == "dynamic"
        self._agreed: BlockLayout | None = None
        self.kind = self.owners_kind = TENSOR
        self._global_shape = None if global_shape is None else tuple(global_shape)

    def _grid(self, dims: int) -> tuple[int, ...]:
        return pad_left(self._cut, dims, 1) if len(self._cut) <= dims else ()

    def __call__(self, x: torch.Tensor) -> BlockLayout:
        """Return the layout that follows from ``x``; collective if the ranks have not agreed yet.

        Raises:
            ShapeError: a block has the wrong number of dims or is on the wrong device.
            PlanMismatch: a block changed in a way its peers cannot know.
        """
        if self._global_shape is not None:
            return self.adapt(self._layout_of_global_shape(x), x)
        if self._agreed is None or self._dynamic:
            self._agreed = self._gather_layout(x)
            return self._agreed
        return self.adapt(self._agreed, x)

    def set_layout(self, layout: BlockLayout) -> None:
        """Set ``layout`` as the agreed one; every rank must know it without a message."""
        self._agreed = layout

    @property
    def number(self) -> int:
        """Digest of the last layout agreed on, the same on all ranks; 0 before any agreement."""
        if self._agreed is None:
            return 0
        key = repr(self._agreed.identity).encode()
        return int.from_bytes(blake2b(key, digest_size=7).digest(), "little")

    def confirm(self, x: torch.Tensor, expected: int) -> None:
        """Agree again, for a compiled graph, which cannot adapt to other blocks.

        Raises:
            PlanMismatch: on every rank, if the layout does not have the expected number.
        """
        layout = self(x)
        if self.number != expected:
            self.refuse(
                PlanMismatch(
                    f"{self._name}: agreed on {layout.key} of {layout.dtype}, but this rank's "
                    "graph was compiled for other blocks, and the rank cannot detect the "
                    "difference; call it outside torch.compile"
                )
            )

    def _problem(self, x: torch.Tensor) -> int:
        return problem_of(x, self._P_x, self._dims)

    def _layout_of_global_shape(self, x: torch.Tensor) -> BlockLayout:
        assert self._global_shape is not None
        problem = self._problem(x)
        if problem > BLOCK:
            self.reject(self._error(problem, self._P_all.rank, shape_of(x, problem), x))
        whole = self._global_shape
        grid = self._grid(len(whole))
        cut = Decomposition.balanced(whole, grid)
        layout = BlockLayout(self._name, grid, x.dtype, cut, placed=self._placed)
        if self._P_x.rank is not None:
            expected = layout.shape_of(self._P_x.rank)
            error = wrong_block(self._name, self._P_x, x.shape, expected, whole, grid)
            if error is not None:
                self.refuse(error)
        return layout

    def _facts_of(self, x: torch.Tensor) -> TensorFacts:
        problem = self._problem(x)
        return TensorFacts(problem, x.dtype, shape_of(x, problem), wants_gradient(x), self.kind)

    def _gather_layout(self, x: torch.Tensor) -> BlockLayout:
        inferred = self._infer_layout(x)
        if inferred is not None:
            return inferred
        rows = self._P_all.allgather_data([*self._facts_of(x).row, self._number_alike])
        if len({row[-1] for row in rows}) > 1:
            ends = [f"{list(P.shape)} from rank {P.ranks[0]} on" for P in self._partitions]
            texts = gather_texts(self._P_all, " to ".join([self._alike, *ends]).encode())
            views = {rank: text.decode() for rank, text in enumerate(texts)}
            raise PlanMismatch(f"{self._name}: {self._differing.format(side_by_side(views))}")
        facts = [TensorFacts.of(row[:-1]) for row in rows]
        for rank, row in enumerate(facts):
            if row.problem > BLOCK:
                own_block = x if rank == self._P_all.rank else None
                raise self._error(row.problem, rank, row.shape, own_block)
        by_world_rank = dict(zip(self._P_all.ranks, facts, strict=True))
        owners = [by_world_rank[rank] for rank in self._P_x.ranks]
        self.owners_kind = owners[0].kind
        dtypes = {row.dtype for row in owners}
        dims = {len(row.shape) for row in owners}
        if len(dtypes) > 1 or len(dims) > 1:
            raise PlanMismatch(
                f"{self._name}: the blocks of {self._P_x!r} do not belong to one tensor:"
                + side_by_side(
                    {
                        rank: f"{row.dtype} {list(row.shape)}, {len(row.shape)} dims"
                        for rank, row in enumerate(owners)
                    }
                )
            )
        shapes = tuple(row.shape for row in owners)
        layout = BlockLayout(self._name, self._grid(dims.pop()), dtypes.pop(), table=shapes)
        layout.requires_grad = any(row.requires_grad for row in owners)
        last = self._agreed
        if last is not None and last.key == shapes:
            is_same = (last.dtype, last.requires_grad) == (layout.dtype, layout.requires_grad)
            # Its decomposition is known.
            return last if is_same else layout
        if self._digest is not None and len(owners) > 1 and len(set(shapes)) == 1:
            digest = self._digest(x) if self._P_x.active else 0
            numbers = [number for (number,) in self._P_all.allgather_data([digest])]
            digests = {numbers[self._P_all.ranks.index(rank)] for rank in self._P_x.ranks}
            layout.has_equal_blocks = len(digests) == 1 and 0 not in digests
        return layout

    def _infer_layout(self, x: torch.Tensor) -> BlockLayout | None:
        """Return the layout if the transport knows it without other ranks, else ``None``."""
        if self._P_x.rank is None or self._problem(x) > BLOCK:
            return None
        grid = self._grid(x.dim())
        index = (
            self._placed(self._P_x.rank)
            if self._placed is not None
            else index_of(self._P_x.rank, self._cut)
        )
        shape = self._P_x.wire.known_global_shape(x.shape, grid, pad_left(index, len(grid), 0))
        if shape is None:
            return None
        cut = Decomposition.balanced(shape, grid)
        return BlockLayout(self._name, grid, x.dtype, cut, placed=self._placed)

    def adapt(self, agreed: BlockLayout, x: torch.Tensor) -> BlockLayout:
        """Return ``agreed`` with the allowed changes: the dtype, and dims that are not split.

        Raises:
            PlanMismatch: a block changed in a way its peers cannot know.
        """
        dims = agreed.dims
        free = [d for d in range(dims) if not agreed.grid or agreed.grid[d] == 1]
        changed: dict[int, int] = {}
        dtype = agreed.dtype
        if self._P_x.rank is not None:
            problem = self._problem(x)
            if problem > BLOCK:
                self.reject(self._error(problem, self._P_all.rank, shape_of(x, problem), x))
            mine = agreed.shape_of(self._P_x.rank)
            dtype = x.dtype
            if x.dim() != dims or any(x.shape[d] != mine[d] for d in range(dims) if d not in free):
                self._refuse_change(f"{list(mine)}", f"{list(x.shape)}")
            changed = {d: x.shape[d] for d in free if x.shape[d] != mine[d]}
            if not self._is_seen_by_all and (dtype != agreed.dtype or changed.keys() - {0}):
                # A placeholder can show a batch size and nothing else.
                self._refuse_change(f"{agreed.dtype} {list(mine)}", f"{x.dtype} {list(x.shape)}")
        elif x.dim() == 2 and x.shape[1] == 0 and 0 in free and x.shape[0] != agreed.shape_of(0)[0]:
            changed = {0: x.shape[0]}
        before = agreed.shape_of(self._P_x.rank or 0)
        fills_or_empties = any((extent == 0) != (before[d] == 0) for d, extent in changed.items())
        if fills_or_empties and not self._is_seen_by_all:
            # Blocks without cells send nothing, so a receiver would not know.
            now = [changed.get(d, extent) for d, extent in enumerate(before)]
            self._refuse_change(f"{list(before)}", f"{now}")
        if not changed and dtype == agreed.dtype:
            return agreed
        return agreed.with_extents(changed, dtype)

    def _refuse_change(self, agreed: str, now: str) -> NoReturn:
        self.refuse(
            PlanMismatch(
                f"{self._name}: the block of rank {self._P_x.rank or 0} of {self._P_x!r} was "
                f"agreed on as {agreed} and is now {now}, which the other ranks cannot know; "
                f"{self._remedy}"
            )
        )

    def _error(
        self, problem: int, rank: int | None, shape: tuple[int, ...], x: torch.Tensor | None
    ) -> GpudistError:
        where = f"{self._name}, rank {rank} of {self._P_all!r}"
        return problem_error(where, problem, shape, self._dims, self._P_x.device, x)

    def refuse(self, error: GpudistError) -> NoReturn:
        """Raise on all ranks; see :func:`refuse`."""
        refuse(self._P_x, error)

    def reject(self, error: GpudistError) -> NoReturn:
        """Raise for a tensor that no rank may pass; if only some ranks pass one, on all ranks."""
        if not self._is_seen_by_all:
            self.refuse(error)
        reject(self._P_x, error)


def wants_gradient(x: torch.Tensor) -> bool:
    """Return whether a result computed from ``x`` now requires grad."""
    return x.requires_grad and torch.is_grad_enabled()


def reject(P: Partition, error: GpudistError) -> NoReturn:
    """Raise for an argument that ranks of one program reject alike, before anything was sent."""
    P.wire.reject(error, P.ranks)


def refuse(P: Partition, error: GpudistError) -> NoReturn:
    """Raise here and on the waiting ranks, for an error that only this rank knows."""
    P.wire.refuse(error)
