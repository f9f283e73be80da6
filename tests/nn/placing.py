"""The two placements of a layer's parameters, moved by the layer itself or by a network around."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpudist.nn import fuse_parameter_movements
from gpudist.nn.parameters.parameter_placement import placements
from tests.nn.compare import Slices

Owned = Callable[[str, torch.Size], Slices | None]


def draw_placing(rng: random.Random) -> dict[str, Any]:
    """Entries of a case for :class:`Placing`; none for a layer as it is by default."""
    found: dict[str, Any] = {}
    if rng.random() < 0.4:
        found["replicate_parameters"] = True
    if rng.random() < 0.4:
        found["fused"] = True
    return found


class Placing:
    """Placement and movement of one layer's parameters.

    Attributes:
        options: arguments for the layer's constructor.
    """

    def __init__(self, drawn: Mapping[str, Any], owned: Owned) -> None:
        """``owned`` gives this rank's block of a parameter that has one owner."""
        self._replicates = bool(drawn.get("replicate_parameters"))
        self._fused = bool(drawn.get("fused"))
        self._owned = owned
        self._layer: torch.nn.Module | None = None
        self.options: dict[str, Any] = {"replicate_parameters": True} if self._replicates else {}

    def around(self, layer: torch.nn.Module) -> torch.nn.Module:
        """The layer, once made."""
        self._layer = fuse_parameter_movements(layer) if self._fused else layer
        return self._layer

    def owned(self, name: str, shape: torch.Size) -> Slices | None:
        """Return this rank's block of a parameter, at the place that the layer reports."""
        if not self._replicates:
            return self._owned(name, shape)
        assert self._layer is not None
        placement = placements(self._layer)[name]
        assert placement.shape == tuple(shape)
        return None if placement.own_box is None else placement.own_box.slices
