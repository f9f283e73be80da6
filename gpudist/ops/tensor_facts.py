"""Facts about tensors that ranks exchange, and the check for tensors that cannot be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpudist.checks.storage import MOVED_DTYPES, dtype_refusal, storage_problem
from gpudist.errors import GpudistError, ShapeError
from gpudist.world.partition import Partition

MAX_DIMS = 8
# Numbers of the dtypes that can be moved, below 16.
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(MOVED_DTYPES)}
_NO_BLOCK, BLOCK, _WRONG_DIMS, _WRONG_DEVICE, _WRONG_DTYPE, _NO_STORAGE = range(6)


class TensorFacts(NamedTuple):
    """Facts about a rank's tensor, as sent to other ranks.

    Attributes:
        problem: ``BLOCK``, or the reason why the tensor is not a block that can be moved.
        requires_grad: whether a result computed from the tensor now requires grad.
        kind: kind of array as which the tensor was passed.
    """

    problem: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    kind: int

    @classmethod
    def of(cls, row: Sequence[int]) -> TensorFacts:
        """Return the facts encoded as a row of integers, with the first ``MAX_DIMS`` extents."""
        problem, dtype, dims, *shape, requires_grad, kind = row
        return cls(problem, MOVED_DTYPES[dtype], tuple(shape[:dims]), bool(requires_grad), kind)

    @property
    def row(self) -> list[int]:
        """Facts as ``ROW_LENGTH`` integers."""
        shape = self.shape[:MAX_DIMS]
        room = [0] * (MAX_DIMS - len(shape))
        wants = int(self.requires_grad)
        dtype = DTYPE_NUMBERS.get(self.dtype, 0)
        return [self.problem, dtype, len(self.shape), *shape, *room, wants, self.kind]


ROW_LENGTH = 5 + MAX_DIMS


def problem_of(x: torch.Tensor, P_x: Partition, dims: int | None) -> int:
    """Return ``BLOCK``, or why ``x`` is not a block on ``P_x`` (with ``dims`` dims, if given)."""
    if x.device != P_x.device:
        return _WRONG_DEVICE
    if not P_x.active:
        return _NO_BLOCK
    if x.dtype not in DTYPE_NUMBERS:
        return _WRONG_DTYPE
    if storage_problem(x):
        return _NO_STORAGE
    wrong = x.dim() != dims if dims is not None else x.dim() > MAX_DIMS
    return _WRONG_DIMS if wrong else BLOCK


def shape_of(x: torch.Tensor, problem: int) -> tuple[int, ...]:
    """Return the shape of ``x``; empty for other storage, where extents may not be numbers."""
    return tuple(x.shape) if problem != _NO_STORAGE else ()


def problem_error(
    where: str,
    problem: int,
    shape: tuple[int, ...],
    dims: int | None,
    device: torch.device,
    x: torch.Tensor | None,
) -> GpudistError:
    """Return the error for a tensor of ``shape`` with a problem.

    Args:
        where: operator, and the rank that has the tensor.
        dims, device: expected number of dims, and device.
        x: tensor, on the rank that has it.
    """
    if problem == _WRONG_DIMS:
        if dims is None:
            return ShapeError(
                f"{where}: operators support at most {MAX_DIMS} dims, but the block has more; "
                "merge some of them"
            )
        return ShapeError(
            f"{where}: the tensor of shape {list(shape)} has {len(shape)} dims, not {dims}; pass "
            "one with a dim for each axis of P_x, or use a P_x with one axis for each of its dims"
        )
    if problem == _WRONG_DEVICE:
        location = "another device" if x is None else x.device
        return ShapeError(
            f"{where}: the tensor is on {location} but the partition's device is {device}; move "
            "it there with .to()"
        )
    if problem == _NO_STORAGE:
        text = "the tensor is not in strided memory" if x is None else storage_problem(x)
        return ShapeError(f"{where}: {text}")
    return ShapeError(f"{where}: {dtype_refusal(None if x is None else x.dtype)}")
