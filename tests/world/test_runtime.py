"""From a launcher's environment to a world, and from a failure to the launcher."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import gpudist
from gpudist.errors import ShapeError, TransportError
from gpudist.testing import run_distributed
from gpudist.transport.failure.channel import Failure
from gpudist.transport.host.core_transport import is_built
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.report import write_error_file
from gpudist.world.launch import Built, Launch, launch_of, settings_of
from gpudist.world.runtime import _runtime, _shut_down
from tests import warm
from tests.patience import allowed_s

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "node0",
}


def test_srun_that_does_not_say_how_many_share_a_node() -> None:
    unsaid = {name: value for name, value in SRUN.items() if name != "SLURM_NTASKS_PER_NODE"}
    assert launch_of({**unsaid, "SLURM_LOCALID": "1"}).local_rank == 1
    with pytest.raises(TransportError, match="SLURM_LOCALID is 4"):
        launch_of({**SRUN, "SLURM_LOCALID": "4"})


def test_unlaunched() -> None:
    launch = launch_of({"PATH": "/bin", "LOCAL_RANK": "3"})
    assert launch == Launch("none")
    assert (launch.rank, launch.size, launch.same_node) == (0, 1, True)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("RANK", "WORLD_SIZE"),
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ],
)
def test_half_of_a_launch(given: str, missing: str) -> None:
    said = {given: "0", "SLURM_STEP_ID": "3"} if given.startswith("SLURM") else {given: "0"}
    with pytest.raises(
        TransportError, match=f"{given} is '0' but {missing} is not set.*unset {given}"
    ):
        launch_of(said)
    # Another launcher's pair is whole.
    assert launch_of({**said, **MPICH}).launcher == "mpiexec" or given.startswith("PMI")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": ""}])
@pytest.mark.parametrize("names", [["SLURM_NTASKS"], ["SLURM_PROCID", "SLURM_NTASKS"]])
def test_scripts_and_shells_of_slurm_are_no_ranks(step: dict[str, str], names: list[str]) -> None:
    """A batch script has the rank and the size of a task; an interactive shell a step as well."""
    assert launch_of({**{name: SRUN[name] for name in names}, **step}) == Launch("none")


NO_DEADLINES = [0, -1, 0.0, math.nan, math.inf, 1e300, 10**400, "5", None, True, [5]]


@pytest.mark.parametrize("timeout", NO_DEADLINES)
def test_deadlines_that_are_none(timeout: Any) -> None:
    words = "timeout is .*; it must be a number of seconds above 0 and at most 1000000"
    with pytest.raises(TransportError, match=f"gpudist.init: {words}"):
        gpudist.init(timeout=timeout)
    with pytest.raises(TransportError, match=f"run_distributed: {words}"):
        run_distributed(str, 2, timeout=timeout)
    assert run_distributed(lambda P: P.wire.timeout_s, 2, timeout=1_000_000) == [1e6, 1e6]


def test_what_is_no_deadline_but_a_mesh_or_a_group() -> None:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    group: Any = dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue]
    remedies = [(mesh, "create_mesh_partition(mesh)"), (group, "process_group=group")]
    for given, remedy in (*remedies, ((1, 2), "gpudist.init().grid(shape)")):
        with pytest.raises(TransportError, match=re.escape(remedy)):
            gpudist.init(given)  # pyright: ignore[reportArgumentType]


def test_torchrun() -> None:
    launch = launch_of(TORCHRUN)
    assert launch == Launch("torchrun", 3, 8, 4, 3, "node7", 1234, True, "job/2")
    assert not launch.same_node


def test_torchrun_comes_before_the_scheduler_around_it() -> None:
    assert launch_of({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_open_mpi() -> None:
    launch = launch_of(OPEN_MPI)
    assert (launch.launcher, launch.rank, launch.size, launch.local_size) == ("mpirun", 1, 2, 2)
    assert (launch.address, launch.same_node, launch.store_is_served) == ("127.0.0.1", True, False)
    assert launch.run == "prterun-1/0"
    assert launch.port == launch_of({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).port


def test_mpich() -> None:
    launch = launch_of(MPICH)
    assert (launch.launcher, launch.rank, launch.size, launch.local_size) == ("mpiexec", 1, 4, 4)
    without = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    assert launch_of(without).same_node


def test_srun() -> None:
    launch = launch_of(SRUN)
    assert (launch.launcher, launch.rank, launch.size, launch.local_size) == ("srun", 5, 8, 4)
    assert (launch.address, launch.run) == ("node0", "77/0")
    one_node = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1"}
    one_node["SLURM_STEP_ID"] = "1"
    assert launch_of(one_node).same_node
    unknown = {**one_node, "SLURM_JOB_NUM_NODES": "2", "MASTER_ADDR": "node0"}
    assert not launch_of(unknown).same_node


def test_jobs_on_one_node_meet_at_different_ports() -> None:
    ports = {launch_of({**OPEN_MPI, "PMIX_NAMESPACE": f"prterun-{i}"}).port for i in range(20)}
    assert len(ports) >= 10


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "2 ranks on several nodes.*MASTER_ADDR"),
        ({k: v for k, v in SRUN.items() if k != "MASTER_ADDR"}, "8 ranks.*MASTER_ADDR.*srun"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'.*number.*torchrun"),
        ({**TORCHRUN, "RANK": ""}, "RANK is ''"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8 but WORLD_SIZE is 8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is -1"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "4(x2)"}, "SLURM_NTASKS_PER_NODE"),
    ],
)  # fmt: skip
def test_incomplete_environments(environment: Mapping[str, str], text: str) -> None:
    with pytest.raises(TransportError, match=text):
        launch_of(environment)


WHOLE = Built(host_missing="", nccl_missing="", gpus=0)
GPUS = Built(host_missing="", nccl_missing="", gpus=4)


@pytest.mark.parametrize(
    ("environment", "built", "transport", "reason"),
    [
        ({}, WHOLE, "loopback", "one process"),
        ({}, Built("no native core", "no CUDA half", 0), "gloo", "no native core"),
        (OPEN_MPI, WHOLE, "host", "2 processes on one node"),
        (TORCHRUN, WHOLE, "gloo", "8 processes on several nodes"),
        ({}, GPUS, "nccl", "torch sees 4 GPUs"),
        (TORCHRUN, GPUS, "nccl", "torch sees 4 GPUs"),
        (OPEN_MPI, Built("", "no CUDA half", 4), "none", "torch sees 4 GPUs, which .*no CUDA half"),
        (OPEN_MPI, Built("no native core", "no CUDA half", 0), "gloo", "no native core"),
        ({**OPEN_MPI, "GPUDIST_TRANSPORT": "host"}, GPUS, "host", "GPUDIST_TRANSPORT is host"),
        ({**OPEN_MPI, "GPUDIST_TRANSPORT": "gloo"}, WHOLE, "gloo", "GPUDIST_TRANSPORT is gloo"),
        ({"GPUDIST_TRANSPORT": "mpi"}, WHOLE, "none", "GPUDIST_TRANSPORT is 'mpi'; it must be"),
        ({**TORCHRUN, "RANK": "8"}, WHOLE, "none", "RANK is 8 but WORLD_SIZE is 8"),
    ],
)
def test_choice_of_transport(
    environment: Mapping[str, str], built: Built, transport: str, reason: str
) -> None:
    asked = settings_of(environment, built)
    assert asked.transport == transport
    assert re.match(reason, asked.reason)


def test_settings_of_the_environment() -> None:
    plain = settings_of({}, WHOLE)
    assert (plain.nccl_library, plain.device_library, plain.checks) == ("", "", False)
    asked = settings_of({"GPUDIST_NCCL_LIBRARY": "/a/b", "GPUDIST_CHECK": "1"}, WHOLE)
    assert (asked.nccl_library, asked.device_library, asked.checks) == ("/a/b", "", True)


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [({**TORCHRUN, "LOCAL_RANK": "1"}, 1), ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0)],
)
def test_number_on_the_node(environment: Mapping[str, str], local_rank: int) -> None:
    assert launch_of(environment).local_rank == local_rank


def run(
    arguments: list[str], python: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    launchers = ("RANK", "WORLD_SIZE", "OMPI_", "PMI", "SLURM_", "GPUDIST_", "TORCHELASTIC_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python or warm.python(), *arguments],
        env={**inherited, **known, **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )


def script(path: Path, text: str) -> str:
    file = path / "program.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


def test_init_unlaunched(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import gpudist, torch
        P = gpudist.init()
        assert gpudist.init() is P
        y = gpudist.all_sum_reduce(torch.ones(2), P.create_cartesian_topology_partition([1]), [0])
        print(P.size, P.rank, P.transport, y.tolist())
        """,
    )
    ended = run([program])
    assert ended.returncode == 0, ended.stderr
    name = "loopback" if is_built() else "gloo"
    assert ended.stdout.split("\n")[0] == f"1 0 {name} [1.0, 1.0]"


