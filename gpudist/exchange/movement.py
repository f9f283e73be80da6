"""A linear operator on this rank, bound to partitions, shapes and a dtype."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from gpudist.checks.digest import digest_of
from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Plan, Stage
from gpudist.world.partition import Partition


class Step(NamedTuple):
    """A stage, and the partition whose ranks its messages name."""

    stage: Stage
    partition: Partition


@dataclass(frozen=True, eq=False)
class Movement:
    """This rank's part of a linear operator, ready to be carried out on a tensor.

    Attributes:
        label: the operator and partitions in words.
        identity: 16 bytes all ranks of the operator share.
        steps: carried out in order; as many on every rank.
        input_shape, output_shape: of this rank's tensors, zero-volume placeholders included.
        dtype: of the data that moves.
        input_dtype, output_dtype: of this rank's tensors; a placeholder keeps its own.
        fill: value of output cells nothing moves to. It is a constant, so adjoints fill with zero.
        is_passing: its shapes are those of one call and may never come again, so that what the
            transport makes for it is not kept for long.
    """

    label: str
    identity: bytes
    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    input_dtype: torch.dtype
    output_dtype: torch.dtype
    fill: float = 0.0
    is_passing: bool = False
    _forward: Movement | None = field(default=None, repr=False)

    @cached_property
    def T(self) -> Movement:
        """The adjoint movement. ``movement.T.T`` is the linear part of ``movement``."""
        if self._forward is not None:
            return self._forward
        linear = self if self.fill == 0 else replace(self, fill=0.0)
        return Movement(
            f"adjoint of {self.label}",
            digest_of(self.identity, b"T"),
            tuple(Step(step.stage.T, step.partition) for step in reversed(self.steps)),
            self.output_shape,
            self.input_shape,
            self.dtype,
            self.output_dtype,
            self.input_dtype,
            is_passing=self.is_passing,
            _forward=linear,
        )

    def then(self, other: Movement) -> Movement:
        """The composition: this movement, then ``other``, as one."""
        return Movement(
            f"{self.label}, then {other.label}",
            digest_of(self.identity, other.identity),
            self.steps + other.steps,
            self.input_shape,
            other.output_shape,
            self.dtype,
            self.input_dtype,
            other.output_dtype,
            self.fill,
            self.is_passing or other.is_passing,
        )

    def passing(self) -> Movement:
        """The same movement, for the shapes of one call."""
        return replace(self, is_passing=True)


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
        partition: holds every worker that takes part.
        label: the operator in words.
        dtype: of the data that moves.
        placeholder: shape of this rank's input where the plan gives it no block.
        placeholder_dtype: its dtype; a zero-volume output has the same.
        empty: shape of this rank's output where the plan gives it no block.
        fill: value of output cells nothing moves to.

    Raises:
        ShapeError: the plan, or its adjoint, adds but the dtype has no sum.
    """
    adds = any(
        stage.destinations_overlap or any(c.kind != "broadcast" for c in stage.collectives)
        for stage in plan.stages
    )
    if adds and dtype == torch.bool:
        raise ShapeError(f"{label}: torch.bool has no sum; convert to an integer dtype first")
    has_input, has_output = plan.input_shape is not None, plan.output_shape is not None
    key = (plan.identity, partition.digest, str(dtype))
    return Movement(
        f"{label} of {dtype}",
        digest_of(repr(key).encode()),
        tuple(Step(stage, partition) for stage in plan.stages),
        plan.input_shape if plan.input_shape is not None else tuple(placeholder),
        plan.output_shape if plan.output_shape is not None else tuple(empty),
        dtype,
        dtype if has_input else placeholder_dtype,
        dtype if has_output else placeholder_dtype,
        fill,
    )
