"""Read the rank of this process and the choice of transport from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gpudist.errors import NotBuiltError, TransportError
from gpudist.transport import TRANSPORTS


@dataclass(frozen=True)
class Launch:
    """Rank of this process and rendezvous address, as set by the launcher.

    Attributes:
        launcher: ``"torchrun"``, ``"mpirun"``, ``"mpiexec"``, ``"srun"`` or ``"none"``.
        rank, size: rank of this process and number of ranks in the world.
        local_size: number of ranks on this node.
        local_rank: position of this process among them.
        address, port: address of the rendezvous store.
        store_is_served: whether the launcher itself serves the store.
        run: identifier that separates runs and restarts of jobs that share an address.
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


# The operating system limits waits to 24 days.
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


# Slurm steps above this number are batch scripts and shells, which srun did not start.
_LAST_STEP = 4_000_000_000


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Read the variables of torchrun, mpirun or srun; without them the world has one process.

    The first launcher whose rank and world size are both set is used. Slurm's variables are used
    only within an ``srun`` step, because batch scripts and shells also have a rank.

    Raises:
        TransportError: a variable is missing, is not a number, or contradicts the others.
    """
    launcher = _launcher_of(environment)
    if launcher is None:
        return Launch("none")

    def number(variable: str, default: int | None = None) -> int:
        text = environment.get(variable, "" if default is None else str(default))
        # int() accepts more than launchers write: 1_0, and digits of other scripts.
        if not re.fullmatch(r"-?[0-9]{1,9}", text):
            raise TransportError(
                f"{variable} is {text!r:.80} but must be a number for a process started by "
                f"{launcher}"
            )
        return int(text)

    rank_variable, size_variable, local_variable, local_rank_variable = _LAUNCHERS[launcher]
    rank, size = number(rank_variable), number(size_variable)
    if not 0 <= rank < size:
        raise TransportError(
            f"{rank_variable} is {rank} but {size_variable} is {size}; the rank must be from 0 to "
            f"{size - 1}"
        )
    local_size = number(
        local_variable, size if launcher == "torchrun" else _local_size(environment, size)
    )
    if launcher == "srun":  # this launcher's variable is the maximum per node
        local_size = min(local_size, size)
    if not 1 <= local_size <= size:
        raise TransportError(
            f"{local_variable} is {local_size} but {size_variable} is {size}; it must be from 1 to "
            f"{size}"
        )
    local_rank = number(local_rank_variable, rank % local_size)
    # Without a variable, the local size on several nodes is a guess.
    is_known = launcher == "torchrun" or local_variable in environment or local_size == size
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
                f"rank 0's node and a free port there; {launcher} does not set them"
            )
        address = "127.0.0.1"
    jobs = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_ID")
    for name in ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", *jobs):
        _require_utf8(name, environment.get(name, ""))
    job = next((environment[name] for name in jobs if name in environment), "0")
    default_port = 29500 + sum(job.encode()) % 1000
    port = number("MASTER_PORT", default_port)
    if not 0 < port < 2**16:
        raise TransportError(f"MASTER_PORT is {port}; it must be from 1 to 65535")
    # Steps of a Slurm job may run side by side.
    step = environment.get("SLURM_STEP_ID", "0") if launcher == "srun" else "0"
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", step)
    return Launch(
        launcher,
        rank,
        size,
        local_size,
        local_rank,
        address,
        port,
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environment.get('TORCHELASTIC_RUN_ID', job)}/{restarts}",
    )


def _require_utf8(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TransportError(
            f"{name} is {text!r:.80}, which is not UTF-8; set it to letters and digits (torchrun "
            "takes the id of a job from --rdzv-id)"
        ) from None


def _launcher_of(environment: Mapping[str, str]) -> str | None:
    """Return the first launcher that has set both the rank and the world size."""
    alone: dict[str, str] = {}
    for launcher, (rank, size, *_) in _LAUNCHERS.items():
        if launcher == "srun" and not _is_step_of_srun(environment):
            continue
        if rank in environment and size in environment:
            return launcher
        if rank in environment or size in environment:
            present, absent = (rank, size) if rank in environment else (size, rank)
            alone.setdefault(present, absent)
    for present, absent in alone.items():
        raise TransportError(
            f"{present} is {environment[present]!r:.80} but {absent} is not set; a launcher sets "
            f"both: start the program by torchrun, mpirun or srun, or unset {present} to run it as "
            f"one process"
        )
    return None


def _is_step_of_srun(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return re.fullmatch(r"[0-9]{1,10}", step) is not None and int(step) < _LAST_STEP


def _local_size(environment: Mapping[str, str], size: int) -> int:
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return size if nodes == "1" else 1


def deadline_of(timeout: object, where: str) -> float:
    """Return ``timeout`` as a float, in seconds.

    Args:
        timeout: value given by the user.
        where: name of the function, for the error message.

    Raises:
        TransportError: ``timeout`` is not a positive number of seconds, or it is too large.
    """
    number: Any = timeout if isinstance(timeout, Real) and not isinstance(timeout, bool) else 0
    if not 0 < number <= LONGEST_S:
        remedy = ""
        if hasattr(timeout, "mesh_dim_names"):
            remedy = "; to use torch's mesh, call gpudist.init().create_mesh_partition(mesh)"
        elif hasattr(timeout, "rank") and hasattr(timeout, "size"):
            remedy = "; to join the ranks of torch's group, pass process_group=group"
        elif isinstance(timeout, (list, tuple)):
            remedy = "; to arrange the workers on a grid, call gpudist.init().grid(shape)"
        raise TransportError(
            f"{where}: timeout is {timeout!r:.80}; it must be a number of seconds above 0 and at "
            f"most {LONGEST_S:.0f}{remedy}"
        )
    return float(number)


@dataclass(frozen=True)
class Settings:
    """Settings of ``init()`` that come from the environment.

    Attributes:
        transport: transport that ``init()`` will use; ``"none"`` if it will raise.
        reason: why this transport was chosen, or the error message of ``init()``.
        nccl_library: path of the NCCL library, ``""`` to search for one.
        device_library: path of a replacement for the CUDA driver in tests, ``""`` for CUDA.
        checks: whether ranks compare their plans at every call.
    """

    transport: str
    reason: str
    nccl_library: str
    device_library: str
    checks: bool


def diagnostics_of(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Read ``GPUDIST_DEBUG`` and ``GPUDIST_DUMP``.

    Returns:
        Whether to print one line per message to standard error, and the folder for reports written
        on failure or on a signal; ``""`` for none.
    """
    lines = environment.get("GPUDIST_DEBUG", "0") not in ("", "0")
    return lines, environment.get("GPUDIST_DUMP", "")


@dataclass(frozen=True)
class Built:
    """Parts of gpudist that are built, and GPUs of this machine.

    Attributes:
        host_missing: why the native core is missing; ``""`` if it is built.
        nccl_missing: why the native core cannot use GPUs; ``""`` if it can.
        gpus: number of GPUs visible to torch.
    """

    host_missing: str
    nccl_missing: str
    gpus: int


def settings_of(environment: Mapping[str, str], built: Built) -> Settings:
    """Read the settings of ``init()``; an error becomes the reason of transport ``"none"``."""
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
    """Return the name of the transport for ``launch`` and the reason for the choice.

    If torch sees GPUs, the transport is NCCL unless the environment names another one. gpudist
    never falls back silently to the CPU.

    Raises:
        TransportError: ``GPUDIST_TRANSPORT`` names an unknown or unsuitable transport, or another
            variable of gpudist has an invalid value.
        NotBuiltError: there are GPUs, but this installation cannot use them.
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
    if launch.size == 1 and not built.host_missing:
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
