"""Windows of adaptive pooling, whose number of outputs is fixed."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.geometry.blocks import Blocks


@dataclass(frozen=True)
class AdaptiveWindow:
    """Output ``i`` of ``m`` reads cells ``[floor(i n / m), ceil((i + 1) n / m))`` of ``n``.

    Two windows have at most one cell in common. There may be more outputs than cells.

    Attributes:
        output_extent: global number of outputs.
    """

    output_extent: int

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(self.output_extent, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start * extent // self.output_extent, -(-stop * extent // self.output_extent)
