"""The protocol every wire speaks: NCCL's verbs, a failure channel and a flight recorder.

A ``Transport`` belongs to one world of ranks. It hands out one ``Communicator`` per list of
members, which carries the verbs. Verbs are posted inside ``with transport.group(signature):`` and
are complete when the group ends (on a GPU: ordered on the current stream). Several communicators
may take part in one group, so that groups which cross (a rank is root in one and member of
another) cannot deadlock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch

from gpudist import errors
from gpudist.checks.digest import digest_of
from gpudist.geometry.boxes import Stage
from gpudist.geometry.messages import as_messages
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.failure.forks import keep_for_good, leave_to_parent_after_fork
from gpudist.transport.recording import Activity, FlightRecorder, Post, posts_between

ReduceOp = Literal["sum", "max", "min", "prod"]
# A bound stage, and the addresses of its input and output, whose tensors the caller keeps alive.
StageCall = tuple[object, int, int]
RoundRunner = Callable[[Sequence["torch.Tensor | None"]], "list[torch.Tensor | None]"]


@dataclass(frozen=True)
class Signature:
    """What a group of messages is for; each carries it, so that a disagreement is an error.

    Attributes:
        label: the operator, partition and shapes in words, for error messages and the flight
            recorder.
        digest: 16 bytes that two ranks share exactly when they mean the same operation.
    """

    label: str
    digest: bytes

    @classmethod
    def of(cls, label: str, *meaning: bytes) -> Signature:
        """Of an operation that ``label`` and ``meaning`` say all about."""
        return cls(label, digest_of(label.encode(), *meaning))


class StagesInFlight(Protocol):
    """Bound stages on their way."""

    def wait(self, call: int) -> None:
        """Return when call number ``call`` is complete."""
        ...


class RoundPart(Protocol):
    """The stage of one movement, with what each of its calls needs.

    Attributes:
        index: of its movement.
        movement: for the shape and dtype of an input that ``comes_from_outside``.
        takes, gives: whether this rank has an input, and an output.
        bound: stages by strides of their input; :meth:`bind` adds to them.
        makers: by the same strides, what makes an output of their layout.
        make_output: a new output where there is no such maker, or what is in its place.
    """

    index: int
    movement: Any
    comes_from_outside: bool
    takes: bool
    gives: bool
    bound: dict[tuple[int, ...], object]
    makers: dict[tuple[int, ...], Callable[[], torch.Tensor]]
    make_output: Callable[[], torch.Tensor | None]

    def posts(self, accumulates: bool = False) -> tuple[Post, ...]: ...
    def block(self, x: torch.Tensor) -> torch.Tensor: ...
    def bind(self, strides: tuple[int, ...], accumulates: bool = False) -> object: ...


class Communicator(ABC):
    """The verbs, over one list of members. Ranks here are positions in that list.

    Tensors are contiguous and on the transport's device. No verb sends to the calling rank itself.
    Verbs called outside a group are a group of their own.
    """

    def __init__(self, members: Sequence[int], world_rank: int) -> None:
        self.members = tuple(members)
        self.size = len(self.members)
        self.rank = self.members.index(world_rank)

    def part(self, colors: Sequence[int], keys: Sequence[int]) -> tuple[int, ...]:
        """World ranks of the members of this rank's color, ordered by key, then by rank."""
        mine = colors[self.rank]
        ranks = sorted((keys[i], i) for i in range(self.size) if colors[i] == mine)
        return tuple(self.members[i] for _, i in ranks)

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send the bytes of ``tensor``; it must not change before the group ends."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive into ``tensor``, which is filled when the group ends."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite ``tensor`` with the root's, on every member."""

    @abstractmethod
    def reduce(
        self,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        root: int,
        op: ReduceOp = "sum",
    ) -> None:
        """Combine the members' ``tensor`` in ascending rank order into the root's ``output``.

        ``output`` is given on the root only. The root alone may pass ``None`` for ``tensor`` and
        then contributes nothing.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Combine in ascending rank order into every member's ``output``: bitwise equal on all."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Stack the members' equally shaped ``tensor`` into ``output[rank]``, on every member."""

    @abstractmethod
    def reduce_scatter(
        self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum"
    ) -> None:
        """Combine the members' ``tensor[rank]`` into the ``output`` of that rank."""

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise errors.TransportError(f"rank {rank} is not in a communicator of size {self.size}")

    def _check_op(self, op: str, tensor: torch.Tensor) -> None:
        if op not in get_args(ReduceOp):
            known = ", ".join(get_args(ReduceOp))
            raise errors.TransportError(f"reduction {op!r} is none of {known}")
        if tensor.is_complex() and op in ("max", "min"):
            raise errors.ShapeError(f"{tensor.dtype} has no order, so there is no {op} of it")


