"""Gradients of plain modules between tensor-parallel layers: partial gradients are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist import invariant_sum
from gpudist.errors import ConventionError
from gpudist.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelCrossEntropyLoss,
    fuse_parameter_movements,
    invariant_copy,
    invariant_share,
)
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import CONVENTIONS, F64, leaf
from tests.pool import distributed

TOKENS, FEATURES, INNER, CLASSES = 7, 4, 6, 5


class Network(nn.Module):
    """Columns, rows, a norm, columns; plain modules where values are whole and where they are cut.

    ``first`` meets the input, ``scale`` a block of features, ``norm`` the whole or tokens.
    """

    def __init__(self, up: nn.Module, down: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, dtype=F64)
        self.scale = nn.PReLU(dtype=F64)
        self.norm = nn.LayerNorm(FEATURES, dtype=F64)
        self.up, self.down, self.head = up, down, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.down(self.scale(self.up(x)))
        return self.head(self.norm(x))


def sequential() -> Network:
    torch.manual_seed(5)
    sizes = (FEATURES, INNER), (INNER, FEATURES), (FEATURES, CLASSES)
    return Network(*(nn.Linear(*size, dtype=F64) for size in sizes))


def parallel(P: Partition, convention: Convention, dim: int | None = None) -> Network:
    torch.manual_seed(5)
    options: dict[str, Any] = {"dtype": F64, "convention": convention, "sequence_dim": dim}
    return Network(
        ColumnParallelLinear(P, FEATURES, INNER, **options),
        RowParallelLinear(P, INNER, FEATURES, **options),
        ColumnParallelLinear(P, FEATURES, CLASSES, **options),
    )


def own_tokens(whole: torch.Tensor, P: CartesianPartition, is_split: bool) -> torch.Tensor:
    """Return the tokens of this worker's copy of the network, or its block of them if split."""
    assert P.index is not None
    copy = whole.tensor_split(P.shape[0])[P.index[0]]
    return copy.tensor_split(P.shape[1])[P.index[1]] if is_split else copy


def assert_sequential(network: nn.Module, alone: nn.Module) -> None:
    placed = placements(network)
    for name, parameter in network.named_parameters():
        box = placed[name].own_box if name in placed else None
        expected = gradient_of(alone.get_parameter(name))
        expected = expected if box is None else expected[box.slices]
        assert_equal_to(parameter.grad, expected, 1e-10, f"gradient of {name}")


def check(
    P: CartesianPartition, network: nn.Module, alone: nn.Module, is_split: bool, seed: int = 1
) -> None:
    whole = random_like_all((TOKENS, FEATURES), seed)
    targets = torch.arange(TOKENS) % CLASSES
    for each in (network, alone):
        each.zero_grad()
    F.cross_entropy(alone(whole), targets).backward()
    y = network(leaf(own_tokens(whole, P, is_split)))
    VocabParallelCrossEntropyLoss(P)(y, own_tokens(targets, P, False)).backward()
    assert_sequential(network, alone)


