"""On how many workers a network fits, and its memory at the peak."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gpudist.cli import main, plan
from gpudist.errors import ShapeError
from gpudist.planning import Memory, fits, profile_of, recompute, smallest
from gpudist.planning.fitting import _cells, _count_memory, numbers_to_show
from gpudist.planning.grids import grids
from gpudist.planning.live_bytes import LiveBytes, update_bytes
from gpudist.planning.rehearsal import DryNetwork
from tests.patience import allowed_s

SHAPE = (1, 4, 64, 64)
KIB = 1 / 2**20
PROFILE = profile_of("h100")


def blocks(layers: int = 1) -> nn.Module:
    """Return four blocks, each of so many convolutions and their activations."""

    def pair() -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()

    return nn.Sequential(
        *(nn.Sequential(*(x for _ in range(layers) for x in pair())) for _ in range(4))
    )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.embed(x) * mask.unsqueeze(-1)


def memory_of(optimizer: str = "sgd", network: nn.Module | None = None) -> Memory:
    network = network or blocks()
    return DryNetwork(network, SHAPE, PROFILE, True, optimizer).rehearse((1, 1, 1, 1), 0).memory


def test_storages_count_until_they_are_freed() -> None:
    live = LiveBytes()
    x = torch.empty(3, device="meta")
    view = x.view(3, 1)
    live.add(x)
    live.add(view)
    del x
    assert live.now_bytes == 12
    number = live.number_of(view)
    del view
    assert (live.now_bytes, live.peak_bytes, live.at_peak([number])) == (0, 12, [12, 0])


@pytest.mark.parametrize(
    ("optimizer", "state", "temporary"), [("sgd", 0, 0), ("momentum", 40, 0), ("adam", 80, 40)]
)
def test_state_and_temporary_tensors_are_those_of_the_optimizer(
    optimizer: str, state: int, temporary: int
) -> None:
    found = update_bytes([torch.empty(10, device="meta")], optimizer, foreach=False)
    assert found[0] == pytest.approx(state, abs=8)
    assert found[1] >= temporary


def test_the_peak_of_a_step_is_that_of_its_tensors() -> None:
    """The input, four results of ReLU and the loss's tensor are kept; two gradients are made."""
    cells = 4 * 64 * 64 * 4
    memory = memory_of()
    assert memory.activations == 6 * cells
    assert memory.temporary == pytest.approx(2 * cells, abs=16)
    assert memory.total == sum(vars(memory).values())
    assert memory_of("adam").optimizer == pytest.approx(2 * memory.parameters, abs=64)


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    """Kept are four inputs; three results of a block are made again, beside two gradients."""
    cells = 4 * 64 * 64 * 4
    assert memory_of(network=blocks(3)).activations == 14 * cells
    memory = memory_of(network=recompute(blocks(3)))
    assert memory.activations == 4 * cells
    assert memory.temporary == pytest.approx(5 * cells, abs=16)
    x = torch.randn(1, 4, 8, 8)
    torch.manual_seed(0)
    network = blocks()
    expected = torch.autograd.grad(network(x).sum(), [*network.parameters()])
    names = [*network.state_dict()]
    assert [*recompute(network).state_dict()] == names
    found = torch.autograd.grad(network(x).sum(), [*network.parameters()])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_smallest_number_and_a_grid_for_each_are_found_in_time() -> None:
    start_s = time.process_time()
    alone = memory_of("adam").total
    found = fits(blocks(), SHAPE, 0.4 * alone / 2**30, most=12)
    assert time.process_time() - start_s < allowed_s(12.0)
    assert [one.ranks for one in found] == [*range(1, 13)]
    best = smallest(found)
    # A worker of several also keeps inputs with ghosts.
    assert best is not None and best.is_counted and 3 <= best.ranks <= 6
    assert all(not one.fits and one.is_counted for one in found if one.ranks < best.ranks)
    assert all(torch.Size(one.grid).numel() == one.ranks for one in found)


def test_a_grid_whose_layers_copy_more_than_estimated_is_not_chosen() -> None:
    """A convolution copies blocks of odd extents, which have ghosts, and no others."""
    network = nn.Sequential(nn.Tanh(), nn.Conv3d(4, 4, 2, stride=2))
    shape = (1, 4, 242, 240, 240)
    dry = DryNetwork(network, shape, PROFILE, True, "sgd")
    least = min(_count_memory(dry, g).total for g in grids(6, shape, (2, 3, 4)))
    found = fits(network, shape, 1.1 * least / 2**30, most=6, optimizer="sgd")
    for one in found[3:]:
        assert one.is_counted
        totals = {g: _count_memory(dry, g).total for g in grids(one.ranks, shape, (2, 3, 4))}
        assert one.memory.total <= 1.1 * min(totals.values())
        if one.ranks == 6:
            first = min(totals, key=lambda grid: _cells(dry, grid))
            assert totals[first] > 1.3 * one.memory.total


