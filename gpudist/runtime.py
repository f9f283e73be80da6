"""From the launcher's environment to ``P_world``. The only reader of the environment."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from gpudist.errors import GpudistError, TransportError
from gpudist.partition import Partition
from gpudist.transport.base import Failure, Transport
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host import HostTransport, is_built, what_is_missing
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.nccl import NcclTransport

logger = logging.getLogger("gpudist")

_CLOSING_S = 10.0


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process.

    Attributes:
        launcher: ``"torchrun"``, ``"mpirun"``, ``"srun"`` or ``"none"``.
        rank, size: of the world.
        local_size: processes of the world on this node.
        address, port: where the ranks meet.
        store_is_served: the launcher itself serves the store at that address.
        run: tells this start of the job from others that meet at the same address.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    store_is_served: bool = False
    run: str = "0"

    @property
    def same_node(self) -> bool:
        return self.local_size == self.size


_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
}


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Read torchrun's, mpirun's or srun's variables; a process without them is a world of one.

    Raises:
        TransportError: a variable is missing or is no number.
    """
    found = next(
        (name for name, (rank, size, _) in _LAUNCHERS.items()
         if rank in environment and size in environment),
        None,
    )  # fmt: skip
    if found is None:
        return Launch("none")

    def number(variable: str, default: int | None = None) -> int:
        text = environment.get(variable, "" if default is None else str(default))
        try:
            return int(text)
        except ValueError:
            raise TransportError(
                f"{variable} is {text!r} but must be a number for a process started by {found}"
            ) from None

    rank_variable, size_variable, local_variable = _LAUNCHERS[found]
    rank, size = number(rank_variable), number(size_variable)
    if not 0 <= rank < size:
        raise TransportError(f"{rank_variable} is {rank} but {size_variable} is {size}")
    local_size = number(
        local_variable, size if found == "torchrun" else _local_size(environment, size)
    )
    address = environment.get("MASTER_ADDR")
    if address is None:
        if local_size != size:
            raise TransportError(
                f"{size} ranks on several nodes need MASTER_ADDR and MASTER_PORT, the address of "
                f"rank 0's node and a free port there; {found} does not set them"
            )
        address = "127.0.0.1"
    job = next(
        (environment[name] for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_ID")
         if name in environment),
        "0",
    )  # fmt: skip
    default_port = 29500 + sum(job.encode()) % 1000
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        found,
        rank,
        size,
        local_size,
        address,
        number("MASTER_PORT", default_port),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environment.get('TORCHELASTIC_RUN_ID', job)}/{restarts}",
    )


def _local_size(environment: Mapping[str, str], size: int) -> int:
    """Under srun and mpiexec: all ranks are here if there is one node."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return size if nodes == "1" else 1


@dataclass(frozen=True)
class Settings:
    """What the environment asks of ``init()``, and what comes of it.

    Attributes:
        transport: the transport that ``init()`` uses; ``"none"`` where it raises.
        reason: why that one, or what ``init()`` raises.
        nccl_library: the libnccl to use, ``""`` to find one.
    """

    transport: str
    reason: str
    nccl_library: str


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Read them."""
    try:
        launch = launch_of(environment)
        transport, reason = _choose_transport(launch, environment)
    except TransportError as error:
        transport, reason = "none", str(error)
    return Settings(transport, reason, environment.get("GPUDIST_NCCL_LIBRARY", ""))


def settings() -> Settings:
    """Those of this process."""
    return settings_of(os.environ)


class _Runtime:
    """What ``init()`` made, for as long as the process runs."""

    P_world: Partition | None = None
    store: dist.Store | None = None
    failed: bool = False


_runtime = _Runtime()


