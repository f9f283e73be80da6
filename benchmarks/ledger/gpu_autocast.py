"""Autocast of CPU tensors by the lists of CUDA, which differ from those of CPUs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Everything here leans on private parts of torch: the lists are not public.
_torch: Any = torch._C
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def gpu_autocast(enabled: bool = True) -> Generator[None, None, None]:
    """Let ``torch.autocast("cpu")`` cast what that of CUDA casts, in this process.

    Products, which both cast alike, keep torch's kernels. So do the few operations that promote.
    """
    if not enabled:
        yield
        return
    # What gpudist has derived under one list would be wrong under the other, so that one process
    # should not count both. Registrations of torch last as long as the library.
    library = torch.library.Library("aten", "IMPL")
    has = _torch._dispatch_has_kernel_for_dispatch_key
    names = {n for n in _torch._dispatch_get_all_op_names() if n.startswith("aten::")}
    on_cpu = {n for n in names if has(n, "AutocastCPU")}
    on_gpu = {n for n in names if has(n, "AutocastCUDA")}
    single, summing = _operations_listed_in("FP32"), _operations_listed_in("FP32_SET_OPT_DTYPE")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in sorted(on_cpu - on_gpu):
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    for name in sorted((single | summing) & on_gpu - on_cpu):
        kernel = (
            _summing_in_float32(_operation(name))
            if name in summing
            else _computing_in_float32(_operation(name))
        )
        library.impl(name, kernel, "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _operations_listed_in(macro: str) -> set[str]:
    text = _HEADER.read_text(encoding="utf-8")
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", text)
    assert body is not None, f"{_HEADER} has no list {macro}"
    found = re.findall(r"_\(([^)]*)\)", body[1])
    return {"aten::" + ".".join(part.strip() for part in name.split(",")) for name in found}


def _operation(name: str) -> Callable[..., Any]:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return _torch._ExcludeDispatchKeyGuard(_torch.DispatchKeySet(_torch.DispatchKey.AutocastCPU))


def _computing_in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operation(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    return kernel


def _summing_in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that reads 16-bit floats and has a float32 result, unless told a dtype."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        has_dtype = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
        with _without_autocast():
            if args[0].dtype in _LOW and not has_dtype:
                kwargs = {**kwargs, "dtype": torch.float32}
            return operation(*args, **kwargs)

    return kernel


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in _LOW else x
