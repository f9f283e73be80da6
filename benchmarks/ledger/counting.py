"""Launches and bytes of what torch and gpudist run on a GPU, counted on a CPU over test doubles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpudist.exchange.tracing import Watching
from gpudist.nn.random import cells, drop
from gpudist.planning.clock import FREE
from tests.doubles.nccl import count

# Kernels of norms read their block more often than once: for its sums, and to normalise it.
_PASSES = {
    "native_group_norm": 3,
    "native_batch_norm": 3,
    "native_layer_norm": 3,
    "native_group_norm_backward": 5,
    "native_batch_norm_backward": 5,
    "native_layer_norm_backward": 5,
}
# Operations that do not read the tensor that they write.
_OVERWRITES = {"copy_", "fill_", "zero_"}
# Counters of the doubles, each a kernel of the CUDA half.
_OWN = ("launch_combine", "launch_norm", "launch_random")
_draw = cells.draw


@dataclass
class Counts:
    """Kernels of a step.

    Attributes:
        launches: kernels, without those of NCCL.
        size_bytes: bytes that they read and write.
        copied_bytes: those of them with which gpudist copies a tensor to another one.
        by_name: both, by the name of the operation.
    """

    launches: int
    size_bytes: int
    copied_bytes: int
    by_name: dict[str, tuple[int, int]]


class Counting(Watching):
    """Dispatch mode that counts the operations of torch and the kernels of gpudist."""

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, tuple[int, int]] = {}
        self._copied_bytes = 0
        self._before = {name: count(name) for name in (*_OWN, "kernel_bytes", "copied_bytes")}

    def __enter__(self) -> Any:
        # The native core draws on the CPU here, where the doubles of CUDA see no kernel.
        for module in (cells, drop):
            vars(module)["draw"] = self._drawing
        return super().__enter__()

    def _drawing(self, kind: str, output: torch.Tensor, *args: Any, **options: Any) -> None:
        tensors = [x for x in (output, options.get("input")) if x is not None]
        self._add("gpudist::draw", 1, sum(x.numel() * x.element_size() for x in tensors))
        _draw(kind, output, *args, **options)

    def __exit__(self, *error: Any) -> None:
        for module in (cells, drop):
            vars(module)["draw"] = _draw
        super().__exit__(*error)
        for name in _OWN:
            self._add(f"gpudist::{name}", count(name) - self._before[name], 0)
        self._add("gpudist::bytes", 0, count("kernel_bytes") - self._before["kernel_bytes"])
        self._copied_bytes = count("copied_bytes") - self._before["copied_bytes"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if not (func.is_view or name in FREE):
            given = args[1:] if name in _OVERWRITES else args
            tensors = tree_leaves((given, kwargs, result))
            sizes = [x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor)]
            size_bytes = _PASSES[name] * max(sizes) if name in _PASSES else sum(sizes)
            self._add(name, 1, size_bytes)
        return result

    def counts(self) -> Counts:
        """Return everything within the context, which has ended."""
        launches, size_bytes = (sum(pair[i] for pair in self._by_name.values()) for i in (0, 1))
        return Counts(launches, size_bytes, self._copied_bytes, self._by_name)

    def _add(self, name: str, launches: int, size_bytes: int) -> None:
        before = self._by_name.get(name, (0, 0))
        self._by_name[name] = before[0] + launches, before[1] + size_bytes
