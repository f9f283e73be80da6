"""Errors of a forward name the module, the function and what to do about the input."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpudist
from tests.pool import distributed


class Outer(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), module)

    def forward(self, x: Any) -> torch.Tensor:
        return self.inner(x)


IMAGE = torch.rand(2, 2, 4, 8)
SHAPES = r"of tensors of shapes \[2, 2, 8, 8\]"
CHANNELS = rf"^'inner.1', .* {SHAPES} and .*: the input has 2 channels; "
CASES: dict[str, tuple[nn.Module, Any, str]] = {
    "conv": (nn.Conv2d(3, 1, 3), IMAGE, f"{CHANNELS}.* groups=1 need 3 "),
    "transposed": (nn.ConvTranspose2d(3, 1, 3), IMAGE, f"{CHANNELS}.* needs 3 "),
    "groups": (nn.ConvTranspose2d(4, 2, 3, groups=2), IMAGE, f"{CHANNELS}.* needs 4 "),
    "batch norm": (nn.BatchNorm2d(3), IMAGE, rf"{CHANNELS}.* shape \[3\] "),
    "evaluated": (nn.BatchNorm2d(3).eval(), IMAGE, rf"{CHANNELS}.* shape \[3\] "),
    "group norm": (nn.GroupNorm(1, 3), IMAGE, rf"{CHANNELS}.* shape \[3\] "),
    "dtype": (nn.ConvTranspose2d(2, 1, 3), IMAGE.double(), f"^'inner.1', .*2d {SHAPES} of .*64 "),
    "linear": (nn.Linear(8, 1), IMAGE.double(), f"^'inner.1', .*linear {SHAPES} of .*64 "),
    "integers": (nn.BatchNorm2d(2), IMAGE.long(), "^'inner.1', .*a norm needs a floating dtype"),
    "layer": (nn.LayerNorm(8), IMAGE.long(), "^'inner.1', .*a norm needs a floating dtype"),
    "array": (
        nn.Conv2d(2, 1, 3), IMAGE.numpy(),
        r"\(in 'inner.1'; input 'x' is a numpy.ndarray, .*torch.from_numpy\(...\)\)$",
    ),
    "attribute": (nn.GroupNorm(1, 2), np.ones(3), r"\(in 'inner.1'; input 'x' is a numpy.ndarray"),
    "nothing": (nn.Linear(8, 1), None, r"not NoneType \(in 'inner.1'\)$"),
}  # fmt: skip


@distributed(ranks=2)
def test_module_and_function(P_world: Any) -> None:
    for module, x, text in CASES.values():
        net = gpudist.distribute(Outer(copy.deepcopy(module)), P_world.grid(1, 1, 2, 1))
        with pytest.raises((RuntimeError, TypeError, AttributeError), match=f"(?s){text}"):
            net(x + P_world.rank if isinstance(x, torch.Tensor) else x)
