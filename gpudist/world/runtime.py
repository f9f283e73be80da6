"""From the launcher's environment to ``P_world``. The only reader of the environment."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from gpudist.checks.arguments import check
from gpudist.errors import GpudistError, NotBuiltError, PlanMismatch, TransportError
from gpudist.transport.background import Background
from gpudist.transport.base import Transport
from gpudist.transport.debug_lines import DebugLines
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.forks import keep_for_good
from gpudist.transport.failure.last_words import Endings, tell_uncaught_errors
from gpudist.transport.failure.store import STORE_ERRORS, own_connection, store_gone
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host.meeting import NotOneNode
from gpudist.transport.host.processes import await_end_of_parent, has_variable
from gpudist.transport.host.transport import HostTransport, is_built, what_is_missing
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.nccl.library import keep_memory_unregistered, what_nccl_misses
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.transport.report import report_failures, report_on_signal
from gpudist.version import __version__
from gpudist.world.agreement import Agreement
from gpudist.world.launch import (
    Built,
    Launch,
    Settings,
    choose_transport,
    deadline_of,
    diagnostics_of,
    launch_of,
    settings_of,
)
from gpudist.world.partition import Partition

logger = logging.getLogger("gpudist")

_CLOSING_S = 10.0
# After a failure the others hear of it soon, or never.
_FAILED_CLOSING_S = 1.0
# After a failure to connect.
_COMPARING_S = 0.2


def settings() -> Settings:
    """What the environment of this process asks of ``init()``."""
    return settings_of(os.environ, built())


def launch() -> Launch:
    """What the launcher says about this process.

    Raises:
        TransportError: a variable is missing or is no number.
    """
    return launch_of(os.environ)


def built() -> Built:
    """What this installation and this machine have."""
    return Built(
        "" if is_built() else what_is_missing(),
        what_nccl_misses(),
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


def variables() -> dict[str, str]:
    """What the environment of this process says to gpudist."""
    return {name: text for name, text in os.environ.items() if name.startswith("GPUDIST_")}


def nccl_variables() -> dict[str, str]:
    """What the environment of this process says to NCCL."""
    return {name: text for name, text in os.environ.items() if name.startswith("NCCL_")}


def set_variables(said: dict[str, str]) -> None:
    """Let the environment say just this: a forked server's may be older than its children's."""
    for name in variables():
        del os.environ[name]
    os.environ.update(said)


class _Runtime:
    """What ``init()`` made, for as long as the process runs."""

    P_world: Partition | None = None
    store: dist.Store | None = None
    failed: bool = False
    pid: int = 0
    closing: Background = Background("gpudist closes")


_runtime = _Runtime()


def world() -> Partition:
    """The world that :func:`init` joined.

    Raises:
        TransportError: it was not called.
    """
    if _runtime.P_world is None:
        raise TransportError("this process has joined no world; call gpudist.init() first")
    return _runtime.P_world


def _leave_to_parent() -> None:
    """In a forked child: the store's threads, for which its end would wait, are the parent's."""
    keep_for_good(_runtime.store)


os.register_at_fork(after_in_child=_leave_to_parent)


def init(
    timeout: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
    deterministic: bool = False,
) -> Partition:
    """Join the world that torchrun, mpirun or srun started, and return the partition of all its
    workers.

    A launcher is known by the rank and the world size that it sets: ``RANK`` and ``WORLD_SIZE``
    (torchrun), ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, ``PMI_RANK`` and ``PMI_SIZE``, or, in a step
    of ``srun``, ``SLURM_PROCID`` and ``SLURM_NTASKS``. A process with none of them is a world of
    one, and so is one in a batch script or a shell of Slurm's.

    Called again, returns the same partition. The transport is NCCL where torch sees GPUs, else
    shared memory between processes of one node and gloo between nodes; ``GPUDIST_TRANSPORT``
    overrides the choice. On GPUs this process takes the one of its number on the node, as torch's
    current device, and backward runs in one thread.

    Args:
        timeout: deadline of every wait, in seconds: above 0, and at most 1,000,000.
        process_group: torch's group of the workers, in place of all that were started: they meet in
            its store. Over NCCL they have communicators of their own, whatever the group has.
        deterministic: the same bits in every run and over every transport, in a stated order of
            additions, from operators of gpudist's; and ``torch.use_deterministic_algorithms``,
            which makes torch's raise where they have no such algorithm. Over NCCL, sums then go by
            messages. The same on all ranks.

    Raises:
        TransportError: the launcher's variables are incomplete (only one of a pair is set),
            ``timeout`` is no such number, or the world cannot be joined.
        NotBuiltError: there are GPUs, and this installation cannot use them.
    """
    timeout = deadline_of(timeout, "gpudist.init")
    given = {"process_group": process_group, "deterministic": deterministic}
    check(init, "gpudist.init", (), given, TransportError)
    if _runtime.P_world is not None:
        return _runtime.P_world
    if deterministic:
        _make_torch_deterministic()
    launch = launch_of(os.environ)
    if process_group is not None:
        launch = replace(launch, rank=process_group.rank(), size=process_group.size())
    choice, reason = choose_transport(launch, os.environ, built())
    if reason == what_is_missing():
        logger.warning("using gloo, which is many times slower: %s", reason)
    transport: Transport
    store: dist.Store | None = None
    if choice == "loopback":
        transport = LoopbackTransport.single(timeout)
    else:
        store = _join(launch, timeout) if process_group is None else _store_of(process_group)
        if process_group is None and launch.size > 1:
            _runtime.store = store
        take_device(choice, launch.local_rank)
        try:
            transport = _connect_all(choice, store, launch, timeout, process_group, deterministic)
        except GpudistError:
            # The others are still to find out why.
            _leave_store(launch, _FAILED_CLOSING_S)
            raise
    _runtime.P_world = world_of(transport)
    _runtime.pid = os.getpid()
    if _runtime.store is not None:
        _runtime.closing.start()
    logger.info(
        "rank %d of %d: transport %s, device %s, started by %s",
        launch.rank, launch.size, transport.name, transport.device, launch.launcher,
    )  # fmt: skip
    if launch.launcher == "torchrun" and launch.store_is_served:
        _watch_launcher(transport)
    wanted = diagnostics_of(os.environ)
    report_on_signal(transport, wanted.folder)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    endings = Endings(store if transport.size > 1 else None, f"gpudist/{launch.run}")
    tell_uncaught_errors(transport, error_file, _note_failure, endings, wanted.lines)
    atexit.register(_shut_down, transport, launch)
    return _runtime.P_world


def _watch_launcher(transport: Transport) -> None:
    """End the world when torchrun's agent, which started this process, is gone.

    Nobody would end or restart the workers any more, and over shared memory they need no store.
    """
    agent = os.getppid()
    if has_variable(agent, "TORCHELASTIC_RUN_ID"):
        return  # a shell between, which torchrun has started and which may end before this process

    def watch() -> None:
        await_end_of_parent(agent)
        transport.post_failure(
            Failure(
                "TransportError",
                None,
                f"the launcher has died: torchrun's agent of rank {transport.rank}, process "
                f"{agent}, has ended before its workers; start the job again",
            )
        )

    threading.Thread(target=watch, name="gpudist watches the launcher", daemon=True).start()


def _make_torch_deterministic() -> None:
    # CUDA's matrix products read this once, at the first of them.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _connect_all(
    choice: str,
    store: dist.Store,
    launch: Launch,
    timeout: float,
    process_group: dist.ProcessGroup | None,
    deterministic: bool,
) -> Transport:
    """The wire of all ranks. What the launcher takes for one node may be several containers."""

    def connected(name: str, prefix: str, same_node: bool) -> Transport:
        return connect(
            name, store, launch.rank, launch.size, timeout, prefix,
            same_node=same_node,
            interface=os.environ.get("GLOO_SOCKET_IFNAME"),
            deterministic=deterministic,
            store_rank=0 if _runtime.store is not None and not launch.store_is_served else None,
        )  # fmt: skip

    prefix = f"gpudist/{launch.run}"
    try:
        return connected(choice, prefix, launch.same_node)
    except NotOneNode as error:
        if os.environ.get("GPUDIST_TRANSPORT"):
            raise
        logger.warning("using gloo: %s", error)
        return connected("gloo", f"{prefix}/apart", False)


def connect(
    name: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    prefix: str,
    *,
    same_node: bool = True,
    interface: str | None = None,
    deterministic: bool = False,
    store_rank: int | None = None,
) -> Transport:
    """Join the world of ``size`` processes that meet in ``store`` under ``prefix``. Collective.

    Args:
        name: of the transport.
        same_node, interface: as :class:`GlooTransport` has them.
        deterministic: the same sums over every transport.
        store_rank: the one whose process hosts the store, where it is one of them.

    Raises:
        PlanMismatch: on every rank, if ranks have different versions of gpudist, or are to join
            over different transports or with different options.
    """

    asked = settings()

    def join(look: Callable[[], None]) -> Transport:
        if name == "host":
            return HostTransport(
                store, rank, size, timeout_s, prefix=prefix, store_rank=store_rank, look=look
            )
        if name == "gloo":
            return GlooTransport(
                store, rank, size, timeout_s, prefix=prefix, same_node=same_node,
                interface=interface, store_rank=store_rank, look=look,
            )  # fmt: skip
        if size > 1:
            keep_memory_unregistered(os.environ)
        on_cpu = bool(asked.device_library)
        device = torch.device("cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}")
        return NcclTransport(
            store, rank, size, timeout_s, prefix=prefix, device=device,
            nccl_library=asked.nccl_library, device_library=asked.device_library,
            checks=asked.checks, in_rank_order=deterministic,
            interface=interface, store_rank=store_rank,
        )  # fmt: skip

    with (
        StoreAsker(f"connect {size} ranks", rank, timeout_s, store_rank) as ask,
        closing(Agreement(ask, store, prefix, rank, size)) as agreement,
    ):
        try:
            agreement.say(_said(name, deterministic, asked.checks))
            made = join(agreement.look)
        except STORE_ERRORS as error:
            raise store_gone(store_rank, error).to_exception() from error
        except Exception:
            # A store that is gone, or hangs, has no say in why; a wait of the transport may go on.
            job = ask.submit(lambda: agreement.compare(own_connection(store)))
            if job.wait(_COMPARING_S) and job.failed_with(PlanMismatch):
                job.result()
            raise
        try:
            # The first operation says who has died with a store that is gone by now.
            with suppress(*STORE_ERRORS):
                ask(lambda: agreement.compare(store))
        except BaseException:
            made.close()
            raise
    return made


def _said(transport: str, deterministic: bool, checks: bool) -> str:
    """What all ranks of a world have to be alike in, in words."""
    options = [", deterministic"] * deterministic + [", GPUDIST_CHECK=1"] * checks
    return f"gpudist {__version__} over {transport}{''.join(options)}"


def take_device(transport: str, local_rank: int) -> None:
    """Over NCCL, make the GPU of this number on the node torch's current device.

    Raises:
        NotBuiltError: this installation cannot use GPUs, or torch sees none.
    """
    if transport != "nccl" or settings().device_library:
        return
    missing = what_nccl_misses() or ("" if torch.cuda.is_available() else "torch sees no GPU")
    if missing:
        raise NotBuiltError(f"the nccl transport: {missing}")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # Each device has a thread of its own else, and nothing orders what two of them start.
    torch.autograd.set_multithreading_enabled(False)


def world_of(transport: Transport) -> Partition:
    """The partition of all ranks of ``transport``, which tells what the environment wants."""
    wanted = diagnostics_of(os.environ)
    if wanted.lines and not any(isinstance(o, DebugLines) for o in transport.recorder.observers):
        transport.recorder.observe(DebugLines(transport.rank))
    if wanted.folder:
        report_failures(wanted.folder, transport)
    return Partition(transport, range(transport.size))


def _store_of(process_group: dist.ProcessGroup) -> dist.Store:
    return dist.distributed_c10d._world.pg_map[process_group][1]


def _join(launch: Launch, timeout: float) -> dist.Store:
    if launch.size == 1:
        return dist.HashStore()
    try:
        return dist.TCPStore(
            launch.address,
            launch.port,
            world_size=launch.size,
            is_master=launch.rank == 0 and not launch.store_is_served,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"rank {launch.rank} cannot meet the others at {launch.address}:{launch.port}: {error}"
        ) from error


def _note_failure() -> None:
    _runtime.failed = True


def _shut_down(transport: Transport, launch: Launch) -> None:
    """Close; the rank that serves the store waits until nobody needs it any more.

    A store behind a network that is cut never answers, and the process ends all the same.
    """
    if os.getpid() != _runtime.pid:
        return
    has_failed = transport.error() is not None
    transport.close()
    if not _runtime.failed:
        _leave_store(
            launch, _FAILED_CLOSING_S if has_failed else min(_CLOSING_S, transport.timeout_s)
        )


def _leave_store(launch: Launch, patience_s: float) -> None:
    """Tell the rank that serves the store that it is needed no more; that one waits for all."""
    store = _runtime.store
    if store is not None and not launch.store_is_served:
        _runtime.closing.submit(lambda: _part(store, launch, patience_s)).wait(patience_s)


def _part(store: dist.Store, launch: Launch, patience_s: float) -> None:
    key = f"gpudist/{launch.run}/closed"
    deadline_s = time.monotonic() + patience_s
    store.add(key, 1)
    while launch.rank == 0 and time.monotonic() < deadline_s:
        if store.add(key, 0) >= launch.size:
            break
        time.sleep(0.02)
