"""Convert parts of a round to arguments of the native core."""

from __future__ import annotations

from typing import Any

from gpudist.transport.base import RoundPart


def native_part(part: RoundPart) -> tuple[Any, ...]:
    """Return the tuple that describes a part to ``Round`` and ``DeviceRound``."""
    comes = part.comes_from_outside
    return (
        part.index,
        part.movement.input_shape if comes else None,
        part.movement.input_dtype if comes else None,
        part.takes,
        part.gives,
        part.block,
        part.make_output,
        part.makers,
        part.bound,
        part.bind,
    )
