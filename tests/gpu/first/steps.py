"""Steps for the first minutes on a GPU, and for the minutes after them, the most telling first.

Steps that only say right or wrong run beside each other; a step that is ``alone`` measures time, or
others need what it makes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-rfEs", "-W", "default", "-p", "no:cacheprovider"),
    *("--tb=short", "--maxfail=12"),
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MODULES = "torch, gpudist, tests.gpu.worlds, benchmarks.gpu.__main__"
ONE_RANK = ("--world", "one rank")
TWO_RANKS = ("--world", "2 ranks on one GPU")
A_RANK_A_GPU = ("--world", "a rank a GPU")
LOGS = "{logs}"
KERNELS = sorted(
    path.name
    for pattern in ("test_kernels", "test_random_*", "test_norm*", "test_one_rank")
    for path in Path(__file__).parents[1].glob(f"{pattern}.py")
)
# A step that writes nothing for so long hangs; longer where a line takes processes of its own.
QUIET_S, QUIET_STARTING_S = 30.0, 45.0


@dataclass(frozen=True)
class Step:
    """Command, and the condition under which it has failed.

    Attributes:
        name: also of its log.
        shows: what is known when it has succeeded.
        command: the program and its arguments; ``{logs}`` is the folder of the logs, ``{gpus}`` the
            number of GPUs, ``{commit}`` that of the code.
        limit_s: after which it is killed, with the stacks of its Python threads in its log.
        quiet_s: the same, after its last line.
        telling: a regular expression of the line that tells most of a run that succeeded; the last
            line if empty.
        tools: programs without which it is skipped.
        gpus: fewer than these and it is skipped.
        alone: no other step runs meanwhile, and NCCL logs nothing.
        rehearsed: it runs over the doubles too.
        smallest: arguments of a rehearsal, which make it short.
        shares_a_gpu: several ranks are on one GPU, by the NCCL that is given for them.
        variables: of its environment.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    telling: str = ""
    quiet_s: float = QUIET_S
    tools: tuple[str, ...] = ()
    gpus: int = 1
    alone: bool = False
    rehearsed: bool = True
    smallest: tuple[str, ...] = ()
    shares_a_gpu: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def first_steps() -> tuple[Step, ...]:
    """Whether it works, how fast it is, and then whether everything works."""
    return (*_installation(), *_most_telling(), *_speed(), *_several_gpus(), *_everything())


def second_steps() -> tuple[Step, ...]:
    """Steps for which the first minutes have no time."""
    return (*_more_speed(), *_tools(), *_networks())


def _installation() -> tuple[Step, ...]:
    return (
        Step("build", "the CUDA half compiles",
             ("make", "gpu-build", f"GPU_PYTHON={sys.executable}"), 240, quiet_s=200, alone=True,
             rehearsed=False),
        Step("gpu", "there is one, and a driver", ("nvidia-smi",), 20, r"\d+MiB +/",
             tools=("nvidia-smi",), rehearsed=False),
        Step("compiler", "nvcc, and its version", ("nvcc", "--version"), 20, "release",
             tools=("nvcc",), rehearsed=False),
        Step("import", "every module is imported",
             (sys.executable, "-c", f"import {MODULES}; print('imported', torch.__version__)"),
             60, quiet_s=60),
        Step("environment", "versions, NCCL, the transport",
             (sys.executable, "-m", "gpudist", "env", "--json"), 60, '"transport_reason"',
             quiet_s=60),
    )  # fmt: skip


def _most_telling() -> tuple[Step, ...]:
    return (
        _tests("self communicator", "NCCL itself: configuration, messages, graphs, end, abort",
               90, "test_self_communicator.py"),
        _tests("kernels", "each of ours is right", 110, *KERNELS, *ONE_RANK),
        _tests("operators", "every operator, its gradient and layouts of memory, in a world of one",
               110, "test_operators.py", *ONE_RANK),
        _tests("streams and layers", "order, graphs, arrays and training in a world of one", 110,
               "test_streams.py", "test_layers.py", "test_arrays.py", *ONE_RANK),
        _tests("two ranks: messages", "NCCL's messages between two processes", 90,
               "test_messages.py", *TWO_RANKS, shares=True),
        _tests("two ranks: training", "networks train as on one rank, in all precisions", 120,
               "test_training.py", *TWO_RANKS, shares=True),
    )  # fmt: skip


def _speed() -> tuple[Step, ...]:
    return (
        _measured("speed of messages", "a halo by NCCL to itself", "self_messages", limit_s=60),
        _measured("speed of a step", "a U-Net's training step beside torch's", "unet_step",
                  limit_s=110),
        _measured("speed of layers", "norms, dropout and convolutions beside torch's", "norms",
                  "dropout", "overlap", limit_s=130),
        _measured("speed of copies", "a halo within the GPU, and our kernel, beside copy_",
                  "self_halo", "copy", limit_s=50),
    )  # fmt: skip


