"""The three ways in which a global tensor lies along one axis of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpudist.arguments import check
from gpudist.errors import PartitionError

Kind = Literal["split", "broadcast", "partial_sum"]
_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Sbp:
    """How a tensor lies along one axis of a placement.

    Attributes:
        kind: ``"split"`` in balanced blocks of one dim, ``"broadcast"``, a copy everywhere, or
            ``"partial_sum"``, terms whose sum is the tensor.
        dim: the dim that is split, ``-1`` for the other two.
    """

    kind: Kind
    dim: int = -1

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
        return f"split({self.dim})" if self.kind == "split" else self.kind

    @property
    def is_split(self) -> bool:
        return self.kind == "split"

    @property
    def dual(self) -> Sbp:
        """What the gradient of such a tensor is: sums and copies change places."""
        return _DUAL.get(self, self)


def split(dim: int) -> Sbp:
    """Balanced blocks of dim ``dim``, counted from the front.

    Raises:
        PartitionError: ``dim`` is negative.
    """
    if type(dim) is not int:
        check(split, "split", (dim,), {})
    if dim < 0:
        raise PartitionError(f"split({dim}): count the dim from the front, from 0 on")
    return Sbp("split", int(dim))


broadcast = Sbp("broadcast")
partial_sum = Sbp("partial_sum")
_DUAL = {broadcast: partial_sum, partial_sum: broadcast}

NdSbp = tuple[Sbp, ...]


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
