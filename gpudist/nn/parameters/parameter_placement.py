"""Placement of the blocks of parameters and buffers of distributed layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Plan
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast
from gpudist.geometry.repartition import plan_repartition
from gpudist.world.partition import Partition


@dataclass(frozen=True)
class ParameterPlacement:
    """Placement of the blocks of one parameter or buffer of a distributed layer.

    Attributes:
        P: partition of the owners; each holds one block, other workers a zero-volume tensor.
        sbp: attribute along each axis of ``P``: a split of one dim, or copies.
        shape: shape of the global tensor, as in the sequential layer.
    """

    P: Partition
    sbp: NdSbp
    shape: tuple[int, ...]

    @classmethod
    def on(
        cls, P: Partition, shape: Sequence[int], splits: Mapping[int, Sbp] | None = None
    ) -> ParameterPlacement:
        """Place a tensor of ``shape`` on ``P``, split along the axes in ``splits``, else copied."""
        attributes = splits or {}
        return cls(P, tuple(attributes.get(a, broadcast) for a in range(P.dim)), tuple(shape))

    @cached_property
    def layout(self) -> Layout:
        """Cells of each rank of the world."""
        return Layout(self.P.ranks, self.P.shape, self.sbp, self.shape)

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Blocks of each dim."""
        return self.layout.blocks

    def box(self, rank: int) -> Box:
        """Return the global cells held by the worker at ``rank`` of ``P``."""
        return self.layout.box(index_of(rank, self.P.shape))

    @cached_property
    def own_box(self) -> Box | None:
        """Global cells held by this worker, ``None`` if it is not an owner."""
        return None if self.P.rank is None else self.box(self.P.rank)

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this worker's block, ``(0,)`` if it is not an owner."""
        return (0,) if self.own_box is None else self.own_box.shape

    @property
    def copies(self) -> int:
        """Number of workers that hold each cell."""
        return self.layout.count("broadcast")

    @property
    def is_replicated(self) -> bool:
        """Whether several workers hold the same cells."""
        return self.copies > 1

    @property
    def first_copies(self) -> ParameterPlacement:
        """Placement of the first copy of each block alone."""
        first = self.layout.first_copies
        P = self.P.world.create_partition_inclusive(first.ranks)
        return ParameterPlacement(
            P.create_cartesian_topology_partition(first.grid), self.sbp, self.shape
        )

    @property
    def is_first_copy(self) -> bool:
        """Whether this worker holds a block, and is the first of its holders."""
        index = self.P.index
        if index is None:
            return False
        return not any(
            i for i, attribute in zip(index, self.sbp, strict=True) if attribute == broadcast
        )

    @property
    def block_index(self) -> tuple[int, ...] | None:
        """Return the index of this worker's block along each dim, ``None`` without a block."""
        if self.P.index is None:
            return None
        block = [0] * len(self.shape)
        for attribute, i in zip(self.sbp, self.P.index, strict=True):
            if attribute.is_split:
                block[attribute.dim] += i
        return tuple(block)

    def holder_of(self, block: Sequence[int]) -> int:
        """Return the rank of the world that holds a block, on this worker's index of copies."""
        own_index = self.P.index or (0,) * self.P.dim
        index = [
            min(block[attribute.dim], parts - 1) if attribute.is_split else i
            for attribute, parts, i in zip(self.sbp, self.P.shape, own_index, strict=True)
        ]
        return self.P.ranks[rank_of(index, self.P.shape)]


def plan_recut(source: ParameterPlacement, target: ParameterPlacement, P_all: Partition) -> Plan:
    """Plan the movement between two placements of a tensor, in ranks of ``P_all``.

    A worker sends to, and receives from, the copies at its own index along axes of copies.
    """
    return plan_repartition(
        Decomposition(source.blocks),
        Decomposition(target.blocks),
        P_all.plan_rank,
        source.block_index,
        target.block_index,
        lambda block: P_all.rank_of(source.holder_of(block)),
        lambda block: P_all.rank_of(target.holder_of(block)),
        key=(source.P.digest, source.sbp, target.P.digest, target.sbp),
    )


def set_placements(
    layer: torch.nn.Module, placed: Callable[[], dict[str, ParameterPlacement]]
) -> None:
    """Let :func:`placements` call ``placed`` for ``layer``, which may be any module."""
    layer._placements = placed  # pyright: ignore


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
