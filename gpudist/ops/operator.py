"""Base class of operators: agree on the tensor, plan, bind, cache, move."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module

from gpudist.cache import Cache
from gpudist.checks.arguments import Checked, as_plain, check, checked, refusal_of
from gpudist.checks.storage import TORCH_ERRORS, explain
from gpudist.errors import PartitionError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import is_eager, move, move_one
from gpudist.exchange.carry import carry_out_one, repetition_of
from gpudist.exchange.torch_library import handle_of
from gpudist.exchange.tracing import constant_when_traced
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement, ShapeMode
from gpudist.world.partition import CartesianPartition, Partition, require_one_world

# Limit per list of partitions, since arguments such as a global shape may be new at every call.
_REMEMBERED_OPERATORS = 256


@checked()
def zero_volume_tensor(
    batch: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return the tensor of a worker without a block: shape ``(0,)``, or ``(batch, 0)``.

    A placeholder for a tensor that requires grad must require grad too.

    Args:
        batch: extent of dim 0, if the placeholder is to show the batch size.
        dtype, device, requires_grad: see ``torch.empty``.

    Returns:
        New tensor without cells.
    """
    shape = (0,) if batch is None else (batch, 0)
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)


def placeholder_shape(x: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a zero-volume output, with the batch size of ``x`` if ``x`` shows it."""
    return (x.shape[0], 0) if x.dim() and x.shape != (0,) else (0,)


def _with_agreed_grad(x: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Return ``x``, or a replacement with the ``requires_grad`` on which the ranks agreed."""
    wanted = layout.requires_grad
    if wanted is None or x.requires_grad == wanted or not torch.is_grad_enabled():
        return x
    if not wanted:
        return x.detach()
    if x.is_floating_point() or x.is_complex():
        return x.detach().requires_grad_()
    return torch.empty(x.shape, dtype=layout.dtype, device=x.device, requires_grad=True)


class Operator(Checked, torch.nn.Module):
    """Module of a linear operator from a tensor on ``P_x`` to one on ``P_y``.

    Workers in neither partition return a clone of their input. At the first call with a tensor, the
    ranks agree once on its blocks; see :class:`~gpudist.ops.shape_agreement.ShapeAgreement`.

    Args:
        P_x, P_y: partitions of the input and the output.
        dims: number of dims the input must have, ``None`` for any.
        preserve_batch: zero-volume outputs are ``(batch, 0)`` instead of ``(0,)``.
        global_shape: global shape of the balanced input; saves the agreement.
        shape: ``"static"``, or ``"dynamic"`` to agree at every call. In the latter case, an output
            requires grad iff grad mode is enabled and a block requires grad; placeholders need not
            require it.
        grid, placed: grid that splits the tensor, and the position of each rank's block on it, if
            they differ from those of ``P_x``.
        options: further arguments of :class:`~gpudist.ops.shape_agreement.ShapeAgreement`.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        dims: int | None,
        preserve_batch: bool = True,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        grid: Sequence[int] | None = None,
        placed: Callable[[int], tuple[int, ...]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.P_y = P_y
        require_one_world(type(self).__name__, P_x, P_y)
        self.P_all = P_x if P_x.ranks == P_y.ranks else P_x.create_partition_union(P_y)
        self.preserve_batch = preserve_batch
        self._takes_part = self.P_all.active
        self.agreement = ShapeAgreement(
            type(self).__name__, P_x, self.P_all, dims, global_shape, shape, grid, placed,
            partitions=(P_x, P_y), **options,
        )  # fmt: skip
        self._is_dynamic = shape == "dynamic"
        self._bindings = BindCache[tuple[BlockLayout, Movement]](shape, self.agreement)
        self._recent = Cache[object, Movement](64)

    def agree_by(self, agreement: ShapeAgreement) -> None:
        """Replace the agreement of all ranks by another one."""
        self.agreement = agreement
        self._bindings = BindCache[tuple[BlockLayout, Movement]]("dynamic", agreement)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Torch's call takes as long as a small message.
        if (
            is_dynamo_compiling()
            or type(x) is not torch.Tensor
            or self._compiled_call_impl is not None
            or self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or module._global_forward_hooks
            or module._global_forward_pre_hooks
            or module._global_backward_hooks
            or module._global_backward_pre_hooks
        ):
            return super().__call__(x)
        y = self._bindings.repeat(x)
        return y if y is not None else self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if not is_dynamo_compiling() and (y := self._bindings.repeat(x)) is not None:
                return y
            if not self._takes_part:
                if not isinstance(x, torch.Tensor):
                    self.require_tensor(x)
                return x.clone()
            if x is None or not is_eager(x):
                if not isinstance(x, torch.Tensor):
                    self.require_tensor(x)
                return move((self.movement(x),), (x,))[0]
            if self._is_dynamic:
                layout = self.agreement(x)
                x = _with_agreed_grad(x, layout)
                movement = self._bind_recent(layout, x)
            else:
                movement = self._bindings.get(x, self._agree_and_bind)[1]
                if not x.requires_grad:
                    y = carry_out_one(movement, x)
                    self._bindings.repeat = repetition_of(movement)
                    return y
            return move_one(movement, x)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (x,))
            raise

    def require_tensor(self, x: object) -> None:
        """Reject ``x`` if it is not a tensor."""
        refusal = refusal_of(type(self).forward, type(self).__name__, (self, x), {})
        if refusal is not None:
            self.agreement.reject(refusal)

    def movement(self, x: torch.Tensor) -> Movement:
        """Return the movement of ``x``, bound to its shape and dtype; collective at first."""
        return self._bindings(x, self._agree_and_bind)[1]

    def _agree_and_bind(self, x: torch.Tensor) -> tuple[BlockLayout, Movement]:
        layout = self.agreement(x)
        return layout, (self._bind_recent if self._is_dynamic else self._bind)(layout, x)

    def _bind_recent(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        key = (layout.identity, x.shape, x.dtype)
        return self._recent.get_or_make(key, lambda: self._bind(layout, x))

    def empty_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's output if it receives no block."""
        return placeholder_shape(x) if self.preserve_batch else (0,)

    @abstractmethod
    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement: ...

    def extra_repr(self) -> str:
        return f"{list(self.P_x.shape)} -> {list(self.P_y.shape)}"


_Operator = TypeVar("_Operator")


def cached_operator(
    make: Callable[..., _Operator], P_x: Partition, values: tuple[object, ...]
) -> _Operator:
    """Return the operator that a function calls, created at its first call and cached.

    If there are many operators on the same partitions, the oldest is dropped, and agrees again if
    it is called again. All ranks that agree create the same operators in the same order, so they
    drop the same ones.

    Args:
        make: called as ``make(P_x, ...)`` with the values.
        P_x: partition.
        values: all further arguments, in the order of the parameters of ``make``.
    """
    if is_dynamo_compiling():
        values = tuple([_constant(value) for value in values])
        return getattr(P_x, _remember_while_tracing(make, P_x, *values))
    key: Any = (make, P_x, values)
    try:
        operators = P_x.wire.remembered
        operator = operators.get(key)
    except (AttributeError, TypeError):
        # Lists have no hash; everything else is an invalid argument.
        try:
            key = as_plain(key)
            operators = P_x.wire.remembered
            operator = operators.get(key)
        except (AttributeError, TypeError):
            args, kwargs = _arguments(make, values)
            check(make.__init__, make.__name__, (None, P_x, *args), kwargs)
            raise
    if operator is None:
        args, kwargs = _arguments(make, values)
        operator = make(P_x, *args, **kwargs)
        partitions = (P_x, *[value for value in values if isinstance(value, Partition)])
        order: Any = operators.setdefault(("order", partitions), deque())
        if len(order) >= _REMEMBERED_OPERATORS:
            del operators[order.popleft()]
        order.append(key)
        operators[key] = operator
    return operator  # type: ignore[return-value]


def _arguments(
    make: Callable[..., object], values: tuple[object, ...]
) -> tuple[tuple[object, ...], dict[str, object]]:
    parameters = signature(make).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    count = len(values) - len(names)
    return values[:count], dict(zip(names, values[count:], strict=True))


@constant_when_traced
def _remember_while_tracing(make: Callable[..., object], P_x: Partition, *values: object) -> str:
    operator = cached_operator(make, P_x, values)
    name = f"_operator_{handle_of(operator)}"
    setattr(P_x, name, operator)
    return name


def _constant(value: object) -> object:
    if isinstance(value, tuple | list):
        return tuple([_constant(part) for part in value])
    if isinstance(value, (int, float)):
        # Hashing converts a symbol to a number.
        (value,) = {value}
    return value


def own_index(P: Partition) -> tuple[int, ...]:
    """Return this worker's index on ``P``, of which it must be a member."""
    assert P.index is not None
    return P.index


def require_cartesian(name: str, P: Partition) -> None:
    """Raise if a partition has no topology, and thus no axes."""
    if not isinstance(P, CartesianPartition):
        raise PartitionError(
            f"{name}: {P!r} has no Cartesian topology; create one with its method grid"
        )
