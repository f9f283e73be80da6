"""Parts of a round, as the rounds of the native core take them."""

from __future__ import annotations

from typing import Any

from gpudist.transport.base import RoundPart


def native_part(part: RoundPart) -> tuple[Any, ...]:
    """What the rounds of the native core take of a part."""
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
