"""Messages and bytes of a rehearsal equal those that every rank sends in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import gpudist
from benchmarks.resnet import ResNet18
from gpudist.planning.hardware import profile_of
from gpudist.planning.rehearsal import DryNetwork
from gpudist.world.partition import Partition
from tests.convert.networks import Classifier, LeNet5, OneCell
from tests.pool import distributed

Counts = tuple[int, int]


def with_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
    )


def with_linear() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 5, stride=2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * 2 * 3, 5)
    )


class WithMean(nn.Module):
    """Images to classes, by a mean that loses the spatial dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norms": (with_norms, (2, 2, 13, 18)),
    "linear": (with_linear, (2, 2, 13, 17)),
    "mean": (WithMean, (3, 2, 9, 8)),
    "lenet": (LeNet5, (4, 1, 28, 28)),
    "encoder": (encoder, (4, 12, 8)),
    "convnext": (Classifier, (3, 3, 18, 14)),
    "one cell": (OneCell, (3, 2, 5, 7)),
    "resnet": (partial(ResNet18, 4, 5), (2, 3, 64, 48)),
}
FEW = ("norms", "linear")
GRIDS = {
    2: [(1, 1, 2, 1), (2, 1, 1, 1)],
    3: [(1, 1, 3, 1)],
    4: [(1, 1, 2, 2), (1, 1, 4, 1), (2, 1, 1, 2)],
}


def counted_step(
    P_world: Partition, network: nn.Module, shape: tuple[int, ...], grid: tuple[int, ...],
    replicates: bool, plan: gpudist.Plan | None = None,
) -> list[Counts]:  # fmt: skip
    """Count the second step; in the first one ranks agree on shapes."""
    P_x = P_world.create_cartesian_topology_partition(grid)
    converted = gpudist.distribute(deepcopy(network), P_x, plan, replicate_parameters=replicates)
    x = gpudist.scatter(torch.randn(shape) if P_world.rank == 0 else torch.empty(0), P_x)
    converted(x).sum().backward()
    gpudist.stats(reset=True, P_world=P_world)
    y = converted(x)
    forward = gpudist.stats(reset=True, P_world=P_world).total
    y.sum().backward()
    backward = gpudist.stats(P_world=P_world).total
    return [(phase.messages, phase.sent_bytes) for phase in (forward, backward)]


def check(
    P_world: Partition,
    name: str,
    replicates: bool,
    grids: Sequence[tuple[int, ...]] | None = None,
) -> None:
    make, shape = NETWORKS[name]
    network = make()
    # Threads use the core of host.
    wire = "gloo" if P_world.transport == "gloo" else "host"
    profile = replace(profile_of("h100"), wire=wire)
    stage = DryNetwork(network, shape, profile, replicates)
    moved = 0
    for grid in grids or GRIDS[P_world.size]:
        counted = counted_step(P_world, network, shape, grid, replicates)
        assert P_world.rank is not None
        rehearsed = stage.rehearse(grid, P_world.rank)
        phases = (rehearsed.forward, rehearsed.backward)
        predicted = [(phase.messages, phase.message_bytes) for phase in phases]
        assert counted == predicted, f"{grid}: {counted} sent, {predicted} predicted"
        moved += sum(messages for messages, _ in counted)
    assert moved


@pytest.mark.parametrize("replicates", [True, False])
@pytest.mark.parametrize("name", FEW)
@distributed(ranks=(2, 4), transports=("host", "gloo", "loopback"))
def test_messages_and_bytes_are_those_of_a_step(
    P_world: Partition, name: str, replicates: bool
) -> None:
    check(P_world, name, replicates)


@pytest.mark.parametrize("name", ["convnext", "one cell", "mean"])
@distributed(ranks=(3, 4), transports=("host", "gloo", "loopback"))
def test_of_tensors_of_one_cell(P_world: Partition, name: str) -> None:
    """One worker has the cell; it is scattered over the others, or flattened and moved."""
    check(P_world, name, True)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("lenet", (1, 1, 1, 2)), ("encoder", (1, 2, 1)), ("resnet", (1, 1, 2, 1))],
)
@distributed(ranks=2, transports=("loopback", "host"))
def test_of_whole_networks(P_world: Partition, name: str, grid: tuple[int, ...]) -> None:
    check(P_world, name, True, [grid])


def test_norms_on_cpus_count_the_passes_of_the_core() -> None:
    """Not as the composition, which takes dozens of operations."""
    norm = nn.GroupNorm(2, 4)
    profile = replace(profile_of("a100"), wire="host")
    rehearsed = DryNetwork(norm, (1, 4, 16, 16), profile).rehearse((1, 1, 2, 1), 0)
    for phase, most in ((rehearsed.forward, 5), (rehearsed.backward, 8)):
        assert 1 <= phase.terms_s["kernel starts"] / (profile.kernel_us * 1e-6) < most + 0.5


def test_views_launch_no_kernel() -> None:
    """Torch marks the last view of a product of three dims as an operation of its own."""
    profile = profile_of("h100")
    product = DryNetwork(nn.Linear(4, 4, bias=False), (2, 3, 4), profile).sequential
    assert product.terms_s["kernel starts"] == pytest.approx(profile.kernel_us * 1e-6)


class ReadsPositions(nn.Module):
    """A forward that reads a value which planning knows, as GPT does with its mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return x * 2 if (positions >= 0).all() else x


def test_a_value_that_is_read_is_copied_to_the_host() -> None:
    profile = profile_of("h100")
    network = DryNetwork(ReadsPositions(), (2, 4), profile)
    rehearsed = network.rehearse((2, 1), 0)
    for phase in (network.sequential, rehearsed.forward):
        # The range, the comparison, all of it, the copy and the product.
        assert phase.terms_s["kernel starts"] == pytest.approx(5 * profile.kernel_us * 1e-6)
