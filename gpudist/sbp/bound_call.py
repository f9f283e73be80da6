"""Operators bound to the layouts that they were called with, and called with local tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.exchange import Movement
from gpudist.sbp import views
from gpudist.sbp.call import Applied, Compute, share_memory
from gpudist.sbp.dispatch import OperatorCall, box_inputs
from gpudist.sbp.global_spec import GlobalSpec, global_spec, make_wrapper, wrap
from gpudist.sbp.scope import current_draws
from gpudist.sbp.trees import tensors_in

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor


class Derivations(threading.local):
    """Per-thread state.

    Attributes:
        open: one list of operators for each call being derived, innermost last.
        anew: number of active contexts that disable the cache.
    """

    def __init__(self) -> None:
        self.open: list[list[OperatorCall | None]] = []
        self.anew = 0


derivations = Derivations()


class BoundCall(NamedTuple):
    """A function bound to arguments, layouts and dtypes of its tensors.

    Attributes:
        movements: boxings of the inputs, by position.
        compute: maps local tensors to local results; ``None`` if the function is called with the
            arguments of each call.
        result: spec of the result, if it is a single tensor.
        results: specs of several results; empty if the function modifies its first tensor in place.
        holder: type of the tuple or list of several results.
        operator: the operator, without tensors.
        order: selects the operator's tensors from those of the call, if their order differs.
        draws: number of random draws that the call counts.
        part: see :func:`~gpudist.sbp.done.part_of`; the caller lists it.
    """

    movements: dict[int, Movement]
    compute: Compute | None
    result: GlobalSpec | None
    results: tuple[GlobalSpec, ...]
    holder: Any
    operator: OperatorCall
    order: Callable[[Sequence[Any]], Sequence[Any]] | None
    draws: int
    part: bytes

    def __call__(
        self,
        kind: type[GlobalTensor],
        local: Sequence[torch.Tensor],
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of ``function(*args, **kwargs)``, whose tensors have these parts."""
        _, compute, spec, specs, holder, operator, order, draws, _ = self
        if draws:
            state = current_draws()
            assert state is not None
            state.draws += draws
        if order is not None:
            local = order(local)
        if self.movements:
            local = box_inputs(self.movements, local)
        if type(compute) is Applied:
            result = compute.function(*local, *compute.rest, **compute.named)
        elif compute is not None:
            result = compute(local)
        elif len(local) == len(args):
            result = function(*local, **kwargs)
        elif len(local) == 1 and isinstance(args[0], torch.Tensor):
            result = function(local[0], *args[1:], **kwargs)
        else:
            parts = iter(local)
            positional = [next(parts) if isinstance(x, torch.Tensor) else x for x in args]
            named = {
                k: next(parts) if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()
            }
            result = function(*positional, **named)
        if spec is not None:
            if type(result) is list or type(result) is tuple:
                (result,) = result
            if result.dtype != spec.dtype:
                spec = _of_dtype(spec, result.dtype)
            # As wrapped() does, without its call.
            y: Any = make_wrapper(
                kind, spec.shape, strides=spec.strides, dtype=spec.dtype, device=result.device
            )
            y._local, y._global_spec = result, spec
            if operator.base is not None:
                base = args[operator.base]
                is_shared = share_memory(result, base._local) and not operator.is_copy
                if not is_shared or "_view" in base.__dict__:
                    views.note(y, base, function, args, kwargs, operator.call, operator.is_copy)
            elif share_memory(result, local[0]):
                y._local = result.clone()
            if derivations.open:
                self._note_operator(args, kwargs, [y])
            return y
        outputs: list[Any] = []
        for place, (part, spec) in enumerate(zip(result if specs else (), specs, strict=True)):
            if part.dtype != spec.dtype:
                spec = _of_dtype(spec, part.dtype)
            outputs.append(wrap(kind, part, spec))
            if operator.base is not None:
                base, is_copy = args[operator.base], operator.is_copy
                views.note(outputs[-1], base, function, args, kwargs, operator.call, is_copy, place)
        if derivations.open:
            self._note_operator(args, kwargs, outputs)
        return holder(outputs) if specs else args[0]

    def _note_operator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]
    ) -> None:
        # For the call that is being derived.
        inputs = tensors_in([args, kwargs])
        if self.order is not None:
            inputs = self.order(inputs)
        derivations.open[-1].append(self.operator._replace(inputs=inputs, results=results))


def _of_dtype(spec: GlobalSpec, dtype: torch.dtype) -> GlobalSpec:
    return global_spec(spec.placement, spec.sbp, spec.shape, dtype, spec.strides)
