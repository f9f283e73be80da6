"""Steps for the first minutes on a GPU, the most informative first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "-W", "default", "-p", "no:cacheprovider")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MODULES = "torch, gpudist, tests.gpu.worlds, benchmarks.gpu.__main__"
ONE_GPU_SUBJECTS = (
    "copy", "packing", "self_halo", "latency", "adjoint", "enqueue", "overlap", "norms",
)  # fmt: skip
ONE_RANK = ("--world", "one rank")
TWO_RANKS = ("--world", "2 ranks on one GPU")
A_RANK_A_GPU = ("--world", "a rank a GPU")
OUT = "{out}"


@dataclass(frozen=True)
class Step:
    """Command, and the condition under which it has failed.

    Attributes:
        name: also of its log.
        shows: what is known when it has succeeded.
        command: the program and its arguments; ``{out}`` is the folder of the output, ``{gpus}``
            the number of GPUs.
        limit_s: after which it is killed, with the stacks of its Python threads in its log.
        telling: a regular expression of the line that tells most of a run that succeeded; the last
            line if empty.
        tools: programs without which it is skipped.
        gpus: fewer than these and it is skipped.
        rehearsed: it runs over the doubles too.
        quick: it takes seconds there.
        shares_a_gpu: several ranks are on one GPU, by the NCCL that is given for them.
        variables: of its environment.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    telling: str = ""
    tools: tuple[str, ...] = ()
    gpus: int = 1
    rehearsed: bool = True
    quick: bool = False
    shares_a_gpu: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def steps() -> tuple[Step, ...]:
    """All of them, in their order."""
    return (*_installation(), *_one_rank(), *_two_ranks(), *_speed(), *_several_gpus())


def _installation() -> tuple[Step, ...]:
    return (
        Step("gpu", "there is one, and a driver", ("nvidia-smi",), 20, r"\d+MiB +/",
             tools=("nvidia-smi",), quick=True, rehearsed=False),
        Step("compiler", "nvcc, and its version", ("nvcc", "--version"), 20, "release",
             tools=("nvcc",), quick=True, rehearsed=False),
        Step("build", "the CUDA half compiles",
             ("make", "gpu-build", f"GPU_PYTHON={sys.executable}"), 240, rehearsed=False),
        Step("import", "every module is imported",
             (sys.executable, "-c", f"import {MODULES}; print('imported', torch.__version__)"),
             40, quick=True),
        Step("environment", "versions, NCCL, the transport",
             (sys.executable, "-m", "gpudist", "env", "--json"), 30, '"transport_reason"',
             quick=True),
        Step("machine code", "the build has code for this GPU",
             ("sh", "-c", "cuobjdump --list-elf gpudist/_native*.so"), 30, r"sm_\w+",
             tools=("cuobjdump",), quick=True, rehearsed=False),
    )  # fmt: skip


def _one_rank() -> tuple[Step, ...]:
    return (
        _tests("self communicator", "NCCL itself: configuration, messages, graphs, end, abort",
               60, "test_self_communicator.py", quick=True),
        _tests("kernels", "pack, add and unpack are right", 90, "test_kernels.py",
               "test_random_halos.py", "test_one_rank.py"),
        _tests("one rank's graphs", "capture and replay, and of a large table", 60,
               "test_streams.py", "test_layers.py", "test_large.py", *ONE_RANK, "-k",
               "graph or arguments"),
        Step("memcheck", "a round of the kernels reads and writes nothing else",
             ("sh", "tests/gpu/sanitize.sh", sys.executable, "memcheck", "-k",
              "pack-0 or add-0 or random_halos[0]"),
             150, "ERROR SUMMARY", tools=("compute-sanitizer",), rehearsed=False),
        _tests("one rank", "every operator, stream, layer and graph of a world of one", 120,
               "test_operators.py", "test_streams.py", "test_layers.py", "test_compile.py",
               "test_arrays.py", *ONE_RANK),
    )  # fmt: skip


def _two_ranks() -> tuple[Step, ...]:
    shared = {"shares_a_gpu": True}
    large = ("test_large.py",)
    return (
        _tests("messages", "NCCL's messages between two processes", 60, "test_messages.py",
               *TWO_RANKS, **shared),
        _tests("large messages", "those of networks, both ways", 120, *large, *TWO_RANKS,
               "-k", "not captured", **shared),
        _tests("large messages in graphs", "the same, whatever NCCL registers", 120, *large,
               *TWO_RANKS, "-k", "captured", **shared),
        _tests("operators", "every operator, its gradient and layouts of memory", 120,
               "test_operators.py", *TWO_RANKS, **shared),
        _tests("streams and layers", "their order; training", 120, "test_streams.py",
               "test_layers.py", *TWO_RANKS, **shared),
        _tests("ends", "what becomes of the others when a rank dies or disagrees", 240,
               "test_failures.py", *TWO_RANKS, **shared),
    )  # fmt: skip


def _speed() -> tuple[Step, ...]:
    measured = tuple(
        Step(f"speed of {subject}", "beside the device's own and torch",
             (sys.executable, "-m", "benchmarks.gpu", "--subject", subject, "--json",
              f"{OUT}/gpu-{subject}.jsonl"), 90, rehearsed=False)
        for subject in ONE_GPU_SUBJECTS
    )  # fmt: skip
    counted = (
        "ncu", "--clock-control", "none", "--kernel-name", "regex:combine", "--launch-count", "8",
        "--section", "SpeedOfLight", "--section", "SchedulerStats",
        sys.executable, "-m", "tests.gpu.first.interiors",
    )  # fmt: skip
    return (
        *measured,
        Step("issue slots", "whether memory or instructions bound the interior of a halo", counted,
             120, "DRAM Throughput", tools=("ncu",), rehearsed=False),
    )  # fmt: skip


def _several_gpus() -> tuple[Step, ...]:
    return (
        _tests("a rank a GPU", "operators, layers, messages and ends between GPUs", 300,
               "", *A_RANK_A_GPU, gpus=2, rehearsed=False),
        _tests("contexts", "no process has memory on another's GPU; DDP beside a halo", 90,
               "test_several_gpus.py", gpus=2),
        Step("check", "right or wrong, GB/s of each link, and a remedy",
             (*TORCHRUN, "{gpus}", "-m", "gpudist", "check"), 120, "^verdict", gpus=2,
             rehearsed=False),
        Step("speed between GPUs", "beside torch's messages, collectives and DTensor",
             (*TORCHRUN, "{gpus}", "-m", "benchmarks.gpu", "--json", f"{OUT}/gpus.jsonl"), 300,
             gpus=2, rehearsed=False),
    )  # fmt: skip


def _tests(name: str, shows: str, limit_s: float, *arguments: str, **more: object) -> Step:
    paths = tuple(f"tests/gpu/{a}" if a.endswith(".py") or not a else a for a in arguments)
    return Step(name, shows, (*PYTEST, *paths), limit_s, r"\d+ passed", **more)  # pyright: ignore