def grid_of(P_world: Partition) -> CartesianPartition:
    copies = 2 if P_world.size == 4 else 1
    return P_world.create_cartesian_topology_partition([copies, P_world.size // copies])


@pytest.mark.parametrize("dim", [None, 0], ids=["whole", "tokens"])
@pytest.mark.parametrize("convention", CONVENTIONS)
@distributed(ranks=[2, 3, 4])
def test_between_layers(P_world: Partition, convention: Convention, dim: int | None) -> None:
    """The same call for both conventions, with or without a split sequence; copies included."""
    P = grid_of(P_world)
    network = fuse_parameter_movements(parallel(P, convention, dim), P)
    for seed in (1, 2):
        check(P, network, sequential(), dim is not None, seed)


@distributed(ranks=4, transports=["loopback"])
def test_the_structure_changes(P_world: Partition) -> None:
    """From the second step on, layers of the network split the sequence."""
    P = grid_of(P_world)
    network = fuse_parameter_movements(parallel(P, "invariant"), P)
    check(P, network, sequential(), False)
    for layer in (network.up, network.down, network.head):
        layer.sequence_dim = 0  # pyright: ignore
    network.down._holders = parallel(P, "invariant", 0).down._holders  # pyright: ignore
    check(P, network, sequential(), True)


@distributed(ranks=4, transports=["loopback"])
def test_other_axes_and_a_partition_without_axes(P_world: Partition) -> None:
    P = P_world.create_cartesian_topology_partition([2, 2])
    for given in (P, P_world, P.create_partition_inclusive([3, 2, 1, 0])):
        network = fuse_parameter_movements(parallel(P, "invariant"), given)
        check(P, network, sequential(), False)
    torch.manual_seed(5)
    network = Network(
        ColumnParallelLinear(P, FEATURES, INNER, dtype=F64, axis=0),
        RowParallelLinear(P, INNER, FEATURES, dtype=F64, axis=0),
        ColumnParallelLinear(P, FEATURES, CLASSES, dtype=F64, axis=0, gather_output=True),
    )
    fuse_parameter_movements(network, P)
    alone, whole = sequential(), random_like_all((TOKENS, FEATURES), 1)
    alone(whole).square().sum().backward()
    assert P.index is not None
    network(whole.tensor_split(2)[P.index[1]]).square().sum().backward()
    assert_sequential(network, alone)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@distributed(ranks=2, transports=["loopback"])
def test_recomputed(P_world: Partition, how: str) -> None:
    P = grid_of(P_world)
    network = parallel(P, "invariant")
    norm = network.norm
    network.norm = Recomputed(norm, how == "reentrant")  # pyright: ignore
    fuse_parameter_movements(network, P)
    if how == "reentrant":
        with pytest.raises(ConventionError, match=r"norm\.inner\.\w+ may be used.*use_reentrant"):
            check(P, network, sequential(), False)
        return
    alone = sequential()
    alone.norm = Recomputed(alone.norm, False)  # pyright: ignore
    check(P, network, alone, False)


@pytest.mark.parametrize("is_reentrant", [False, True])
@distributed(ranks=2, transports=["loopback"])
def test_a_whole_network_recomputed(P_world: Partition, is_reentrant: bool) -> None:
    """Recomputed parameters are summed as the graph of the recomputation shows."""
    P = grid_of(P_world)
    network = Recomputed(fuse_parameter_movements(parallel(P, "invariant"), P), is_reentrant)
    check(P, network, Recomputed(sequential(), False), False)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


class Beside(nn.Module):
    """A network with a module that no tensor-parallel layer is around."""

    def __init__(self, network: nn.Module, in_output: bool) -> None:
        super().__init__()
        self.network, self.other = network, nn.Linear(FEATURES, 2, dtype=F64)
        self.in_output, self.kept = in_output, torch.empty(0)

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = self.other(x)
        return (self.network(x), self.kept) if self.in_output else self.network(x)


@pytest.mark.parametrize("in_output", [False, True])
@distributed(ranks=2)
def test_nothing_tells(P_world: Partition, in_output: bool) -> None:
    """If neither graph nor outputs show the convention, it must be passed."""
    P, x = grid_of(P_world), random_like_all((TOKENS, FEATURES), 1)
    for convention in ("invariant", "dual", None):
        torch.manual_seed(7)
        alone = Beside(nn.Identity(), in_output)
        torch.manual_seed(7)
        network = Beside(nn.Identity(), in_output)
        network.network = parallel(P, "invariant")
        fuse_parameter_movements(network, P, convention=convention)
        if convention is None:
            with pytest.raises(ConventionError, match=r"it is unknown whether .*other\.weight"):
                network(x)
                network.kept.square().sum().backward()
            return
        alone(x)
        network(x)
        alone.kept.square().sum().backward()
        count = P.size if convention == "dual" else 1
        (network.kept.square().sum() / count).backward()
        expected = gradient_of(alone.other.weight)
        assert_equal_to(network.other.weight.grad, expected, 1e-10, "gradient")


@distributed(ranks=2, transports=["loopback"])
def test_without_invariant_layers_all_is_summed(P_world: Partition) -> None:
    P, x = grid_of(P_world), random_like_all((TOKENS, FEATURES), 1)
    network = fuse_parameter_movements(Beside(parallel(P, "dual"), True), P)
    (network(x)[1].sum() / P.size).backward()
    assert_equal_to(network.other.bias.grad, torch.full((2,), 7.0, dtype=F64), 1e-10, "gradient")  # pyright: ignore


class Shared(nn.Module):
    """One norm where values are whole and where they are parts."""

    def __init__(self, P: Partition, operators: bool) -> None:
        super().__init__()
        self.P, self.operators = P, operators
        self.norm = nn.LayerNorm(FEATURES, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(invariant_copy(x, self.P))
        if self.operators:
            return invariant_sum(y / self.P.size, self.P)
        return invariant_sum(self.norm(y), self.P) + invariant_share(x, self.P)


@pytest.mark.parametrize("case", ["used twice", "meet"])
@distributed(ranks=2, transports=["loopback"])
def test_both_conventions(P_world: Partition, case: str) -> None:
    P, x = grid_of(P_world), leaf(random_like_all((TOKENS, FEATURES), 1))
    if case == "used twice":
        network = parallel(P, "invariant")
        network.scale = nn.Sequential(network.norm, nn.PReLU(dtype=F64))  # pyright: ignore
        network.up = ColumnParallelLinear(P, FEATURES, 2 * FEATURES, dtype=F64)
        network.down = RowParallelLinear(P, 2 * FEATURES, FEATURES, dtype=F64)
        words = r"parameter scale\.0\.\w+ is used by both conventions"
    else:
        network = Shared(P.along([1]), False)
        words = "values of invariant_copy.* meet values of invariant_s"
        network.forward = lambda x: invariant_sum(x, P) + network.norm(invariant_copy(x, P))  # type: ignore
    fuse_parameter_movements(network, P)
    with pytest.raises(ConventionError, match=words):
        network(x)


@distributed(ranks=2, transports=["loopback"])
def test_operators_of_the_users(P_world: Partition) -> None:
    """The graph of operators without a layer shows the same."""
    alone, x = nn.LayerNorm(FEATURES, dtype=F64), random_like_all((TOKENS, FEATURES), 1)
    network = fuse_parameter_movements(Shared(P_world, True), P_world)
    alone(x).pow(3).sum().backward()
    network(leaf(x)).pow(3).sum().backward()
    assert_equal_to(network.norm.weight.grad, gradient_of(alone.weight), 1e-10, "gradient")  # pyright: ignore


@distributed(ranks=4, transports=["loopback"])
def test_workers_that_are_missing(P_world: Partition) -> None:
    P = grid_of(P_world)
    network = fuse_parameter_movements(parallel(P, "invariant"), P.along([0]))
    with pytest.raises(ConventionError, match=r"parameter scale\.weight has a part.*with all of"):
        check(P, network, sequential(), False)


@distributed(ranks=2, transports=["loopback"])
def test_refused_convention(P_world: Partition) -> None:
    with pytest.raises(ConventionError, match="convention is 'both'"):
        fuse_parameter_movements(nn.Identity(), P_world, convention="both")  # pyright: ignore


@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_a_graph_of_torch_compile_does_not_tell(P_world: Partition) -> None:
    """The workers to sum over are unknown for modules between invariant layers."""
    layers = nn.LayerNorm(FEATURES), ColumnParallelLinear(P_world, FEATURES, CLASSES)
    network = fuse_parameter_movements(nn.Sequential(*layers), P_world)
    torch.compiler.reset()
    compiled: Any = torch.compile(network, backend="eager")
    with pytest.raises(ConventionError, match=r"under torch\.compile or a dispatch mode"):
        compiled(torch.ones(2, FEATURES))


class Swapping(nn.Module):
    """Two plain modules, one on parts and one on whole values, that change places."""

    def __init__(self, P: Partition) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(P, 8, 16), RowParallelLinear(P, 16, 8)
        self.one, self.other = (nn.Parameter(torch.full((8,), 2.0)) for _ in range(2))
        self.is_swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = (self.other, self.one) if self.is_swapped else (self.one, self.other)
        return self.down(self.up(x) * first) * last


@distributed(ranks=2)
def test_parameters_that_change_places(P_world: Partition) -> None:
    """The graphs differ in nothing but which parameter is where."""
    P = P_world.create_cartesian_topology_partition([P_world.size])

    def gradients(*swapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        network = Swapping(P)
        fused = fuse_parameter_movements(network, P)
        for network.is_swapped in swapped:
            network.zero_grad()
            fused(torch.ones(2, 8)).sum().backward()
        return [gradient_of(network.one), gradient_of(network.other)]

    for found, expected in zip(gradients(False, True), gradients(True), strict=True):
        assert torch.equal(found, expected)
