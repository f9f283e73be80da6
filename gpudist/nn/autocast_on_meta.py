"""Autocast for tensors without data, which torch does not cast.

Autocast has a key of torch's dispatcher for each type of device. The kernels here have the key of a
type that no tensor has, and run only in the body of a context. They cast as those of another type:
which inputs a function casts is asked of torch once, with tensors that say they are of that type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpudist.exchange.tracing import outside_torch
from gpudist.nn.autocast import LOW, META_AS, ShapeOnDevice, device_of

_private: Any = torch._C
_NAME = "AutocastIPU"
_KEY = getattr(_private.DispatchKey, _NAME)
_KEYS = _private.DispatchKeySet(_KEY)
_copy: Any = torch.ops.aten._to_copy.default

Dtypes = tuple[torch.dtype | None, ...]


class _Copies(threading.local):
    """16-bit copies of parameters, which torch keeps until autocast is left."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


_copies = _Copies()


@contextmanager
def autocast_on_meta(type: str, dtype: torch.dtype) -> Generator[None, None, None]:
    """Cast tensors on ``meta`` in the body as autocast does on a device of ``type``.

    Args:
        type: type of device, which the machine need not have.
        dtype: 16-bit dtype.
    """
    _functions_cast_on(type)
    before = torch.is_autocast_enabled(type), torch.get_autocast_dtype(type), META_AS.type
    excluded = _private._dispatch_tls_is_dispatch_key_excluded(_KEY)
    _private._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    _set(type, True, dtype, type)
    try:
        with _private._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _set(type, *before)
        _private._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
        if excluded:
            _copies.of.clear()


def same_autocast() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes the context of :func:`autocast_on_meta` that is active now."""
    type = META_AS.type
    if type == "meta" or not torch.is_autocast_enabled(type):
        return nullcontext
    return partial(autocast_on_meta, type, torch.get_autocast_dtype(type))


def _set(type: str, enabled: bool, dtype: torch.dtype, meta_as: str) -> None:
    torch.set_autocast_enabled(type, enabled)
    torch.set_autocast_dtype(type, dtype)
    META_AS.type = meta_as


@cache
def _functions_cast_on(type: str) -> set[Any]:
    """Return the functions of which autocast has a kernel for ``type``, which have one here now."""
    library, known = _library()
    functions: set[Any] = set()
    for name in _private._dispatch_get_registrations_for_dispatch_key(f"Autocast{type.upper()}"):
        space, _, name = name.partition("::")
        if space == "aten":
            packet, _, overload = name.partition(".")
            function = getattr(getattr(torch.ops.aten, packet), overload or "default")
            functions.add(function)
            if function not in known:
                known.add(function)
                library.impl(name, _kernel_of(function), _NAME)
    return functions


@cache
def _library() -> tuple[torch.library.Library, set[Any]]:
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, _NAME)
    _libraries.append(library)
    return torch.library.Library("aten", "IMPL"), set()


_libraries: list[torch.library.Library] = []


def _kernel_of(function: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _private._ExcludeDispatchKeyGuard(_KEYS):
            tensors = _tensors_in((args, kwargs))
            type = META_AS.type
            casts = torch.is_autocast_enabled(type) and function in _functions_cast_on(type)
            if casts and all(x.is_meta and not isinstance(x, ShapeOnDevice) for x in tensors):
                args, kwargs = _as_cast(function, args, kwargs, tensors)
            return function(*args, **kwargs)

    return kernel


def _as_cast(function: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    dtypes_of_inputs = [
        x.dtype if isinstance(x, torch.Tensor) else None for x in tree_leaves((args, kwargs))
    ]
    key = function, META_AS.type, torch.get_autocast_dtype(META_AS.type), *dtypes_of_inputs
    if key not in _dtypes:
        _dtypes[key] = _dtypes_of(function, args, kwargs)
    dtypes = iter(_dtypes[key])
    args, kwargs = tree_map(
        lambda x: _cast(x, next(dtypes)) if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )
    takes_dtype = any(x.name == "dtype" for x in function._schema.arguments)
    has_dtype = any(isinstance(x, torch.dtype) for x in tree_leaves((args, kwargs)))
    if takes_dtype and not has_dtype and tensors[0].dtype in LOW and not any(_dtypes[key]):
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


# Dtypes to which inputs of a function are cast, by function, type of device and dtypes.
_dtypes: dict[Any, Dtypes] = {}


def _dtypes_of(function: Any, args: Any, kwargs: Any) -> Dtypes:
    """Return the dtype to which torch casts each tensor among the arguments, if it does."""
    device = device_of(META_AS.type)
    with outside_torch(), torch.no_grad():
        args, kwargs = tree_map(
            lambda x: ShapeOnDevice.like(x.detach(), device) if isinstance(x, torch.Tensor) else x,
            (args, kwargs),
        )
        inputs = _tensors_in((args, kwargs))
        seen = _Casts(inputs)
        try:
            with seen:
                function(*args, **kwargs)
        except _Computes:
            pass
    return tuple(seen.dtypes.get(id(x)) for x in inputs)


class _Computes(BaseException):
    """A function has cast its inputs, and computes."""


class _Casts(TorchDispatchMode):
    """Mode that ends a function after its casts."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._given = set(map(id, given))
        self.dtypes: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is not _copy or id(args[0]) not in self._given:
            raise _Computes
        self.dtypes[id(args[0])] = kwargs["dtype"]
        return func(*args, **kwargs)


def _cast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or x.dtype == dtype:
        return x
    is_kept = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    if not (is_kept and dtype in LOW and torch.is_autocast_cache_enabled()):
        return x.to(dtype)
    if id(x) not in _copies.of:
        _copies.of[id(x)] = x, x.to(dtype)
    return _copies.of[id(x)][1]


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


_lock = threading.Lock()
_open_count = 0
_autocast_init: Callable[..., None] = torch.autocast.__init__


def _init_autocast(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    # Torch has no autocast for the meta tensors of a dry run; to disable it there is harmless.
    if device_type == "meta" and (META_AS.type != "meta" or not enabled):
        device_type = "cpu" if META_AS.type == "meta" else META_AS.type
    _autocast_init(self, device_type, dtype, enabled, cache_enabled)


@contextmanager
def patched_autocast() -> Generator[None, None, None]:
    """Patch autocast, for which torch has no hook, while any thread is in a dry run."""
    global _open_count
    with _lock:
        _open_count += 1
        if _open_count == 1:
            torch.autocast.__init__ = _init_autocast
    try:
        yield
    finally:
        with _lock:
            _open_count -= 1
            if _open_count == 0:
                torch.autocast.__init__ = _autocast_init