def _everything() -> tuple[Step, ...]:
    return (
        _tests("two ranks: operators", "every operator, its gradient and layouts of memory", 120,
               "test_operators.py", *TWO_RANKS, shares=True),
        _tests("two ranks: layers", "order of streams; every layer", 120, "test_streams.py",
               "test_layers.py", *TWO_RANKS, shares=True),
        _tests("two ranks: ends", "what becomes of the others when a rank dies or disagrees", 180,
               "test_failures.py", *TWO_RANKS, shares=True),
        _tests("two ranks: large", "messages of networks, both ways and captured", 120,
               "test_large.py", *TWO_RANKS, shares=True),
        _tests("large tables", "capture and replay of one", 90, "test_large.py", *ONE_RANK,
               "-k", "arguments or captured"),
        _tests("compiled", "torch.compile of operators and layers", 120, "test_compile.py",
               *ONE_RANK, quiet_s=90),
    )  # fmt: skip


def _several_gpus() -> tuple[Step, ...]:
    return (
        _tests("a rank a GPU", "operators, layers, messages and ends between GPUs", 300,
               "", *A_RANK_A_GPU, gpus=2, quiet_s=QUIET_STARTING_S),
        _tests("contexts", "no process has memory on another's GPU; DDP beside a halo", 90,
               "test_several_gpus.py", gpus=2, quiet_s=QUIET_STARTING_S),
        Step("check", "right or wrong, GB/s of each link, and a remedy",
             (*TORCHRUN, "{gpus}", "-m", "gpudist", "check"), 120, "^verdict", gpus=2, alone=True,
             rehearsed=False),
        Step("speed between GPUs", "beside torch's messages, collectives and DTensor",
             (*TORCHRUN, "{gpus}", "-m", "benchmarks.gpu", "--json", f"{LOGS}/gpus.jsonl"), 300,
             gpus=2, alone=True),
    )  # fmt: skip


def _more_speed() -> tuple[Step, ...]:
    return (
        _measured("speed of enqueueing", "the host's time of an exchange", "enqueue", limit_s=60),
        _measured("speed of packing", "pack, unpack and add beside copy_", "packing", "latency",
                  limit_s=110),
        _measured("speed of adjoints", "the adjoint of a halo beside it", "adjoint", limit_s=40),
        Step("profile", "the planner's figures, measured",
             (sys.executable, "-m", "benchmarks.gpu.profile", f"{LOGS}/profile.json"), 60,
             alone=True),
    )  # fmt: skip


def _tools() -> tuple[Step, ...]:
    return (
        Step("issue slots", "whether memory or instructions bound the interior of a halo",
             ("ncu", "--clock-control", "none", "--kernel-name", "regex:combine",
              "--launch-count", "8", "--section", "SpeedOfLight", "--section", "SchedulerStats",
              sys.executable, "-m", "tests.gpu.first.interiors"), 90, "DRAM Throughput",
             quiet_s=60, tools=("ncu",), alone=True, rehearsed=False),
    )  # fmt: skip


def _networks() -> tuple[Step, ...]:
    return (
        _tests("two ranks: zoo", "networks of three packages as on one rank", 240, "test_zoo.py",
               *TWO_RANKS, shares=True, quiet_s=90),
        _tests("two ranks: norms", "float32 norms are as precise as torch's", 90,
               "test_norm_precision.py", *TWO_RANKS, shares=True),
        _tests("two ranks: compiled", "torch.compile of operators and layers", 120,
               "test_compile.py", *TWO_RANKS, shares=True, quiet_s=90),
        Step("memcheck", "a round of the kernels reads and writes nothing else",
             ("sh", "tests/gpu/sanitize.sh", sys.executable, "memcheck", "-k",
              "pack-0 or add-0 or random_halos[0]"),
             150, "ERROR SUMMARY", quiet_s=100, tools=("compute-sanitizer",), rehearsed=False,
             variables={"GPU_BUILT": "1"}),
        # Its parts are rehearsed above.
        _tests("all tests of one rank", "the rest of tests/gpu", 300, "", *ONE_RANK, quiet_s=90,
               rehearsed=False),
    )  # fmt: skip


def _tests(
    name: str, shows: str, limit_s: float, *arguments: str, shares: bool = False,
    quiet_s: float | None = None, gpus: int = 1, rehearsed: bool = True,
) -> Step:  # fmt: skip
    paths = tuple(f"tests/gpu/{a}" if a.endswith(".py") or not a else a for a in arguments)
    starting_s = QUIET_STARTING_S if shares else QUIET_S
    return Step(
        name, shows, (*PYTEST, *paths), limit_s, r"\d+ passed", quiet_s or starting_s, gpus=gpus,
        smallest=("--smallest",), shares_a_gpu=shares, rehearsed=rehearsed,
    )  # fmt: skip


def _measured(name: str, shows: str, *subjects: str, limit_s: float) -> Step:
    asked = [part for subject in subjects for part in ("--subject", subject)]
    command = (
        *(sys.executable, "-m", "benchmarks.gpu", *asked, "--commit", "{commit}"),
        *("--iterations", "20", "--json", f"{LOGS}/{subjects[0]}.jsonl"),
    )
    return Step(name, shows, command, limit_s, alone=True, smallest=("--smallest",))
