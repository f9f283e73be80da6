"""Torch's stream as on a GPU: a thread executes later what operators enqueue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doubles.device import finish
from tests.doubles.nccl import configure

_ALLOCATIONS = ("aten::empty", "aten::new_empty")


class Asynchronous(TorchDispatchMode):
    """Give the null stream of the double a thread in a ``with`` block.

    Torch's own operators on the CPU do not use it: each waits for the stream first, as if it
    were put there after what is on it. Nothing else does: what reads a tensor's memory in another
    way has to synchronise, as on a GPU. Tensors live until the end of the block, since memory that
    is freed may be used again in the order of the stream alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = []

    def __enter__(self) -> Asynchronous:
        configure("asynchronous", 1)
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        finish(None)
        configure("asynchronous", 0)
        self._tensors.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if not (func.is_view or func.name().startswith(_ALLOCATIONS)):
            finish(None)
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        self._tensors += [x for x in made if isinstance(x, torch.Tensor)]
        return result
