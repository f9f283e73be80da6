"""The planner's advice, and how long it takes."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, prod
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.networks import UNet3d
from gpudist import Plan
from gpudist.cli import main
from gpudist.convert import distribute
from gpudist.errors import ShapeError
from gpudist.planning import (
    CollectiveRates,
    ConvolutionRate,
    Link,
    Profile,
    plan,
    profile_of,
)
from gpudist.planning.advice import advice_below, rank_grids
from gpudist.planning.clock import Clock, Kernel
from gpudist.planning.grids import Grid, estimate_s, grids, imbalance
from gpudist.planning.rehearsal import DryNetwork, Rehearsal
from gpudist.planning.table import MEMORY_PARTS, choice
from gpudist.transport.dry import Posted, SharedCollective, Traffic
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests import warm
from tests.convert.networks import Classifier
from tests.every import EVERY
from tests.patience import allowed_s
from tests.pool import distributed

# Processor time on one core for eight grids, since the machine of a test may be busy; half as long
# again as usual, since virtual processors become slower where others share them.
PLANNING_LIMIT_S = 30.0


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))


def test_grids_are_all_products_on_the_axes_given():
    found = list(grids(8, (1, 3, 4, 8), axes=(2, 3)))
    assert sorted(found) == [(1, 1, 1, 8), (1, 1, 2, 4), (1, 1, 4, 2)]
    assert all(prod(grid) == 8 for grid in found)


def test_unet_on_4096_ranks_is_planned_in_time():
    start_s = time.process_time()
    count = 8 if EVERY else 2
    advice = plan(UNet3d(1, 3, 8), (1, 1, 512, 512, 512), 4096, "h100", best=count)
    assert time.process_time() - start_s < allowed_s(PLANNING_LIMIT_S * count / 8)
    assert len(advice) == count
    assert all(prod(one.grid) == 4096 for one in advice)
    assert [one.seconds for one in advice] == sorted(one.seconds for one in advice)
    assert all(one.slowest.forward.messages > 0 for one in advice)


def test_the_fastest_of_all_partitions_is_among_those_planned():
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1))
    shape = (1, 1, 256, 256, 256)
    every = plan(network, shape, 64, "h100", best=100)
    dry = DryNetwork(network, shape, profile_of("h100"))
    chosen = sorted(grids(64, shape, (2, 3, 4)), key=lambda grid: estimate_s(dry, grid))[:8]
    assert {one.candidates for one in every} == {len(every)} == {28}
    assert every[0].grid in chosen


@pytest.mark.parametrize(
    ("network", "shape", "grid"),
    [
        (two_convolutions, (1, 1, 64, 4096), (1, 1, 1, 4)),
        (partial(nn.Conv2d, 4, 4, 1), (1, 4, 1, 1), (1, 4, 1, 1)),
    ],
    ids=["the longest dim", "channels"],
)
def test_what_is_cut(network: Callable[[], nn.Module], shape: Grid, grid: Grid):
    assert plan([network()], shape, 4, "a100")[0].grid == grid


def test_a_batch_is_cut_where_no_message_is_needed():
    best = plan(two_convolutions(), (4, 1, 64, 64), 4, "a100")[0]
    assert best.grid == (4, 1, 1, 1)
    assert best.slowest.forward.messages == best.slowest.forward.collectives == 0
    assert best.slowest.backward.collectives == 1  # the gradients of the weights


def test_samples_are_split_before_images():
    """No window reaches over the batch, so splitting it sends nothing between layers."""
    layers = [nn.Conv2d(3, 16, 7, 2, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1)]
    dry = DryNetwork(nn.Sequential(*layers), (8, 3, 224, 224), profile_of("h100"))
    assert estimate_s(dry, (8, 1, 1, 1)) == pytest.approx(3 * dry.sequential.compute_s / 8)
    chosen = sorted(grids(64, dry.global_shape, range(4)), key=lambda grid: estimate_s(dry, grid))
    assert {(8, 1, 8, 1), (8, 1, 1, 8), (8, 1, 4, 2), (8, 1, 2, 4)} < set(chosen[:8])


def test_partitions_that_are_too_slow_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = DryNetwork(two_convolutions(), (1, 1, 50, 90), profile_of("a100"))
    rehearse, ranks = DryNetwork.rehearse, list[int]()

    def note(self: DryNetwork, grid: Grid, rank: int, plan: Plan | None = None) -> Rehearsal:
        ranks.append(rank)
        return rehearse(self, grid, rank, plan)

    monkeypatch.setattr(DryNetwork, "rehearse", note)
    every, all_ranks = rank_grids(dry, 8), len(ranks)
    ranks.clear()
    assert rank_grids(dry, 8, wanted=1) == every[:1]
    assert len(ranks) < all_ranks
    least_s = every[0].seconds
    # The slowest rank comes first, and shows enough.
    ranks.clear()
    slowest = every[-1].slowest.rank
    assert advice_below(dry, every[-1].grid, least_s, first=slowest) is None
    assert ranks == [slowest]
    found = advice_below(dry, every[-1].grid, 1.01 * every[-1].seconds, first=slowest)
    assert found is not None
    assert found.rehearsed == every[-1].rehearsed


def test_uneven_blocks_show_as_imbalance():
    dry = DryNetwork(two_convolutions(), (1, 1, 9, 8), profile_of("h100"))
    assert imbalance(dry, (1, 1, 2, 1)) == pytest.approx(5 / 4.5)
    assert imbalance(dry, (1, 1, 1, 2)) == 1


def test_flops_of_both_ranks_are_those_of_the_network():
    network, shape = two_convolutions(), (1, 1, 16, 16)
    whole = 2 * 9 * 4 * 256 * 2
    (one,) = [a for a in plan(network, shape, 2) if a.grid == (1, 1, 2, 1)]
    assert sum(r.forward.flops for r in one.rehearsed) >= whole
    assert sum(r.forward.flops for r in one.rehearsed) < 1.5 * whole


def test_memory_counts_parameters_and_what_is_saved():
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1))
    (one,) = [a for a in plan(network, (1, 1, 16, 16), 2) if a.grid == (1, 1, 2, 1)]
    assert one.memory.parameters == 4 * (36 + 4)
    assert not any(weight.is_meta for weight in network.parameters())
    # Adam also counts the steps of each parameter, in 4 bytes.
    assert one.memory.optimizer == 2 * (one.memory.parameters + 4)
    # The input and its copy with ghosts, and as much as the loss keeps of four channels.
    ghosts = 16
    assert 5 * 4 * 128 <= one.memory.activations <= 4 * (2 * (128 + ghosts) + 4 * 128)


def test_totals_are_those_of_all_ranks():
    few, all_of_them = (
        plan(two_convolutions(), (1, 1, 64, 8), 8, best=1, every_rank=every_rank)[0]
        for every_rank in (False, True)
    )
    assert few.grid == all_of_them.grid == (1, 1, 8, 1)
    assert (few.is_total, all_of_them.is_total) == (False, True)
    assert all_of_them.all_messages == sum(r.messages for r in all_of_them.rehearsed)
    # Those at both ends have one neighbour, the others two: of each convolution, forth and back.
    ends = sum(r.forward.messages for r in all_of_them.rehearsed)
    assert ends == 2 * (6 * 2 + 2 * 1)
    assert few.all_messages > all_of_them.all_messages
    assert few.all_message_bytes == 8 * few.slowest.message_bytes


def test_progress_is_told():
    told: list[tuple[str, int, int]] = []
    plan(two_convolutions(), (1, 1, 16, 16), 2, progress=lambda *words: told.append(words))
    assert [done for _, done, _ in told] == [0, 0, 1, 2]
    assert [total for *_, total in told] == [1, 2, 2, 2]
    assert told[-1][0] == ""


class AddsInPlace(nn.Module):
    """A convolution, and an addition that torch refuses if there are gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.conv(x).chunk(2, 1)
        return left.add_(right)