def test_init_without_the_native_core(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import sys
        sys.modules["gpudist._native"] = None
        import gpudist, torch
        P = gpudist.init()
        y = gpudist.all_sum_reduce(torch.ones(2), P.create_cartesian_topology_partition([1]), [0])
        print(P.size, P.rank, P.transport, y.tolist())
        try:
            gpudist.testing.run_distributed(print, 2)
        except gpudist.NotBuiltError as error:
            print(error)
        """,
    )
    # Not a process that has imported the core before.
    ended = run([program], python=sys.executable)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == "1 0 gloo [1.0, 1.0]"
    assert second.startswith("the loopback transport: this installation of gpudist has no native")
    assert "GPUDIST_NATIVE=on pip install" in second
    assert "using gloo, which is many times slower" in ended.stderr


def test_init_refuses_a_transport_it_does_not_know(tmp_path: Path) -> None:
    program = script(tmp_path, "import gpudist; gpudist.init()")
    ended = run([program], GPUDIST_TRANSPORT="pigeon")
    assert ended.returncode == 1
    assert "GPUDIST_TRANSPORT is 'pigeon'" in ended.stderr


def torchrun(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, *options, program], GPUDIST_TRANSPORT="gloo")


def test_torchrun_of_two_ranks(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import gpudist, sys, torch
        P = gpudist.init(timeout=60)
        P_x = P.create_partition_inclusive([1])
        x = torch.arange(3.0) if P_x.active else gpudist.zero_volume_tensor()
        y = gpudist.broadcast(x.requires_grad_(), P_x, P)
        y.sum().backward()
        sys.stdout.write(f"{P.rank} of {P.size} {P.transport} {y.tolist()} {x.grad.tolist()}\\n")
        """,
    )
    ended = torchrun(program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "0 of 2 gloo [0.0, 1.0, 2.0] []",
        "1 of 2 gloo [0.0, 1.0, 2.0] [2.0, 2.0, 2.0]",
    ]