def init(timeout: float = 300.0) -> Partition:
    """Join the world that torchrun, mpirun or srun started, and return the partition of all its
    workers.

    Un-launched, the process is a world of one. Called again, returns the same partition. The
    transport is shared memory between processes of one node and gloo between nodes;
    ``GPUDIST_TRANSPORT`` overrides the choice.

    Args:
        timeout: deadline of every wait, in seconds.

    Raises:
        TransportError: the launcher's variables are incomplete, or the world cannot be joined.
    """
    if _runtime.P_world is not None:
        return _runtime.P_world
    launch = launch_of(os.environ)
    choice, reason = _choose_transport(launch, os.environ)
    if reason == what_is_missing():
        logger.warning("using gloo, which is many times slower: %s", reason)
    transport: Transport
    if choice == "loopback":
        transport = LoopbackTransport.single(timeout)
    else:
        _runtime.store = _join(launch, timeout)
        transport = connect(
            choice,
            _runtime.store,
            launch.rank,
            launch.size,
            timeout,
            f"gpudist/{launch.run}",
            launch.same_node,
            os.environ.get("GLOO_SOCKET_IFNAME"),
        )
    _runtime.P_world = world_of(transport)
    logger.info(
        "rank %d of %d: transport %s, device %s, started by %s",
        launch.rank, launch.size, transport.name, transport.device, launch.launcher,
    )  # fmt: skip
    _post_uncaught_errors(transport)
    atexit.register(_shut_down, transport, launch)
    return _runtime.P_world


def _choose_transport(launch: Launch, environment: Mapping[str, str]) -> tuple[str, str]:
    """The name of the transport for ``launch``, and why that one.

    Raises:
        TransportError: ``GPUDIST_TRANSPORT`` asks for what there is not.
    """
    asked = environment.get("GPUDIST_TRANSPORT")
    if asked:
        if asked not in ("host", "gloo", "loopback"):
            raise TransportError(
                f"GPUDIST_TRANSPORT is {asked!r}; it must be host, gloo or loopback"
            )
        if asked == "loopback" and launch.size > 1:
            raise TransportError(
                f"GPUDIST_TRANSPORT=loopback is for one process, but {launch.launcher} started "
                f"{launch.size}"
            )
        return asked, f"GPUDIST_TRANSPORT is {asked}"
    if launch.size == 1:
        return "loopback", "one process"
    if not launch.same_node:
        return "gloo", f"{launch.size} processes on several nodes"
    if not is_built():
        return "gloo", what_is_missing()
    return "host", f"{launch.size} processes on one node"


def connect(
    name: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    prefix: str,
    same_node: bool = True,
    interface: str | None = None,
) -> Transport:
    """Join the world of ``size`` processes that meet in ``store`` under ``prefix``. Collective."""
    if name == "nccl":
        double = os.environ.get("GPUDIST_DEVICE_LIBRARY", "")
        return NcclTransport(
            store,
            rank,
            size,
            timeout_s,
            prefix=prefix,
            device=torch.device("cpu" if double else f"cuda:{torch.cuda.current_device()}"),
            nccl_library=os.environ.get("GPUDIST_NCCL_LIBRARY", ""),
            device_library=double,
            checks=os.environ.get("GPUDIST_CHECK", "0") not in ("", "0"),
        )
    if name == "host":
        return HostTransport(store, rank, size, timeout_s, prefix=prefix)
    return GlooTransport(
        store, rank, size, timeout_s, prefix=prefix, same_node=same_node, interface=interface
    )


def world_of(transport: Transport) -> Partition:
    """The partition of all ranks of ``transport``."""
    return Partition(transport, range(transport.size))


def _join(launch: Launch, timeout: float) -> dist.Store:
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


def _post_uncaught_errors(transport: Transport) -> None:
    """An exception that ends this process ends its peers' waits with its text."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _runtime.failed = True
        try:
            if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
                transport.abort(Failure.from_exception(error, transport.rank))
            if isinstance(error, GpudistError):
                _write_torchrun_error(error, transport.rank)
        finally:
            # The user's own error is shown whatever becomes of telling the others.
            previous(kind, error, trace)

    sys.excepthook = hook


def _write_torchrun_error(error: GpudistError, rank: int) -> None:
    """The cause, where torchrun looks for it: it ends the other ranks before they can tell."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    message = {
        "message": f"rank {rank}: {type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _shut_down(transport: Transport, launch: Launch) -> None:
    """Close; the rank that serves the store waits until nobody needs it any more."""
    store = _runtime.store
    transport.close()
    if store is None or _runtime.failed or launch.store_is_served:
        return
    key = f"gpudist/{launch.run}/closed"
    try:
        store.add(key, 1)
        deadline = time.monotonic() + _CLOSING_S
        while launch.rank == 0 and time.monotonic() < deadline:
            if store.add(key, 0) >= launch.size:
                break
            time.sleep(0.02)
    except RuntimeError:
        return
