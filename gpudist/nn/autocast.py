"""Dtypes under autocast of computations that torch does not see as one layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move

LOW = (torch.float16, torch.bfloat16)


class _MetaAs(threading.local):
    """Type of device whose autocast applies to tensors on ``meta``, or ``"meta"``."""

    type = "meta"


META_AS = _MetaAs()


def autocast_type(device: torch.device) -> str:
    """Return the type of device whose autocast applies to tensors on ``device``."""
    return META_AS.type if device.type == "meta" else device.type


def autocast_is_on(device: torch.device) -> bool:
    """Return whether autocast is enabled for tensors on ``device``; rarely so for ``meta``."""
    type = autocast_type(device)
    return type != "meta" and torch.is_autocast_enabled(type)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's convolution of ``x``, its product with a weight, or attention."""
    casts = autocast_is_on(x.device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(autocast_type(x.device)) if casts else x.dtype


def in_product_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as torch's convolution or attention reads it: cells that move are 16-bit."""
    dtype = product_dtype(x)
    return x.to(dtype) if x.dtype != dtype and x.is_floating_point() else x


def sum_of_products(reduction: Movement, y: torch.Tensor) -> torch.Tensor:
    """Sum products over workers; under autocast, in the dtype of the layer's input."""
    if not autocast_is_on(y.device):
        return move((reduction,), (y,))[0]
    (total,) = move((reduction,), (y.to(reduction.input_dtype),))
    return total.to(product_dtype(total))


def device_of(type: str) -> torch.device:
    """Return a device of this type, with the number that torch's kernels expect of GPUs."""
    return torch.device(type) if type == "cpu" else torch.device(type, 0)


class ShapeOnDevice(torch.Tensor):
    """Meta tensor that torch dispatches like a tensor of ``device``, so that autocast casts it."""

    _of: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def like(meta: torch.Tensor, device: torch.device) -> ShapeOnDevice:
        shape_alone = torch.Tensor._make_subclass(  # pyright: ignore
            ShapeOnDevice, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        shape_alone._of = device
        return shape_alone

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs: list[ShapeOnDevice] = []

        def shape_of(x: Any) -> Any:
            if isinstance(x, cls):
                inputs.append(x)
            elif isinstance(x, torch.Tensor):
                return x.to("meta")
            return torch.device("meta") if isinstance(x, torch.device) else x

        args, kwargs = tree_map(shape_of, (args, kwargs or {}))
        device = inputs[0]._of
        if func is torch.ops.prim.device.default:
            return torch.device("meta") if _kernels.running else device
        with _kernels.as_meta():
            result = func(*args, **kwargs)
        is_new = (torch.Tensor, torch.nn.Parameter)
        return tree_map(lambda y: cls.like(y, device) if type(y) in is_new else y, result)


class _KernelState(threading.local):
    """Whether this thread runs a meta kernel on tensors that say they are on another device."""

    running = False

    @contextmanager
    def as_meta(self) -> Generator[None, None, None]:
        self.running, before = True, self.running
        private: Any = torch._C
        try:
            with private._DisableTorchDispatch(), private._PreserveDispatchKeyGuard():
                private._set_meta_in_tls_dispatch_include(True)
                yield
        finally:
            self.running = before


_kernels = _KernelState()


def in_dtypes_of_torch(
    compute: Callable[[Sequence[torch.Tensor]], Any], device: str, dtypes: Sequence[torch.dtype]
) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return ``compute`` with the dtypes that a function of torch has under autocast.

    Autocast casts the inputs of a function of torch once, and is off within it. A composition of
    other functions would be cast at each of these. Where torch computes in single precision,
    ``compute`` therefore gets such tensors, and autocast is off.

    Args:
        compute: computes what the function of torch does, of the same tensors; of 16-bit ones too
            if its attribute ``reads_low`` is true.
        device: type of the device of the tensors, for which autocast is on.
        dtypes: dtypes of the results of torch's function.
    """
    if not any(map(_is_cast, dtypes)):
        return compute
    in_single, first = is_wide(dtypes), dtypes[0]
    reads_low = getattr(compute, "reads_low", False)

    def computed(tensors: Sequence[torch.Tensor]) -> Any:
        if in_single:
            torch.set_autocast_enabled(device, False)
        try:
            if in_single and not reads_low:
                tensors = [x.float() if x.dtype in LOW else x for x in tensors]
            result = compute(tensors)
            is_right = type(result) is torch.Tensor and result.dtype == first
            return result if is_right else cast(result, dtypes)
        finally:
            if in_single:
                torch.set_autocast_enabled(device, True)

    return computed


def is_wide(dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether autocast computes results of these dtypes in single precision or better."""
    floats = [dtype for dtype in dtypes if _is_cast(dtype)]
    return bool(floats) and not any(dtype in LOW for dtype in floats)


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def cast(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """Return the tensors of a result in these dtypes."""
    if isinstance(result, torch.Tensor):
        return result if result.dtype == dtypes[0] else result.to(dtypes[0])
    left = iter(dtypes)
    return tree_map(lambda y: cast(y, (next(left),)) if isinstance(y, torch.Tensor) else y, result)


def widen(x: Any) -> Any:
    """Return a 16-bit tensor in float32, and anything else as it is."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in LOW else x
