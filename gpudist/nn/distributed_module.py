"""Base classes of all distributed layers: argument checks, and dispatch on tensor types."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import Checked, refusal_of
from gpudist.checks.storage import TORCH_ERRORS, explain, storage_refusal, with_memory
from gpudist.nn.layer_table import sequential_of
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement, refuse


class CheckedModule(Checked, torch.nn.Module):
    """Layer that checks its arguments at construction and at each call."""

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
        args, kwargs = self._settled(args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (*args, *kwargs.values()))
            raise

    def _settled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with torch's zero tensors, which have no memory, materialized.

        Raises an error on all ranks if the layer does not accept the arguments.
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
    """Layer on blocks of tensors, or on tensor types that define their own handling.

    If the type of an argument has a method ``__distributed_layer__``, it handles the call, given
    the layer, ``args`` and ``kwargs``, as ``__torch_function__`` handles functions of torch.

    Attributes and ``extra_repr`` are those of torch's layer of the same name.
    """

    # Attributes shown by ``extra_repr`` in addition to those of torch's layer.
    _shown: ClassVar[tuple[str, ...]] = ()

    def _call_with_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args or kwargs.values():
            carry_out = getattr(type(x), "__distributed_layer__", None)
            if carry_out is not None:
                return carry_out(self, args, kwargs)
        return super()._call_with_others(args, kwargs)

    def extra_repr(self) -> str:
        """Return the text of torch's layer of the same name, followed by the partitions' shapes."""
        like = sequential_of(type(self))
        parts = [like.extra_repr(self)]
        parts += [f"{name}={getattr(self, name)!r}" for name in self._shown]
        partitions = {name: getattr(self, name, None) for name in ("P_x", "P_y", "P_w")}
        for name, P in partitions.items():
            if P is not None and (name == "P_x" or P is not partitions["P_x"]):
                parts.append(f"{name}={list(P.shape)}")
        return ", ".join(filter(None, parts))


def settle(layer: torch.nn.Module, layout: BlockLayout) -> None:
    """Set ``layout`` as the layout of every input of ``layer``, the same on all ranks."""
    for one in layer.modules():
        found = getattr(one, "agreement", None) or getattr(one, "_agreement", None)
        if isinstance(found, ShapeAgreement):
            found.settle(layout)
