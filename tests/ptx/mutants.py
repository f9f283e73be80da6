"""Small errors put into the compiled kernels, one instruction at a time: do random launches notice?

    python -m tests.ptx.mutants [--architecture 90] [--kernels random_cells] [--count 200]
        [--launches 6000] [--seed 1]

Left out by rule, and counted: results that cannot reach memory or a branch (`effects.py`), branches
to the next instruction, and instructions that no launch executes. Never changed: operands of equal
value, the order of operands that commute, cache hints, signs.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.ptx.assembly import Instruction, Kernel, read, split
from tests.ptx.build import KERNELS, UNITS, ptx_of
from tests.ptx.copies import Copies
from tests.ptx.effects import Effects, Flow
from tests.ptx.launches import launcher
from tests.ptx.program import encode, encoded, live_registers

LEAST_NOTICED = 0.99

_OPERATORS = {
    "add": ("sub",),
    "sub": ("add",),
    "and": ("or", "xor"),
    "or": ("and",),  # mostly of numbers without common bits, for which xor is the same
    "xor": ("and", "or"),
    "shl": ("shr",),
    "shr": ("shl",),
    "min": ("max",),
    "max": ("min",),
    "rem": ("div",),
    "div": ("rem",),
}
# A comparison of a register and a number may have a boundary that no value reaches.
_COMPARISONS = {
    "eq": "ne",
    "ne": "eq",
    "lt": "ge",
    "ge": "lt",
    "gt": "le",
    "le": "gt",
    "nan": "num",
    "num": "nan",
    "ltu": "ge",
    "leu": "gt",
    "gtu": "le",
    "geu": "lt",
    "equ": "ne",
    "neu": "eq",
}
_BOUNDARIES = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_NARROWER = {"64": "32", "32": "16", "16": "8"}
_COMMUTATIVE = ("add", "mul", "and", "or", "xor", "min", "max")
_OFFSET = re.compile(r"\+(-?\d+)\]")


@dataclass(frozen=True)
class Mutant:
    """One changed instruction of a kernel."""

    kernel: int
    index: int
    change: str
    original: Instruction
    instruction: Instruction


class Changes:
    """The changes of one kernel's instructions."""

    def __init__(self, kernel: Kernel, draw: random.Random) -> None:
        self.kernel = kernel
        self.draw = draw
        self.effects = Effects(kernel)
        self.copies = Copies(kernel, self.effects.values)
        self.live = live_registers(kernel)

    def one_that_may_matter(self, index: int) -> tuple[str, Instruction] | None:
        """Return a change drawn from those that may be noticed."""
        one = self.kernel.instructions[index]
        if one.operation == "bra" and self.kernel.labels[one.operands[0]] == index + 1:
            return None
        # Without the last one a thread would run on behind the kernel.
        if one.operation in ("ret", "exit") or index + 1 == len(self.kernel.instructions):
            return None
        changes = self.of(index)
        self.draw.shuffle(changes)
        # Effects take long to follow.
        may_matter = (
            pair
            for pair in changes
            if self.effects.matters(index, changed_bits(one, pair[1], self.effects.flow))
        )
        return next(may_matter, None)

    def of(self, index: int) -> list[tuple[str, Instruction]]:
        one = self.kernel.instructions[index]
        made = [
            *self._operators(one),
            *self._comparisons(one),
            *self._predicates(one),
            *self._constants(one),
            *self._operands(one, index),
            *self._widths(one),
            *self._orders(one),
        ]
        return made or [self._without_result(one)]

    @staticmethod
    def _without_result(one: Instruction) -> tuple[str, Instruction]:
        # Random bits, unless a guard may keep another value.
        if not one.written or one.guard:
            return "no such instruction", replace(one, opcode="nop", guard="", operands=())
        opcode = f"random.{len(one.written)}"
        return "no result", replace(one, opcode=opcode, operands=tuple(one.written))

    def _operators(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        for other in _OPERATORS.get(one.operation, ()):
            if "pred" in one.parts and other in ("add", "sub"):
                continue
            kind = one.operand_type
            if other == "rem" and kind.startswith("f"):
                other = "mul"
            if other in ("shl", "and", "or", "xor") and kind != "pred":
                kind = f"b{kind[1:]}"
            yield "operator", replace(one, opcode=".".join([other, *one.parts[1:-1], kind]))

    def _comparisons(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        if one.operation != "setp":
            return
        found = one.parts[1]
        others = [_COMPARISONS[found]]
        if found in _BOUNDARIES and one.operands[2].startswith("%"):
            others.append(_BOUNDARIES[found])
        for other in others:
            yield "comparison", replace(one, opcode=".".join(["setp", other, *one.parts[2:]]))

    def _predicates(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        if one.guard:
            guard = one.guard[1:] if one.guard.startswith("!") else f"!{one.guard}"
            yield "predicate", replace(one, guard=guard)
        if one.operation == "selp":
            to, first, second, by = one.operands
            if self.effects.values.of(first) != self.effects.values.of(second):
                yield "predicate", replace(one, operands=(to, second, first, by))

    def _constants(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        for place, operand in enumerate(one.operands):
            changed = None
            if one.operation == "bar":
                continue  # as long as all threads wait there, another barrier is as good
            if re.fullmatch(r"-?\d+", operand):
                changed = str(self._other(one.operation, int(operand)))
            elif found := _OFFSET.search(operand):
                changed = operand[: found.start()] + f"+{int(found[1]) + self._bytes(one)}]"
            if changed is not None:
                operands = (*one.operands[:place], changed, *one.operands[place + 1 :])
                yield "constant", replace(one, operands=operands)

    @staticmethod
    def _other(operation: str, value: int) -> int:
        """Return a different number that is unlikely to have the same effect."""
        match operation:
            case "setp":  # few values are compared: a small step may change nothing
                return 2 * value + 1
            case "mov" | "selp" if value in (0, 1):  # perhaps a flag
                return 1 - value
            case "bfi":  # one bit fewer; one more may be none of the register's
                return value - 1
            case "and" if value > 0:
                # Not the lowest of several bits: those of addresses and distances are all zero.
                return 2 * value if value & (value - 1) == 0 else value >> 1
            case _:  # multiples of a power of two may be added to such multiples alone
                return value + (value & -value or 1)

    @staticmethod
    def _bytes(one: Instruction) -> int:
        items = next((int(part[1]) for part in one.parts if part in ("v2", "v4")), 1)
        return items * int(one.operand_type[1:]) // 8

    def _operands(self, one: Instruction, index: int) -> Iterator[tuple[str, Instruction]]:
        """Another register of the same kind that has a value here."""
        values = self.effects.values
        available = self.live[index] | set(one.read)
        first = 1 if one.written else 0
        for place in range(first, len(one.operands)):
            operand = one.operands[place]
            if not re.fullmatch(r"%[a-z]+\d+", operand):
                continue
            kind = operand.rstrip("0123456789")
            others = [
                name
                for name in sorted(available)
                if name.rstrip("0123456789") == kind
                and name not in one.written
                and values.of(name) != values.of(operand)
                and self.copies.of(index, name) != self.copies.of(index, operand)
            ]
            if others:
                operands = (
                    *one.operands[:place],
                    self.draw.choice(others),
                    *one.operands[place + 1 :],
                )
                yield "operand", replace(one, operands=operands)

    @staticmethod
    def _widths(one: Instruction) -> Iterator[tuple[str, Instruction]]:
        kind, bits = one.operand_type[:1], one.operand_type[1:]
        if kind not in "usb" or bits not in _NARROWER:
            return
        # Product of an entry's index and its size in bytes: no table has 4 GiB.
        if one.operation == "mul" and one.operands[2].isdigit():
            return
        narrower = kind + _NARROWER[bits]
        if one.is_memory or (bits == "64" and one.operation in ("add", "sub", "mul", "shl")):
            yield "width", replace(one, opcode=".".join([*one.parts[:-1], narrower]))

    def _orders(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        values = self.effects.values
        if one.is_memory:
            place = 0 if one.operation == "ld" else 1
            names = split(one.operands[place].strip("{}"))
            if len(names) > 1 and values.of(names[0]) != values.of(names[-1]):
                names[0], names[-1] = names[-1], names[0]
                changed = "{" + ", ".join(names) + "}"
                operands = (*one.operands[:place], changed, *one.operands[place + 1 :])
                yield "order", replace(one, operands=operands)
        elif len(one.operands) == 3 and one.operation in ("sub", "div", "rem", "shl", "shr"):
            to, left, right = one.operands
            if left.startswith("%") and values.of(left) != values.of(right):
                yield "order", replace(one, operands=(to, right, left))


def changed_bits(one: Instruction, other: Instruction, flow: Flow) -> int:
    """Bits of the result that may differ."""
    if one.opcode == other.opcode and one.guard == other.guard and one.written:
        pairs = enumerate(zip(one.operands, other.operands, strict=True))
        different = [place for place, (own, others) in pairs if own != others]
        if len(different) == 1 and different[0] > 0 and one.registers[different[0]]:
            return flow.of_operand(one, different[0])
    if one.operation == other.operation == "mov":
        numbers = [operand for operand in (one.operands[1], other.operands[1]) if operand.isdigit()]
        if len(numbers) == 2:
            return int(numbers[0]) ^ int(numbers[1])
    kinds = [re.fullmatch(r"[usb](\d+)", x.operand_type) for x in (one, other)]
    if kinds[0] is None or kinds[1] is None:
        return -1
    width, other_width = int(kinds[0][1]), int(kinds[1][1])
    if one.operation == other.operation and one.operands == other.operands and other_width < width:
        return -1 << other_width
    return (1 << width) - 1 if one.operation == "ld" and one.operand_type[0] in "ub" else -1


class Sample:
    """Mutants drawn at random, and how many draws were left out, by reason."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.draw = random.Random(seed)
        self.left_out: Counter[str] = Counter()

    def choose(self, kernels: list[Kernel], executed: list[list[int]]) -> list[Mutant]:
        changes = [Changes(kernel, self.draw) for kernel in kernels]
        places = [
            (k, index)
            for k, kernel in enumerate(kernels)
            for index in range(len(kernel.instructions))
        ]
        self.draw.shuffle(places)
        mutants: list[Mutant] = []
        for k, index in places:
            if len(mutants) == self.count:
                break
            if not executed[k][index]:
                self.left_out["never executed"] += 1
                continue
            if (found := changes[k].one_that_may_matter(index)) is None:
                self.left_out["without effect"] += 1
                continue
            change, instruction = found
            original = kernels[k].instructions[index]
            mutants.append(Mutant(k, index, change, original, instruction))
        return mutants


def run(
    architecture: int,
    launches: int,
    seed: int,
    choose: Callable[[list[Kernel], list[list[int]]], list[Mutant]],
    name: str = KERNELS[0],
) -> list[tuple[Mutant, int, str]]:
    """Return each mutant, how many launches were tried with it, and what was wrong if anything was.

    Args:
        architecture: of the PTX.
        launches: carried out without a mutant first.
        seed: of the launches.
        choose: the mutants, of the kernels and of how often each instruction was executed.
        name: file of the kernels.
    """
    kernels = read(ptx_of(architecture, name))
    path, environment = launcher(architecture, name)
    running = subprocess.Popen(
        [path, str(launches), str(seed), "mutants"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdin is not None and running.stdout is not None
        executed = [list(map(int, running.stdout.readline().split()[1:])) for _ in kernels]
        first = running.stdout.readline().strip()
        if first != "passed":
            raise RuntimeError(f"launches without a mutant: {first}")
        mutants = choose(kernels, executed)
        running.stdin.write("\n".join(_lines(kernels, mutants)) + "\n")
        running.stdin.close()
        results = [line.rstrip("\n").split("\t") for line in running.stdout]
    if running.returncode != 0 or len(results) != len(mutants):
        raise RuntimeError(f"{len(results)} of {len(mutants)} mutants were run")
    return [
        (mutant, int(tried), wrong) for mutant, (tried, wrong) in zip(mutants, results, strict=True)
    ]


def _lines(kernels: list[Kernel], mutants: list[Mutant]) -> Iterator[str]:
    """Yield the launcher's input: constants that no instruction had, and the mutants."""
    slots = [encode(kernel)[1] for kernel in kernels]
    for one in mutants:
        known = len(slots[one.kernel].constants)
        text = encoded(one.instruction, kernels[one.kernel], slots[one.kernel])
        for value in list(slots[one.kernel].constants)[known:]:
            yield f"constant {one.kernel} {value}"
        yield f"mutant {one.kernel} {one.index} {text}"


def report(architecture: int, count: int, launches: int, seed: int, name: str) -> bool:
    """Print the mutants of a file that survive, and return whether they are few."""
    drawn = Sample(count, seed)
    results = run(architecture, launches, seed, drawn.choose, name)
    survivors = [(mutant, tried) for mutant, tried, wrong in results if not wrong]
    for mutant, tried in survivors:
        print(f"not noticed in {tried} launches: PTX line {mutant.original.line}, {mutant.change}")
        print(f"    {mutant.original}\n    {mutant.instruction}")
    noticed = len(results) - len(survivors)
    left_out = ", ".join(f"{many} {why}" for why, many in sorted(drawn.left_out.items()))
    print(
        f"sm_{architecture}, {name}: {noticed} of {len(results)} mutants noticed; seed {seed}, "
        f"{launches} launches; left out: {left_out or 'none'}"
    )
    return noticed >= LEAST_NOTICED * len(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", type=int, default=90, choices=(80, 90))
    parser.add_argument("--kernels", nargs="+", default=list(UNITS), choices=UNITS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--launches", type=int, help="default: 6,000, but 600 normalizations")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    are_few = []
    for name in arguments.kernels:
        launches = arguments.launches or (600 if name == "norm_kernels" else 6000)
        given = arguments.architecture, arguments.count, launches, arguments.seed
        are_few.append(report(*given, name))
    return int(not all(are_few))


if __name__ == "__main__":
    raise SystemExit(main())