def test_a_step_that_cannot_be_followed_says_why():
    words = (
        "a step of rank 0 on [1, 1, 2] fails: RuntimeError: torch.Tensor.add_ of tensors of "
        "shapes [1, 1, 5] and [1, 1, 5]: Output 0 of"
    )
    with pytest.raises(ShapeError, match=f"dim 2 cannot be cut: {re.escape(words)}"):
        plan(AddsInPlace(), (1, 1, 5), 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [3, 4])
def test_squeeze_and_excitation_is_planned_for_every_rank(ranks: int):
    advice = plan(Classifier(), (3, 3, 18, 14), ranks)
    assert all(one.is_total for one in advice)
    found = {one.grid for one in advice}
    assert found >= {3: {(1, 1, 3, 1)}, 4: {(1, 1, 2, 2), (1, 1, 4, 1)}}[ranks]


@distributed(ranks=2, transports=("loopback",))
def test_a_network_that_is_distributed_is_refused(P_world: Partition):
    P_x = P_world.create_cartesian_topology_partition((1, 1, 2, 1))
    network = distribute(two_convolutions(), P_x)
    with pytest.raises(ShapeError, match="is a DistributedSequential, which is"):
        plan(network, (1, 1, 16, 16), 2)


def test_too_much_memory_comes_last():
    small = replace(profile_of("h100"), memory_gib=1e-6)
    assert all(one.fits is False for one in plan(two_convolutions(), (1, 1, 16, 16), 2, small))


