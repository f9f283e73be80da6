"""What a launcher and the environment ask for: who this process is, and which transport to use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gpudist.errors import NotBuiltError, TransportError

TRANSPORTS = ("nccl", "host", "gloo", "loopback")


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process.

    Attributes:
        launcher: ``"torchrun"``, ``"mpirun"``, ``"srun"`` or ``"none"``.
        rank, size: of the world.
        local_size: processes of the world on this node.
        local_rank: this one's number among them.
        address, port: where the ranks meet.
        store_is_served: the launcher itself serves the store at that address.
        run: tells this start of the job from others that meet at the same address.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    store_is_served: bool = False
    run: str = "0"

    @property
    def same_node(self) -> bool:
        return self.local_size == self.size


# A wait of the system's takes at most 24 days.
LONGEST_S = 1e6

_SWITCHES = ("GPUDIST_CHECK", "GPUDIST_DEBUG")

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
}


# Steps of Slurm above this number are not started by srun: batch scripts, interactive shells.
_LAST_STEP = 4_000_000_000


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Read torchrun's, mpirun's or srun's variables; a process without them is a world of one.

    A launcher sets a rank and a world size, and the first launcher with both of them counts. What
    Slurm sets counts in a step of ``srun`` only: its batch scripts and shells have a rank too.

    Raises:
        TransportError: a variable is missing, is no number, or does not go with the others.
    """
    found = _launcher_of(environment)
    if found is None:
        return Launch("none")

    def number(variable: str, default: int | None = None) -> int:
        text = environment.get(variable, "" if default is None else str(default))
        # Python reads more as a number than launchers write: 1_0, and digits of other scripts.
        if not re.fullmatch(r"-?[0-9]{1,9}", text):
            raise TransportError(
                f"{variable} is {text!r:.80} but must be a number for a process started by {found}"
            )
        return int(text)

    rank_variable, size_variable, local_variable, local_rank_variable = _LAUNCHERS[found]
    rank, size = number(rank_variable), number(size_variable)
    if not 0 <= rank < size:
        raise TransportError(f"{rank_variable} is {rank} but {size_variable} is {size}")
    local_size = number(
        local_variable, size if found == "torchrun" else _local_size(environment, size)
    )
    if found == "srun":  # its variable is the most that a node may get
        local_size = min(local_size, size)
    if not 1 <= local_size <= size:
        raise TransportError(f"{local_variable} is {local_size} but {size_variable} is {size}")
    local_rank = number(local_rank_variable, rank % local_size)
    # Without its variable the size is a guess where there are several nodes.
    is_known = found == "torchrun" or local_variable in environment or local_size == size
    if local_rank < 0 or (is_known and local_rank >= local_size):
        raise TransportError(
            f"{local_rank_variable} is {local_rank} but {local_size} processes of the world are "
            f"on this node"
        )
    address = environment.get("MASTER_ADDR")
    if not address:
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
    port = number("MASTER_PORT", default_port)
    if not 0 < port < 2**16:
        raise TransportError(f"MASTER_PORT is {port}; a port is from 1 to 65535")
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        found,
        rank,
        size,
        local_size,
        local_rank,
        address,
        port,
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environment.get('TORCHELASTIC_RUN_ID', job)}/{restarts}",
    )


def _launcher_of(environment: Mapping[str, str]) -> str | None:
    """The first launcher that says both which rank this is and how many there are."""
    alone: dict[str, str] = {}
    for launcher, (rank, size, *_) in _LAUNCHERS.items():
        if launcher == "srun" and not _is_step_of_srun(environment):
            continue
        if rank in environment and size in environment:
            return launcher
        if rank in environment or size in environment:
            given, missing = (rank, size) if rank in environment else (size, rank)
            alone.setdefault(given, missing)
    for given, missing in alone.items():
        raise TransportError(
            f"{given} is {environment[given]!r:.80} but {missing} is not set; a launcher sets "
            f"both: start the program by torchrun, mpirun or srun, or unset {given} to run it as "
            f"one process"
        )
    return None


