"""Join the world that the environment describes. Only this module reads environment variables."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import check
from gpudist.errors import GpudistError, NotBuiltError, TransportError
from gpudist.transport import TRANSPORTS
from gpudist.transport.background import Background
from gpudist.transport.base import Transport
from gpudist.transport.debug_lines import DebugLines
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.forks import keep_for_good
from gpudist.transport.failure.last_words import Endings, report_uncaught_errors
from gpudist.transport.failure.store import STORE_ERRORS, second_connection, store_failure
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.transport.host.meeting import NotOneNode
from gpudist.transport.host.processes import await_end_of_parent, has_variable
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.nccl.driver import what_this_driver_lacks
from gpudist.transport.nccl.library import installed_wheels, what_nccl_misses, wheel_warnings
from gpudist.transport.report import report_failures, report_on_signal
from gpudist.transport.world_facts import WorldFacts
from gpudist.version import __version__
from gpudist.world.agreement import Outsider, WorldAgreement
from gpudist.world.job_store import join_store, leave_store, store_of
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
from gpudist.world.partition import CartesianPartition, Partition

logger = logging.getLogger("gpudist")

T = TypeVar("T")

_CLOSING_S = 10.0
# Time for closing the store after a failure, so that the other ranks learn of it.
_FAILED_CLOSING_S = 1.0
# Time to compare the ranks after a failure to connect.
_COMPARING_S = 0.2


def settings() -> Settings:
    """Read the settings of ``init()`` from the environment of this process."""
    return settings_of(os.environ, build_info())


def launch() -> Launch:
    """Read the launcher's variables from the environment of this process.

    Raises:
        TransportError: a variable is missing, is not a number, or contradicts the others.
    """
    return launch_of(os.environ)


def build_info() -> Built:
    """Return which parts of gpudist are built and how many GPUs torch sees."""
    return Built(
        "" if is_built() else what_is_missing(),
        what_nccl_misses(),
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


def variables(prefix: str = "GPUDIST_") -> dict[str, str]:
    """Return the environment variables whose names begin with ``prefix``."""
    return {name: text for name, text in os.environ.items() if name.startswith(prefix)}


def set_variables(said: dict[str, str]) -> None:
    """Replace gpudist's environment variables, which may be stale in a child of a fork server."""
    for name in variables():
        del os.environ[name]
    os.environ.update(said)


class _Runtime:
    """State created by ``init()``, kept until the process exits.

    Attributes:
        P_world: world of this process.
        worlds: world of each thread that is a rank by itself, by the thread's identifier.
    """

    P_world: Partition | None = None
    worlds: ClassVar[dict[int, Partition]] = {}
    store: dist.Store | None = None
    failed: bool = False
    pid: int = 0
    closing: Background = Background("gpudist closes")


_runtime = _Runtime()


def world() -> Partition:
    """Return the partition of the world that :func:`init` joined.

    Raises:
        TransportError: ``init`` has not been called.
    """
    P_world = _world_of_thread()
    if P_world is None:
        raise TransportError("this process has joined no world; call gpudist.init() first")
    return P_world


def process_grid(P_x: CartesianPartition | DeviceMesh | Sequence[int]) -> CartesianPartition:
    """Return ``P_x``, or the workers of the world on torch's mesh or on a grid of this shape.

    Raises:
        PartitionError: the world has too few workers.
    """
    if isinstance(P_x, CartesianPartition):
        return P_x
    return init().create_mesh_partition(P_x) if isinstance(P_x, DeviceMesh) else init().grid(P_x)


