"""What layers with parameters share: one worker owns each block, or all that use it do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.exchange.library import is_compiled
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.parameters.replication import copies_of, holders_of
from gpudist.nn.parameters.spread import Spread, copies_of_owned
from gpudist.world.partition import CartesianPartition, Partition


class ParameterLayer(DistributedModule):
    """A layer with a weight and perhaps a bias, or with parameters of other names.

    Attributes:
        replicate_parameters: every worker that uses a block of them holds it; else one does.
    """

    weight: Any
    _names: tuple[str, ...] = ("weight", "bias")
    replicate_parameters: bool = False
    _holders: tuple[Partition | None, ...] = ()
    _spreads: tuple[Spread | None, ...] = ()
    _copies: list[torch.Tensor] | None = None
    _is_fused: bool = False

    def _place(
        self,
        replicate_parameters: bool,
        placed: Mapping[str, Placement],
        users: Mapping[str, CartesianPartition],
        P_all: Partition,
    ) -> None:
        """Take note of who holds the same cells of a parameter, or of its way to who uses it.

        Args:
            replicate_parameters: who uses a block of them holds it.
            placed: where the parameters that there are, are.
            users: the workers that use each one, where one owns it.
            P_all: everybody who takes part in the layer.
        """
        self.replicate_parameters = replicate_parameters
        names = [name for name in self._names if name in placed]
        self._holders = tuple(
            holders_of(placed[name]) if replicate_parameters else None for name in names
        )
        of_layer = type(self).__name__
        self._spreads = tuple(
            None
            if replicate_parameters
            else Spread.between(f"{name} of {of_layer}", placed[name], users[name], P_all)
            for name in names
        )

    @property
    def _own(self) -> list[torch.Tensor]:
        """The parameters that there are, as this worker holds them."""
        own = [getattr(self, name, None) for name in self._names]
        return [parameter for parameter in own if parameter is not None]

    def lend(self, copies: list[torch.Tensor] | None) -> None:
        """Use these in place of the parameters, until ``None`` ends it.

        Afterwards too, the layer moves its parameters before anything else: checkpointing wants the
        same tensors when it recomputes, outside of the forward in which there were copies.
        """
        self._copies, self._is_fused = copies, True

    @property
    def uses_copies(self) -> bool:
        """What :meth:`own_parameters` gives are the blocks that this worker uses."""
        if self.replicate_parameters:
            return False
        return self._copies is not None or (self._is_fused and not is_compiled())

    def own_parameters(self) -> list[torch.Tensor]:
        """The same for use in a forward, once; the gradients of replicated ones are summed."""
        if self._copies is not None:
            return self._copies
        if self.replicate_parameters:
            return copies_of(self._own, self._holders)
        return copies_of_owned(self._own, self._spreads) if self.uses_copies else self._own

    def bind_parameters(self) -> tuple[Movement | None, ...]:
        """Their movements to every worker that uses them, ``None`` for those that are there."""
        if self.uses_copies:
            return (None,) * len(self._spreads)
        return tuple(
            None if spread is None else spread.bind(parameter)
            for spread, parameter in zip(self._spreads, self._own, strict=True)
        )


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
