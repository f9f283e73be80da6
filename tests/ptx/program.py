"""A kernel in the form that the machine of ``machine.h`` reads: operands are register slots.

Constants, special registers and the addresses of the parameter and of shared memory also have
slots, which hold their value when a thread starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.ptx.assembly import Instruction, Kernel, UnknownAssembly, split

# Special registers the machine knows; `parameter` and `shared` are addresses.
SPECIAL = ("parameter", "shared", "%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%laneid")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)U?$")


class Slots:
    """Slots of one kernel; registers share them where no two are needed at once."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constants: dict[int, int] = {}
        self.registers = allocate(kernel)
        self.first_register = len(SPECIAL)
        self._named = {name: place for place, name in enumerate(SPECIAL)}
        self._named[kernel.parameter] = self._named["parameter"]

    @property
    def register_count(self) -> int:
        return 1 + max(self.registers.values(), default=0)

    def of(self, operand: str) -> int:
        """Slot of a register, special register, array or number."""
        if operand in self._named:
            return self._named[operand]
        if operand in self.registers:
            return self.first_register + self.registers[operand]
        if operand in self.kernel.shared:
            return self.constant(self.kernel.shared[operand])
        return self.constant(number(operand))

    def constant(self, value: int) -> int:
        first = self.first_register + self.register_count
        return self.constants.setdefault(value, first + len(self.constants))


def number(text: str) -> int:
    """Return a literal as 64 bits."""
    if text.startswith(("0f", "0F", "0d", "0D")):
        return int(text[2:], 16)
    if not _NUMBER.match(text):
        raise UnknownAssembly(f"{text} is not an operand that the machine knows")
    return int(text.rstrip("U"), 0) & (1 << 64) - 1


def live_registers(kernel: Kernel) -> list[frozenset[str]]:
    """Registers whose value may be read after each instruction."""
    instructions = kernel.instructions
    before: list[frozenset[str]] = [frozenset()] * (len(instructions) + 1)
    after = list(before[:-1])
    changed = True
    while changed:
        changed = False
        for index in range(len(instructions) - 1, -1, -1):
            follow = [before[next_] for next_ in kernel.successors(index)]
            live = follow[0] if len(follow) == 1 else frozenset().union(*follow)
            instruction = instructions[index]
            kept = live if instruction.guard else live.difference(instruction.written)
            now = kept.union(instruction.read)
            if now != before[index] or live != after[index]:
                before[index], after[index] = now, live
                changed = True
    return after


def allocate(kernel: Kernel) -> dict[str, int]:
    """Return a number for each register, shared by registers that are never live at once."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    live = live_registers(kernel)
    for index, instruction in enumerate(kernel.instructions):
        # In one order in every process.
        for name in sorted({*instruction.read, *instruction.written, *live[index]}):
            first.setdefault(name, index)
            last[name] = index
    numbers: dict[str, int] = {}
    free: list[int] = []
    ends: dict[int, list[str]] = {}
    used = 0
    for name, start in sorted(first.items(), key=lambda item: item[1]):
        for end in sorted(end for end in ends if end < start):
            free += [numbers[ended] for ended in ends.pop(end)]
        if free:
            numbers[name] = free.pop()
        else:
            numbers[name] = used
            used += 1
        ends.setdefault(last[name], []).append(name)
    return numbers


def encode(kernel: Kernel) -> tuple[list[str], Slots]:
    """Return the kernel's lines for the machine, and its slots."""
    slots = Slots(kernel)
    lines = [encoded(instruction, kernel, slots) for instruction in kernel.instructions]
    head = (
        f"kernel {kernel.name} {kernel.parameter_bytes} {kernel.shared_bytes} "
        f"{slots.first_register} {slots.register_count}"
    )
    constants = [f"constant {value}" for value in slots.constants]
    return [head, *lines, *constants, "end"], slots


def encoded(instruction: Instruction, kernel: Kernel, slots: Slots) -> str:
    """``LINE OPCODE GUARD OFFSET TARGET SLOTS...``: guard is -1, or a slot, with ``!`` negated."""
    guard = "-1"
    if instruction.guard:
        negated = "!" if instruction.guard.startswith("!") else ""
        guard = f"{negated}{slots.of(instruction.guard.lstrip('!'))}"
    target, offset = -1, 0
    operands: list[int] = []
    if instruction.operation == "bra":
        target = kernel.labels[instruction.operands[0]]
    elif instruction.is_memory:
        address, values = instruction.operands
        if instruction.operation != "st":
            address, values = values, address
        found = _ADDRESS.match(address)
        if not found:
            raise UnknownAssembly(f"line {instruction.line}: address {address}")
        offset = int(found[2] or 0)
        operands = [slots.of(found[1]), *_slots_of(values, slots)]
    else:
        for operand in instruction.operands:
            operands += _slots_of(operand, slots)
    opcode = instruction.meaning
    if instruction.operation == "mov" and "{" in "".join(instruction.operands):
        opcode += ".pack" if instruction.operands[1].startswith("{") else ".unpack"
        opcode += str(len(split(max(instruction.operands, key=len).strip("{}"))))
    fields = [instruction.line, opcode, guard, offset, target, *operands]
    return " ".join(map(str, fields))


def _slots_of(operand: str, slots: Slots) -> Iterable[int]:
    if operand.startswith("{"):
        return [slots.of(part) for part in split(operand[1:-1])]
    return [slots.of(operand)]
