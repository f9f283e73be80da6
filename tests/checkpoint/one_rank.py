"""Checkpoints of a small module by a world of one rank, without starting it."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition

P_WORLD = Partition(LoopbackTransport.single(), [0])


class Holder(torch.nn.Module):
    """A parameter, buffers, and extra state unless it is ``...``."""

    def __init__(self, extra: Any = ..., **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.extra = extra


class Extra(Holder):
    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Keeper(torch.optim.Optimizer):
    """Optimizer with any options and any state."""

    def __init__(
        self, module: torch.nn.Module, state: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(module.parameters(), {"lr": 0.1, **options})
        for parameter in module.parameters() if state else ():
            self.state[parameter] = dict(state or {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit, in classes, dtypes and order."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)
