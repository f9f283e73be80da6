"""Steps of movements: a stage of a plan, bound by the transport when it is first carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpudist import recycling
from gpudist.checks.storage import storage_problem, with_memory
from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Stage
from gpudist.transport.base import StageCall
from gpudist.transport.flight_recorder import Post, posts_between
from gpudist.world.partition import Partition

if TYPE_CHECKING:
    from gpudist.exchange.movement import Movement

Make = Callable[[], "torch.Tensor | None"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class MovementStep:
    """Stage of a movement, with everything that repeated calls need.

    Transports read the attributes. It does not refer to its movement, which keeps it.

    Attributes:
        stage: stage of this rank's plan.
        partition: partition to which the ranks in the messages of the stage refer.
        label, dtype, fill, is_guarded: those of the movement.
        input_shape, input_dtype: what the input must have; ``None`` if it is the output of the
            step before.
        takes, gives: whether this rank has an input, and an output.
        make_output: creates the output of a rank without an output block.
        bound: bound stage and function that creates its output, by the strides of the input.
    """

    def __init__(self, movement: Movement, depth: int) -> None:
        self.stage, self.partition = movement.stages[depth]
        self.label, self.dtype, self.fill = movement.label, movement.dtype, movement.fill
        self.is_guarded = movement.is_guarded
        self.input_shape = movement.input_shape if depth == 0 else None
        self.input_dtype = movement.input_dtype if depth == 0 else None
        self.takes = self.stage.input_shape is not None
        self.gives = self.stage.output_shape is not None
        self.make_output: Make = lambda: None
        if depth == len(movement.stages) - 1:
            # The caller gets a placeholder. One with cells is the gradient of a tensor that was not
            # moved, which is zero.
            self.make_output = partial(
                torch.zeros, movement.output_shape, dtype=movement.output_dtype,
                device=self.partition.device,
            )  # fmt: skip
        self.bound: dict[tuple[int, ...], tuple[object, Make]] = {}
        self._accumulating: dict[tuple[int, ...], tuple[object, Make]] = {}

    def posts(self, accumulates: bool = False) -> tuple[Post, ...]:
        """Return the messages that this rank sends and receives."""
        if not self.stage.communicates:
            return ()
        P, rank = self.partition, self.partition.plan_rank
        carried = P.wire.express_stage(self.stage, rank, self.dtype, accumulates)
        return posts_between(carried, self.stage, P.ranks, rank, self.dtype)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """Check an input given by the caller and return it with readable memory."""
        device = self.partition.device
        if x.device != device:
            raise ShapeError(
                f"{self.label}: the tensor is on {x.device}, its partition is on {device}; move it "
                "there with .to()"
            )
        shape = self.input_shape or ()
        if x.shape != shape or x.dtype != self.input_dtype:
            raise ShapeError(
                f"{self.label}: bound to a {self.input_dtype} tensor of shape {list(shape)}, got "
                f"{x.dtype} of shape {list(x.shape)}"
            )
        problem = storage_problem(x)
        if problem:
            raise ShapeError(f"{self.label}: {problem}")
        return with_memory(x)

    def check_target(self, target: torch.Tensor | None) -> None:
        """Raise if the output cannot be added to ``target``."""
        if target is None:
            return
        shape, device = self.stage.output_shape, self.partition.device
        if target.device != device:
            raise ShapeError(
                f"{self.label}: its output on {device} cannot be added to a tensor on "
                f"{target.device}"
            )
        if target.shape != shape or target.dtype != self.dtype:
            raise ShapeError(
                f"{self.label}: its {self.dtype} output of shape {shape} cannot be added to a "
                f"{target.dtype} tensor of shape {list(target.shape)}"
            )

    def call(
        self, x: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, StageCall | None]:
        """Return the output, ``into`` or a new tensor, and the call that fills it, if any."""
        if self.takes:
            assert x is not None
            strides, address = x.stride(), x.data_ptr()
        elif self.gives:
            strides, address = (), 0
        else:
            return self.make_output(), None
        stages = self.bound if into is None else self._accumulating
        stage, make = stages.get(strides) or self.bind(strides, into is not None)
        y = into if into is not None else make()
        assert y is not None  # Movements of one step return at least a placeholder.
        return y, (stage, address, y.data_ptr())

    def bind(self, strides: tuple[int, ...], accumulates: bool = False) -> tuple[object, Make]:
        """Bind the stage to an input with these strides; return an item of :attr:`bound`.

        Threads that bind it concurrently all get the same one, which may already be running.
        """
        P, shape = self.partition, self.stage.output_shape
        form = None if accumulates else memory_format_of(self.stage, P, strides)
        output_strides, make = None, self.make_output
        if form is not None and shape is not None:
            output_strides = torch.empty(shape, device="meta", memory_format=form).stride()
            make = partial(
                torch.empty, shape, dtype=self.dtype, device=P.device, memory_format=form
            )
        elif shape is not None:
            make = recycling.maker(shape, self.dtype, P.device)
        stage = P.wire.bind_stage(
            self.stage, P.ranks, P.plan_rank, strides, self.dtype, self.fill, accumulates,
            output_strides, self.is_guarded,
        )  # fmt: skip
        stages = self._accumulating if accumulates else self.bound
        return stages.setdefault(strides, (stage, make))


def memory_format_of(
    stage: Stage, partition: Partition, strides: Sequence[int]
) -> torch.memory_format | None:
    """Return the memory format of the input if the output keeps it, otherwise ``None``."""
    input_shape, shape = stage.input_shape, stage.output_shape
    if input_shape is None or shape is None or not partition.wire.keeps_layout:
        return None
    form = _CHANNELS_LAST.get(len(input_shape)) if len(input_shape) == len(shape) else None
    x = torch.empty_strided(input_shape, strides, device="meta")
    if form is None or x.is_contiguous() or not x.is_contiguous(memory_format=form):
        return None
    return form
