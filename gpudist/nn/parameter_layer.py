"""What layers with parameters share: these may be on every worker that uses them."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.autograd import move
from gpudist.exchange import Movement
from gpudist.nn.placement import Placement
from gpudist.nn.replication import copies_of, holders_of
from gpudist.partition import Partition


class ParameterLayer(torch.nn.Module):
    """A layer with a weight and perhaps a bias, or with parameters of other names.

    Attributes:
        replicate_parameters: every worker that uses a block of them holds it; else one does.
    """

    weight: Any
    _names: tuple[str, ...] = ("weight", "bias")
    replicate_parameters: bool = False
    _holders: tuple[Partition | None, ...] = ()
    _copies: list[torch.Tensor] | None = None

    def _replicate(self, replicate_parameters: bool, placed: dict[str, Placement]) -> None:
        """Take note of who holds the same cells; ``placed`` are the parameters that there are."""
        self.replicate_parameters = replicate_parameters
        if replicate_parameters:
            self._holders = tuple(
                holders_of(placed[name]) for name in self._names if name in placed
            )

    @property
    def _own(self) -> list[torch.Tensor]:
        """The parameters that there are, as this worker holds them."""
        own = [getattr(self, name, None) for name in self._names]
        return [parameter for parameter in own if parameter is not None]

    def own_parameters(self) -> list[torch.Tensor]:
        """The same for use in a forward; the gradients of replicated ones are summed."""
        if not self.replicate_parameters:
            return self._own
        return self._copies if self._copies is not None else copies_of(self._own, self._holders)


def move_those(
    movements: tuple[Movement | None, ...], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """``tensors``, those with a movement moved, all in flight together."""
    moving = [i for i, movement in enumerate(movements) if movement is not None]
    if not moving:
        return tensors
    moved = move([m for m in movements if m is not None], [tensors[i] for i in moving])
    results = list(tensors)
    for i, tensor in zip(moving, moved, strict=True):
        results[i] = tensor
    return results