class Transport(ABC):
    """One wire, for one world.

    Attributes:
        name: ``"gloo"``, ``"loopback"``, ...: what the user sees in ``P_world.transport``.
        rank, size: this process (or thread) in the world.
        device: where tensors must be.
        timeout_s: deadline of every wait, in seconds.
        failures: the failure channel.
        recorder: the flight recorder.
        attached: wires among some of the same ranks, aborted and closed with this one.
        packs: stages of plans are carried out by the transport itself, in one call.
        keeps_layout: their outputs are channels-last where their inputs are.
        has_streams: stages that were started run beside what follows, on a stream of their own.
        on_failure: told, once, what this transport ended with.
        remembered: operators made for this world, so that functions need not make them at every
            call.
    """

    name: str
    packs: bool = False
    keeps_layout: bool = False
    has_streams: bool = False

    def __init__(
        self, rank: int, size: int, device: torch.device, timeout_s: float, failures: FailureChannel
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self.failures = failures
        self.recorder = FlightRecorder()
        self.on_failure: Callable[[Failure], None] | None = None
        self.remembered: dict[tuple[object, ...], object] = {}
        self.attached: dict[tuple[int, ...], Transport] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        entry = RLock()
        self._try_enter: Callable[[], bool] = partial(entry.acquire, blocking=False)
        self._leave: Callable[[], None] = entry.release
        leave_to_parent_after_fork(self)

    @property
    def wires(self) -> tuple[Transport, ...]:
        """This one, and those attached to it."""
        return (self, *self.attached.values())

    def communicator(self, members: Sequence[int]) -> Communicator:
        """The communicator of these world ranks, made at first use by members only, then cached."""
        key = tuple(members)
        found = self._communicators.get(key)
        if found is None:
            if self.rank not in key:
                raise errors.TransportError(
                    f"rank {self.rank} is not a member of communicator {key}"
                )
            found = self._communicators[key] = self._make_communicator(key)
        return found

    def split(
        self, parent: Communicator, colors: Sequence[int], keys: Sequence[int]
    ) -> Communicator:
        """This rank's part of ``parent``: the members of its color, ordered by key, then by rank.

        ``colors`` and ``keys`` have one entry per member, known to all of them, so nothing is
        exchanged.
        """
        return self.communicator(parent.part(colors, keys))

    @contextmanager
    def group(self, signature: Signature) -> Generator[None, None, None]:
        """Post verbs inside; they are in flight together and complete when the block ends.

        Raises:
            PlanMismatch: ranks disagree (signature, order or size); raised on all of them.
            PeerFailure: a peer died or raised; names it.
            CollectiveTimeout: the deadline passed; says what each rank did last.
            TransportError: another thread of this rank is inside.
        """
        self.check()
        if not self._try_enter():
            self._refuse_entry(signature.label)
        try:
            operation = self.recorder.begin_group(signature.label)
            try:
                self._group_start(signature)
                try:
                    yield
                except BaseException:
                    self._group_discard()
                    raise
                self._group_end()
            except BaseException:
                self.recorder.leave(operation)
                raise
            self.recorder.end(operation)
        finally:
            self._leave()

    def _refuse_entry(self, label: str) -> NoReturn:
        error = errors.TransportError(
            f"'{label}': two threads of rank {self.rank} are inside operations of one world at "
            "once, and no other rank can know whose messages come first: call operators of a world "
            "from one thread at a time, in the same order on every rank"
        )
        self.abort(Failure.from_exception(error, self.rank))
        raise error

    def refuse(self, error: errors.GpudistError) -> NoReturn:
        """Raise ``error`` here, and where the other ranks wait for this one, if there are any."""
        if self.size > 1:
            self.abort(Failure.from_exception(error, self.rank))
        raise error

    def check(self) -> None:
        """Raise the failure this transport already ended with, if any. Local and cheap."""
        error = self.error()
        if error is not None:
            self.tell_failure(Failure.from_exception(error, self.rank))
            raise error

    def tell_failure(self, failure: Failure) -> None:
        """This transport has ended, or is about to; only the first of several is told."""
        told, self.on_failure = self.on_failure, None
        if told is not None:
            told(failure)

    def exception_of(self, failure: Failure) -> errors.GpudistError:
        """The error of a failed world; where a peer failed, it names this rank's operation too."""
        lines = self.recorder.lines(1)
        label = lines[0].partition(" ")[2].rpartition(": ")[0] if lines else "(none)"
        if failure.rank == self.rank or failure.kind != "PeerFailure" or label in failure.message:
            return failure.to_exception()
        text = f"{failure.message}; the last operation of rank {self.rank} was '{label}'"
        return replace(failure, message=text).to_exception()

    def bind_stage(
        self,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        input_strides: Sequence[int],
        dtype: torch.dtype,
        fill: float,
        accumulates: bool = False,
        output_strides: Sequence[int] | None = None,
    ) -> object:
        """A stage ready for :meth:`start_stages`, where the transport ``packs``.

        Args:
            stage: of this rank's plan.
            ranks: world rank of each rank the stage names.
            rank: this rank among them, -1 if it has no part in the stage.
            input_strides: of the input, in items.
            dtype: of the data.
            fill: value of output cells nothing moves to.
            accumulates: the output has values, to which everything that arrives is added.
            output_strides: of the output, in items; contiguous if ``None``, as they are where the
                transport does not keep layouts.
        """
        raise NotImplementedError(f"the {self.name} transport does not pack")

    def bind_round(self, signature: Signature | None, parts: Sequence[RoundPart]) -> RoundRunner:
        """What carries out one stage of each of several movements, from tensors to tensors.

        It checks, packs, exchanges and unpacks, and raises what :meth:`group` does.

        Args:
            signature: ``None`` for stages that exchange nothing.
            parts: what there is to know about each stage.
        """
        raise NotImplementedError(f"the {self.name} transport does not pack")

    def posts_of(
        self,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        dtype: torch.dtype,
        accumulates: bool = False,
    ) -> tuple[Post, ...]:
        """The messages of a stage bound by :meth:`bind_stage`, which has the same arguments."""
        narrow = dtype in (torch.float16, torch.bfloat16)
        return posts_between(
            as_messages(stage, rank, dtype.itemsize, narrow, accumulates), ranks, dtype
        )

    def start_stages(
        self, signature: Signature, calls: Sequence[StageCall], activity: Activity
    ) -> StagesInFlight:
        """Send bound stages on their way together; each call must be waited for.

        Args:
            signature: of all of them.
            calls: stages with their inputs and outputs.
            activity: what they are counted as.
        """
        raise NotImplementedError(f"the {self.name} transport does not pack")

    def known_global_shape(
        self, shape: Sequence[int], grid: Sequence[int], index: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Of the tensor in balanced blocks over ``grid`` of which that at ``index`` has ``shape``.

        ``None`` where ranks have to tell each other, as over every wire with others on it.
        """
        return None

    def wait(self) -> None:  # noqa: B027
        """Return when all that was posted is complete, so that the host may read it.

        Nothing to do where groups are complete when they end.
        """

    @abstractmethod
    def _make_communicator(self, members: tuple[int, ...]) -> Communicator: ...

    @abstractmethod
    def _group_start(self, signature: Signature) -> None: ...

    @abstractmethod
    def _group_end(self) -> None: ...

    @abstractmethod
    def _group_discard(self) -> None:
        """Forget what was posted in the open group; nothing of it has been sent."""

    @abstractmethod
    def abort(self, failure: Failure) -> None:
        """Post ``failure`` and end this rank's transport: every later use raises it."""

    def post_failure(self, failure: Failure) -> None:
        """Leave ``failure`` for all ranks, from any thread: waits and later uses end with it."""
        self.failures.post(failure)

    @abstractmethod
    def error(self) -> errors.GpudistError | None:
        """What this transport ended with, as far as this rank knows; local and cheap."""

    def leave_to_parent(self) -> None:
        """In a child that this process forked: no use reaches the world; it raises.

        CUDA itself refuses a forked child, which only has to end in peace.
        """
        keep_for_good(self)

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent, never blocks on a peer."""
