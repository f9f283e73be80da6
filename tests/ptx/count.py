"""Instructions that the kernels execute to move a byte, and how fast they could be issued.

    python -m tests.ptx.count [--architecture 90] [--clock-ghz 1.755] [--opcodes CASE]

Instructions are counted in nvcc's PTX; ptxas makes about as many machine instructions. Nothing is
measured: the issue bound and the memory limit a kernel's speed, but it may be slower than both.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from dataclasses import dataclass

from tests.ptx.assembly import Instruction, read
from tests.ptx.build import HERE, program, ptx_of

# An H100 SXM, at its boost clock.
MULTIPROCESSORS, SCHEDULERS, CLOCK_GHZ = 132, 4, 1.755
CLASSES = ("integer", "memory", "parameter", "branch", "float", "conversion", "move")


def class_of(instruction: Instruction) -> str:
    """Return the class an instruction is counted in."""
    if instruction.is_memory:
        return "parameter" if "param" in instruction.parts else "memory"
    if instruction.operation in ("bra", "ret", "exit", "bar", "barrier"):
        return "branch"
    if instruction.operation == "cvt":
        return "conversion"
    if instruction.operation in ("mov", "cvta"):
        return "move"
    return "float" if instruction.operand_type.startswith(("f", "bf")) else "integer"


@dataclass(frozen=True)
class Counted:
    """Instructions that one launch executed.

    Attributes:
        lane_bytes: bytes a thread moves at a time.
        threads: executed instructions of all threads in the sampled blocks, by class.
        warps: executed instructions of all warps in the sampled blocks.
        opcodes: executed instructions of the threads, by opcode.
        bytes: bytes read and written.
    """

    case: str
    dtype: str
    lane_bytes: int
    thread_count: int
    threads: Counter[str]
    warps: int
    opcodes: Counter[str]
    bytes: float

    @property
    def per_thread(self) -> float:
        return self.threads.total() / self.thread_count

    def bound_tbps(self, clock_ghz: float) -> float:
        """Bytes read and written in a second if every scheduler issues at every clock."""
        return self.bytes / self.warps * MULTIPROCESSORS * SCHEDULERS * clock_ghz / 1e3


def counted(architecture: int, blocks: int = 200) -> list[Counted]:
    """Count instructions, in about so many blocks of each launch."""
    path, environment = program([HERE / "count_launches.cpp"], architecture)
    kernels = read(ptx_of(architecture))
    instructions = {one.line: one for kernel in kernels for one in kernel.instructions}
    done = subprocess.run(
        [path, str(blocks)], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    return [_counted(line.split("\t"), instructions) for line in done.stdout.splitlines()]


def _counted(fields: list[str], instructions: dict[int, Instruction]) -> Counted:
    case, dtype, *numbers, _kernel = fields[:9]
    cell_bytes, cells, lane_bytes, blocks, executed, block_threads = map(int, numbers)
    threads: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    warps = 0
    for entry in fields[9:]:
        line, by_threads, by_warps = map(int, entry.split(":"))
        threads[class_of(instructions[line])] += by_threads
        opcodes[instructions[line].opcode] += by_threads
        warps += by_warps
    moved = cell_bytes * cells * executed / blocks
    return Counted(
        case, dtype, lane_bytes, executed * block_threads, threads, warps, opcodes, moved
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", type=int, default=90, choices=(80, 90))
    parser.add_argument("--clock-ghz", type=float, default=CLOCK_GHZ)
    parser.add_argument(
        "--opcodes", metavar="TEXT", help="also each opcode of cases with this text"
    )
    arguments = parser.parse_args()
    print(
        f"PTX instructions of sm_{arguments.architecture}: of a thread, by class, and for each "
        "byte that is read or written"
    )
    print(
        f"Issue bound, read + write: {MULTIPROCESSORS} SMs x {SCHEDULERS} schedulers x "
        f"{arguments.clock_ghz} GHz\n"
    )
    head = " ".join(f"{name[:7]:>7}" for name in CLASSES)
    print(f"{'case':46} {'dtype':8} {'lane':>4} {head} {'all':>7} {'/byte':>6} {'bound TB/s':>10}")
    for one in counted(arguments.architecture):
        classes = " ".join(f"{one.threads[name] / one.thread_count:7.1f}" for name in CLASSES)
        print(
            f"{one.case:46} {one.dtype:8} {one.lane_bytes:4} {classes} {one.per_thread:7.1f} "
            f"{one.threads.total() / one.bytes:6.2f} {one.bound_tbps(arguments.clock_ghz):10.2f}"
        )
        if arguments.opcodes and arguments.opcodes in f"{one.case} {one.dtype}":
            for opcode, times in one.opcodes.most_common():
                print(f"    {opcode:28} {times / one.thread_count:8.2f}")


if __name__ == "__main__":
    main()
