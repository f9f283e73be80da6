"""What an instruction's result can change, which tells mutants that cannot matter."""

from __future__ import annotations

from collections import Counter

from tests.ptx.assembly import Instruction, Kernel

# Of the walk below; an instruction with more is taken to matter.
MOST_STATES = 1_000


class Values:
    """Numbers of values: registers of the same number hold the same value wherever both have one.

    Known of registers that one instruction writes: copies, equal operations on equal values, and
    loads from equal addresses, since the kernels read nothing that they have written.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.writes = Counter(name for one in kernel.instructions for name in one.written)
        self._numbers: dict[str, object] = {}
        for instruction in kernel.instructions:
            self._define(instruction)

    def of(self, operand: str) -> object:
        return self._numbers.get(operand, operand)

    def leaves(self, value: object) -> frozenset[str]:
        """Registers that a value is made of, and that are not known to be anything else."""
        if isinstance(value, tuple):
            return frozenset[str]().union(*map(self.leaves, value))
        return frozenset([value]) if isinstance(value, str) and value[:1] == "%" else frozenset()

    def _operand(self, operand: str) -> object:
        """Of an address, the base and what is added to it."""
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
        if self.writes[name] > 1 or "volatile" in instruction.parts:
            return
        if instruction.operation in ("mov", "cvta") and len(instruction.operands) == 2:
            self._numbers[name] = self.of(instruction.operands[1])
            return
        used = tuple(self._operand(operand) for operand in instruction.operands[1:])
        if all(self.writes[one] <= 1 for one in instruction.read):
            self._numbers[name] = (instruction.meaning, used)


Facts = frozenset[tuple[object, bool]]
_ALL = (1 << 64) - 1


def _known_bits(value: object, holds: bool) -> tuple[object, int, int] | None:
    """Bits that a predicate tells of a value: which, and what they are.

    Of comparisons of a value, or of some of its bits, with a number.
    """
    if not isinstance(value, tuple) or not str(value[0]).startswith(("setp.eq.", "setp.ne.")):
        return None
    (of, number), mask = value[1], _ALL
    if not str(number).isdigit():
        return None
    if isinstance(of, tuple) and str(of[0]).startswith("and.b") and str(of[1][1]).isdigit():
        of, mask = of[1][0], int(of[1][1])
    bits = int(number)
    if str(value[0]).startswith("setp.eq.") == holds:
        return of, mask, bits
    is_one_bit = mask & (mask - 1) == 0 and bits in (0, mask)
    return (of, mask, mask ^ bits) if is_one_bit else None


def _excludes(facts: Facts, value: object, holds: bool) -> bool:
    """Whether a predicate cannot be this, if others are what is known of them."""
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


class Effects:
    """Whether what an instruction writes can reach memory, an address or a branch.

    A walk of all paths from it, on which a branch whose predicate is known on every way to the
    instruction is taken as that predicate says.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.values = Values(kernel)
        self._facts = self._known_predicates()

    def matters(self, index: int) -> bool:
        instruction = self.kernel.instructions[index]
        if not instruction.written:
            return True
        start = frozenset(instruction.written)
        facts = self._facts[index] or frozenset()
        waiting = [(next_, start, facts) for next_ in self.kernel.successors(index)]
        seen = set(waiting)
        while waiting:
            if len(seen) > MOST_STATES:
                return True
            at, tainted, facts = waiting.pop()
            one = self.kernel.instructions[at]
            is_read = not tainted.isdisjoint(one.read)
            if is_read and self._is_seen(one, tainted):
                return True
            if one.written:
                facts = self._without(facts, one)
                if is_read:
                    tainted = tainted | frozenset(one.written)
                elif not one.guard:
                    tainted = tainted - frozenset(one.written)
            if not tainted:
                continue
            for next_, then in self._ways(at, facts):
                state = (next_, tainted, then)
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        return False

    @staticmethod
    def _is_seen(one: Instruction, tainted: frozenset[str]) -> bool:
        return one.is_memory or not one.written or one.guard.lstrip("!") in tainted

    def _known_predicates(self) -> list[Facts | None]:
        """Predicates that are known before each instruction, whatever the way to it."""
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
        """The instructions that may follow, and what is known then."""
        one = self.kernel.instructions[at]
        follow = self.kernel.successors(at)
        if one.operation != "bra" or not one.guard:
            return [(next_, facts) for next_ in follow]
        name = one.guard.lstrip("!")
        if self.values.writes[name] > 1:
            return [(next_, facts) for next_ in follow]
        value = self.values.of(name)
        taken = not one.guard.startswith("!")
        ways = zip(follow, (taken, not taken), strict=True)
        return [
            (next_, facts | {(value, holds)})
            for next_, holds in ways
            if not _excludes(facts, value, holds)
        ]

    def _without(self, facts: Facts, one: Instruction) -> Facts:
        """What is still known when a register that a predicate is made of has another value."""
        changed = {name for name in one.written if self.values.of(name) == name}
        if not facts or not changed:
            return facts
        return frozenset(
            (value, holds)
            for value, holds in facts
            if changed.isdisjoint(self.values.leaves(value))
        )
