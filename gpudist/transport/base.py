"""Protocol of all transports: NCCL's verbs, a failure channel and a flight recorder.

A ``Transport`` belongs to one world of ranks. It creates one ``Communicator`` per list of members,
which has the verbs. Verbs are posted inside ``with transport.group(signature):`` and are complete
when the group ends (on a GPU: ordered on the current stream). Several communicators may take part
in one group, so that crossing groups (in which a rank is the root of one and a member of another)
cannot deadlock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args
from weakref import WeakSet

import torch

from gpudist import errors
from gpudist.checks.digest import digest_of
from gpudist.geometry.boxes import Stage
from gpudist.geometry.messages import MessageStage, as_messages
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.failure.forks import keep_for_good, leave_to_parent_after_fork
from gpudist.transport.flight_recorder import Activity, FlightRecorder, Operation
from gpudist.transport.world_facts import WorldFacts

ReduceOp = Literal["sum", "max", "min", "prod"]
# Bound stage with the addresses of its input and output, whose tensors the caller keeps alive.
StageCall = tuple[object, int, int]
RunSteps = Callable[[Sequence["torch.Tensor | None"]], "list[torch.Tensor | None]"]


class BoundSteps(NamedTuple):
    """One step of each of several movements, bound by a transport.

    Attributes:
        run: maps input tensors to output tensors: checks, packs, exchanges and unpacks.
        run_like_last: maps the only input to the only output if all is as in the last call, the
            layout of the input and the state of torch included, and no gradient is needed.
            Otherwise returns ``None``, and nothing has happened.
    """

    run: RunSteps
    run_like_last: Callable[[torch.Tensor | None], torch.Tensor | None] = lambda x: None


@dataclass(frozen=True)
class Signature:
    """Identity of an operation, sent with each of its messages to detect disagreements.

    Attributes:
        label: description of the operator, partition and shapes, for error messages and the flight
            recorder.
        digest: 16 bytes, equal on two ranks if and only if they execute the same operation.
    """

    label: str
    digest: bytes

    @classmethod
    def of(cls, label: str, *meaning: bytes) -> Signature:
        """Return the signature of an operation identified by ``label`` and ``meaning``."""
        return cls(label, digest_of(label.encode(), *meaning))


class StagesInFlight(Protocol):
    """Bound stages in flight."""

    def wait(self, call: int) -> None:
        """Wait until call number ``call`` is complete."""


class Communicator(ABC):
    """Verbs over one list of members. Ranks are positions in that list.

    Tensors must be contiguous and on the transport's device. A rank cannot send to itself. A verb
    called outside a group forms a group of its own.
    """

    def __init__(self, members: Sequence[int], world_rank: int) -> None:
        self.members = tuple(members)
        self.size = len(self.members)
        self.rank = self.members.index(world_rank)

    def part(self, colors: Sequence[int], keys: Sequence[int]) -> tuple[int, ...]:
        """Return the world ranks of the members with this rank's color, by key, then by rank."""
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
        """Overwrite ``tensor`` on every member with that of ``root``."""

    @abstractmethod
    def reduce(
        self,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        root: int,
        op: ReduceOp = "sum",
    ) -> None:
        """Reduce the members' ``tensor`` in ascending rank order into the root's ``output``.

        Only the root passes ``output``. Only the root may pass ``None`` for ``tensor``; it then
        contributes nothing.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in ascending rank order into every ``output``: bitwise equal on all members."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Gather the members' equally shaped ``tensor`` into ``output[rank]`` on every member."""

    @abstractmethod
    def reduce_scatter(
        self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum"
    ) -> None:
        """Reduce the members' ``tensor[rank]`` into the ``output`` of member ``rank``."""

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise errors.TransportError(f"rank {rank} is not in a communicator of size {self.size}")

    def _check_op(self, op: str, tensor: torch.Tensor) -> None:
        if op not in get_args(ReduceOp):
            known = ", ".join(get_args(ReduceOp))
            raise errors.TransportError(f"reduction {op!r} is unknown; it must be one of {known}")
        if tensor.is_complex() and op in ("max", "min"):
            raise errors.ShapeError(f"{tensor.dtype} has no order, so its {op} is undefined")


