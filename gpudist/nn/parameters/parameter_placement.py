"""Placement of the blocks of parameters and buffers of distributed layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class ParameterPlacement:
    """Placement of the blocks of one parameter or buffer of a distributed layer.

    Attributes:
        P: partition of the owners; each holds one block, other workers a zero-volume tensor.
        cut: decomposition of the global tensor, as in the sequential layer, into blocks.
        axes: axis of ``P`` that splits each dim. Along all other axes, owners hold the same cells.
    """

    P: CartesianPartition
    cut: Decomposition
    axes: tuple[int, ...]

    @classmethod
    def balanced(
        cls, shape: Sequence[int], P: CartesianPartition, axes: Sequence[int]
    ) -> ParameterPlacement:
        """Place balanced blocks of a tensor of ``shape``, split by ``axes`` of ``P``."""
        return cls(P, Decomposition.balanced(shape, [P.shape[a] for a in axes]), tuple(axes))

    @classmethod
    def everywhere(cls, shape: Sequence[int], P: Partition) -> ParameterPlacement:
        """Place a full copy of the tensor on every worker of ``P``."""
        line = P.create_cartesian_topology_partition([P.size, 1])
        return cls.balanced(shape, line, (1,) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.cut.shape

    def box(self, rank: int) -> Box:
        """Return the global cells held by the worker at ``rank`` of ``P``."""
        index = self.P.cartesian_index(rank)
        return self.cut.block([index[axis] for axis in self.axes])

    @property
    def own_box(self) -> Box | None:
        """Global cells held by this worker, ``None`` if it is not an owner."""
        return None if self.P.rank is None else self.box(self.P.rank)

    @property
    def copies(self) -> int:
        """Number of workers that hold each cell."""
        return prod(n for axis, n in enumerate(self.P.shape) if axis not in self.axes)

    @property
    def is_replicated(self) -> bool:
        """Whether several workers hold the same cells."""
        return self.copies > 1

    @property
    def is_first_copy(self) -> bool:
        """Whether this worker holds a block, and is the first of its holders."""
        index = self.P.index
        if index is None:
            return False
        return not any(i for axis, i in enumerate(index) if axis not in self.axes)


def set_placements(layer: torch.nn.Module, placed: Mapping[str, ParameterPlacement]) -> None:
    """Set what :func:`placements` returns for ``layer``, which may be any module."""
    layer._placements = partial(dict, placed)  # pyright: ignore


def drop_placements(layer: torch.nn.Module) -> None:
    """Remove the placements set by :func:`set_placements`."""
    vars(layer).pop("_placements", None)


def placements(module: torch.nn.Module) -> dict[str, ParameterPlacement]:
    """Return the placement of the parameters and buffers of all distributed layers of ``module``.

    Args:
        module: tree of layers, distributed or not.

    Returns:
        Placements by full name, as in the state dict; shared layers appear under all their names.
        Tensors of other layers are absent: every rank holds all of their cells.
    """
    return {
        f"{prefix}.{name}" if prefix else name: placement
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if hasattr(layer, "_placements")
        for name, placement in layer._placements().items()  # pyright: ignore
    }
