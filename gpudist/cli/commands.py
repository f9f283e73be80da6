"""Subcommands: their texts and arguments, which need no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import fill
from typing import Any

from gpudist.cli.bench import subjects
from gpudist.cli.command import Command, extent

ENV = Command(
    "env",
    "show what this installation and machine can do",
    "Show versions, GPUs and how they are linked, NCCL, and the transports that work here and why "
    "the others do not. Joins no world; run it like your program to see what "
    "gpudist.init() would choose there.\n\n"
    "  gpudist env\n"
    "  torchrun --standalone --nproc-per-node 4 -m gpudist env",
    lambda parser: None,
)


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, help="number of threads, unless launched")
    parser.add_argument(
        "--mib", type=int, default=4, help="size of each rank's block, for the speed"
    )


CHECK = Command(
    "check",
    "check every operator on this machine",
    "Check that every operator is exact, that its backward is its adjoint (the dot test), and how "
    "fast it is compared to a plain copy of the same bytes; then measure messages between pairs of "
    "ranks, and say what to do if something is wrong or slow. Launch it like a program, or run it "
    "alone with threads of one process as ranks. The exit status is 1 if an operator is wrong.\n\n"
    "  gpudist check --ranks 2\n"
    "  torchrun --standalone --nproc-per-node 4 -m gpudist check",
    _add_check_arguments,
)


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if subjects():
        parser.epilog = fill(f"Subjects: {', '.join(subjects())}.", 78)
    add = parser.add_argument
    add("subject", help="such as halo, repartition or conv; all; or profile")
    add("--ranks", type=int, action="append", help="number of processes; may be repeated")
    add("--iterations", type=int, help="timed iterations, after warm-up")
    add("--output", type=Path, help="file for profile (profile.json)")


BENCH = Command(
    "bench",
    "measure operators and layers beside their peers",
    """\
Measure a subject of the benchmarks in a checkout of the repository; its
benchmarks/README.md says what is measured and how. The exit status is 1 if a
result was wrong. profile measures the rates of this machine for gpudist plan,
and needs no checkout.

  gpudist bench halo --ranks 2
  gpudist bench profile --output here.json""",
    _add_bench_arguments,
)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("network", metavar="NETWORK",
        help="MODULE:NAME or FILE.py:NAME of a torch module, a list of layers, or a function "
        "that makes one")  # fmt: skip
    add("--shape", required=True, nargs="+", action="append", metavar="N",
        help="global shape of its input, repeated for each further input; a dtype may follow, "
        "as in 8 1024 int64")  # fmt: skip
    add("--ranks", type=int,
        help="plan for so many workers; otherwise say on how many it fits, 1 to 64")  # fmt: skip
    add(
        "--all",
        action="store_true",
        help="without --ranks, print every number of workers from 1 to 64",
    )
    add("--memory", type=float, metavar="GIB", help="memory of a worker (that of the profile)")
    add("--profile", default="h100",
        help="h100, h200, a100, pcie, or a file that gpudist bench profile wrote")  # fmt: skip
    add("--best", type=int, help="number of partitions to plan (8, or all for up to 4 ranks)")
    add("--every-rank", action="store_true",
        help="rehearse all ranks, for exact totals; takes proportionally longer")  # fmt: skip
    add("--optimizer", default="adam", choices=("adam", "adamw", "momentum", "rmsprop", "sgd"),
        help="whose state counts as memory")  # fmt: skip
    add("--recompute", action="store_true",
        help="recompute every block in backward, as gpudist.planning.recompute does")  # fmt: skip
    add("--amp", choices=("bf16", "fp16"), help="run the forward under autocast to this dtype")
    add("--output", "-o", type=Path,
        help="picture of the partitions: .svg, .png or .pdf; or the plan of --search")  # fmt: skip
    add("--one-owner", action="store_true", help="keep each parameter on one worker, not on all")
    edits = parser.add_mutually_exclusive_group()
    edits.add_argument("--plan", type=Path, metavar="FILE",
        help="plan that Plan.save wrote, as one more row beside the grids")  # fmt: skip
    add("--grid", type=extent, nargs="+", metavar="N",
        help="partition of the input for --plan or --search (the fastest without it)")  # fmt: skip
    edits.add_argument("--search", action="store_true",
        help="search which tensors to keep whole, on --grid, or on the best grids of --ranks or of "
        "the fewest workers on which it fits")  # fmt: skip


PLAN = Command(
    "plan",
    "say on how many GPUs a network fits, or find a fast partition",
    """\
Rehearse a training step of a network on partitions of its input. Without --ranks, print the
smallest number of GPUs on which it fits, and grid and memory for 1, 2, 4 ... 64 and around it.
With --ranks, print messages, memory and predicted times, the fastest grid first; above 4 ranks, a
quick estimate chooses 8. With --search, print which tensors stay whole on which workers, and why.
No other process is started and no tensor is made.

  gpudist plan net.py:make --shape 1 1 512 512 512 --memory 80
  gpudist plan net.py:make --shape 1 1 256 256 256 --ranks 64
  gpudist plan mynet:make --shape 8 3 512 512 --ranks 4 -o plan.svg
  gpudist plan net.py:make --shape 8 3 512 512 --ranks 8 --search -o plan.json""",
    _add_plan_arguments,
)


def _add_draw_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    several: dict[str, Any] = dict(type=extent, nargs="+", metavar="N")
    add = parser.add_argument
    add("--shape", help="shape of the global tensor", **several)
    add("--grid", help="workers along each dim", **several)
    add("--plan", type=Path, metavar="FILE", help="draw the layouts of a plan instead")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kernel", help="kernel of a convolution, per dim from the last", **several)
    what.add_argument("--halo", help="cells needed on both sides, per dim", **several)
    what.add_argument("--to", help="grid to repartition to", **several)
    add("--stride", default=[1], help="stride of the kernel (1)", **several)
    add("--dilation", default=[1], help="dilation of the kernel (1)", **several)
    add("--padding", default=[0], help="padding of the tensor (0)", **several)
    add("--periodic", action="store_true", help="the halo wraps at the edges")
    add("--nested", action="store_true", help="exchange the halo dim after dim")
    add("--rank", type=int, help="rank whose ghosts and messages are shown (the busiest)")
    add("--dims", help="dims of the tensor to draw (those that are cut)", **several)
    add("--itemsize", type=int, default=4, help="bytes of a cell (4)")
    add("--output", "-o", type=Path, default=Path("partition.svg"), help=".svg, .png or .pdf")


DRAW = Command(
    "draw",
    "draw a partition, its ghosts and its messages",
    """\
Draw who owns which box of a tensor, one rank's ghosts, its messages in each
stage, and the matrix of all messages, from the plans that programs run. Needs
neither a launcher nor other ranks.

  gpudist draw --shape 64 64 --grid 2 2 --kernel 3 --padding 1 -o conv.svg
  gpudist draw --shape 64 64 --grid 4 1 --to 1 4 -o repartition.png
  gpudist draw --plan plan.json -o plan.svg

A single number for --kernel, --halo and the options of the kernel applies to
every dim from the first that is cut to the last.""",
    _add_draw_arguments,
)


COMMANDS: tuple[Command, ...] = (ENV, CHECK, BENCH, PLAN, DRAW)