def test_dropout_keeps_a_key_alone() -> None:
    def activations(*layers: nn.Module) -> int:
        network = nn.Sequential(nn.Conv2d(4, 4, 1), *layers, nn.Conv2d(4, 4, 1))
        return memory_of(network=network).activations

    dropouts = (nn.Dropout(0.1), nn.Dropout2d(0.1))
    assert activations(*dropouts) == pytest.approx(activations(), abs=32)


class Reading(nn.Module):
    """Network that reads values which do not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-1], device=x.device)
        if (positions.diff() != 1).any():
            raise AssertionError("the values are not known")
        with torch.autocast(x.device.type, enabled=False):
            return self.convolution(x)


def test_forwards_may_read_values_that_are_known() -> None:
    assert memory_of(network=Reading()).activations > 0


def test_numbers_between_powers_of_two_are_estimated() -> None:
    found = fits(blocks(), SHAPE, 1.0, most=7)
    assert [one.ranks for one in found if not one.is_counted] == [3, 5, 6, 7]
    counted = fits(blocks(), SHAPE, found[4].memory.total / 2**30, most=7)[4]
    assert counted.ranks == 5 and counted.is_counted
    assert found[4].memory.total == pytest.approx(counted.memory.total, rel=0.2)


def test_the_smallest_number_is_that_of_all_rehearsals() -> None:
    dry = DryNetwork(blocks(), SHAPE, PROFILE, True, "sgd")
    least = {
        n: min(_count_memory(dry, g).total for g in grids(n, SHAPE, (2, 3))) for n in range(1, 8)
    }
    for n in (3, 5, 6):
        found = smallest(fits(blocks(), SHAPE, least[n] / 2**30, most=7, optimizer="sgd"))
        assert found is not None
        assert found.ranks == min(m for m in least if least[m] <= least[n])


def command(*words: str) -> list[str]:
    path = Path(__file__).resolve()
    return ["plan", f"{path}:blocks", "--shape", *map(str, SHAPE), *words]


def test_the_command_says_first_whether_it_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "fits", partial(fits, most=9))
    for words, expected in (((), [1, 2, 4, 8]), (("--all",), [*range(1, 10)])):
        assert main(command("--optimizer", "sgd", "--recompute", "--amp", "bf16", *words)) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("Fits on 1 GPU: grid [1, 1, 1, 1] needs ")
        assert max(map(len, printed.splitlines())) <= 80
        rows = [line.split()[0] for line in printed.splitlines() if "[1,1," in line]
        assert rows == [str(n) for n in expected]
    assert numbers_to_show([1, 2, 3, 5, 6, 7, 8, 9], 6) == [1, 2, 5, 6, 7, 8]
    assert main(command("--ranks", "2", "--all")) == 2


def test_too_little_memory_says_what_helps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "fits", partial(fits, most=2))
    assert main(command("--memory", str(KIB), "--json")) == 0
    assert [one["fits"] for one in json.loads(capsys.readouterr().out)] == [False, False]
    assert main(command("--memory", str(KIB))) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Does not fit on 1 to 2 GPUs") and "--recompute" in printed
    assert main(command("--memory", str(KIB), "--ranks", "2")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Does not fit on 2 ranks") and "--recompute" in printed


def test_several_inputs_have_a_shape_and_a_dtype_each(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve()
    shapes = ["--shape", "4", "8", "int64", "--shape", "4", "8"]
    assert main(["plan", f"{path}:Masked", *shapes, "--ranks", "2"]) == 0
    assert "[2, 1]" in capsys.readouterr().out


def test_a_network_that_fits_nowhere_or_cannot_be_called_is_refused() -> None:
    with pytest.raises(ShapeError, match="give the memory of a worker"):
        fits(blocks(), SHAPE, -1.0)
    with pytest.raises(ShapeError, match="cannot be called with an input of shape"):
        fits(blocks(), (1, 3, 8, 8))
    with pytest.raises(ShapeError, match="pass torch\\.bfloat16"):
        fits(blocks(), SHAPE, amp=torch.float32)
