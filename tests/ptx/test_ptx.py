"""nvcc's PTX of the kernels, executed: random launches, what is reported, and the machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.doubles.build import NoCompiler
from tests.every import EVERY
from tests.ptx import machine_code
from tests.ptx.assembly import Instruction, Kernel, read
from tests.ptx.build import ARCHITECTURES, KERNELS, NoNvcc, compiled_kernels, objects
from tests.ptx.copies import Copies
from tests.ptx.count import CLOCK_GHZ, counted
from tests.ptx.effects import Effects
from tests.ptx.launches import LEAST_COVERED, launch
from tests.ptx.machine_code import NoTool
from tests.ptx.mutants import Mutant, run

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


# The original text, the mutated text, and the expected report.
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

    def choose(kernels: list[Kernel], executed: list[list[int]]) -> list[Mutant]:
        mutants = []
        for name, (is_meant, change, _) in WRONG.items():
            kernel = kernels[0]
            index = next(i for i, times in enumerate(executed[0]) if times and is_meant(kernel, i))
            original = kernel.instructions[index]
            mutants.append(Mutant(0, index, name, original, change(kernel, index)))
        return mutants

    found = run(90, 48, 1, choose)
    return {mutant.change: (mutant.original.line, wrong) for mutant, _, wrong in found}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_instruction_is_reported(name: str, reports: dict[str, tuple[int, str]]):
    line, report = reports[name]
    assert re.match(WRONG[name][2], report), report
    place = re.search(r"kernel \w*combine_kernel\w*, PTX line (\d+) \(.*\), block \d+", report)
    # A thread that never ends is stopped anywhere in its loop.
    assert place is not None and abs(int(place[1]) - line) <= (name == "endless"), report


SAMPLE = """
.visible .entry sample(
	.param .u64 sample_param_0
)
{
	.reg .pred 	%p<4>;
	ld.param.u64 	%rd1, [sample_param_0];
	mov.u32 	%r1, %tid.x;
	setp.gt.u32 	%p1, %r1, 7;
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r2, %r1, 1;
	add.s32 	%r5, %r1, 2;
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	mov.u32 	%r2, 0;
	mov.u32 	%r5, 0;
$L__BB0_3:
	add.s32 	%r3, %r2, %r2;
	@%p1 bra 	$L__BB0_5;
	st.global.u32 	[%rd1], %r3;
$L__BB0_5:
	st.global.u32 	[%rd1+4], %r5;
	ret;
}
"""


# %r2 is stored where it is loaded alone: where all four bits are set, or the highest of them is.
BITS = """
.visible .entry bits(
	.param .u64 bits_param_0
)
{
	.reg .pred 	%p<4>;
	ld.param.u64 	%rd1, [bits_param_0];
	mov.u32 	%r1, %tid.x;
	and.b32 	%r3, %r1, 8;
	setp.eq.s32 	%p1, %r3, 0;
	mov.u32 	%r2, 0;
	@%p1 bra 	$L__BB0_1;
	ld.global.u32 	%r2, [%rd1];
$L__BB0_1:
	setp.eq.s32 	%p2, %r1, 15;
	@%p2 bra 	$L__BB0_2;
	@%p1 bra 	$L__BB0_3;
$L__BB0_2:
	st.global.u32 	[%rd1+4], %r2;
$L__BB0_3:
	ret;
}
"""


# %r2 is the low byte of what is stored where bit 1 is set, and its high byte is alone elsewhere.
BYTES = """
.visible .entry bytes(
	.param .u64 bytes_param_0
)
{
	.reg .pred 	%p<4>;
	ld.param.u64 	%rd1, [bytes_param_0];
	mov.u32 	%r1, %tid.x;
	ld.global.u8 	%r3, [%rd1];
	and.b32 	%r4, %r1, 2;
	setp.eq.s32 	%p1, %r4, 0;
	mov.u32 	%r2, 0;
	@%p1 bra 	$L__BB0_1;
	ld.global.u8 	%r2, [%rd1+1];
$L__BB0_1:
	shl.b32 	%r5, %r3, 8;
	or.b32 	%r6, %r5, %r2;
	and.b32 	%r7, %r6, 32639;
	add.s32 	%r8, %r7, %r7;
	shr.u32 	%r9, %r1, 1;
	and.b32 	%r10, %r9, 3;
	setp.eq.s32 	%p2, %r10, 3;
	@%p2 bra 	$L__BB0_2;
	shr.u32 	%r11, %r8, 8;
	st.global.u8 	[%rd1+4], %r11;
	ret;
$L__BB0_2:
	st.global.u16 	[%rd1+4], %r8;
	ret;
}
"""


@pytest.mark.parametrize(
    ("text", "changed", "expected"),
    [
        (SAMPLE, -1, ["mov.u32 %r2, 0;"]),
        (BITS, -1, ["mov.u32 %r2, 0;"]),
        (BYTES, 0x81, ["mov.u32 %r1, %tid.x;", "mov.u32 %r2, 0;"]),
    ],
)
def test_results_that_no_store_can_see_are_told(text: str, changed: int, expected: list[str]):
    (kernel,) = read(text)
    effects = Effects(kernel)
    unseen = [
        str(one)
        for index, one in enumerate(kernel.instructions)
        if one.written and not effects.matters(index, changed)
    ]
    assert unseen == expected


# %r3 and %r4 equal 0 at first, and after each turn of the loop what %r2 was before it.
COPIES = """
.visible .entry copies(
	.param .u64 copies_param_0
)
{
	.reg .b32 	%r<6>;
	mov.u32 	%r2, %tid.x;
	mov.u32 	%r3, 0;
	mov.u32 	%r4, 0;
$L__BB0_1:
	mov.u32 	%r3, %r2;
	mov.u32 	%r4, %r3;
	add.s32 	%r2, %r2, 1;
	setp.lt.u32 	%p1, %r2, 9;
	@%p1 bra 	$L__BB0_1;
	ret;
}
"""


def test_copies_are_equal_until_one_is_computed_again():
    (kernel,) = read(COPIES)
    copies = Copies(kernel, Effects(kernel).values)

    def equal(index: int) -> set[str]:
        names = ("%r2", "%r3", "%r4")
        return {a + b for a in names for b in names if a < b and found(index, a) == found(index, b)}

    found = copies.of
    assert equal(3) == set()
    assert equal(4) == {"%r2%r3"}
    assert equal(5) == {"%r2%r3", "%r2%r4", "%r3%r4"}
    assert equal(6) == equal(8) == {"%r3%r4"}
    assert found(2, "%r3") == "0" != found(4, "%r3")


def test_effects_of_a_long_chain_are_followed():
    """Each sum reads the one before twice: as a tree the last one has 2^60 nodes."""
    start = SAMPLE.index("\tmov.u32")
    chain = "".join(f"\tadd.s64 \t%rd{i}, %rd{i - 1}, %rd{i - 1};\n" for i in range(3, 63))
    store = "\tst.global.u64 \t[%rd1], %rd62;\n\tret;\n}\n"
    (kernel,) = read(SAMPLE[:start] + "\tld.global.u64 \t%rd2, [%rd1];\n" + chain + store)
    effects = Effects(kernel)
    assert effects.matters(1) and effects.matters(1, 1 << 3)
    assert not effects.matters(1, 0)


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
