"""Where the blocks of the parameters and buffers of distributed layers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class Placement:
    """Where the blocks of one parameter or buffer of a distributed layer are.

    Attributes:
        P: its owners; each holds one block, other workers a zero-volume tensor.
        cut: of the whole, as the sequential layer has it, into blocks.
        axes: of ``P``, the one that cuts each dim. Along all others, owners hold the same cells.
    """

    P: CartesianPartition
    cut: Decomposition
    axes: tuple[int, ...]

    @classmethod
    def balanced(
        cls, shape: Sequence[int], P: CartesianPartition, axes: Sequence[int]
    ) -> Placement:
        """Balanced blocks of a tensor of ``shape``; ``axes`` of ``P`` cut its dims."""
        return cls(P, Decomposition.balanced(shape, [P.shape[a] for a in axes]), tuple(axes))

    @classmethod
    def everywhere(cls, shape: Sequence[int], P: Partition) -> Placement:
        """The whole on every worker of ``P``."""
        line = P.create_cartesian_topology_partition([P.size, 1])
        return cls.balanced(shape, line, (1,) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.cut.shape

    def box(self, rank: int) -> Box:
        """Global cells that the worker at ``rank`` of ``P`` holds."""
        index = self.P.cartesian_index(rank)
        return self.cut.block([index[axis] for axis in self.axes])

    @property
    def own_box(self) -> Box | None:
        """Global cells that this worker holds, ``None`` if it is no owner."""
        return None if self.P.rank is None else self.box(self.P.rank)

    @property
    def copies(self) -> int:
        """How many workers hold each cell."""
        return prod(n for axis, n in enumerate(self.P.shape) if axis not in self.axes)

    @property
    def is_replicated(self) -> bool:
        """Several workers hold the same cells."""
        return self.copies > 1

    @property
    def is_first_copy(self) -> bool:
        """This worker holds a block, and is the first of those that hold the same."""
        index = self.P.index
        if index is None:
            return False
        return not any(i for axis, i in enumerate(index) if axis not in self.axes)


def placements(module: torch.nn.Module) -> dict[str, Placement]:
    """Where the parameters and buffers of all distributed layers of ``module`` are.

    Args:
        module: a tree of layers, distributed or not.

    Returns:
        By full name, as in the state dict, those of distributed layers, also under further names of
        shared layers. Others are absent: every rank holds them whole.
    """
    return {
        f"{prefix}.{name}" if prefix else name: placement
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if hasattr(layer, "_placements")
        for name, placement in layer._placements().items()  # pyright: ignore
    }
