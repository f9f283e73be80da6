"""The judge finds what is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.hazards.forwards import ENTRIES
from tests.hazards.judge import judge
from tests.hazards.subjects import Alone, Subject, Values


class ScaledGradient(Alone):
    """Simulate a term that is summed twice, in one parameter."""

    def parameter_gradient(self, p: nn.Parameter) -> torch.Tensor:
        found = super().parameter_gradient(p)
        return found * 2 if p is next(self.network.parameters()) else found


class WrongInputGradient(Alone):
    """Simulate a halo's adjoint that adds to a wrong cell."""

    def input_gradients(self, values: Values) -> Values:
        return {n: g.roll(1, 0) for n, g in super().input_gradients(values).items()}


class StaleBuffers(Alone):
    """Simulate training a copy of the network."""

    def call(self, values: Values) -> Any:
        before = {name: b.clone() for name, b in self.network.named_buffers()}
        found = super().call(values)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(before[name])
        return found


class OneCell(Alone):
    """One cell of an output, a little."""

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        y = y.detach().clone()
        if y.is_floating_point() and y.dim() > 1:
            y.view(-1)[-1] += 1e-8 * y.abs().max()
        return y


class CutGraph(Alone):
    """Simulate a function that is not dispatched."""

    def call(self, values: Values) -> Any:
        return super().call({n: x.detach() for n, x in values.items()})


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("SqueezeExcitation", ScaledGradient, "gradient of parameter conv.weight"),
        ("SqueezeExcitation", WrongInputGradient, "gradient of input x"),
        ("RunningMean", StaleBuffers, "buffer seen"),
        ("SqueezeExcitation", OneCell, "output: 1 of "),
        ("SqueezeExcitation", CutGraph, "gradient of input"),
    ],
)
def test_fault_is_wrong(name: str, fault: type[Subject], says: str) -> None:
    verdict = judge(ENTRIES[name], (1, 1, 2, 1), fault)
    assert verdict.how == "wrong" and says in verdict.text, verdict
