"""Pickles of bounded size: a few bytes can describe more objects than any memory can hold."""

from __future__ import annotations

import pickletools
from typing import Any

from gpudist.errors import CheckpointError

_LEAVES, _GETS, _PUTS, _MARKS, _STOPS, _NOTHING, _FILLS, _MAKES, _TAKES = range(9)
_LEAF: Any = ()
_FACTOR = 100
# In place of the number of objects in a container that is being counted.
_OPEN = -1


def end_of(data: bytes) -> int:
    """Return the number of bytes of the pickle at the start of ``data``, without loading it.

    Raises:
        CheckpointError: if ``data`` is not a pickle, or describes an object that contains itself or
            more than 100 objects per byte. A list of two references to a list of two references,
            and so on, takes for ever to print, to compare or to hash.
    """
    try:
        end, nodes = _parsed(data)
        too_much = _exceeds(nodes, _FACTOR * (len(data) + 100))
    except Exception as error:  # Data that is not a pickle may raise any exception.
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from error
    if too_much:
        raise CheckpointError(
            f"{end} bytes describe more than {_FACTOR} objects per byte, or one that contains "
            "itself; they may come from an attack"
        )
    return end


def _parsed(data: bytes) -> tuple[int, list[list[Any]]]:
    """Return the end of the pickle, and for each of its containers the objects directly inside."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    nodes: list[list[Any]] = []
    for opcode, argument, position in pickletools.genops(data):
        effect, count = _EFFECTS[opcode.code]
        if effect == _LEAVES:
            stack.append(_LEAF)
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
            return (position or 0) + 1, nodes
        elif effect != _NOTHING:
            start = marks.pop() if count is None else len(stack) - count
            if start < (marks[-1] if marks else 0):
                raise ValueError(f"{opcode.name} takes more objects than there are")
            objects = stack[start:]
            del stack[start:]
            if effect == _FILLS:
                if type(stack[-1]) is not list:
                    raise ValueError(f"{opcode.name} fills an object other than a container")
                stack[-1].extend(objects)
            elif effect == _MAKES:
                stack.append(objects)
                nodes.append(objects)
    raise ValueError("it has no end")


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


def _exceeds(nodes: list[list[Any]], limit: int) -> bool:
    """Return whether a container holds more than ``limit`` objects in all, or itself."""
    totals: dict[int, int] = {}
    for root in nodes:
        if id(root) in totals:
            continue
        path, sums = [(root, iter(root))], [1]
        totals[id(root)] = _OPEN
        while path:
            node, rest = path[-1]
            for each in rest:
                total = totals.get(id(each)) if type(each) is list else 1
                if total is None:
                    totals[id(each)] = _OPEN
                    path.append((each, iter(each)))
                    sums.append(1)
                    break
                if total == _OPEN:
                    return True
                sums[-1] += total
            else:
                path.pop()
                total = totals[id(node)] = sums.pop()
                if total > limit:
                    return True
                if sums:
                    sums[-1] += total
    return False
