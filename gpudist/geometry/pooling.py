"""Pooling window, whose last outputs may read less than a full kernel."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.errors import ShapeError
from gpudist.geometry.windows import SlidingWindow


@dataclass(frozen=True)
class PoolWindow(SlidingWindow):
    """Sliding window that may reach beyond the padded extent.

    Attributes:
        ceil_mode: whether the number of outputs is rounded up. The last window starts inside the
            extent or the padding in front of it, and is truncated at the end of the padding behind.
    """

    ceil_mode: bool = False

    def output_extent(self, extent: int) -> int:
        """Return the global number of outputs for ``extent`` inputs; raise if there is none."""
        if not self.ceil_mode:
            return super().output_extent(extent)
        padded = extent + sum(self.padding)
        outputs = -((self.reach - padded) // self.stride) + 1
        if (outputs - 1) * self.stride >= extent + self.padding[0]:
            outputs -= 1
        if outputs < 1:
            raise ShapeError(
                f"kernel {self.kernel} with dilation {self.dilation} and stride {self.stride} has "
                f"no output for a padded global extent of {padded}, even in ceil_mode; pad the "
                "input or use a smaller kernel"
            )
        return outputs

    def cuts(self, extent: int) -> bool:
        """Return whether the last window extends beyond the padded extent."""
        last = (self.output_extent(extent) - 1) * self.stride - self.padding[0]
        return last + self.reach > extent + self.padding[1]

    def has_only_padding(self, extent: int) -> bool:
        """Return whether any window has no tap in ``[0, extent)``."""
        outputs = range(min(self.output_extent(extent), self.padding[0] // self.stride + 1))
        return any(self._first_tap(output) >= extent for output in outputs)

    def _first_tap(self, output: int) -> int:
        start = output * self.stride - self.padding[0]
        return start if start >= 0 else start % self.dilation
