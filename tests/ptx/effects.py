"""Effects of an instruction's result, which identify mutants that cannot matter."""

from __future__ import annotations

from collections import Counter

from tests.ptx.assembly import Instruction, Kernel, registers_of

# Limits of the walk below; an instruction with more is assumed to matter. A path records the first
# branches.
MOST_STATES = 50_000
MOST_LEARNT = 3


class Value(tuple[str, tuple[object, ...]]):
    """Result of an instruction: its meaning and the values of its operands.

    Equal values of a kernel are one object. As trees they may have more nodes than can be compared
    or written.
    """

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __repr__(self) -> str:
        return self[0]


class Values:
    """Numbers of values: equal numbers mean equal values, wherever both exist.

    Known of registers that one instruction writes: copies, equal operations on equal values, and
    loads from equal addresses, since the kernels read nothing that they have written but in shared
    memory.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.writes = Counter(name for one in kernel.instructions for name in one.written)
        self._numbers: dict[str, object] = {}
        self._known: dict[object, Value] = {}
        self._leaves: dict[Value, frozenset[str]] = {}
        for instruction in kernel.instructions:
            self._define(instruction)

    def of(self, operand: str) -> object:
        return self._numbers.get(operand, operand)

    def leaves(self, value: object) -> frozenset[str]:
        """Registers that a value is made of, and that are not known to be anything else."""
        if isinstance(value, Value):
            if value not in self._leaves:
                self._leaves[value] = self.leaves(value[1])
            return self._leaves[value]
        if isinstance(value, tuple):
            return frozenset[str]().union(*map(self.leaves, value))
        return frozenset([value]) if isinstance(value, str) and value[:1] == "%" else frozenset()

    def _operand(self, operand: str) -> object:
        """Return the value of an operand; for an address, its base and offset."""
        if not operand.startswith("["):
            return self.of(operand)
        base, _, added = operand.strip("[]").partition("+")
        value, offset = self.of(base), int(added or 0)
        while isinstance(value, tuple) and value[0] == "add.s64" and str(value[1][1]).isdigit():
            value, offset = value[1][0], offset + int(value[1][1])
        return (value, offset)

    def _define(self, instruction: Instruction) -> None:
        if len(instruction.written) != 1 or instruction.guard:
            return
        (name,) = instruction.written
        if self.writes[name] > 1 or {"volatile", "shared"}.intersection(instruction.parts):
            return
        if instruction.operation in ("mov", "cvta") and len(instruction.operands) == 2:
            self._numbers[name] = self.of(instruction.operands[1])
            return
        used = tuple(self._operand(operand) for operand in instruction.operands[1:])
        if all(self.writes[one] <= 1 for one in instruction.read):
            key = instruction.meaning, used
            self._numbers[name] = self._known.setdefault(key, Value(key))


Facts = frozenset[tuple[object, bool]]
# Bits of registers.
Bits = frozenset[tuple[str, int]]


def _ones(bits: int) -> int:
    return (1 << bits) - 1


def _without_logic(value: object, holds: bool) -> tuple[object, bool]:
    """Resolve a predicate that equals another one or its negation."""
    while isinstance(value, tuple):
        operation, operands = value
        if operation == "not.pred":
            value, holds = operands[0], not holds
        elif operation == "xor.pred" and operands[1] in ("0", "-1"):
            value, holds = operands[0], holds == (operands[1] == "0")
        else:
            break
    return value, holds


def _known_bits(value: object, holds: bool) -> tuple[object, int, int] | None:
    """Bits of a value that a predicate determines: their mask and their values.

    Of comparisons of a value, or of some of its bits, with a number.
    """
    if not isinstance(value, tuple) or not str(value[0]).startswith(("setp.eq.", "setp.ne.")):
        return None
    (of, number), mask = value[1], _ones(int(str(value[0])[-2:]))
    if not str(number).isdigit():
        return None
    bits = int(number)
    while isinstance(of, tuple) and isinstance(of[1], tuple) and len(of[1]) == 2:
        operation, (inner, by) = str(of[0]), of[1]
        if not str(by).isdigit() or not operation.startswith(("and.b", "shr.u")):
            break
        if operation.startswith("and.b"):
            mask &= int(by)
        else:
            mask, bits = mask << int(by), bits << int(by)
        of = inner
    if str(value[0]).startswith("setp.eq.") == holds:
        return of, mask, bits
    is_one_bit = mask & (mask - 1) == 0 and bits in (0, mask)
    return (of, mask, mask ^ bits) if is_one_bit else None


def _excludes(facts: Facts, value: object, holds: bool) -> bool:
    """Return whether a predicate cannot have this value, given the known ones."""
    if (value, not holds) in facts:
        return True
    wanted = _known_bits(value, holds)
    if wanted is None:
        return False
    known = (_known_bits(*fact) for fact in facts)
    return any(
        one is not None and one[0] == wanted[0] and (one[2] ^ wanted[2]) & one[1] & wanted[1]
        for one in known
    )


class Flow:
    """Which bits of what an instruction writes depend on which of what it reads."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def of_operand(self, one: Instruction, place: int) -> int:
        """Return the bits of the only result that another register as an operand may change."""
        read = one.registers[place]
        found = self.through(one, {name: _ones(width_of(name)) for name in read})
        return found.get(one.written[0], 0) if len(one.written) == 1 else -1

    def through(self, one: Instruction, known: dict[str, int]) -> dict[str, int]:
        """Bits of its results that depend on these bits of registers."""
        read = [known.get(name, 0) for name in one.read]
        if not any(read):
            return {}
        if len(one.written) == 1 and not one.guard:
            (name,) = one.written
            return {name: self._result(one, known) & _ones(width_of(name))}
        if one.operation == "mov" and len(one.written) == 2 and not one.guard:
            half = width_of(one.written[0])
            low, high = one.written
            return {low: read[0] & _ones(half), high: read[0] >> half}
        return {name: _ones(width_of(name)) for name in one.written}

    def _result(self, one: Instruction, known: dict[str, int]) -> int:
        operands = one.operands[1:]
        bits = [sum_of_parts(operand, known) for operand in operands]
        everything = _ones(64)
        kind = one.operand_type
        match one.operation, [self._number(operand) for operand in operands]:
            case "mov", _:
                return bits[0]
            case (("or" | "xor"), _):
                return bits[0] | bits[1]
            case "and", [_, int(number)]:
                return bits[0] & number
            case "and", _:
                return bits[0] | bits[1]
            case "shl", [_, int(number)]:
                return bits[0] << number
            case "shr", [_, int(number)] if kind[0] != "s":
                return bits[0] >> number
            case "shf", [_, _, int(number)]:
                return (bits[1] << 32 | bits[0]) >> number % 32
            case "selp", _:
                chosen = self._difference(operands[0], operands[1]) if bits[2] else 0
                return bits[0] | bits[1] | chosen
            case "add", _ if kind[0] in "us":
                return self._sum(operands, bits, int(kind[1:]))
            case "cvt", _ if kind[0] == "u" and one.parts[-2][0] in "us":
                return bits[0] & _ones(int(kind[1:]))
            case "cvt", [_, _]:  # two numbers of 16 bits in one register, the first on top
                return (_ones(16) << 16 if bits[0] else 0) | (_ones(16) if bits[1] else 0)
            case _:
                return everything

    def _difference(self, left: str, right: str) -> int:
        return min(
            self._changed(self.values.of(a), self.values.of(b))
            for a, b in ((left, right), (right, left))
        )

    def _changed(self, value: object, start: object) -> int:
        if value == start:
            return 0
        if isinstance(value, tuple) and str(value[0]).startswith(("and.b", "or.b")):
            inner, number = value[1][0], str(value[1][1])
            if number.lstrip("-").isdigit():
                other = ~int(number) if str(value[0]).startswith("and") else int(number)
                return self._changed(inner, start) | other & _ones(64)
        return _ones(64)

    def _sum(self, operands: tuple[str, ...], bits: list[int], width: int) -> int:
        """Return the bits of a sum, with all that carries may change."""
        zeros = _ones(width)
        for operand in operands:
            zeros &= self._zeros(operand)
        made, carries = 0, False
        for place in range(width):
            carries = carries or bool((bits[0] | bits[1]) >> place & 1)
            made |= carries << place
            carries = carries and not zeros >> place & 1
        return made

    def _zeros(self, operand: str) -> int:
        value = self.values.of(operand)
        if isinstance(value, tuple) and str(value[0]).startswith("and.b"):
            number = str(value[1][1])
            return ~int(number) if number.lstrip("-").isdigit() else 0
        return 0

    def _number(self, operand: str) -> int | None:
        value = str(self.values.of(operand))
        return int(value) if value.lstrip("-").isdigit() else None


