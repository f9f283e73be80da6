"""Converted networks compute what their originals do: small forwards, and random modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.sbp import GlobalTensor
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.hazards.entries import Grid, workers
from tests.hazards.forwards import ENTRIES
from tests.hazards.judge import in_float64, judge
from tests.hazards.random_modules import draw
from tests.nn.compare import own_block
from tests.pool import distributed

RANDOM = 60 if EVERY else 20
# Each forward on one grid, every fourth on four workers; `make hazards` tries every grid.
FOURTH = 4


def _grids() -> list[tuple[str, Grid]]:
    chosen: list[tuple[str, Grid]] = []
    for number, (name, entry) in enumerate(ENTRIES.items()):
        size = 4 if number % FOURTH == 0 else 2
        grids = [grid for grid in entry.all_grids() if workers(grid) == size]
        grids = grids or list(entry.all_grids())
        chosen.append((name, grids[number % len(grids)]))
    return chosen


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "grid"), _grids(), ids=str)
def test_forward(name: str, grid: Grid) -> None:
    entry = ENTRIES[name]
    if entry.processes and not is_built():
        pytest.skip(what_is_missing())
    verdict = judge(entry, grid, transport="host" if entry.processes else "loopback")
    assert verdict.how in entry.allowed, f"{verdict}\n{entry.make.__doc__}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(RANDOM))
def test_random_module(number: int) -> None:
    case = draw(1, number)
    verdict = case.judge()
    # A view that had to be moved may not be changed in place.
    allowed = ("right", "refused") if case.program.changes_in_place else ("right",)
    assert verdict.how in allowed, f"{verdict}\n{case}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(RANDOM))
def test_idioms(number: int) -> None:
    case = draw(1, number, idioms=3)
    verdict = case.judge()
    assert verdict.how in ("right", "refused"), f"{verdict}\n{case}"


def test_draws_with_idioms_depend_on_the_seed_alone() -> None:
    first, again, other = draw(4, 1, idioms=2), draw(4, 1, idioms=2), draw(5, 1, idioms=2)
    assert str(first) == str(again) != str(other)
    assert first.program.returned == again.program.returned


class Dropped(nn.Module):
    """Dropout of half of the cells within a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda t: F.dropout(t * 1.0, 0.5, self.training), x, use_reentrant=self.use_reentrant
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(ranks=4, transports=["loopback"])
def test_checkpointed_dropout_drops_the_same_cells_again(
    P_world: Partition, use_reentrant: bool
) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 2])
    with in_float64():
        net = gpudist.distribute(Dropped(use_reentrant), P_x).train()
        whole = 1 + torch.rand(2, 4, 12, 10, generator=torch.Generator().manual_seed(3))
        torch.manual_seed(5)
        seen: list[torch.Tensor] = []
        for _ in range(3):
            x = own_block(whole, P_x)
            y = net(x)
            y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad * x.detach(), y.to_local().detach())
            seen.append(y.full_tensor().detach() / whole)
    for mask in seen:
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert 0.4 < (mask > 0).double().mean() < 0.6
        corners = [part for rows in mask.chunk(2, 2) for part in rows.chunk(2, 3)]
        assert not torch.equal(corners[0], corners[1]) and not torch.equal(corners[0], corners[2])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@distributed(ranks=2, transports=["loopback"])
def test_losses_and_names_are_the_networks_own(P_world: Partition) -> None:
    """A loss of torch on a global output and target, and what a user asks the network."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 1, 2])
    with in_float64():
        torch.manual_seed(1)
        alone = ENTRIES["SqueezeExcitation"].make()
        net = gpudist.distribute(copy.deepcopy(alone), P_x)
        assert isinstance(net, type(alone))
        assert list(net.state_dict()) == list(alone.state_dict())
        assert [n for n, _ in net.named_modules()] == [n for n, _ in alone.named_modules()]
        x = torch.randn(2, 4, 12, 10, generator=torch.Generator().manual_seed(2))
        target = torch.zeros(2, 8, 12, 10)
        y = net(own_block(x, P_x))
        copies = [gpudist.sbp.broadcast] * y.placement.axes
        loss = F.mse_loss(y, gpudist.to_global(target, y.placement, copies))
        assert isinstance(loss, GlobalTensor)
        loss.backward()
        expected = F.mse_loss(alone(x), target)
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_class_of_global_tensors_says_torch() -> None:
    """Libraries choose their backend by the module of a tensor's class."""
    assert GlobalTensor.__module__.split(".")[0] == "torch"
    assert issubclass(GlobalTensor, torch.Tensor)