class Transport(ABC):
    """Connection of this rank to one world.

    Attributes:
        name: name that users read and set, such as ``"gloo"``.
        connects: ranks that it connects, in words for users.
        rank, size: rank of this process (or thread) and number of ranks.
        device: device on which tensors must be.
        timeout_s: deadline of every wait, in seconds.
        failures: failure channel.
        recorder: flight recorder.
        users: objects whose ``close`` must be called before this transport closes.
        attached: transports between subsets of the ranks, aborted and closed with this one.
        packs: whether the transport itself executes whole stages of plans, in one call.
        keeps_layout: whether outputs of stages are channels-last if their inputs are.
        carries_pieces: whether a message may consist of pieces of memory, see
            :meth:`start_pieces`.
        device_library: path of a replacement for the GPU's runtime in tests, where tensors are on
            the CPU; empty otherwise.
        compares_every_call: whether ranks compare what they do at every call; equal on all ranks.
        failed_word: address of a word that kernels read: nonzero once the transport has failed, so
            that what it moved is invalid; 0 if there is none.
        has_streams: whether started stages run concurrently with later work, on their own stream.
        on_failure: called once, with the failure that ended this transport.
        remembered: cache of the operators created for this world.
    """

    name: str
    connects: str = ""
    packs: bool = False
    keeps_layout: bool = False
    carries_pieces: bool = False
    has_streams: bool = False
    device_library: str = ""
    failed_word: int = 0
    compares_every_call: bool = False

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
        self.users: WeakSet[Any] = WeakSet()
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        # Signature of the open group, and what was posted in it.
        self._open: tuple[Signature, list[Any]] | None = None
        # Whether a failure that ended this transport was reported, so that the user knows it.
        self._is_reported = False
        entry = RLock()
        self._try_enter: Callable[[], bool] = partial(entry.acquire, blocking=False)
        self._leave: Callable[[], None] = entry.release
        leave_to_parent_after_fork(self)

    @classmethod
    def connect(cls, facts: WorldFacts) -> Transport:
        """Connect this process to those that meet in ``facts.store``. Collective.

        Raises:
            NotBuiltError: this installation lacks a part of the transport.
            TransportError: the world cannot be joined.
        """
        raise errors.TransportError(f"the {cls.name} transport does not connect processes")

    @property
    def wires(self) -> tuple[Transport, ...]:
        """Return this transport, followed by those attached to it."""
        return (self, *self.attached.values())

    def communicator(self, members: Sequence[int]) -> Communicator:
        """Return the communicator of these world ranks, created at first use by its members."""
        key = tuple(members)
        communicator = self._communicators.get(key)
        if communicator is None:
            if self.rank not in key:
                raise errors.TransportError(
                    f"rank {self.rank} is not a member of communicator {key}"
                )
            communicator = self._communicators[key] = self._make_communicator(key)
        return communicator

    def split(
        self, parent: Communicator, colors: Sequence[int], keys: Sequence[int]
    ) -> Communicator:
        """Return the communicator of the members with this rank's color, by key, then by rank.

        ``colors`` and ``keys`` have one entry per member of ``parent`` and must be equal on all of
        them, so no message is sent.
        """
        return self.communicator(parent.part(colors, keys))

    @contextmanager
    def group(self, signature: Signature) -> Generator[None, None, None]:
        """Open a group: verbs posted inside run together and are complete when it ends.

        Raises:
            PlanMismatch: ranks disagree about signature, order or size; raised on all of them.
            PeerFailure: a peer died or raised; names it.
            CollectiveTimeout: the deadline passed; lists the last operations of each rank.
            TransportError: another thread of this rank is inside a group.
        """
        self.check()
        if not self._try_enter():
            self._refuse_entry(signature.label)
        try:
            operation = self.recorder.begin_group(signature.label)
            try:
                if self._open is not None:
                    raise errors.TransportError(
                        f"'{signature.label}' opens a group inside that of "
                        f"'{self._open[0].label}'; groups do not nest: end the outer one first"
                    )
                group = self._open = signature, []
                try:
                    yield
                finally:
                    self._open = None
                self._run_group(*group)
            except BaseException:
                self.recorder.leave(operation)
                raise
            self.recorder.end(operation)
        finally:
            self._leave()

    def fold(self, peers: Sequence[int], number: int, what: str) -> None:  # noqa: B027
        """Let headers of later messages to and from ``peers`` compare a number.

        The peers, world ranks, fold the same number between the same messages. Headers contain one
        number in which all that was folded counts, in its order.

        Args:
            peers: world ranks other than this one.
            number: number of at most 64 bits.
            what: names it in errors.
        """

    def enqueue(self, label: str, put: Callable[[], object]) -> None:
        """Watch what ``put`` enqueues on the current stream as an operation, with the deadline.

        Raises:
            GpudistError: the failure that has ended this transport.
        """
        self.check()
        put()

    def _refuse_entry(self, label: str) -> NoReturn:
        error = errors.TransportError(
            f"'{label}': two threads of rank {self.rank} are inside operations of one world at "
            "once, so the order of their messages is undefined: call operators of a world from "
            "one thread at a time, in the same order on every rank"
        )
        self.abort(Failure.from_exception(error, self.rank))
        raise error

    def reject(self, error: errors.GpudistError, ranks: Sequence[int]) -> NoReturn:
        """Raise ``error`` on this rank, before it has sent anything; the world goes on.

        For an argument that no rank may pass: ranks that run the same program reject it alike. A
        rank of ``ranks`` that does not waits until this rank ends, which names ``error``, or sends
        it another message, which is a PlanMismatch on both, since rejected calls count in headers.
        """
        if self.rank in ranks:
            self.fold([r for r in ranks if r != self.rank], 1, f"rejecting the call: {error}")
        raise error

    def refuse(self, error: errors.GpudistError) -> NoReturn:
        """Raise ``error``, which only this rank knows, and end the world and all waits with it."""
        if self.size > 1:
            self.abort(Failure.from_exception(error, self.rank))
        raise error

    def check(self) -> None:
        """Raise the failure that ended this transport, if any, without communication."""
        error = self.error()
        if error is not None:
            self._raise_failure(error)

    def look(self) -> None:
        """Raise the failure that ended the world, though this rank has no operation in flight."""
        self.check()

    def _raise_failure(
        self, error: errors.GpudistError, cause: BaseException | None = None
    ) -> NoReturn:
        # The first time as it is, later as the failure that has ended the world.
        failure = Failure.from_exception(error, self.rank)
        if self._is_reported:
            text = f"the world has ended, no operation is possible; its first error: {error}"
            error = replace(failure, message=text).to_exception()
        self.report_failure(failure)
        raise error from cause

    def report_failure(self, failure: Failure) -> None:
        """Call :attr:`on_failure` with the failure that ends this transport; only the first."""
        self._is_reported = True
        on_failure, self.on_failure = self.on_failure, None
        if on_failure is not None:
            on_failure(failure)

    def exception_of(self, failure: Failure) -> errors.GpudistError:
        """Return the error of a failed world; if a peer failed, add this rank's last operation."""
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
        is_guarded: bool = True,
    ) -> object:
        """Return a bound stage for :meth:`start_stages`. Only if the transport ``packs``.

        Args:
            stage: stage of this rank's plan.
            ranks: world rank of each rank in the stage.
            rank: rank of this process in the stage, -1 if it takes no part.
            input_strides: strides of the input, in items.
            dtype: dtype of the data.
            fill: value of output cells that receive nothing.
            accumulates: whether received data is added to existing values of the output.
            output_strides: strides of the output, in items; ``None`` for contiguous, which is
                required unless the transport ``keeps_layout``.
            is_guarded: whether the output becomes NaN if the transport fails on the way; otherwise
                the kernel that reads the output looks at :attr:`failed_word`.
        """
        raise self._lacks("pack stages", "packs")

    def bind_steps(
        self, signature: Signature, activity: Activity | None, steps: Sequence[Any]
    ) -> BoundSteps:
        """Bind one step of each of several movements, which are executed together.

        They raise the same errors as :meth:`group`.

        Args:
            signature: common signature of the steps.
            activity: activity that counts the calls, ``None`` if nothing is exchanged.
            steps: a :class:`~gpudist.exchange.MovementStep` per tensor, ``None`` for a tensor that
                is returned as it is.
        """
        raise self._lacks("pack stages", "packs")

    def end_with(self, error: BaseException) -> NoReturn:
        """Fail the world with an error of its own, and raise it as an error of gpudist."""
        raise error

    def end_steps(self, operation: Operation | None, raise_again: Callable[[], object]) -> NoReturn:
        """End a call of bound steps that has failed; the native core calls this.

        Args:
            operation: operation of the call, if it was recorded.
            raise_again: raises the error.
        """
        try:
            raise_again()
        except errors.ShapeError:
            # Nothing was posted.
            if operation is not None:
                self.recorder.leave(operation)
                self.recorder.drop(operation)
            raise
        except BaseException as error:
            if operation is not None:
                self.recorder.leave(operation)
            self.end_with(error)
        raise AssertionError("the call has not failed")

    def express_stage(
        self, stage: Stage, rank: int, dtype: torch.dtype, accumulates: bool
    ) -> MessageStage:
        """Express a stage by messages and the collectives that this transport has verbs for.

        Args:
            stage ... accumulates: see :meth:`bind_stage`.
        """
        narrow = dtype in (torch.float16, torch.bfloat16)
        return as_messages(stage, rank, dtype.itemsize, narrow, accumulates)

    def start_stages(
        self, signature: Signature, calls: Sequence[StageCall], activity: Activity
    ) -> StagesInFlight:
        """Start bound stages together; each call must be waited for.

        Args:
            signature: common signature of the stages.
            calls: stages with the addresses of their inputs and outputs.
            activity: activity that counts the calls.
        """
        raise self._lacks("pack stages", "packs")

    def start_pieces(
        self,
        signature: Signature,
        sends: bool,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> AbstractContextManager[None]:
        """Send one message to several ranks, or receive one, without a plan.

        Only if the transport ``carries_pieces``. The message is a sequence of pieces of memory,
        which may be divided differently on the other side. The transfer ends with the ``with``
        statement: until then the pieces must stay alive, and sent data must not change.

        Args:
            signature: signature of the message, equal on both sides.
            sends: whether to send or to receive.
            peers: world ranks of the receivers, or of the one sender.
            pieces: address and size in bytes of each piece; the total must be equal on both sides.
        """
        raise self._lacks("carry pieces", "carries_pieces")

    def _lacks(self, what: str, attribute: str) -> NotImplementedError:
        return NotImplementedError(
            f"the {self.name} transport does not {what}; check its attribute {attribute}"
        )

    def host_wire(self, ranks: tuple[int, ...]) -> Transport:
        """Return a transport for CPU tensors between ``ranks``.

        This transport itself, unless it carries GPU tensors. Then it is an attached transport whose
        ranks are positions in ``ranks``; the first call is collective over them.
        """
        return self

    def known_global_shape(
        self, shape: Sequence[int], grid: Sequence[int], index: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Return the global shape of a balanced tensor whose block at ``index`` has ``shape``.

        Returns ``None`` if the ranks must agree on it by messages, as over every transport but a
        dry one.
        """
        return None

    def wait(self) -> None:  # noqa: B027
        """Wait until everything posted is complete, so that the host may read the results.

        Returns at once if groups are complete when they end.
        """

    @abstractmethod
    def _make_communicator(self, members: tuple[int, ...]) -> Communicator: ...

    # Carry out what was posted in a group, and end with the error if that fails.
    @abstractmethod
    def _run_group(self, signature: Signature, posts: list[Any]) -> None: ...

    @abstractmethod
    def abort(self, failure: Failure) -> None:
        """Post ``failure`` and end this rank's transport: every later use raises it."""

    def post_failure(self, failure: Failure) -> None:
        """Post ``failure`` from any thread: waits and later uses on all ranks raise it."""
        self.failures.post(failure)

    @abstractmethod
    def error(self) -> errors.GpudistError | None:
        """Return the error that ended this transport, if this rank knows one. Local and cheap."""

    def leave_to_parent(self) -> None:
        """Disable this transport in a forked child: every use raises.

        CUDA does not work in forked children, so they only need to exit cleanly.
        """
        keep_for_good(self)

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent; never blocks on a peer."""