def _is_step_of_srun(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return re.fullmatch(r"[0-9]{1,10}", step) is not None and int(step) < _LAST_STEP


def _local_size(environment: Mapping[str, str], size: int) -> int:
    """Under srun and mpiexec: all ranks are here if there is one node."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return size if nodes == "1" else 1


def deadline_of(timeout: object, where: str) -> float:
    """``timeout`` in seconds, as ``where`` takes it.

    Raises:
        TransportError: it is not a number of seconds that can be waited for.
    """
    number: Any = timeout if isinstance(timeout, Real) and not isinstance(timeout, bool) else 0
    if not 0 < number <= LONGEST_S:
        raise TransportError(
            f"{where}: timeout is {timeout!r:.80}; it must be a number of seconds above 0 and at "
            f"most {LONGEST_S:.0f}"
        )
    return float(number)


@dataclass(frozen=True)
class Settings:
    """What the environment asks of ``init()``, and what comes of it.

    Attributes:
        transport: the transport that ``init()`` uses; ``"none"`` where it raises.
        reason: why that one, or what ``init()`` raises.
        nccl_library: the libnccl to use, ``""`` to find one.
        device_library: a stand-in for CUDA's runtime in tests, ``""`` for CUDA.
        checks: compare plans between ranks at every call.
    """

    transport: str
    reason: str
    nccl_library: str
    device_library: str
    checks: bool


@dataclass(frozen=True)
class Diagnostics:
    """What the environment wants to be told.

    Attributes:
        lines: one for each message, on standard error.
        folder: for the reports of ranks that fail or are asked; ``""`` for none.
    """

    lines: bool
    folder: str


def diagnostics_of(environment: Mapping[str, str]) -> Diagnostics:
    """Read it."""
    lines = environment.get("GPUDIST_DEBUG", "0") not in ("", "0")
    return Diagnostics(lines, environment.get("GPUDIST_DUMP", ""))


@dataclass(frozen=True)
class Built:
    """What this installation and this machine have.

    Attributes:
        host_missing: why there is no native core; ``""`` if there is one.
        nccl_missing: why the native core cannot use GPUs; ``""`` if it can.
        gpus: how many torch sees.
    """

    host_missing: str
    nccl_missing: str
    gpus: int


def settings_of(environment: Mapping[str, str], built: Built) -> Settings:
    """Read them."""
    try:
        transport, reason = choose_transport(launch_of(environment), environment, built)
    except (TransportError, NotBuiltError) as error:
        transport, reason = "none", str(error)
    return Settings(
        transport,
        reason,
        environment.get("GPUDIST_NCCL_LIBRARY", ""),
        environment.get("GPUDIST_DEVICE_LIBRARY", ""),
        environment.get("GPUDIST_CHECK", "0") == "1",
    )


def choose_transport(
    launch: Launch, environment: Mapping[str, str], built: Built
) -> tuple[str, str]:
    """The name of the transport for ``launch``, and why that one.

    GPUs that torch sees are used, by NCCL, unless the environment says otherwise: no other device
    takes their place unasked.

    Raises:
        TransportError: ``GPUDIST_TRANSPORT`` asks for what there is not, or another of gpudist's
            variables says what it cannot.
        NotBuiltError: there are GPUs, and this installation cannot use them.
    """
    _require_switches(environment)
    asked = environment.get("GPUDIST_TRANSPORT")
    if asked:
        if asked not in TRANSPORTS:
            raise TransportError(
                f"GPUDIST_TRANSPORT is {asked!r:.80}; it must be one of {', '.join(TRANSPORTS)}"
            )
        if asked == "loopback" and launch.size > 1:
            raise TransportError(
                f"GPUDIST_TRANSPORT=loopback is for one process, but {launch.launcher} started "
                f"{launch.size}"
            )
        return asked, f"GPUDIST_TRANSPORT is {asked}"
    if built.gpus:
        if built.nccl_missing:
            raise NotBuiltError(
                f"torch sees {built.gpus} GPUs, which this installation of gpudist cannot use: "
                f"{built.nccl_missing}. To leave them idle, set GPUDIST_TRANSPORT=host"
            )
        return "nccl", f"torch sees {built.gpus} GPUs"
    if launch.size == 1:
        return "loopback", "one process"
    if not launch.same_node:
        return "gloo", f"{launch.size} processes on several nodes"
    if built.host_missing:
        return "gloo", built.host_missing
    return "host", f"{launch.size} processes on one node"


def _require_switches(environment: Mapping[str, str]) -> None:
    for name in _SWITCHES:
        text = environment.get(name, "0")
        if text not in ("", "0", "1"):
            raise TransportError(f"{name} is {text!r:.80}; it must be 0 or 1")
