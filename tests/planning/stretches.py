"""Choices of layouts beside which the exact optimum is judged."""

from __future__ import annotations

from gpudist.planning.layout_choices import Choice, LayoutChoices
from gpudist.planning.layout_costs import State


def stretch(found: LayoutChoices, start: int, stop: int, state: State) -> Choice:
    """Return the choice of a state for functions ``start`` to ``stop``, the grid's for others."""
    return tuple(
        (found.value(x, state) or 0) if start <= variable.node <= stop else 0
        for x, variable in enumerate(found.variables)
    )
