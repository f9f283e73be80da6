"""What all distributed layers share: other kinds of tensors may carry them out in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CarryOut = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]

# By type of tensor, what carries out a layer given one: an upper room enters its tensors here.
carried_out_by: dict[type, CarryOut] = {}


class DistributedModule(torch.nn.Module):
    """A layer on blocks of tensors, or on tensors that know what their blocks are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in args or kwargs.values():
            carry_out = carried_out_by.get(type(x))
            if carry_out is not None:
                return carry_out(self, args, kwargs)
        return super().__call__(*args, **kwargs)
