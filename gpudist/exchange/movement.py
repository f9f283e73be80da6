"""Movements: linear operators bound to partitions, shapes and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from gpudist.cache import Cache
from gpudist.checks.digest import digest_of
from gpudist.checks.storage import MOVED_DTYPES, dtype_refusal
from gpudist.errors import ShapeError
from gpudist.exchange.step import MovementStep, memory_format_of
from gpudist.geometry.boxes import Plan, Stage
from gpudist.world.partition import Partition


@dataclass(frozen=True, eq=False)
class Movement:
    """This rank's part of a linear operator, ready to be applied to a tensor.

    Attributes:
        label: description of the operator and its partitions.
        identity: 16-byte digest, equal on all ranks of the operator.
        stages: stages in order, each with the partition to which the ranks in its messages refer;
            their number is equal on all ranks.
        input_shape, output_shape: shapes of this rank's tensors or zero-volume placeholders.
        dtype: dtype of the data that moves.
        input_dtype, output_dtype: dtypes of this rank's tensors; a placeholder keeps its own.
        fill: value of output cells that receive nothing; constant, so the adjoint fills with zero.
        is_guarded: whether the output becomes NaN if the world fails on the way.
        kept: what repeated calls reuse, see :mod:`gpudist.exchange.carry`.
    """

    label: str
    identity: bytes
    stages: tuple[tuple[Stage, Partition], ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    input_dtype: torch.dtype
    output_dtype: torch.dtype
    fill: float = 0.0
    is_guarded: bool = True
    _forward: Movement | None = field(default=None, repr=False)
    kept: Cache[object, Any] = field(default_factory=Cache, init=False, repr=False)

    @cached_property
    def steps(self) -> tuple[MovementStep, ...]:
        """Steps in order, one per stage."""
        return tuple(MovementStep(self, depth) for depth in range(len(self.stages)))

    @cached_property
    def T(self) -> Movement:
        """Adjoint movement. ``movement.T.T`` is the linear part of ``movement``."""
        if self._forward is not None:
            return self._forward
        linear = self if self.fill == 0 else replace(self, fill=0.0)
        return Movement(
            f"adjoint of {self.label}",
            digest_of(self.identity, b"T"),
            tuple((stage.T, partition) for stage, partition in reversed(self.stages)),
            self.output_shape,
            self.input_shape,
            self.dtype,
            self.output_dtype,
            self.input_dtype,
            is_guarded=self.is_guarded,
            _forward=linear,
        )

    @cached_property
    def unguarded(self) -> Movement:
        """This movement for kernels that read the transport's ``failed_word`` themselves."""
        return replace(self, is_guarded=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Movement:
        # Immutable but for what it keeps, which belongs to the transport: copies of layers share.
        return self

    def then(self, other: Movement) -> Movement:
        """Return the composition of this movement, applied first, and ``other``."""
        return Movement(
            f"{self.label}, then {other.label}",
            digest_of(self.identity, other.identity),
            self.stages + other.stages,
            self.input_shape,
            other.output_shape,
            self.dtype,
            self.input_dtype,
            other.output_dtype,
            self.fill,
        )


# No process can address more.
_MOST_BYTES = 2**56


def bind(
    plan: Plan,
    partition: Partition,
    label: str,
    dtype: torch.dtype,
    placeholder: torch.Size | tuple[int, ...],
    placeholder_dtype: torch.dtype,
    empty: tuple[int, ...] = (0,),
    fill: float = 0.0,
) -> Movement:
    """Bind ``plan``, whose ranks are those of ``partition``, to tensors.

    Args:
        plan: this rank's plan.
        partition: partition of every worker that takes part.
        label: description of the operator.
        dtype: dtype of the data that moves.
        placeholder: shape of this rank's input if it has no input block.
        placeholder_dtype: dtype of this placeholder, and of a zero-volume output.
        empty: shape of this rank's output if it has no output block.
        fill: value of output cells that receive nothing.

    Raises:
        ShapeError: the plan or its adjoint adds, but the dtype has no sum; or, on every rank alike,
            a block has more bytes than any memory.
    """
    adds = any(
        stage.destinations_overlap or any(c.kind != "broadcast" for c in stage.collectives)
        for stage in plan.stages
    )
    if dtype not in MOVED_DTYPES:
        raise ShapeError(f"{label}: {dtype_refusal(dtype)}")
    if adds and dtype == torch.bool:
        raise ShapeError(f"{label}: torch.bool has no sum; convert to an integer dtype first")
    size_bytes = dtype.itemsize * prod(plan.output_shape or ())
    if size_bytes >= _MOST_BYTES:
        shape = list(plan.output_shape or ())
        text = f"{label}: a block of the result would have shape {shape}, {size_bytes} bytes"
        partition.wire.refuse(ShapeError(f"{text}; check the widths and sizes"))
    has_input, has_output = plan.input_shape is not None, plan.output_shape is not None
    key = (plan.identity, partition.digest, str(dtype))
    return Movement(
        f"{label} of {dtype}",
        digest_of(repr(key).encode()),
        tuple((stage, partition) for stage in plan.stages),
        plan.input_shape if plan.input_shape is not None else tuple(placeholder),
        plan.output_shape if plan.output_shape is not None else tuple(empty),
        dtype,
        dtype if has_input else placeholder_dtype,
        dtype if has_output else placeholder_dtype,
        fill,
    )


def output_form(movement: Movement, strides: Sequence[int]) -> torch.memory_format:
    """Return the memory format of a movement's output for an input with these strides."""
    form = None
    for stage, partition in movement.stages:
        form = memory_format_of(stage, partition, strides)
        shape = stage.output_shape or ()
        strides = torch.empty(shape, device="meta", memory_format=form).stride()
    return form if form is not None else torch.contiguous_format
