"""Explain a choice of layouts: what each stretch of functions saves, and the next best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpudist.convert.network_plan import Stretch
from gpudist.planning.advice import Advice
from gpudist.planning.layout_choices import Choice, LayoutChoices, State
from gpudist.planning.table import bytes_of, seconds_of


def explain(
    choices: LayoutChoices, choice: Choice, best: Advice, alone: Advice, profile: str
) -> list[str]:
    """Return lines that describe the layouts of a plan.

    Args:
        choices: layouts that the functions may have.
        choice: the ones of the plan.
        best: prediction for the plan.
        alone: prediction for the network without a plan.
        profile: name of the profile of the machine.

    Returns:
        A line with the times, and one for each stretch of functions that do not compute in the
        layouts of the grid.
    """
    after, before = (
        f"{seconds_of(advice.seconds)} and {bytes_of(advice.memory_bytes)}"
        for advice in (best, alone)
    )
    first = f"{profile}: {after} a step, instead of {before} on {list(alone.grid)}"
    return [first, *(_line(choices, choice, stretch) for stretch in stretches(choices, choice))]


def stretches(choices: LayoutChoices, choice: Choice) -> Iterator[list[int]]:
    """Yield the functions of each stretch: those in one state, connected by results."""
    state = {at: choices.state(choice, at) for at in range(len(choices.nodes))}
    stretch_of = {at: [at] for at in state if state[at] != choices.home}
    for result, uses in choices.uses.items():
        for user in uses:
            before, after = stretch_of.get(result.node), stretch_of.get(user)
            if before and after and before is not after and state[result.node] == state[user]:
                before += after
                stretch_of.update(dict.fromkeys(after, before))
    for stretch in {id(stretch): stretch for stretch in stretch_of.values()}.values():
        yield sorted(stretch)


def all_stretches(choices: LayoutChoices, choice: Choice) -> list[Stretch]:
    """Return the stretches of a whole forward, in its order.

    Functions in the layouts of the grid are stretches, too: those that follow each other.
    """
    whole = list(stretches(choices, choice))
    others = {at for stretch in whole for at in stretch}
    runs = groupby(range(len(choices.nodes)), others.__contains__)
    split = [list(run) for is_whole, run in runs if not is_whole]
    return [_stretch(choices, choice, stretch) for stretch in sorted([*whole, *split])]


def _stretch(choices: LayoutChoices, choice: Choice, functions: Sequence[int]) -> Stretch:
    own = choices.state(choice, functions[0])
    whole = dict(zip(choices.axes, own, strict=False))
    entering_bytes = choices.entering_bytes(choice, functions)
    return Stretch(*_ends(choices, functions), len(functions), whole, entering_bytes)


def _ends(choices: LayoutChoices, functions: Sequence[int]) -> tuple[str, str]:
    first, last = (choices.nodes[at] for at in (functions[0], functions[-1]))
    return _place(first.path, first.name), _place(last.path, last.name)


def _line(choices: LayoutChoices, choice: Choice, stretch: Sequence[int]) -> str:
    own = choices.state(choice, stretch[0])
    where, last = _ends(choices, stretch)
    if len(stretch) > 1:
        where += f" to {last}, {len(stretch)} functions"
    costs = {
        state: seconds
        for state in choices.states
        if state != own and (seconds := _seconds(choices, choice, stretch, state)) is not None
    }
    before = choices.cost(choice)
    assert before is not None
    text = f"{where}: {_words(choices, own)}"
    if choices.home in costs:
        text += f"; saves {seconds_of(costs[choices.home] - before[0])}"
    if costs:
        state = min(costs, key=costs.__getitem__)
        slower = costs[state] - before[0]
        text += f"; next best: {_words(choices, state)}, "
        # Rehearsed as a whole, the plan was faster than one with a smaller sum.
        text += f"{seconds_of(slower)} slower" if slower > 0 else "as fast"
    return text


def _seconds(
    choices: LayoutChoices, choice: Choice, stretch: Sequence[int], state: State
) -> float | None:
    # None if a function of the stretch does not have the state.
    numbers = [n for n, variable in enumerate(choices.variables) if variable.node in stretch]
    changed = {n: value for n in numbers if (value := choices.value(n, state)) is not None}
    if len(changed) < len(numbers):
        return None
    cost = choices.cost(tuple(changed.get(n, value) for n, value in enumerate(choice)))
    return None if cost is None else cost[0]


def _place(path: str, name: str) -> str:
    return f"{path} ({name})" if path else name


def _words(choices: LayoutChoices, state: State) -> str:
    axes = [str(choices.axes[axis]) for axis, whole in enumerate(state) if whole]
    if not axes:
        return "split as the input"
    split = len(axes) < sum(
        any(other[axis] for other in choices.states) for axis in range(len(state))
    )
    word = "axes" if len(axes) > 1 else "axis"
    return f"whole along {word} {' and '.join(axes)}" if split else "whole"
