"""The three ways in which a global tensor lies along one axis of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gpudist.arguments import check
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import balanced_block

Kind = Literal["split", "broadcast", "partial_sum"]
_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Sbp:
    """How a tensor lies along one axis of a placement.

    Attributes:
        kind: ``"split"`` in blocks of one dim, ``"broadcast"``, a copy everywhere, or
            ``"partial_sum"``, terms whose sum is the tensor.
        dim: the dim that is split, ``-1`` for the other two.
        sizes: cells of each block, ``None`` for balanced blocks.
    """

    kind: Kind
    dim: int = -1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # At a glance: operators on global tensors make many.
        if type(self.dim) is not int or type(self.kind) is not str:
            check(Sbp.__init__, "Sbp", (None, self.kind, self.dim), {})
        if self.kind not in _KINDS:
            raise PartitionError(f"Sbp: kind is {self.kind!r}; it must be one of {_KINDS}")

    def __call__(self) -> Sbp:
        """Itself, so that ``broadcast()`` and ``broadcast`` are one."""
        return self

    def __repr__(self) -> str:
        if self.kind != "split":
            return self.kind
        sizes = "" if self.sizes is None else f", sizes={list(self.sizes)}"
        return f"split({self.dim}{sizes})"

    @property
    def is_split(self) -> bool:
        return self.kind == "split"

    def cells(self, extent: int, parts: int, index: int) -> tuple[int, int]:
        """Start and stop of block ``index`` of ``parts`` of a dim of ``extent`` cells."""
        if self.sizes is None:
            return balanced_block(extent, parts, index)
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    def moved(self, dim: int) -> Sbp:
        """The same cuts of another dim."""
        return replace(self, dim=dim)

    @property
    def dual(self) -> Sbp:
        """What the gradient of such a tensor is: sums and copies change places."""
        return _DUAL.get(self, self)


NdSbp = tuple[Sbp, ...]


def split(dim: int, sizes: Sequence[int] | None = None) -> Sbp:
    """Blocks of dim ``dim``, counted from the front.

    Args:
        dim: the dim that is split.
        sizes: cells of each block along the axis, in its order; may be 0. By default blocks are
            balanced, ``n // p`` cells and one more in the first ``n % p``. Sizes that are those of
            balanced blocks are no different from none.

    Raises:
        PartitionError: ``dim`` or a size is negative.
    """
    if type(dim) is not int or sizes is not None:
        check(split, "split", (dim, sizes), {})
    if dim < 0:
        raise PartitionError(f"split({dim}): count the dim from the front, from 0 on")
    if sizes is None:
        return Sbp("split", int(dim))
    cut = tuple(int(size) for size in sizes)
    if not cut or min(cut) < 0:
        raise PartitionError(f"split({dim}, sizes={list(cut)}): give each block 0 cells or more")
    is_balanced = all(
        size == stop - start
        for i, size in enumerate(cut)
        for start, stop in [balanced_block(sum(cut), len(cut), i)]
    )
    return Sbp("split", int(dim), None if is_balanced else cut)


def check_cuts(sbp: NdSbp, grid: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless all explicit cuts are of whole dims, one block a worker."""
    cut: set[int] = set()
    for axis, (one, parts) in enumerate(zip(sbp, grid, strict=True)):
        if one.sizes is None:
            cut.add(one.dim)
            continue
        if len(one.sizes) != parts or sum(one.sizes) != shape[one.dim]:
            raise ShapeError(
                f"{one!r}: axis {axis} has {parts} workers and dim {one.dim} {shape[one.dim]} "
                f"cells, but there are {len(one.sizes)} blocks of {sum(one.sizes)} cells; give a "
                "size for each worker, which add up to the dim"
            )
        if one.dim in cut:
            raise ShapeError(
                f"{one!r}: an axis before axis {axis} splits dim {one.dim} too; sizes are of the "
                "outermost axis that splits a dim"
            )
        cut.add(one.dim)


broadcast = Sbp("broadcast")
partial_sum = Sbp("partial_sum")
_DUAL = {broadcast: partial_sum, partial_sum: broadcast}


def nd_sbp(sbp: Sbp | Sequence[Sbp], axes: int, dims: int | None = None) -> NdSbp:
    """``sbp`` as one attribute an axis.

    Args:
        sbp: attributes, outer axis first, or one for the only axis.
        axes: of the placement.
        dims: of the tensor, if it is known.

    Raises:
        PartitionError: there are not as many attributes as axes, or a dim does not exist.
    """
    given = (sbp,) if isinstance(sbp, Sbp) else tuple(sbp)
    if len(given) != axes or not all(isinstance(one, Sbp) for one in given):
        raise PartitionError(
            f"sbp={sbp!r}: give one of split(dim), broadcast and partial_sum for each of the "
            f"{axes} axes of the placement"
        )
    for one in given:
        if dims is not None and one.dim >= dims:
            raise PartitionError(f"{one!r}: the tensor has {dims} dims, numbered from 0")
    return given


def dual(sbp: NdSbp) -> NdSbp:
    """The attributes of the gradient of a tensor with attributes ``sbp``."""
    return tuple(one.dual for one in sbp)
