"""Pickles of bounded size: a few bytes can describe more objects than any memory can hold."""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from math import inf

from gpudist.errors import CheckpointError

_LEAVES, _GETS, _PUTS, _MARKS, _STOPS, _NOTHING, _FILLS, _MAKES, _TAKES = range(9)
_FACTOR = 100


@dataclass
class _Container:
    """Object that holds others.

    Attributes:
        total: number of objects in it, itself included; infinite if it holds itself.
        is_held: whether another object holds it. A pickle fills a container before another takes
            it, unless that is inside.
    """

    total: float = 1.0
    is_held: bool = False


def end_of(data: bytes) -> int:
    """Return the number of bytes of the pickle at the start of ``data``, without loading it.

    Raises:
        CheckpointError: if ``data`` is not a pickle, or describes an object that contains itself or
            more than 100 objects per byte. A list of two references to a list of two references,
            and so on, takes for ever to print, to compare or to hash.
    """
    try:
        end, most = _measure(data)
    except Exception as error:  # Data that is not a pickle may raise any exception.
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from error
    if most > _FACTOR * (len(data) + 100):
        raise CheckpointError(
            f"{end} bytes describe more than {_FACTOR} objects per byte, or one that contains "
            "itself; they may come from an attack"
        )
    return end


def _measure(data: bytes) -> tuple[int, float]:
    """Return the end of the pickle, and the largest number of objects in one of its containers."""
    stack: list[_Container | None] = []
    marks: list[int] = []
    memo: dict[int, _Container | None] = {}
    most = 1.0
    for opcode, argument, position in pickletools.genops(data):
        effect, count = _EFFECTS[opcode.code]
        if effect == _LEAVES:
            stack.append(None)
        elif effect == _GETS:
            stack.append(memo[int(argument or 0)])
        elif effect == _PUTS:
            number = len(memo) if argument is None else int(argument or 0)
            if number > len(data):  # The unpickler would make room for all numbers below.
                raise ValueError(f"it numbers an object {number}")
            memo[number] = stack[-1]
        elif effect == _MARKS:
            marks.append(len(stack))
        elif effect == _STOPS:
            return (position or 0) + 1, most
        elif effect != _NOTHING:
            start = marks.pop() if count is None else len(stack) - count
            if start < (marks[-1] if marks else 0):
                raise ValueError(f"{opcode.name} takes more objects than there are")
            objects = stack[start:]
            del stack[start:]
            if effect == _MAKES:
                stack.append(_Container())
            if effect != _TAKES:
                most = max(most, _fill(stack[-1], objects, opcode.name))
    raise ValueError("it has no end")


def _fill(container: _Container | None, objects: list[_Container | None], name: str) -> float:
    """Put ``objects`` into a container; return how many objects it holds now."""
    if container is None:
        raise ValueError(f"{name} fills an object other than a container")
    for each in objects:
        container.total += each.total if each else 1.0
        if each:
            each.is_held = True
    if container.is_held and objects:
        container.total = inf
    return container.total


def _effect_of(opcode: pickletools.OpcodeInfo) -> tuple[int, int | None]:
    """Return what an opcode does, and how many objects it takes; ``None``: those above a mark."""
    before, name = [kind.name for kind in opcode.stack_before], opcode.name
    if name in ("APPENDS", "ADDITEMS", "SETITEMS"):
        return _FILLS, None
    if name in ("APPEND", "SETITEM", "BUILD"):
        return _FILLS, len(before) - 1
    if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
        return _PUTS, 0
    if name in ("GET", "BINGET", "LONG_BINGET"):
        return _GETS, 0
    if name in ("MARK", "STOP"):
        return (_MARKS if name == "MARK" else _STOPS), 0
    count = None if "mark" in before else len(before)
    if not opcode.stack_after:
        return (_TAKES if before else _NOTHING), count
    return (_MAKES if before or name.startswith("EMPTY") else _LEAVES), count


_EFFECTS = {opcode.code: _effect_of(opcode) for opcode in pickletools.opcodes}
