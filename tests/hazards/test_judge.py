"""The judge finds nothing in the network itself, and finds what is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpudist.errors import ShapeError
from gpudist.transport.host.core_transport import is_built, what_is_missing
from tests.hazards.forwards import ENTRIES
from tests.hazards.judge import judge
from tests.hazards.subjects import Alone, Subject, Values
from tests.hazards.trees import leaves

SAMPLE = (
    "SqueezeExcitation", "RunningMean", "CachedMask", "MixedOutputs", "DropoutsOfEveryKind",
    "NothingByPosition", "GradientInForward", "GeneratorOutput",
)  # fmt: skip


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


class DetachedOutput(Alone):
    def call(self, values: Values) -> Any:
        return super().call(values).detach()


class StaleCache(Alone):
    """Simulate a cache that all calls take from the first."""

    def call(self, values: Values) -> Any:
        found = super().call(values)
        mean = found.detach().mean()
        self.first = getattr(self, "first", mean)
        return found - mean + self.first


class OtherNames(Alone):
    def __init__(self, entry: Any, P_x: Any) -> None:
        super().__init__(entry, P_x)
        self.network = nn.Sequential(self.network)


class OtherContainer(Alone):
    def call(self, values: Values) -> Any:
        return (super().call(values),)


class Refuses(Alone):
    def call(self, values: Values) -> Any:
        raise ShapeError("input 'x': 3 cells were found, 4 were expected")


class Fails(Alone):
    def call(self, values: Values) -> Any:
        return [][0]


class DoesNotFollow(Alone):
    """Draws numbers that depend on the rank."""

    def call(self, values: Values) -> Any:
        torch.manual_seed(torch.seed())
        return super().call(values)


@pytest.mark.parametrize("name", SAMPLE)
def test_network_itself_is_right(name: str) -> None:
    entry = ENTRIES[name]
    assert str(judge(entry, entry.all_grids()[0], Alone)) == "right"


def test_network_itself_is_right_in_processes() -> None:
    if not is_built():
        pytest.skip(what_is_missing())
    verdict = judge(ENTRIES["CacheOfTheModuleFile"], (1, 1, 2, 1), Alone, "host")
    assert str(verdict) == "right"


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("SqueezeExcitation", ScaledGradient, "gradient of parameter conv.weight"),
        ("SqueezeExcitation", WrongInputGradient, "gradient of input x"),
        ("RunningMean", StaleBuffers, "buffer seen"),
        ("SqueezeExcitation", OneCell, "output: 1 of "),
        ("SqueezeExcitation", CutGraph, "gradient of input"),
        ("SqueezeExcitation", DetachedOutput, "requires grad is False"),
        ("SqueezeExcitation", StaleCache, "output: "),
        ("SqueezeExcitation", OtherNames, "named"),
        ("SqueezeExcitation", OtherContainer, "outputs"),
        ("StochasticDepth", DoesNotFollow, "output"),
    ],
)
def test_fault_is_wrong(name: str, fault: type[Subject], says: str) -> None:
    verdict = judge(ENTRIES[name], (1, 1, 2, 1), fault)
    assert verdict.how == "wrong" and says in verdict.text, verdict


def test_errors_are_told_apart() -> None:
    entry = ENTRIES["SqueezeExcitation"]
    refused = judge(entry, (1, 1, 2, 1), Refuses)
    assert refused.how == "refused" and "4 were expected" in refused.text
    assert judge(entry, (1, 1, 2, 1), Fails).how == "failed"


def test_paths_tell_containers_apart() -> None:
    y = torch.ones(1)
    found = [leaves(value) for value in ((y, 1), [y, 1], {"0": y, "1": 1}, ([], y))]
    assert len({tuple(each) for each in found}) == 4