PROFILE = Profile(
    "test", "made up", "nccl", 2, Link(10, 1, 1.0), Link(100, 2, 0.1), 1.0, 1000.0, 0.0
)  # fmt: skip


def test_messages_between_nodes_take_the_network():
    near, far = Clock(PROFILE, rank=0), Clock(PROFILE, rank=0)
    near.exchange(Traffic(sends=(Posted(1, 1000, 1),)))
    far.exchange(Traffic(sends=(Posted(2, 1000, 1), Posted(3, 1000, 1))))
    copies_s = 2 * 1000 / 1e12
    assert near.phase.message_s == pytest.approx(10e-6 + 1e-6 + copies_s)
    assert far.phase.message_s == pytest.approx(102e-6 + 20e-6 + 2 * copies_s)
    # Shared links are slower.
    shared = Clock(replace(PROFILE, node=Link(10, 1, 1.0, shared_by=4)), rank=0)
    shared.exchange(Traffic(receives=(Posted(1, 1000, 1),)))
    assert shared.phase.message_s == pytest.approx(10e-6 + 4e-6 + copies_s)


def test_what_is_started_hides_behind_kernels():
    clock = Clock(PROFILE, rank=0)
    started = clock.start(Traffic(collectives=(SharedCollective("broadcast", (0, 1), 1_000_000),)))
    clock.add_kernel(Kernel(10**9, 0, torch.float32))  # 1 ms, as long as the broadcast
    clock.wait(started)
    assert clock.phase.overlapped_s == pytest.approx(1e-3 + 11e-6)
    assert clock.phase.serial_s == pytest.approx(2e-3 + 11e-6)


COLLECTIVES = CollectiveRates(5.0, 1.0, 10.0, 4.0)


def seconds_of(
    machine: Profile, members: range, size_bytes: int, kind: str = "all_reduce"
) -> float:
    shared = SharedCollective(kind, tuple(members), size_bytes)  # pyright: ignore[reportArgumentType]
    return Clock(machine, rank=0).transfer_s(Traffic(collectives=(shared,)))


def test_a_ring_enters_a_node_over_the_links_of_all_its_members():
    machine = replace(PROFILE, ranks_per_node=8, collectives=COLLECTIVES)
    size_bytes = 10**9
    steps_us = 5 + 2 * 7  # base, and both ways along the other 7 of the node
    assert seconds_of(machine, range(8), 0) == pytest.approx(steps_us * 1e-6)
    assert seconds_of(machine, range(16), 0) == pytest.approx((steps_us + 20) * 1e-6)
    copy_us = 5 + 14 + 10  # once around, through every rank
    assert seconds_of(machine, range(16), 0, "broadcast") == pytest.approx(copy_us * 1e-6)
    within_s = 2 * 7 / 8 * size_bytes / 4e9
    assert seconds_of(machine, range(8), size_bytes) == pytest.approx(within_s, rel=1e-3)
    between_s = 2 * 15 / 16 * size_bytes / (8 * 0.1e9)
    assert seconds_of(machine, range(16), size_bytes) == pytest.approx(between_s, rel=1e-3)
    plain = replace(machine, collectives=None)
    assert seconds_of(plain, range(16), size_bytes) == pytest.approx(between_s, rel=1e-3)
    alone_s = 2 * 1 / 2 * size_bytes / 0.1e9
    assert seconds_of(machine, range(0, 16, 8), size_bytes) == pytest.approx(alone_s, rel=1e-3)


def test_a_switch_that_adds_gets_every_term_once():
    rates = replace(COLLECTIVES, switch_share=0.5)
    machine = replace(PROFILE, ranks_per_node=8, collectives=rates)
    assert seconds_of(machine, range(8), 10**9) == pytest.approx((1 + 1 / 8) / 2.0, rel=1e-3)
    copies = [seconds_of(replace(machine, collectives=c), range(8), 10**9, "broadcast")
              for c in (rates, COLLECTIVES)]  # fmt: skip
    assert copies[0] == copies[1]


def test_layers_are_made_before_the_step(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(Clock, "add_kernel", lambda _, kernel: seen.append(kernel.flops))
    dry = DryNetwork(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)), (1, 1, 8, 8), PROFILE)
    seen.clear()
    dry.rehearse((1, 1, 2, 1), 0)
    # A convolution, its backward, and the gradients joined for their sum; no parameter is drawn.
    assert [flops > 0 for flops in seen] == [True, True, False]


def test_terms_add_up_to_the_time():
    rehearsed = DryNetwork(two_convolutions(), (1, 1, 16, 16), PROFILE).rehearse((1, 1, 2, 1), 0)
    for phase in (rehearsed.forward, rehearsed.backward):
        assert sum(phase.terms_s.values()) == pytest.approx(phase.serial_s)
        assert phase.terms_s["convolutions"] > 0
        assert phase.terms_s["messages"] > 0


RATES = (ConvolutionRate(4, 0.01, 0.001), ConvolutionRate(16, 0.04, 0.02))


def test_rates_of_convolutions():
    """They lie between those of their neighbours; rates of a dtype and a stride come first."""
    machine = replace(PROFILE, convolutions=RATES, tflops_by_dtype={"bfloat16": 2.0})
    found = [machine.convolution_flops_per_s("float32", c, False) for c in (1, 4, 8, 16, 99)]
    assert found == pytest.approx([1e10, 1e10, 2e10, 4e10, 4e10])
    assert machine.convolution_flops_per_s("float32", 16, True) == pytest.approx(2e10)
    assert machine.convolution_flops_per_s("bfloat16", 4, False) == pytest.approx(2e10)
    assert PROFILE.convolution_flops_per_s("float32", 4, True) == 1e12
    own = (ConvolutionRate(4, 3.0, 2.0, "float16"), ConvolutionRate(4, 1.0, 0.5, "float16", 2))
    machine = replace(PROFILE, convolutions=(*RATES, *own), tflops_by_dtype={"float16": 9.0})
    found = [machine.convolution_flops_per_s("float16", 4, False, stride) for stride in (1, 2, 3)]
    assert found == pytest.approx([3e12, 1e12, 3e12])
    assert machine.convolution_flops_per_s("float32", 4, False, 2) == pytest.approx(1e10)


def test_rates_of_convolutions_of_few_operations() -> None:
    few = ConvolutionRate(4, 0.002, 0.001, gflop=0.001), ConvolutionRate(16, 0.01, 0.004, gflop=0.1)
    many = ConvolutionRate(4, 0.01, 0.001, gflop=0.1)
    rate = replace(PROFILE, convolutions=(few[0], many, few[1])).convolution_flops_per_s
    flops = 1e3, 1e6, 1e7, 1e8, inf
    found = [rate("float32", 4, False, flops=f) for f in flops]
    assert found == pytest.approx([2e9, 2e9, (2e9 * 1e10) ** 0.5, 1e10, 1e10])
    assert rate("float32", 16, False, flops=1e3) == rate("float32", 99, False) == 1e10
    assert rate("float32", 8, False, flops=1e6) == pytest.approx((2e9 * 1e10) ** 0.5)


@pytest.mark.parametrize(
    ("layer", "forward_s"),
    [
        (nn.Conv2d(4, 16, 1, bias=False), 2 * 64 * 1024 / 4e10),
        (nn.Conv2d(16, 4, 1, bias=False), 2 * 64 * 1024 / 1e10),
        (nn.Conv2d(16, 64, 1, groups=4, bias=False), 2 * 256 * 1024 / 4e10),
        (nn.ConvTranspose2d(16, 4, 1, bias=False), 2 * 64 * 1024 / 1e10),
    ],
)
def test_a_convolution_is_as_fast_as_those_of_the_channels_it_makes(
    layer: nn.Module, forward_s: float
):
    machine = replace(PROFILE, convolutions=RATES, kernel_us=0.0, memory_gbps=1e9)
    channels = int(layer.in_channels)  # pyright: ignore[reportArgumentType]
    dry = DryNetwork(layer, (1, channels, 32, 32), machine)
    assert dry.sequential.compute_s == pytest.approx(forward_s)


