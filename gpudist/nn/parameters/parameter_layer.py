"""Base class of layers with parameters: each block has one owner, or all users hold a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.checks.storage import dtype_remedy
from gpudist.errors import ShapeError
from gpudist.exchange import Movement, add_into
from gpudist.exchange.autograd import move
from gpudist.exchange.tracing import is_compiled, is_traced
from gpudist.nn.autocast import autocast_is_on
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.parameter import bias_bound, kaiming_bound, uniform_parameter
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.parameters.replication import copies_of, holders_of
from gpudist.ops.tensor_facts import DTYPE_NUMBERS
from gpudist.world.partition import Partition


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
    bias: Any
    _placed: dict[str, ParameterPlacement]
    _names: tuple[str, ...] = ("weight", "bias")
    replicate_parameters: bool = False
    _holders: tuple[Partition | None, ...] = ()
    _broadcasts: tuple[ParameterBroadcast | None, ...] = ()
    _copies: list[torch.Tensor] | None = None
    _is_fused: bool = False

    def _place(
        self, replicate_parameters: bool, used: Mapping[str, ParameterPlacement], P_all: Partition
    ) -> None:
        """Record who holds each parameter, and its holders or its broadcast to its users.

        Args:
            replicate_parameters: whether every worker that uses a block holds it; otherwise the
                first of them does.
            used: placement of each existing parameter on the workers that use it.
            P_all: all workers that take part in the layer.
        """
        self.replicate_parameters = replicate_parameters
        names = [name for name in self._names if name in used]
        self._placed = {
            name: used[name] if replicate_parameters else used[name].first_copies for name in names
        }
        self._holders = tuple(holders_of(self._placed[name]) for name in names)
        self._broadcasts = tuple(
            ParameterBroadcast.between(
                f"{name} of {type(self).__name__}", self._placed[name], used[name], P_all
            )
            for name in names
        )

    def _draw_affine(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Draw the blocks of a weight and its bias as torch does, or create placeholders.

        Every worker must call this method, to keep all random generators in the same state.
        """
        weight, bias = self._placed["weight"], self._placed.get("bias")
        # Torch computes the fan-in from the second dim, also for transposed convolutions.
        fan_in = prod(weight.shape[1:])
        self.weight = uniform_parameter(
            weight.shape, kaiming_bound(fan_in), weight.own_box, device, dtype
        )
        self.bias = None
        if bias is not None:
            self.bias = uniform_parameter(
                bias.shape, bias_bound(fan_in), bias.own_box, device, dtype
            )

    def _require_dtype(self, dtype: torch.dtype) -> None:
        # A trace may be under an autocast that only its graph enters.
        weight = self.weight
        if dtype == weight.dtype or is_traced():
            return
        is_float = dtype.is_floating_point or dtype.is_complex
        if not (is_float and autocast_is_on(weight.device)):
            raise ShapeError(f"{type(self).__name__}: {dtype_remedy((dtype, weight.dtype))}")

    def _placements(self) -> dict[str, ParameterPlacement]:
        return self._placed

    @property
    def _own(self) -> list[torch.Tensor]:
        return [x for name in self._names if (x := getattr(self, name, None)) is not None]

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

    def way_of(self, x: torch.Tensor) -> int:
        """Return the number of the way in which a call with ``x`` uses the parameters.

        Results of binding are valid for one way: of copies or not, under autocast or not, and for
        these dtypes of the parameters.
        """
        way = self.uses_copies + 2 * autocast_is_on(x.device)
        for parameter in self._own:
            way = 16 * way + DTYPE_NUMBERS.get(parameter.dtype, 0)
        return way

    def own_parameters(self) -> list[torch.Tensor]:
        """Return the parameters for one forward, and sum the gradients of replicated ones."""
        if self._copies is not None:
            return self._copies
        if self.replicate_parameters:
            return copies_of(self._own, self._holders)
        is_fused = self._is_fused and not is_compiled()
        return copies_of_owned(self._own, self._broadcasts) if is_fused else self._own

    def bind_parameters(self) -> tuple[Movement | None, ...]:
        """Return the movement of each parameter to its users; ``None`` if it is already local."""
        if self.uses_copies:
            return (None,) * len(self._broadcasts)
        return tuple(
            None if broadcast is None else broadcast.bind(parameter.dtype)
            for broadcast, parameter in zip(self._broadcasts, self._own, strict=True)
        )


def move_those(
    movements: tuple[Movement | None, ...], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Move each tensor that has a movement, all in flight together, and return ``tensors``."""
    moving = tuple(filter(None, movements))
    if not moving:
        return tensors
    moved = iter(move(moving, tuple(compress(tensors, movements))))
    return [x if m is None else next(moved) for m, x in zip(movements, tensors, strict=True)]


def adjoints_of(parameters: Sequence[Movement | None]) -> list[Movement | None]:
    """Return the adjoints of the movements of a weight and, if there is one, of a bias."""
    return [None if m is None else m.T for m in (*parameters, None)][:2]


def move_gradients(
    movements: Sequence[Movement | None],
    gradients: Sequence[torch.Tensor | None],
    into: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """Move gradients back to where their values came from, all in flight together.

    Args:
        movements: movements of one stage; ``None`` for a value that was not moved.
        gradients: gradients of the moved values; ``None`` if it is not needed.
        into: tensor to which the first gradient is added; ``None`` for a new tensor.

    Returns:
        The gradients; those without a movement as they are.
    """
    targets = (into, *[None] * (len(gradients) - 1))
    pairs = zip(movements, gradients, strict=True)
    moves = [m is not None and g is not None for m, g in pairs]
    if not any(moves):
        return list(gradients)
    operands: list[Any] = [list(compress(row, moves)) for row in (movements, gradients, targets)]
    moved = iter(add_into(*operands))
    return [next(moved) if m else g for m, g in zip(moves, gradients, strict=True)]
