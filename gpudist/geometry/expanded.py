"""Windows of a layer that computes several outputs from every cell."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.geometry.blocks import Blocks


@dataclass(frozen=True)
class ExpandedWindow:
    """Cell ``i`` becomes outputs ``[i * factor, (i + 1) * factor)``.

    Attributes:
        factor: number of outputs per cell, at least 1.
    """

    factor: int

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(inputs.extent * self.factor, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start // self.factor, -(-stop // self.factor)
