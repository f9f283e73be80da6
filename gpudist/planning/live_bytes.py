"""Count the bytes of tensors that are alive, from operations on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpudist.transport.dry import META

_make: Any = torch.optim
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": _make.Adam,
    "adamw": _make.AdamW,
    "momentum": lambda parameters, **how: _make.SGD(parameters, momentum=0.9, **how),
    "rmsprop": _make.RMSprop,
    "sgd": _make.SGD,
}


class LiveBytes:
    """Bytes of the storages that are alive now, and at most so far.

    Args:
        held: tensors whose storages do not count.

    Attributes:
        now_bytes: bytes that are alive.
        peak_bytes: largest value of ``now_bytes``.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []
        self._events: list[tuple[int, int]] = []
        self.now_bytes = self.peak_bytes = self._peak_event = 0
        for x in held:
            self._follow(x.untyped_storage(), 0)

    def add(self, x: torch.Tensor) -> None:
        """Count the storage of ``x`` until its last tensor is freed."""
        # Tensors in layouts of oneDNN have no storage, and no views.
        storage: Any = x if x.is_mkldnn else x.untyped_storage()
        if storage._cdata not in self._numbers:
            self._follow(storage, x.nbytes if x.is_mkldnn else storage.nbytes())

    def number_of(self, x: torch.Tensor) -> int:
        """Return the number of the storage of ``x``; -1 if it is not followed."""
        return self._numbers.get(x.untyped_storage()._cdata, -1)

    def at_peak(self, *kinds: Iterable[int]) -> list[int]:
        """Return the bytes of each kind at the peak, and those of no kind.

        Args:
            kinds: numbers of the storages of each kind.
        """
        kind_of = {number: k for k, numbers in enumerate(kinds) for number in numbers}
        sizes = [0] * (len(kinds) + 1)
        for number, nbytes in self._events[: self._peak_event]:
            sizes[kind_of.get(number, -1)] += nbytes
        return sizes

    def _follow(self, storage: Any, nbytes: int) -> None:
        key, number = storage._cdata, len(self._references)
        self._numbers[key] = number
        self._references.append(ref(storage, lambda _: self._free(key, number, nbytes)))
        self._change(number, nbytes)

    def _free(self, key: int, number: int, nbytes: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._change(number, -nbytes)

    def _change(self, number: int, nbytes: int) -> None:
        self._events.append((number, nbytes))
        self.now_bytes += nbytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_event = self.now_bytes, len(self._events)


class StandInLoss(torch.autograd.Function):
    """Loss that keeps as much as cross entropy: one tensor like the output, in float32 or better.

    Backward makes the gradient of that tensor and the gradient of the output.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        ctx.dtype = y.dtype
        ctx.save_for_backward(torch.empty_like(y, dtype=wide))
        return torch.empty((), dtype=wide, device=y.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        between = torch.empty_like(kept)
        return torch.empty_like(between, dtype=ctx.dtype)


class _Following(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._live.add(x)
        return result


def update_bytes(blocks: Iterable[torch.Tensor], optimizer: str, foreach: bool) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and of its temporary tensors at most.

    Args:
        blocks: parameters of this rank.
        optimizer: name in ``OPTIMIZERS``.
        foreach: whether all parameters are updated together, as torch does on GPUs.
    """
    return _update_bytes(tuple((tuple(x.shape), x.dtype) for x in blocks), optimizer, foreach)


@cache
def _update_bytes(
    blocks: tuple[tuple[tuple[int, ...], torch.dtype], ...], optimizer: str, foreach: bool
) -> tuple[int, int]:
    parameters = [torch.empty(s, dtype=t, device=META).requires_grad_() for s, t in blocks]
    if not parameters:
        return 0, 0
    for x in parameters:
        x.grad = torch.empty_like(x)
    live = LiveBytes([*parameters, *(x.grad for x in parameters if x.grad is not None)])
    update = OPTIMIZERS[optimizer](parameters, lr=0.1, foreach=foreach)
    with _Following(live):
        # The first step makes the state.
        update.step()
        state_bytes = live.now_bytes
        live.peak_bytes = state_bytes
        update.step()
    return state_bytes, live.peak_bytes - state_bytes
