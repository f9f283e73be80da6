"""A two-layer MLP-mixer, trained in several layouts as it is sequentially."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random

BATCH, TOKENS, CHANNELS, CLASSES, STEPS = 6, 4, 6, 5, 20
TARGET = torch.tensor([0, 4, 2, 1, 3, 2])


class Mixing(nn.Module):
    """Mixes along the last dim, about a normalized input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.wide, self.narrow = nn.Linear(width, 7), nn.Linear(7, width)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.gelu(self.wide(x)))


class Mixer(nn.Module):
    """Two layers, each of which mixes tokens and then channels; attention pools the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList([Mixing(TOKENS) for _ in range(2)])
        self.channels = nn.ModuleList([Mixing(CHANNELS) for _ in range(2)])
        self.score, self.head = nn.Linear(CHANNELS, 1), nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = zip(self.tokens, self.channels, strict=True)
        for tokens, channels in layers:
            x = x + tokens.mix(tokens.norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels.mix(channels.norm(x))
        return self.head((x * self.score(x).softmax(1)).sum(1))


def layout(name: str, parameter: str, dims: int) -> NdSbp:
    """Return the layout of the input, or of a parameter, on two axes."""
    if name == "data":
        return (S(0), B) if not parameter else (B, B)
    if name == "model":
        return (B, B) if not parameter else (B, S(dims - 1))
    if not parameter:
        return (S(0), S(1))
    return (B, S(0)) if "wide" in parameter or "head" in parameter else (S(0), B)


def model() -> Mixer:
    made = Mixer().double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(0.3 * random(tuple(parameter.shape), i))
    return made


def trained(made: Mixer, x: Any, target: Any) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(made(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["data", "model", "mixed"])
@distributed(ranks=4, transports=("loopback",), timeout_s=300)
def test_trains_as_the_sequential_mixer(P_world: Partition, name: str) -> None:
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    whole, parts = model(), model()
    for prefix, module in parts.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            sbp = layout(name, f"{prefix}.{key}", parameter.dim())
            setattr(module, key, nn.Parameter(global_of(parameter, placement, sbp)))
    x = random((BATCH, TOKENS, CHANNELS), 90)
    expected = trained(whole, x, TARGET)
    inputs = global_of(x, placement, layout(name, "", 3))
    targets = global_of(TARGET, placement, (inputs.sbp[0] if name != "model" else B, B))
    found = trained(parts, inputs, targets)
    assert expected[-1] < 0.1 * expected[0]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for (key, one), (_, other) in zip(
        whole.named_parameters(), parts.named_parameters(), strict=True
    ):
        made: Any = other
        torch.testing.assert_close(
            made.full_tensor(), one, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )
