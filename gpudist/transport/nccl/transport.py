"""NCCL transport between GPUs, in stream order and without waiting for the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpudist.checks.digest import digest_of
from gpudist.errors import GpudistError, NotBuiltError, TransportError
from gpudist.geometry.boxes import Stage
from gpudist.geometry.messages import MessageStage
from gpudist.native import native as _native
from gpudist.transport.base import BoundSteps, Communicator, Signature, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.forks import words_of_child
from gpudist.transport.failure.store import StoreFailureChannel
from gpudist.transport.flight_recorder import Activity
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host.core_transport import native_signature, what_is_missing
from gpudist.transport.host.meeting import NotOneNode
from gpudist.transport.host.processes import forbidden_call
from gpudist.transport.host.transport import HostTransport
from gpudist.transport.nccl.library import order_launches, wheel_libraries
from gpudist.transport.nccl.program import native_call
from gpudist.transport.nccl.rendezvous import Rendezvous
from gpudist.transport.nccl.stages import (
    carry_by_nccl,
    collectives_by_messages,
    collectives_by_nccl,
    lower,
)
from gpudist.transport.nccl.streams import StagesOnStream, stream_of
from gpudist.transport.nccl.verbs import NcclCall, NcclCommunicator, run_alone
from gpudist.transport.nccl.watch import DeviceRecorder, NcclWatch
from gpudist.transport.world_facts import WorldFacts

logger = logging.getLogger("gpudist")

_CLOSING_S = 5.0


class NcclTransport(Transport):
    """One rank of a world over NCCL.

    The constructor is collective: it returns once every rank has joined the world communicator.
    Operators are queued on torch's current stream and never wait for the host. An error on the GPU
    is therefore raised by a later call; until then, the results of the failed operation are NaN.

    Args:
        store: store for the rendezvous and for failures.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every operation from its call to its end on the GPU, in seconds.
        prefix: prefix of the keys in ``store``, unique per world.
        device: device of this rank's tensors.
        nccl_library: path of the NCCL library; empty to search for one.
        device_library: path of a replacement for the CUDA driver in tests, where ``device`` is
            the CPU.
        checks: whether ranks compare plans at every call instead of only at the first.
        in_rank_order: whether every sum has the order and precision of the other transports.
        interface: network interface of attached transports between nodes.
        store_rank: world rank whose process hosts the store, or ``None`` if none of them does.
        look: called during the rendezvous; raises the failure of a surrounding world.

    Attributes:
        same_node: whether all ranks are on one node.

    Raises:
        NotBuiltError: this installation has no CUDA part, or NCCL was not found.
        CollectiveTimeout: a rank did not arrive in time.
    """

    name = "nccl"
    connects = "between GPUs"
    packs = True
    keeps_layout = True
    has_streams = True
    store: Any

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        prefix: str,
        device: torch.device,
        nccl_library: str = "",
        device_library: str = "",
        checks: bool = False,
        in_rank_order: bool = False,
        interface: str | None = None,
        store_rank: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        if _native is None:
            raise NotBuiltError(f"the nccl transport: {what_is_missing()}")
        self._channel = StoreFailureChannel(store, prefix, store_rank)
        super().__init__(rank, size, device, timeout_s, self._channel)
        self._core = _native.NcclWorld(
            rank,
            size,
            device.index or 0,
            timeout_s,
            nccl_library if size > 1 else "",
            [str(path) for path in wheel_libraries()] if size > 1 else [],
            device_library,
            torch.cuda.empty_cache,
        )
        self.failed_word = self._core.failed_word()
        self.fold = self._core.fold
        self.recorder = DeviceRecorder(self._core)
        self.store = store
        self.prefix = prefix
        self.device_library = device_library
        self.interface = interface
        self.store_rank = store_rank
        self.in_rank_order = in_rank_order
        self.strategy = collectives_by_messages if in_rank_order else collectives_by_nccl
        self._native: dict[tuple[int, ...], Any] = {}
        self._closed = False
        self._is_child = False
        self._watch = NcclWatch(self._core, self._channel, rank, size, timeout_s)
        self._look_outside = look
        self._rendezvous = Rendezvous(store, prefix, rank, size, timeout_s, self.look)
        self.compares_every_call = checks
        self.stream = stream_of(device)
        self.same_node = True
        if size == 1:
            return
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, facts: WorldFacts) -> NcclTransport:
        if facts.size > 1:
            order_launches(facts.variables, facts.nccl_library)
        on_cpu = bool(facts.device_library)
        device = torch.device("cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}")
        return cls(
            facts.store, facts.rank, facts.size, facts.timeout_s, prefix=facts.prefix,
            device=device, nccl_library=facts.nccl_library, device_library=facts.device_library,
            checks=facts.checks, in_rank_order=facts.deterministic,
            interface=facts.interface, store_rank=facts.store_rank, look=facts.look,
        )  # fmt: skip

    @property
    def compares_every_call(self) -> bool:
        """Whether ranks compare plans at every call; must be equal on all ranks."""
        return self._core.checks()

    @compares_every_call.setter
    def compares_every_call(self, checks: bool) -> None:
        self._core.set_checks(checks)

    @property
    def staging_bytes(self) -> int:
        """Device memory held for packing and receiving, in bytes."""
        return self._core.staging_bytes()

    def split(
        self, parent: Communicator, colors: Sequence[int], keys: Sequence[int]
    ) -> Communicator:
        members = parent.part(colors, keys)
        mine, position = colors[parent.rank], members.index(self.rank)
        native_parent = self.native(parent.members)
        # Split on all ranks of the parent, because no rank knows which communicators others have
        # cached.
        try:
            operation = self._core.begin(f"splitting the communicator of {list(parent.members)}")
            try:
                native = self._core.split(native_parent, mine, position, members)
            finally:
                self._core.drop(operation)
        except BaseException as error:
            self.end_with(error)
        if len(members) > 1:
            self._native.setdefault(members, native)
        return NcclCommunicator(self, members)

    def host_wire(self, ranks: tuple[int, ...]) -> Transport:
        if ranks not in self.attached:
            made = self.attached[ranks] = self._connect_host(ranks)
            made.recorder.observers = self.recorder.observers
        return self.attached[ranks]

    def _connect_host(self, ranks: tuple[int, ...]) -> Transport:
        """Connect ``ranks`` by a second transport: shared memory on one node, otherwise gloo."""
        rank, size = ranks.index(self.rank), len(ranks)
        prefix = f"{self.prefix}/host/{digest_of(repr(ranks).encode()).hex()}"
        store_rank = ranks.index(self.store_rank) if self.store_rank in ranks else None
        if self.same_node:
            try:
                return HostTransport(
                    self.store, rank, size, self.timeout_s, prefix=prefix, store_rank=store_rank,
                    look=self.look,
                )  # fmt: skip
            except NotOneNode as error:
                logger.warning("using gloo beside nccl: %s", error)
                prefix = f"{prefix}/apart"
        return GlooTransport(
            self.store, rank, size, self.timeout_s, prefix=prefix, same_node=False,
            interface=self.interface, store_rank=store_rank, look=self.look,
        )  # fmt: skip

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
    ) -> Any:
        as_called = partial(
            lower, stage, ranks, rank, input_strides, dtype, accumulates, self.strategy,
            output_strides, is_guarded=is_guarded,
        )  # fmt: skip
        lowered, captured = as_called(), None
        if lowered.is_direct:
            captured = as_called(in_graph=True).bind(self._core, self.native, fill)
        return lowered.bind(self._core, self.native, fill, captured)

    def bind_steps(
        self, signature: Signature, activity: Activity | None, steps: Sequence[Any]
    ) -> BoundSteps:
        index = -1 if self.device.index is None else self.device.index
        exchanged = native_signature(signature) if activity is not None else None
        bound = _native.DeviceRound(
            self._core, exchanged, index, steps, self.stream, self.recorder, activity,
            self.end_steps,
        )  # fmt: skip
        return BoundSteps(bound.run, bound.run_like_last)

    def express_stage(
        self, stage: Stage, rank: int, dtype: torch.dtype, accumulates: bool
    ) -> MessageStage:
        return carry_by_nccl(stage, rank, dtype, accumulates, self.strategy)

    def start_stages(
        self, signature: Signature, calls: Sequence[tuple[Any, int, int]], activity: Activity
    ) -> StagesOnStream:
        operation = self.recorder.begin(activity, "start")
        try:
            event = self._core.start(native_signature(signature), calls, self.stream())
        except BaseException as error:
            self.recorder.leave(operation)
            self.end_with(error)
        # The wait for the result happens on the GPU, so the operation ends here.
        self.recorder.end(operation)
        return StagesOnStream(self.join, event)

    def post(self, call: NcclCall) -> None:
        """Queue a call in the open group, or run it as its own group."""
        if self._open is None:
            text = f"{call.kind} of {call.nbytes} bytes"
            with self.group(Signature.of(text)):
                self.post(call)
            return
        self._open[1].append(call)

    def native(self, members: Sequence[int]) -> Any:
        """Return the native communicator of these world ranks, created at first use by all."""
        key = tuple(members)
        communicator = self._native.get(key)
        if communicator is None:
            communicator = self._native[key] = self._connect(key)
        return communicator

    def enqueue(self, label: str, put: Callable[[], object]) -> None:
        self.check()
        try:
            self._core.enqueue(label, self.stream(), put)
        except BaseException as error:
            self.end_with(error)

    def join(self, event: int) -> None:
        """Make the current stream wait for started stages."""
        try:
            self._core.join(event, self.stream())
        except BaseException as error:
            self.end_with(error)

    def wait(self) -> None:
        """Wait until the current stream is complete, so that the host may read the results."""
        try:
            self._core.synchronize(self.stream())
        except BaseException as error:
            self.end_with(error)

    def abort(self, failure: Failure) -> None:
        if self._is_child:
            return
        self._fail(failure)
        self.report_failure(failure)

    def _fail(self, failure: Failure) -> None:
        for other in self.attached.values():
            other.abort(failure)
        if not self._core.failure():
            self._watch.fail(failure)
        # Started operations without a wait use tensors that are about to be freed.
        self._core.settle(self.stream())

    def post_failure(self, failure: Failure) -> None:
        if not self._is_child:
            self._watch.fail(failure)

    def error(self) -> Any:
        if self._is_child:
            return TransportError(words_of_child(self.name, self.rank))
        if text := self._core.failure():
            return self.exception_of(Failure.from_json(text))
        if self._closed:
            return TransportError(f"the nccl transport of rank {self.rank} was closed")
        return None

    def close(self) -> None:
        if self._closed:
            return
        for user in list(self.users):
            user.close()
        self._closed = True
        for other in self.attached.values():
            other.close()
        self._watch.leave()
        self._core.close(_CLOSING_S)
        self._watch.stop()
        self._rendezvous.close()
        self._channel.close()
        self.store = None

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        # The core may wait for locks that the watchdog's thread held at the fork.
        self._closed = self._is_child = True

    def end_with(self, error: BaseException) -> NoReturn:
        """Fail the world with an error of the native core and raise it as an error of gpudist."""
        if isinstance(error, _native.RefusedCapture):
            raise error
        self._watch.await_death(error)
        mine = Failure.from_exception(error, self.rank)
        self._fail(mine)
        first = Failure.from_json(self._core.failure())
        is_known = isinstance(error, (GpudistError, _native.WorldFailed))
        if not is_known or mine.message.startswith(first.message):
            self.report_failure(first)
            raise error
        self._raise_failure(self.exception_of(first), error)

    def look(self) -> None:
        self._look_outside()
        self._watch.look()
        self.check()

    def _make_communicator(self, members: tuple[int, ...]) -> Communicator:
        return NcclCommunicator(self, members)

    def _run_group(self, signature: Signature, posts: list[Any]) -> None:
        try:
            with torch.no_grad():
                self._run(signature, posts)
        except BaseException as error:
            self.end_with(error)

    def _run(self, signature: Signature, calls: Sequence[NcclCall]) -> None:
        for call in calls:
            if call.members is not None and len(call.members) == 1:
                run_alone(call)
        shared = [c for c in calls if c.count > 0 and (c.members is None or len(c.members) > 1)]
        # All ranks create communicators in the same order, in which their groups run.
        for members in sorted({call.members for call in shared if call.members is not None}):
            self.native(members)
        for call in shared:
            self.recorder.record_post(call.post(self.rank))
        if shared:
            self._core.run_calls(
                native_signature(signature),
                [native_call(call, self._native.get(call.members or ())) for call in shared],
                self.stream(),
            )
        for call in calls:
            if call.after is not None:
                call.after()

    def _join(self) -> None:
        """Wait for the other ranks, watch those on this node, and create the world communicator."""
        world = tuple(range(self.size))
        try:
            here = self._rendezvous.arrive()
            self.same_node = self._rendezvous.is_seen and len(here) == self.size - 1
            if here and (call := forbidden_call()):
                logger.warning(
                    "rank %d cannot watch the processes of this node, so waits for a dead "
                    "process end only at the deadline: the system forbids %s", self.rank, call,
                )  # fmt: skip
            for rank, pid in here.items():
                self._watch.watch_process(rank, pid)
            self._rendezvous.ask(lambda: self._channel.connecting.wait(self.timeout_s))
        except BaseException as error:
            self.end_with(error)
        self._native[world] = self._connect(world)

    def _connect(self, members: tuple[int, ...]) -> Any:
        try:
            self.check()
            operation = self._core.begin(f"making the communicator of ranks {list(members)}")
            try:
                made = self._rendezvous.share_id(members, self._core.new_id)
                return self._core.connect(made, members)
            finally:
                self._core.drop(operation)
        except BaseException as error:
            self.end_with(error)
