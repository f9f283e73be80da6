"""Base class of layers with parameters: each block has one owner, or all users hold a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.exchange.torch_library import is_compiled
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.parameters.replication import copies_of, holders_of
from gpudist.world.partition import CartesianPartition, Partition


class Way(NamedTuple):
    """A parameter, its broadcast to its users, and the workers that hold the same cells."""

    parameter: torch.Tensor
    broadcast: ParameterBroadcast | None
    holders: Partition | None


class ParameterLayer(DistributedModule):
    """Layer with parameters, by default a weight and optionally a bias.

    Attributes:
        replicate_parameters: whether every worker that uses a block of the parameters holds it;
            otherwise one worker does.
    """

    weight: Any
    _names: tuple[str, ...] = ("weight", "bias")
    replicate_parameters: bool = False
    _holders: tuple[Partition | None, ...] = ()
    _broadcasts: tuple[ParameterBroadcast | None, ...] = ()
    _copies: list[torch.Tensor] | None = None
    _is_fused: bool = False

    def _place(
        self,
        replicate_parameters: bool,
        placed: Mapping[str, ParameterPlacement],
        users: Mapping[str, CartesianPartition],
        P_all: Partition,
    ) -> None:
        """Record the holders of each parameter's cells, or its broadcast to its users.

        Args:
            replicate_parameters: whether every worker that uses a block holds it.
            placed: placement of each existing parameter.
            users: workers that use each parameter, for parameters with one owner.
            P_all: all workers that take part in the layer.
        """
        self.replicate_parameters = replicate_parameters
        names = [name for name in self._names if name in placed]
        self._holders = tuple(
            holders_of(placed[name]) if replicate_parameters else None for name in names
        )
        of_layer = type(self).__name__
        self._broadcasts = tuple(
            None
            if replicate_parameters
            else ParameterBroadcast.between(
                f"{name} of {of_layer}", placed[name], users[name], P_all
            )
            for name in names
        )

    @property
    def _own(self) -> list[torch.Tensor]:
        own = [getattr(self, name, None) for name in self._names]
        return [parameter for parameter in own if parameter is not None]

    def ways(self) -> list[Way]:
        """Return how each existing parameter is moved; empty while :meth:`use_copies` applies."""
        if self._copies is not None:
            return []
        return [Way(*way) for way in zip(self._own, self._broadcasts, self._holders, strict=True)]

    def use_copies(self, copies: list[torch.Tensor] | None) -> None:
        """Use these tensors in place of the parameters, until this method is called with ``None``.

        Afterwards too, the layer moves its parameters first, because checkpointing, which
        recomputes outside the forward with copies, expects the same tensors.
        """
        self._copies, self._is_fused = copies, True

    @property
    def uses_copies(self) -> bool:
        """Whether :meth:`own_parameters` returns the blocks that this worker uses."""
        if self.replicate_parameters:
            return False
        return self._copies is not None or (self._is_fused and not is_compiled())

    def own_parameters(self) -> list[torch.Tensor]:
        """Return the parameters for one forward, and sum the gradients of replicated ones."""
        if self._copies is not None:
            return self._copies
        if self.replicate_parameters:
            return copies_of(self._own, self._holders)
        return copies_of_owned(self._own, self._broadcasts) if self.uses_copies else self._own

    def bind_parameters(self) -> tuple[Movement | None, ...]:
        """Return the movement of each parameter to its users; ``None`` if it is already local."""
        if self.uses_copies:
            return (None,) * len(self._broadcasts)
        return tuple(
            None if broadcast is None else broadcast.bind(parameter)
            for broadcast, parameter in zip(self._broadcasts, self._own, strict=True)
        )


def move_those(
    movements: tuple[Movement | None, ...], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Move each tensor that has a movement, all in flight together, and return ``tensors``."""
    moving = [i for i, movement in enumerate(movements) if movement is not None]
    if not moving:
        return tensors
    moved = move([m for m in movements if m is not None], [tensors[i] for i in moving])
    results = list(tensors)
    for i, tensor in zip(moving, moved, strict=True):
        results[i] = tensor
    return results
