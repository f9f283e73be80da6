"""nvcc's PTX of the kernels, executed: random launches, what is reported, and the machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from subprocess import PIPE, Popen

import pytest

from tests.doubles.build import NoCompiler
from tests.every import EVERY
from tests.ptx import machine_code
from tests.ptx.assembly import Instruction, Kernel, read
from tests.ptx.build import ARCHITECTURES, KERNELS, NoNvcc, compiled_kernels, objects, ptx_of
from tests.ptx.count import CLOCK_GHZ, counted
from tests.ptx.launches import LEAST_COVERED, launch, launcher
from tests.ptx.machine_code import NoTool
from tests.ptx.program import encode, encoded

LAUNCHES, BLOCKS = (2000, 200) if EVERY else (560, 40)  # `make ptx` carries out more
# Kernels of each file; those of random cells draw five ways, all but one in four dtypes.
KERNEL_COUNTS = {"combine_kernels": 4, "random_cells": 17}
# Registers per thread: a multiprocessor has 65536, so 1024 threads run at once.
MOST_REGISTERS = 64
# Interiors and adjoints of halos, read + write. An H100's memory copies 3.0 TB/s: it is the limit.
LEAST_BOUND_TBPS = {"float32": 6.0, "bfloat16": 3.9, "float16": 3.9}


@pytest.fixture(scope="module", autouse=True)
def compilers() -> None:
    try:
        compiled_kernels(90)
        objects([])
    except (NoNvcc, NoCompiler) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", KERNELS)
def test_random_launches_do_what_plain_loops_do(name: str):
    found = launch(90, LAUNCHES, 1, name)
    assert found.wrong == ""
    assert found.covered >= LEAST_COVERED, found.missed


def at_offset(operand: int, offset: int) -> Callable[[Kernel, int], Instruction]:
    def change(kernel: Kernel, index: int) -> Instruction:
        one = kernel.instructions[index]
        operands = list(one.operands)
        base = operands[operand].strip("[]").split("+")[0]
        operands[operand] = f"[{base}+{offset}]"
        return replace(one, operands=tuple(operands))

    return change


def is_wide_store(kernel: Kernel, index: int) -> bool:
    one = kernel.instructions[index]
    return one.meaning in ("st.global.v2.u64", "st.global.v4.u32")


def is_global_load(kernel: Kernel, index: int) -> bool:
    return kernel.instructions[index].meaning.startswith("ld.global")


def into_parameter(kernel: Kernel, index: int) -> Instruction:
    one = kernel.instructions[index]
    return replace(one, opcode="st.u64", operands=(f"[{kernel.parameter}]", "0"))


def follows_a_label(kernel: Kernel, index: int) -> bool:
    return index - 1 in kernel.labels.values()


def back_to_the_label(kernel: Kernel, index: int) -> Instruction:
    label = next(name for name, place in kernel.labels.items() if place == index - 1)
    return Instruction(kernel.instructions[index].line, "", "bra.uni", (label,))


# The instruction to change, the change, and the expected report.
WRONG = {
    "misaligned": (is_wide_store, at_offset(0, 8), r"store of 16 bytes at 0x\w+: misaligned, in a"),
    "out of bounds": (
        is_wide_store,
        at_offset(0, 1 << 40),
        r"store of 16 bytes at 0x\w+: (out of|no live)",
    ),
    "nowhere": (is_global_load, at_offset(1, -(1 << 44)), r"load of \d+ bytes at 0x\w+: no live"),
    "parameter": (is_wide_store, into_parameter, r"store of 8 bytes at 0x\w+: the parameter is"),
    "endless": (follows_a_label, back_to_the_label, "the thread has not ended after 1000000 "),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, tuple[int, str]]:
    """Return the line of each wrong instruction, and its report."""
    kernels = read(ptx_of(90, KERNELS[0]))
    path, environment = launcher(90, KERNELS[0])
    command = [path, "48", "1", "mutants"]
    with Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as running:
        assert running.stdin is not None and running.stdout is not None
        executed, *_ = [running.stdout.readline().split()[1:] for _ in kernels]
        assert running.stdout.readline() == "passed\n"
        kernel, (_, slots) = kernels[0], encode(kernels[0])
        lines: list[int] = []
        for is_meant, change, _ in WRONG.values():
            index = next(i for i, n in enumerate(executed) if n != "0" and is_meant(kernel, i))
            known = len(slots.constants)
            text = encoded(change(kernel, index), kernel, slots)
            for value in list(slots.constants)[known:]:
                running.stdin.write(f"constant 0 {value}\n")
            running.stdin.write(f"mutant 0 {index} {text}\n")
            lines.append(kernel.instructions[index].line)
        running.stdin.close()
        found = [line.rstrip("\n").split("\t")[1] for line in running.stdout]
    return dict(zip(WRONG, zip(lines, found, strict=True), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_instruction_is_reported(name: str, reports: dict[str, tuple[int, str]]):
    line, report = reports[name]
    assert re.match(WRONG[name][2], report), report
    place = re.search(r"kernel \w*combine_kernel\w*, PTX line (\d+) \(.*\), block \d+", report)
    # A thread that never ends is stopped anywhere in its loop.
    assert place is not None and abs(int(place[1]) - line) <= (name == "endless"), report


def test_issue_does_not_bound_halos():
    bounds = {
        (one.case, one.dtype): one.bound_tbps(CLOCK_GHZ)
        for one in counted(90, BLOCKS)
        if "of a halo" in one.case and one.dtype in LEAST_BOUND_TBPS
    }
    assert len(bounds) == 36
    slow = {key: bound for key, bound in bounds.items() if bound < LEAST_BOUND_TBPS[key[1]]}
    assert not slow


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES if EVERY else ARCHITECTURES[-1:])
def test_kernels_fit_the_registers(architecture: int, name: str):
    found = machine_code.spills(architecture, name)
    assert len(found) == KERNEL_COUNTS[name]
    for kernel, (registers, spilled_bytes) in found.items():
        assert spilled_bytes == 0, f"{kernel} spills on sm_{architecture}"
        assert registers <= MOST_REGISTERS, f"{kernel} on sm_{architecture}"


def wide_accesses(kernel: str) -> tuple[str, ...]:
    """Return the accesses of 16 bytes that a kernel has; not all draws read."""
    if "random_kernel" not in kernel:
        return "LDG", "STG"
    draw = kernel.split("_")[2]
    return {"kept": (), "uniform": ("STG",), "normal": ("STG",)}.get(draw, ("LDG", "STG"))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES if EVERY else ARCHITECTURES[-1:])
def test_machine_code_moves_wide_lanes_and_keeps_to_registers(architecture: int, name: str):
    try:
        resources = machine_code.resources(architecture, name)
        opcodes = machine_code.opcodes(architecture, name)
    except NoTool as error:
        pytest.skip(str(error))
    assert len(resources) == len(opcodes) == KERNEL_COUNTS[name]
    for kernel, found in resources.items():
        assert found.registers <= MOST_REGISTERS, (kernel, found)
        assert (found.stack_bytes, found.local_bytes) == (0, 0), (kernel, found)
    for kernel, code in opcodes.items():
        for access in wide_accesses(kernel):
            wide = [one for one in code if re.match(rf"{access}\.E\b.*\.128\b", one)]
            assert wide, f"{kernel} has no {access}.E.128 on sm_{architecture}"
        in_local_memory = [one for one in code if one.partition(".")[0] in ("LDL", "STL")]
        assert not in_local_memory, (kernel, architecture, in_local_memory)


def test_copies_load_four_rows_before_one_is_used():
    """A row of the destination's alignment lies in two granules of its source."""
    try:
        found = machine_code.most_loads_in_flight(90)
    except NoTool as error:
        pytest.skip(str(error))
    assert len(found) == KERNEL_COUNTS[KERNELS[0]]
    assert min(found.values()) >= 8, found
