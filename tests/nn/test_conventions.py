"""Combinations of layers, operators and losses: refused ones are wrong, all others are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist import invariant_sum
from gpudist.errors import ConventionError
from gpudist.nn import ColumnParallelLinear, DistributedMSELoss, invariant_copy
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.tensor_parallel import conventions
from gpudist.nn.tensor_parallel.conventions import Expectation
from gpudist.ops import all_sum_reduce
from gpudist.world.partition import Partition
from tests.nn.compare import gradient_of, random_like_all
from tests.nn.convention_cases import (
    CLASSES,
    FEATURES,
    ROWS,
    TOKENS,
    cross_entropy,
    is_right,
    own,
    parallel_network,
    sequential_network,
    vocab_parallel,
)
from tests.nn.parameters.test_data_parallel import store_path, torchs_group
from tests.nn.tensor_parallel.parallel_cases import leaf
from tests.pool import distributed

__all__ = ["store_path"]


@pytest.mark.parametrize("name", ROWS)
@distributed(ranks=[2, 3], transports=["loopback"])
def test_what_is_refused_is_wrong_and_the_rest_is_right(P_world: Partition, name: str) -> None:
    row = ROWS[name]
    assert is_right(P_world, row, checked=False) == (row.outcome == "right")
    if row.outcome == "refused":
        with pytest.raises(ConventionError, match=r"its input comes from (Row|Column|inv)\w+,"):
            is_right(P_world, row, checked=True)
    else:
        assert is_right(P_world, row, checked=True) == (row.outcome == "right")


@distributed(ranks=2)
def test_refused_on_all_workers(P_world: Partition) -> None:
    with pytest.raises(ConventionError, match=r"DistributedMSELoss expects .* from RowPar"):
        is_right(P_world, ROWS["whole, distributed"], checked=True)


@pytest.mark.parametrize("P_loss", ["copies", "all"])
@distributed(ranks=4, transports=["loopback"])
def test_a_loss_over_the_other_axis(P_world: Partition, P_loss: str) -> None:
    """One worker of each line: what is invariant along the line is a part along the other axis."""
    P = P_world.create_cartesian_topology_partition([2, 2])
    network, alone = parallel_network(P, ROWS["whole, torch"]), sequential_network(False)
    whole, target = random_like_all((6, FEATURES), 1), random_like_all((6, CLASSES), 2)
    F.mse_loss(alone(whole), target).backward()
    over = P.along([0]) if P_loss == "copies" else P
    copies = P.along([0])
    loss = DistributedMSELoss(over, P_loss=over)
    y, t = network(own(whole, 0, copies)), own(target, 0, copies)
    if P_loss == "all":
        with pytest.raises(ConventionError, match="each of 2 workers"):
            loss(y, t)
        return
    loss(y, t).backward()
    assert_gradients(network, alone)


def assert_gradients(network: nn.Module, alone: nn.Module) -> None:
    for name, placement in placements(network).items():
        box = placement.own_box
        assert box is not None
        expected = gradient_of(alone.get_parameter(name))[box.slices]
        torch.testing.assert_close(network.get_parameter(name).grad, expected)


@distributed(ranks=2, transports=["loopback"])
def test_checkpointing(P_world: Partition) -> None:
    """The graph is there when a part is to be recomputed; of a reentrant one, its ends are."""
    whole = leaf(random_like_all((TOKENS, FEATURES), 1))
    target = random_like_all((TOKENS, CLASSES), 2)
    row = ROWS["classes, vocabulary"]
    for reentrant in (False, True):
        network, alone = parallel_network(P_world, row), sequential_network(True)
        cross_entropy(alone(whole), target, P_world, None).backward()
        head: Any = network.head
        network.head = None
        y: Any = checkpoint(head, network(whole), use_reentrant=reentrant)
        vocab_parallel(y, target, P_world, lambda loss: loss).backward()
        network.head = head
        assert_gradients(network, alone)
    network = parallel_network(P_world, ROWS["whole, distributed"])
    y = checkpoint(network, whole, use_reentrant=False)
    with pytest.raises(ConventionError):
        DistributedMSELoss(P_world)(y, target)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_a_compiled_part_is_not_followed(P_world: Partition, backend: str) -> None:
    """The invariant value in front of it is turned into copies inside."""
    row = ROWS["classes, vocabulary"]
    network, alone = parallel_network(P_world, row), sequential_network(True)
    whole = leaf(random_like_all((TOKENS, FEATURES), 1))
    target = random_like_all((TOKENS, CLASSES), 2)
    cross_entropy(alone(whole), target, P_world, None).backward()
    head: Any = network.head
    network.head = None
    torch.compiler.reset()
    compiled: Any = torch.compile(head, backend=backend, fullgraph=True)
    vocab_parallel(compiled(network(whole)), target, P_world, lambda loss: loss).backward()
    network.head = head
    assert_gradients(network, alone)


@distributed(ranks=4, transports=["host", "gloo"])
def test_networks_in_torchs_data_parallelism(P_world: Partition, store_path: str) -> None:
    P = P_world.create_cartesian_topology_partition([2, 2])
    P_row, copies = P.along([1]), P.along([0])
    whole, target = random_like_all((6, FEATURES), 1), random_like_all((6, CLASSES), 2)
    with torchs_group(P_world, store_path):
        mesh: Any = P.create_device_mesh([0])
        network, alone = parallel_network(P_row, ROWS["whole, torch"]), sequential_network(False)
        model = nn.parallel.DistributedDataParallel(network, process_group=mesh.get_group())
        F.mse_loss(alone(whole), target).backward()
        y, t = model(own(whole, 0, copies)), own(target, 0, copies)
        F.mse_loss(y, t).backward()
        assert_gradients(network, alone)
        with pytest.raises(ConventionError, match="from RowParallelLinear"):
            DistributedMSELoss(P_row, P_loss=P_row)(model(own(whole, 0, copies)), t)


@distributed(ranks=1, transports=["loopback"])
def test_a_long_way_is_followed_once_for_each_structure(
    P_world: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[object] = []
    found = conventions.nearest_of_other
    monkeypatch.setattr(
        conventions, "nearest_of_other", lambda *given: visits.append(given) or found(*given)
    )
    expectation = Expectation("a layer", "dual")
    two: Any = Two(P_world)
    x = torch.ones(3, requires_grad=True)

    def far() -> torch.Tensor:
        y = x.exp()
        for _ in range(100):
            y = y.tanh()
        return y

    for _ in range(3):
        expectation(far().sin(), two)
    assert len(visits) == 1
    expectation(far().cos(), two)
    assert len(visits) == 2
    for _ in range(3):
        expectation(x.exp(), two)
    assert len(visits) == 5
    expectation(x, two)
    with torch.no_grad():
        expectation(x.exp(), two)
    assert len(visits) == 5


@distributed(ranks=2)
def test_structures_that_end_alike_are_told_apart(P_world: Partition) -> None:
    """A check of one value does not carry over to another, made by other operators before."""
    P = P_world.create_cartesian_topology_partition([P_world.size])
    layer = ColumnParallelLinear(P, 4, 4)

    def after(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.tanh()
        return x

    x = torch.ones(4, requires_grad=True)
    invariant, dual = invariant_sum(x * 1, P), all_sum_reduce(x * 1, P, axes_reduce=[0])
    layer(after(invariant))
    invariant_copy(after(invariant), P)
    with pytest.raises(ConventionError, match="ColumnParallelLinear"):
        layer(after(dual))


class Two:
    """Workers 0 and 1, of whom the first is alone in the world."""

    def __init__(self, P: Partition) -> None:
        self.ranks, self.size, self.wire = (0, 1), 2, P.wire


@distributed(ranks=1, transports=["loopback"])
def test_every_node_is_visited_once(P_world: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are visited once in a graph with exponentially many paths."""
    visits: list[object] = []
    border_of = conventions.border_of
    monkeypatch.setattr(
        conventions, "border_of", lambda node: visits.append(node) or border_of(node)
    )
    x = torch.ones(1, requires_grad=True)
    for _ in range(200):
        x = x + x * x
    ranks = frozenset({0, 1})
    assert conventions.nearest_of_other(x.grad_fn, ranks, "dual")[0] is None
    assert len(visits) == 2 * 200 + 1
    monkeypatch.setattr(conventions, "NODE_LIMIT", 10)
    assert conventions.nearest_of_other(x.grad_fn, ranks, "dual")[0] is None
    assert len(visits) < 2 * 200 + 1 + 11
