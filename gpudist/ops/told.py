"""Facts that a rank tells of its tensor, and the tensors that no operator moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpudist.checks.storage import storage_problem
from gpudist.errors import GpudistError, ShapeError
from gpudist.world.partition import Partition

MAX_DIMS = 8
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NO_BLOCK, BLOCK, _WRONG_DIMS, _WRONG_DEVICE, _WRONG_DTYPE, _NO_STORAGE = range(6)


class Told(NamedTuple):
    """What a rank tells of its tensor.

    Attributes:
        problem: ``BLOCK``, or why there is none that can be moved.
        requires_grad: whether what is made of the tensor now does.
        kind: of array that the tensor was given as.
    """

    problem: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    kind: int

    @classmethod
    def of(cls, row: Sequence[int]) -> Told:
        """What a row says; of too many dims it has the first ones."""
        problem, dtype, dims, *shape, requires_grad, kind = row
        return cls(problem, _DTYPES[dtype], tuple(shape[:dims]), bool(requires_grad), kind)

    @property
    def row(self) -> list[int]:
        """As ``ROW_LENGTH`` integers."""
        shape = self.shape[:MAX_DIMS]
        dtype = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else 0
        room = [0] * (MAX_DIMS - len(shape))
        wants = int(self.requires_grad)
        return [self.problem, dtype, len(self.shape), *shape, *room, wants, self.kind]


ROW_LENGTH = 5 + MAX_DIMS
# These end the world on every rank, at whichever call they come.
NEVER_MOVED = (_WRONG_DTYPE, _NO_STORAGE)


def problem_of(x: torch.Tensor, P_x: Partition, dims: int | None) -> int:
    """``BLOCK``, or why ``x`` is no block of a tensor on ``P_x``, with ``dims`` dims if any."""
    if x.device != P_x.device:
        return _WRONG_DEVICE
    if not P_x.active:
        return _NO_BLOCK
    if x.dtype not in _DTYPES:
        return _WRONG_DTYPE
    if storage_problem(x):
        return _NO_STORAGE
    wrong = x.dim() != dims if dims is not None else x.dim() > MAX_DIMS
    return _WRONG_DIMS if wrong else BLOCK


def shape_of(x: torch.Tensor, problem: int) -> tuple[int, ...]:
    """The shape of ``x``; empty in other storage, where extents may be no numbers."""
    return tuple(x.shape) if problem != _NO_STORAGE else ()


def problem_error(
    where: str,
    problem: int,
    shape: tuple[int, ...],
    dims: int | None,
    device: torch.device,
    x: torch.Tensor | None,
) -> GpudistError:
    """The refusal of a tensor of ``shape`` for a problem, in words.

    Args:
        where: the operator, and the rank that has the tensor.
        dims, device: that it must have.
        x: the tensor, on the rank that has it.
    """
    if problem == _WRONG_DIMS:
        if dims is None:
            return ShapeError(f"{where}: the block has more dims than at most {MAX_DIMS}")
        return ShapeError(
            f"{where}: the block of shape {list(shape)} has {len(shape)} dims, not {dims}; the "
            "partition has one axis per dim of the tensor"
        )
    if problem == _WRONG_DEVICE:
        found = "another device" if x is None else x.device
        return ShapeError(
            f"{where}: the tensor is on {found} but the partition's is {device}; move it there "
            "with .to()"
        )
    if problem == _NO_STORAGE:
        text = "the tensor is not in strided memory" if x is None else storage_problem(x)
        return ShapeError(f"{where}: {text}")
    dtype = "it" if x is None else x.dtype
    known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
    return ShapeError(
        f"{where}: the dtype cannot be moved: {dtype} is none of {known}; convert the tensor, or "
        "where nothing is added move its bytes, x.view(torch.uint8)"
    )