def width_of(register: str) -> int:
    """Width in bits."""
    return {"%p": 1, "%rs": 16, "%rd": 64, "%fd": 64}.get(register.rstrip("0123456789"), 32)


def sum_of_parts(operand: str, known: dict[str, int]) -> int:
    """Return the bits of an operand: a register, or several, the first of which is lowest."""
    bits, place = 0, 0
    for name in registers_of(operand):
        bits |= known.get(name, 0) << place
        place += width_of(name)
    return bits


class Effects:
    """Whether what an instruction writes can reach memory, an address or a branch.

    A walk of all paths from it, on which a branch whose predicate is known on every way to the
    instruction is taken as that predicate says.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.values = Values(kernel)
        self.flow = Flow(self.values)
        self._facts = self._known_predicates()

    def matters(self, index: int, changed: int = -1) -> bool:
        """Return whether changing only these bits of the result has an effect."""
        instruction = self.kernel.instructions[index]
        if not instruction.written:
            return True
        start = frozenset((name, changed & _ones(width_of(name))) for name in instruction.written)
        facts = self._facts[index] or frozenset()
        waiting = [(next_, start, facts, 0) for next_ in self.kernel.successors(index)]
        seen = set(waiting)
        while waiting:
            if len(seen) > MOST_STATES:
                return True
            at, found, facts, learnt = waiting.pop()
            one = self.kernel.instructions[at]
            bits = dict(found)
            is_read = any(name in bits for name in one.read)
            if is_read and self._is_seen(one, bits):
                return True
            if one.written:
                facts = self._without(facts, one)
                made = self.flow.through(one, bits) if is_read else {}
                if not one.guard:
                    bits = {name: mask for name, mask in bits.items() if name not in one.written}
                for name, mask in made.items():
                    bits[name] = bits.get(name, 0) | mask
            bits = {name: mask for name, mask in bits.items() if mask}
            if not bits:
                continue
            ways = self._ways(at, facts)
            for next_, then in ways:
                is_new = then != facts and learnt < MOST_LEARNT
                state = (next_, frozenset(bits.items()), then if is_new else facts, learnt + is_new)
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        return False

    @staticmethod
    def _is_seen(one: Instruction, bits: dict[str, int]) -> bool:
        if not one.written and one.operation == "st":
            if one.guard.lstrip("!") in bits or any(name in bits for name in one.registers[0]):
                return True
            width = _ones(int(one.operand_type[1:]))
            return any(bits.get(name, 0) & width for name in one.registers[1])
        return one.is_memory or not one.written or one.guard.lstrip("!") in bits

    def _known_predicates(self) -> list[Facts | None]:
        """Return the predicates known before each instruction on all paths to it."""
        known: list[Facts | None] = [None] * len(self.kernel.instructions)
        known[0] = frozenset()
        waiting = [0]
        while waiting:
            at = waiting.pop()
            facts = self._without(known[at] or frozenset(), self.kernel.instructions[at])
            for next_, then in self._ways(at, facts):
                before = known[next_]
                now = then if before is None else before & then
                if now != before:
                    known[next_] = now
                    waiting.append(next_)
        return known

    def _ways(self, at: int, facts: Facts) -> list[tuple[int, Facts]]:
        """Return the instructions that may follow, and the predicates known then."""
        one = self.kernel.instructions[at]
        follow = self.kernel.successors(at)
        if one.operation != "bra" or not one.guard:
            return [(next_, facts) for next_ in follow]
        name = one.guard.lstrip("!")
        if self.values.writes[name] > 1:
            return [(next_, facts) for next_ in follow]
        value, taken = _without_logic(self.values.of(name), not one.guard.startswith("!"))
        ways = zip(follow, (taken, not taken), strict=True)
        return [
            (next_, facts | {(value, holds)})
            for next_, holds in ways
            if not _excludes(facts, value, holds)
        ]

    def _without(self, facts: Facts, one: Instruction) -> Facts:
        """Return the facts that still hold after a register of a predicate changed its value."""
        changed = {name for name in one.written if self.values.of(name) == name}
        if not facts or not changed:
            return facts
        return frozenset(
            (value, holds)
            for value, holds in facts
            if changed.isdisjoint(self.values.leaves(value))
        )
