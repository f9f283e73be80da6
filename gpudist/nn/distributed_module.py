"""Base classes of all distributed layers: argument checks, and dispatch on tensor types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from gpudist.cache import Cache
from gpudist.checks.arguments import Checked, refusal_of
from gpudist.checks.storage import TORCH_ERRORS, explain, storage_refusal, with_memory
from gpudist.exchange.tracing import constant_when_traced, outside_torch
from gpudist.nn.autocast import (
    LOW,
    ShapeOnDevice,
    autocast_is_on,
    autocast_type,
    device_of,
    is_wide,
    widen,
)
from gpudist.nn.layer_table import LAYERS, sequential_of
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement, ShapeMode, reject
from gpudist.world.partition import Partition

_any_autocast: Any = torch._C._is_any_autocast_enabled  # pyright: ignore


class CheckedModule(Checked, torch.nn.Module):
    """Layer that checks its arguments at construction and at each call."""

    # Name of the layer in errors.
    _name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._name = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._call(args, kwargs)
        for x in (*args, *kwargs.values()):
            if not (
                type(x) is torch.Tensor
                and x.layout is torch.strided
                and not (x.is_nested or x.is_quantized or x._is_zerotensor())
            ):
                return self._call_with_others(args, kwargs)
        try:
            if _any_autocast():
                return self._call(args, kwargs)
            return super().__call__(*args, **kwargs)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (*args, *kwargs.values()))
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__call__(*args, **kwargs)

    def _call_with_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._prepare_arguments(args, kwargs)
        try:
            return self._call(args, kwargs)
        except TORCH_ERRORS as error:
            explain(type(self).__name__, error, (*args, *kwargs.values()))
            raise

    def _prepare_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with torch's zero tensors, which have no memory, materialized.

        Rejects arguments that the layer does not accept.
        """
        refusal = refusal_of(type(self).forward, type(self).__name__, (self, *args), kwargs)
        if refusal is None:
            refusal = storage_refusal(type(self).__name__, (*args, *kwargs.values()))
        if refusal is not None:
            region: Any = getattr(self, "region", self)
            P: Any = self.P_x if region is self else region.P
            reject(P, refusal)
        return tuple(map(_with_cells, args)), {name: _with_cells(x) for name, x in kwargs.items()}


def _with_cells(x: Any) -> Any:
    return with_memory(x) if isinstance(x, torch.Tensor) and x._is_zerotensor() else x


class DistributedModule(CheckedModule):
    """Layer on blocks of tensors, or on tensor types that define their own handling.

    If the type of an argument has a method ``__distributed_layer__``, it handles the call, given
    the layer, ``args`` and ``kwargs``, as ``__torch_function__`` handles functions of torch.

    Attributes and ``extra_repr`` are those of torch's layer of the same name.
    """

    # Attributes shown by ``extra_repr`` in addition to those of torch's layer.
    _shown: ClassVar[tuple[str, ...]] = ()
    # Whether ``forward`` itself widens 16-bit inputs where autocast computes in single precision.
    _reads_low: ClassVar[bool] = False

    def _call_with_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args or kwargs.values():
            carry_out = getattr(type(x), "__distributed_layer__", None)
            if carry_out is not None:
                return carry_out(self, args, kwargs)
        return super()._call_with_others(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = "" if self._reads_low else self._device_that_widens(args or kwargs.values())
        if not device:
            return super()._call(args, kwargs)
        # Torch casts the input of its layer once; this layer consists of several functions.
        with torch.autocast(device, enabled=False):
            single = {name: widen(x) for name, x in kwargs.items()}
            return super()._call(tuple(map(widen, args)), single)

    def _device_that_widens(self, inputs: Iterable[Any]) -> str:
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.dtype in LOW and autocast_is_on(x.device):
                device = autocast_type(x.device)
                low = torch.get_autocast_dtype(device)
                return device if is_single(type(self), device, x.dtype, low) else ""
        return ""

    def _agree_on(
        self,
        P_x: Partition,
        dims: int | None,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        P_all: Partition | None = None,
        **options: Any,
    ) -> None:
        # The ranks agree on inputs on ``P_x``, and what ``_bind`` returns for them is kept. The
        # arguments are those of ShapeAgreement.
        self._agreement = ShapeAgreement(
            self._name, P_x, P_all or P_x, dims, global_shape, shape, **options
        )
        self._bindings: BindCache[Any] = BindCache(shape, self._agreement)

    def _agree_and_bind(self, x: torch.Tensor, *numbers: int) -> Any:
        return self._bind(self._agreement(x), x, *numbers)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> Any:
        # What ``forward`` computes with for tensors like ``x``, on which the ranks agree.
        raise NotImplementedError

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


@constant_when_traced
def is_single(
    kind: type[torch.nn.Module], device: str, given: torch.dtype, low: torch.dtype
) -> bool:
    """Return whether autocast to ``low`` computes torch's layer in single precision.

    Args:
        kind: class of the distributed layer.
        device: type of the device for which autocast is on.
        given: 16-bit dtype of the inputs.
        low: dtype of autocast.
    """
    key = (kind, device, given, low)
    return _singles.get_or_make(key, lambda: (_is_single(kind, device, given),))[0]


def _is_single(kind: type[torch.nn.Module], device: str, given: torch.dtype) -> bool:
    rows = {row.kind: row for row in LAYERS}
    row = next((rows[each] for each in kind.__mro__ if each in rows), None)
    if row is None:
        return False
    on_device = partial(ShapeOnDevice.like, device=device_of(device))
    with outside_torch(), torch.no_grad(), torch.device("meta"):
        layer = row.make_sequential()
        for module in layer.modules():
            for owned in (module._parameters, module._buffers):
                tensors: dict[str, Any] = owned  # pyright: ignore
                for name, x in tensors.items():
                    tensors[name] = None if x is None else on_device(x.detach())
        inputs = [
            torch.empty(sample.shape, dtype=torch.int64 if sample.values == "classes" else given)
            for sample in row.inputs
        ]
        try:
            y = layer(*map(on_device, inputs))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False  # Torch refuses to compute the layer under autocast.
    return is_wide(x.dtype for x in tree_leaves(y) if isinstance(x, torch.Tensor))


_singles = Cache[Any, tuple[bool]]()


def set_layouts(layer: torch.nn.Module, layout: BlockLayout) -> None:
    """Set ``layout`` as the layout of every input of ``layer``, the same on all ranks."""
    for part in layer.modules():
        agreement = getattr(part, "agreement", None) or getattr(part, "_agreement", None)
        if isinstance(agreement, ShapeAgreement):
            agreement.set_layout(layout)
