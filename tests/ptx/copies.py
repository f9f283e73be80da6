"""Registers that are known to be equal before an instruction, though written several times."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from tests.ptx.assembly import Instruction, Kernel
from tests.ptx.effects import Value, Values

State = dict[str, object]


class Copies:
    """Values of registers before each instruction, from copies and constants on all paths to it.

    A register that several instructions write has the value that a copy gave it, until what was
    copied is computed again; other values are named by where they begin.
    """

    def __init__(self, kernel: Kernel, values: Values) -> None:
        self.kernel = kernel
        self.values = values
        self._several = sorted(name for name, times in values.writes.items() if times > 1)
        self._heads = self._states_of_blocks()
        self.at = lru_cache(maxsize=4)(self._at)

    def of(self, index: int, operand: str) -> object:
        """Return the value of an operand before instruction ``index``."""
        return self.at(index).get(operand, self.values.of(operand))

    def _at(self, index: int) -> State:
        head = max(start for start in self._heads if start <= index)
        state = dict(self._heads[head])
        for place in range(head, index):
            self._carry_out(place, state)
        return state

    def _carry_out(self, index: int, state: State) -> None:
        one = self.kernel.instructions[index]
        for name in one.written:
            for other, value in state.items():
                if self._is_computed_again(value, index, name):
                    state[other] = ("old", index, other)
            if name in self.values.writes and self.values.writes[name] > 1:
                state[name] = self._written(index, one, name, state)

    def _is_computed_again(self, value: object, index: int, name: str) -> bool:
        if isinstance(value, Value):
            return name in self.values.leaves(value)
        return value == name or value[:2] in (("from", index), ("old", index))  # pyright: ignore

    def _written(self, index: int, one: Instruction, name: str, state: State) -> object:
        if one.operation == "mov" and not one.guard and len(one.operands) == 2:
            source = one.operands[1]
            if "{" not in "".join(one.operands):
                return state.get(source, self.values.of(source))
        return ("from", index, name)

    def _states_of_blocks(self) -> dict[int, State]:
        """Return the state at the beginning of each block of instructions that is reached."""
        size = len(self.kernel.instructions)
        ways = Counter([0, *(to for at in range(size) for to in self.kernel.successors(at))])
        starts = {0, *self.kernel.labels.values()}
        starts |= {at + 1 for at in range(size) if len(self.kernel.successors(at)) != 1}
        heads: dict[int, State] = {0: {name: ("from", -1, name) for name in self._several}}
        waiting = [0]
        while waiting:
            start = at = waiting.pop()
            state = dict(heads[start])
            while True:
                self._carry_out(at, state)
                follow = self.kernel.successors(at)
                if len(follow) != 1 or follow[0] in starts:
                    break
                at = follow[0]
            for next_ in follow:
                before = heads.get(next_)
                if ways[next_] == 1 and state != before:
                    heads[next_] = dict(state)
                    waiting.append(next_)
                elif ways[next_] > 1 and self._merge(heads, next_, state):
                    waiting.append(next_)
        return heads

    @staticmethod
    def _merge(heads: dict[int, State], start: int, state: State) -> bool:
        """Merge a state into that of a block; returns whether it changed."""
        if start not in heads:
            heads[start] = dict(state)
            return True
        changed = False
        for name, value in heads[start].items():
            merged = ("at", start, name)
            if value != merged and state[name] != value:
                heads[start][name] = merged
                changed = True
        return changed