def test_python_and_the_input_take_time():
    def rehearsed(**changed: float) -> Rehearsal:
        machine = replace(PROFILE, **changed)
        return DryNetwork(two_convolutions(), (1, 1, 16, 16), machine).rehearse((1, 1, 2, 1), 0)

    quick, late, reading = rehearsed(), rehearsed(layer_us=1e6), rehearsed(input_gbps=1e-6)
    for one, other in ((quick.forward, late.forward), (quick.backward, late.backward)):
        assert other.compute_s - one.compute_s == pytest.approx(3.0)
    # The input is read beside the step.
    assert quick.input_s == 0
    assert reading.input_s == pytest.approx(4 * 128 / 1e3)
    assert reading.seconds(True) == reading.input_s > quick.seconds(True)


def test_profiles_are_saved_and_read(tmp_path: Path):
    path = tmp_path / "profile.json"
    richer = replace(PROFILE, convolutions=RATES, layer_us=3.0, collectives=COLLECTIVES)
    for profile in (PROFILE, richer):
        profile.save(path)
        assert profile_of(path) == profile
    path.write_text("{}")
    with pytest.raises(ShapeError, match="does not contain a profile"):
        profile_of(path)
    with pytest.raises(ShapeError, match="neither built in"):
        profile_of("v100")


COMMAND = ["plan", "tests.planning.test_advice:two_convolutions", "--ranks", "2"]


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]):
    shape = ["--shape", "1", "1", "16", "16"]
    assert main([*COMMAND, *shape]) == 0
    printed = capsys.readouterr().out
    assert "[1, 1, 2, 1]" in printed
    assert printed.startswith("Fits on 2 ranks: grid [1, 1, ")
    assert "Planned all 2 partitions." in printed
    origin = " ".join(printed.split())
    assert "Messages, bytes and memory are counted" in origin and "times are predicted" in origin
    assert max(map(len, printed.splitlines())) <= 80
    assert main([*COMMAND, *shape, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sorted(one["grid"] for one in facts) == [[1, 1, 1, 2], [1, 1, 2, 1]]
    assert facts[0]["ranks"][0]["forward"]["messages"] == 2
    assert facts[0]["memory_bytes"] > 0
    assert facts[0]["candidates"] == 2
    assert facts[0]["memory"].keys() == {*MEMORY_PARTS}
    assert facts[0]["memory_bytes"] == sum(facts[0]["memory"].values())
    assert facts[0]["all_ranks"]["messages"] == sum(
        rank[phase]["messages"] for rank in facts[0]["ranks"] for phase in ("forward", "backward")
    )


def test_what_was_not_planned_is_said():
    few = plan([nn.ReLU()], (1, 1, 16, 16), 4, PROFILE)
    assert choice(few[:1]).startswith(f"Planned 1 of {len(few)} partitions, chosen by")


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    assert main([*COMMAND, "--shape", "1", "1", "16", "16", "-o", str(picture)]) == 0
    assert "[1, 1, 2, 1]" in picture.read_text()
    assert "[1, 1, 2, 1]" in capsys.readouterr().out


@pytest.mark.skipif(not is_built(), reason=what_is_missing())
def test_the_command_measures_a_profile(tmp_path: Path):
    path = tmp_path / "here.json"
    # In a process of its own, since it makes a world.
    command = [warm.python(), "-m", "gpudist", "bench", "profile", "--output", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "measured over host on 2 ranks" in printed
    profile = profile_of(path)
    assert profile.wire == "host"
    assert min(profile.tflops, profile.memory_gbps, profile.kernel_us, profile.node.gbps) > 0
    assert plan(two_convolutions(), (1, 1, 16, 16), 2, profile)[0].seconds > 0
    ended = subprocess.run([*command, "--ranks", "1"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "at least 2 ranks" in ended.stderr