def run_as_rank(
    fn: Callable[..., T], wire: Transport, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> T:
    """Return ``fn(P_world, *args, **kwargs)``, during which ``init()`` returns ``P_world``."""
    thread, P_world = threading.get_ident(), world_of(wire)
    outer = _runtime.worlds.get(thread)
    _runtime.worlds[thread] = P_world
    try:
        return fn(P_world, *args, **kwargs)
    finally:
        if outer is None:
            del _runtime.worlds[thread]
        else:
            _runtime.worlds[thread] = outer


def _world_of_thread() -> Partition | None:
    """Return the world of this thread, else of this process, ``None`` if neither has joined one.

    Raises:
        TransportError: other threads are ranks, and this one may belong to any of them.
    """
    here, main = threading.current_thread(), threading.main_thread()
    for thread in (here, main):
        if thread.ident in _runtime.worlds:
            return _runtime.worlds[thread.ident]
    if _runtime.worlds and here is not main:
        raise TransportError(
            f"gpudist.init: thread {here.name!r} is not a rank of the run_distributed that runs in "
            "this process; pass it the rank's P_world"
        )
    return _runtime.P_world


def _leave_to_parent() -> None:
    # The store's threads belong to the parent; destroying the store in the child would hang.
    keep_for_good(_runtime.store)


os.register_at_fork(after_in_child=_leave_to_parent)


def init(
    timeout: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
    deterministic: bool = False,
) -> Partition:
    """Join the world started by torchrun, mpirun or srun and return the partition of all workers.

    The launcher is recognized by its rank and world size variables: ``RANK`` and ``WORLD_SIZE``
    (torchrun), ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, ``PMI_RANK`` and ``PMI_SIZE``, or, within an
    ``srun`` step, ``SLURM_PROCID`` and ``SLURM_NTASKS``. Without any of them the world has one
    process, also in a Slurm batch script or shell.

    Further calls return the same partition, and so do calls within
    :func:`gpudist.testing.run_distributed`. The transport is NCCL if torch sees GPUs, otherwise
    shared memory on one node and gloo between nodes; ``GPUDIST_TRANSPORT`` overrides the choice. On
    GPUs, ``init`` makes the GPU with this process's local rank torch's current device, and lets
    backward run in a single thread.

    Args:
        timeout: deadline of every wait, in seconds; above 0 and at most 1,000,000.
        process_group: torch process group whose members form the world, instead of all started
            processes. The ranks meet in its store; over NCCL they create their own communicators.
        deterministic: whether gpudist's operators return the same bits in every run and over every
            transport, by adding in a fixed order. Also calls
            ``torch.use_deterministic_algorithms``, which makes torch raise where it has no
            deterministic algorithm. Over NCCL, sums are then computed from point-to-point
            messages. Must be equal on all ranks.

    Returns:
        Partition of all workers of the world.

    Raises:
        TransportError: the launcher's variables are incomplete (only one of a pair is set),
            ``timeout`` is out of range, or the world cannot be joined: among other reasons, because
            another process has this rank.
        NotBuiltError: there are GPUs, but this installation cannot use them.
    """
    timeout = deadline_of(timeout, "gpudist.init")
    options = {"process_group": process_group, "deterministic": deterministic}
    check(init, "gpudist.init", (), options, TransportError)
    P_world = _world_of_thread()
    if P_world is not None:
        return P_world
    if deterministic:
        _make_torch_deterministic()
    launch = launch_of(os.environ)
    if process_group is not None:
        launch = replace(launch, rank=process_group.rank(), size=process_group.size())
    choice, reason = choose_transport(launch, os.environ, build_info())
    if reason == what_is_missing():
        logger.warning("using gloo, which is many times slower: %s", reason)
    wire: Transport
    store: dist.Store | None = None
    if choice == "loopback":
        wire = LoopbackTransport.single(timeout)
    else:
        store = join_store(launch, timeout) if process_group is None else store_of(process_group)
        if process_group is None and launch.size > 1:
            _runtime.store = store
        take_device(choice, launch.local_rank)
        try:
            wire = _connect_all(choice, store, launch, timeout, process_group, deterministic)
        except Outsider:
            raise
        except GpudistError:
            # Keep the store until the other ranks have read the reason.
            _leave_store(launch, _FAILED_CLOSING_S)
            raise
    _runtime.P_world = world_of(wire)
    _runtime.pid = os.getpid()
    if _runtime.store is not None:
        _runtime.closing.start()
    logger.info(
        "rank %d of %d: transport %s, device %s, started by %s",
        launch.rank, launch.size, wire.name, wire.device, launch.launcher,
    )  # fmt: skip
    if launch.launcher == "torchrun" and launch.store_is_served:
        _watch_launcher(wire)
    prints_lines, folder = diagnostics_of(os.environ)
    report_on_signal(wire, folder)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    endings = Endings(store if wire.size > 1 else None, f"gpudist/{launch.run}")
    report_uncaught_errors(wire, error_file, _note_failure, endings, prints_lines)
    atexit.register(_shut_down, wire, launch)
    return _runtime.P_world


def _watch_launcher(wire: Transport) -> None:
    """Fail the world when torchrun's agent, the parent of this process, ends.

    Otherwise, workers over shared memory, which do not need the store, would continue unsupervised.
    """
    agent = os.getppid()
    if has_variable(agent, "TORCHELASTIC_RUN_ID"):
        return  # The parent is a shell started by torchrun, which may end before this process.

    def watch() -> None:
        await_end_of_parent(agent)
        wire.post_failure(
            Failure(
                "TransportError",
                None,
                f"the launcher has died: torchrun's agent of rank {wire.rank}, process "
                f"{agent}, has ended before its workers; start the job again",
            )
        )

    threading.Thread(target=watch, name="gpudist watches the launcher", daemon=True).start()


def _make_torch_deterministic() -> None:
    # cuBLAS reads this variable once, at the first matrix product.
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
    """Connect all ranks; use gloo if the launcher's "node" turns out to be several containers."""

    def connect_by(name: str, prefix: str, same_node: bool) -> Transport:
        return connect(
            name, store, launch.rank, launch.size, timeout, prefix,
            same_node=same_node,
            interface=os.environ.get("GLOO_SOCKET_IFNAME"),
            deterministic=deterministic,
            store_rank=0 if _runtime.store is not None and not launch.store_is_served else None,
        )  # fmt: skip

    prefix = f"gpudist/{launch.run}"
    try:
        return connect_by(choice, prefix, launch.same_node)
    except NotOneNode as error:
        if os.environ.get("GPUDIST_TRANSPORT"):
            raise
        logger.warning("using gloo: %s", error)
        return connect_by("gloo", f"{prefix}/apart", False)


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
        name: name of the transport.
        store: rendezvous store.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every wait, in seconds.
        prefix: prefix of the store keys, unique per world.
        same_node, interface: see :class:`WorldFacts`.
        deterministic: whether sums are bitwise equal over every transport.
        store_rank: rank whose process hosts the store, or ``None`` if none of them does.

    Raises:
        PlanMismatch: on every rank, if ranks have different versions of gpudist, transports,
            options or numbers of ranks.
        TransportError: on every rank, if two processes have the same rank; only on the process that
            arrives once the world is complete.
    """
    asked = settings()
    with (
        closing(StoreAsker(f"connect {size} ranks", rank, timeout_s, store_rank)) as ask,
        closing(WorldAgreement(ask, store, prefix, rank, size)) as agreement,
    ):
        try:
            agreement.say(_describe_options(name, deterministic, asked.checks))
            made = TRANSPORTS[name].connect(
                WorldFacts(
                    store, rank, size, timeout_s, prefix, agreement.look, same_node, interface,
                    store_rank, deterministic, asked.checks, asked.nccl_library,
                    asked.device_library, os.environ,
                )
            )  # fmt: skip
            made.compares_every_call = asked.checks
        except STORE_ERRORS as error:
            raise store_failure(store_rank, error).to_exception() from error
        except NotOneNode:
            # Every rank has arrived, and all of them will meet again.
            agreement.complete()
            raise
        except Exception:
            # A refusal explains the failure better. A dead store must not delay or replace the
            # error, and the transport may still be waiting on the first connection.
            job = ask.submit(lambda: agreement.compare(second_connection(store)))
            if job.wait(_COMPARING_S) and isinstance(job.exception(), GpudistError):
                job.result()
            raise
        try:
            agreement.complete()
        except BaseException:
            made.close()
            raise
    return made


def _describe_options(transport: str, deterministic: bool, checks: bool) -> str:
    options = [", deterministic"] * deterministic + [", GPUDIST_CHECK=1"] * checks
    return f"gpudist {__version__} over {transport}{''.join(options)}"


def take_device(transport: str, local_rank: int) -> None:
    """Over NCCL, make the GPU with this process's local rank torch's current device.

    Conflicts of the installed NCCL wheels are logged, once a node.

    Raises:
        NotBuiltError: this installation cannot use GPUs, or torch sees none.
    """
    if transport != "nccl" or settings().device_library:
        return
    no_gpu = "" if torch.cuda.is_available() else "torch sees no GPU"
    missing = what_nccl_misses() or no_gpu or what_this_driver_lacks()
    if missing:
        raise NotBuiltError(f"the nccl transport: {missing}")
    if local_rank == 0:
        for conflict in wheel_warnings(installed_wheels(), torch.version.cuda):
            logger.warning("the nccl transport: %s", conflict)
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # Otherwise backward has one thread per device, and nothing orders their collectives. Other
    # threads are told at their first operator.
    torch.autograd.set_multithreading_enabled(False)


def world_of(wire: Transport) -> Partition:
    """Return the partition of all ranks of ``wire``, with the diagnostics of the environment."""
    prints_lines, folder = diagnostics_of(os.environ)
    if prints_lines and not any(isinstance(o, DebugLines) for o in wire.recorder.observers):
        wire.recorder.observe(DebugLines(wire.rank))
    if folder:
        report_failures(folder, wire)
    return Partition(wire, range(wire.size))


def _note_failure() -> None:
    _runtime.failed = True


def _shut_down(wire: Transport, launch: Launch) -> None:
    if os.getpid() != _runtime.pid:
        return
    has_failed = wire.error() is not None
    wire.close()
    if not _runtime.failed:
        _leave_store(launch, _FAILED_CLOSING_S if has_failed else min(_CLOSING_S, wire.timeout_s))


def _leave_store(launch: Launch, patience_s: float) -> None:
    # The rank that hosts the store waits for the others, but a store that hangs must not block
    # exit.
    store = _runtime.store
    if store is not None and not launch.store_is_served:
        _runtime.closing.submit(lambda: leave_store(store, launch, patience_s)).wait(patience_s)