def test_torchrun_when_a_rank_raises(tmp_path: Path) -> None:
    """The other rank, which waits, learns who failed and of what, and tells torchrun."""
    program = script(
        tmp_path,
        f"""
        import gpudist, os, pathlib
        P = gpudist.init(timeout=60)
        if P.rank == 1:
            raise ValueError("no such shard")
        try:
            P.barrier()
        except gpudist.PeerFailure as error:
            pathlib.Path({str(tmp_path / "heard")!r}).write_text(f"{{error.rank}} {{error}}")
            raise
        """,
    )
    logs = tmp_path / "logs"
    ended = torchrun(program, "--log-dir", str(logs))
    assert ended.returncode != 0
    told = [json.loads(file.read_text()) for file in logs.rglob("error.json")]
    # Torchrun ends the other rank within milliseconds, perhaps before it can write.
    texts = [error["message"]["message"] for error in told]
    texts += [file.read_text() for file in tmp_path.glob("heard")]
    for text in texts:
        assert "rank 1 raised ValueError: no such shard" in text
    assert "no such shard" in ended.stderr


def test_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(str(path), ShapeError("blocks of 3 and 4"), 5)
    write_error_file(str(path), ShapeError("a later error"), 6)
    told = json.loads(path.read_text())["message"]
    assert told["message"] == "rank 5: ShapeError: blocks of 3 and 4"
    assert "blocks of 3 and 4" in told["extraInfo"]["py_callstack"]
    assert int(told["extraInfo"]["timestamp"]) > 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_rank_leaves_no_part_of_an_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(message: object, file: TextIO) -> None:
        file.write('{"message": ')
        file.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        write_error_file(str(tmp_path / "error.json"), ShapeError("blocks of 3 and 4"), 5)
    assert not (tmp_path / "error.json").exists()


def test_no_error_file_without_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_error_file("", ShapeError("unheard"), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_never_answers_does_not_hold_up_the_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CutOff:
        def add(self, key: str, number: int) -> int:
            threading.Event().wait()
            return number

    monkeypatch.setattr(_runtime, "pid", os.getpid())
    monkeypatch.setattr(_runtime, "store", CutOff())
    transport = LoopbackTransport.single()
    transport.abort(Failure("CollectiveTimeout", 0, "the link is cut"))
    start_s = time.monotonic()
    _shut_down(transport, Launch("mpirun", 1, 2))
    assert 0.5 < time.monotonic() - start_s < allowed_s(5)
