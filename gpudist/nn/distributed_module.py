"""What all distributed layers share: other kinds of tensors may carry them out in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import Checked, refusal_of
from gpudist.checks.storage import TORCH_ERRORS, explain, storage_refusal, with_memory
from gpudist.ops.agreement import refuse

CarryOut = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]

# By type of tensor, what carries out a layer given one: an upper room enters its tensors here.
carried_out_by: dict[type, CarryOut] = {}


class CheckedModule(Checked, torch.nn.Module):
    """A layer that refuses wrong arguments, where it is made and where it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return super().__call__(*args, **kwargs)
        for x in (*args, *kwargs.values()):
            if not (
                type(x) is torch.Tensor
                and x.layout is torch.strided
                and not (x.is_nested or x.is_quantized or x._is_zerotensor())
            ):
                return self._call_with_others(args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (*args, *kwargs.values()))
            raise

    def _call_with_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call where an argument is no tensor with cells in strided memory."""
        args, kwargs = self._settled(args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (*args, *kwargs.values()))
            raise

    def _settled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with zeros for tensors that torch keeps as a rule.

        Raises here, and where the peers wait, if the layer does not take them.
        """
        name = type(self).__name__
        refusal = refusal_of(type(self).forward, name, (self, *args), kwargs)
        if refusal is None:
            refusal = storage_refusal(name, (*args, *kwargs.values()))
        if refusal is not None:
            region: Any = getattr(self, "region", self)
            P: Any = self.P_x if region is self else region.P
            refuse(P, refusal)
        return tuple(map(_filled, args)), {name: _filled(x) for name, x in kwargs.items()}


def _filled(x: Any) -> Any:
    return with_memory(x) if isinstance(x, torch.Tensor) and x._is_zerotensor() else x


class DistributedModule(CheckedModule):
    """A layer on blocks of tensors, or on tensors that know what their blocks are.

    Attributes, and through them its text, are those of torch's layer of the same name.
    """

    # Attributes that its text shows beside those of torch's layer.
    _shown: ClassVar[tuple[str, ...]] = ()

    def _call_with_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args or kwargs.values():
            carry_out = carried_out_by.get(type(x))
            if carry_out is not None:
                return carry_out(self, args, kwargs)
        return super()._call_with_others(args, kwargs)

    def extra_repr(self) -> str:
        """What torch's layer of the same name shows, and the shapes of the partitions."""
        like = next(filter(None, map(_torch_layer, type(self).__mro__)), torch.nn.Module)
        parts = [like.extra_repr(self)]
        parts += [f"{name}={getattr(self, name)!r}" for name in self._shown]
        partitions = {name: getattr(self, name, None) for name in ("P_x", "P_y", "P_w")}
        for name, P in partitions.items():
            if P is not None and (name == "P_x" or P is not partitions["P_x"]):
                parts.append(f"{name}={list(P.shape)}")
        return ", ".join(filter(None, parts))


def _torch_layer(kind: type) -> type[torch.nn.Module] | None:
    """Torch's layer of which ``kind`` has the name, with "Distributed" in front of it."""
    name = kind.__name__.removeprefix("Distributed")
    return getattr(torch.nn, name, None) if name != kind.__name__ else None
