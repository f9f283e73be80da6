"""Small networks of the zoo, and the detection of a wrong gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpudist
from gpudist.sbp import broadcast, split
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.nn.compare import own_block
from tests.zoo.judge import GRIDS, Verdict, judge, layouts_within
from tests.zoo.network import Network
from tests.zoo.networks import DOZEN, missing_packages
from tests.zoo.record import Record, differences, kept_bytes_of, record_of
from tests.zoo.results import passes, table, verdict_of
from tests.zoo.sent import Sent, repartitions

LIMIT_S = 60.0

needs_packages = pytest.mark.skipif(
    bool(missing_packages()),
    reason=f"not installed: {', '.join(missing_packages())}; `make zoo` installs them",
)
# Warnings of the packages are ignored.
pytestmark = pytest.mark.filterwarnings("ignore")


@needs_packages
@pytest.mark.parametrize("name", DOZEN)
def test_converted_network_is_right(name: str) -> None:
    found = judge(name, _grid_of(name), limit_s=LIMIT_S)
    assert found.verdict == "right", (found.what, found.error, found.text)
    assert found.planned_bytes == found.forward_bytes > 0
    assert found.sent_bytes > max(found.forward_bytes, found.repartitioned_bytes)
    assert found.messages > 0
    assert 0 < found.kept_bytes < found.alone_kept_bytes


@needs_packages
def test_network_under_a_searched_plan_is_right() -> None:
    found = judge("monai/unet_3d", "2x1", "searched", LIMIT_S)
    assert found.verdict == "right", (found.what, found.error, found.text)
    assert found.layouts > 0
    assert found.planned_bytes == found.forward_bytes > 0


@needs_packages
def test_gradient_that_is_a_thousandth_larger_on_one_rank_is_wrong() -> None:
    found = judge("monai/unet_3d", "2x2", "tampered", LIMIT_S)
    assert found.verdict == "wrong"
    assert found.error == pytest.approx(1e-3, rel=1e-3)
    assert found.what.startswith("gradient ")


class _Entries(nn.Module):
    """Two methods that are called from outside, and the forward, which calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def test_one_of_several_methods_is_planned_by_its_layouts() -> None:
    plan = gpudist.Plan()
    plan.layout("first", broadcast, at="input")
    plan.layout("last", [split(dim) for dim in range(3)], at="input")
    how = _Entries(), [1, 1, 2], (2, 4, 12)
    encoded = gpudist.plan_of(*how, method="encode")
    with pytest.raises(gpudist.ConversionError, match="not used: last"):
        gpudist.plan_of(*how, method="encode", plan=plan)
    edits = layouts_within(plan, encoded)
    assert edits.layouts == plan.layouts[:1]
    assert gpudist.plan_of(*how, method="encode", plan=edits).layouts == edits.layouts
    assert layouts_within(plan, gpudist.plan_of(*how)).layouts == plan.layouts


class _Fourier(nn.Module):
    """Convolution, with a halo, then a transform, for which a split dim is made whole."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, bias=False, dtype=torch.float64)
        self.register_buffer("shift", torch.ones(4, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.convolution(x), dim=2).real.exp() * self.shift


_FOURIER = Network("tiny/fourier", lambda size: _Fourier(), (8,), (7,))
_LEARNED = {"x"}
_CELL = 8


def _whole_input() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(2, 4, 8)}


def _numbers_of_steps(P_world: Partition) -> tuple[list[tuple[int, int, int]], int]:
    """Return messages, bytes and repartitioned bytes of two steps, and the bytes kept."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2])
    net, whole = gpudist.distribute(_Fourier(), P_x), _whole_input()
    given = {"x": own_block(whole["x"], P_x, None, False)}
    steps = [Sent(P_world), Sent(P_world)]
    for step in steps:
        record_of(_FOURIER, net, _Fourier(), given, whole, _LEARNED, step=step)
    kept = kept_bytes_of(_FOURIER, net, given, _LEARNED)
    return [(step.messages, step.nbytes, step.repartitioned_bytes) for step in steps], kept


def test_numbers_of_a_tiny_network_are_those_computed_by_hand() -> None:
    halo = 2 * 4 * 1 * _CELL
    # A worker has 4 of 8 columns of 8 rows, and gives away half of them.
    repartition = 8 * 4 // 2 * _CELL
    weight = 4 * 4 * 3 * _CELL
    # There and back; a sum over two workers sends as much as it adds.
    step = 5, 2 * halo + 2 * repartition + weight, 2 * repartition
    # The block with a ghost column and one of padding for the convolution, then a block each for
    # the transform and the exponential.
    kept = 2 * 4 * (4 + 2) * _CELL + 2 * 8 * 4 * _CELL
    found = run_distributed(_numbers_of_steps, 2, transport="loopback")
    assert found == [([step, step], kept)] * 2


def test_network_alone_keeps_what_was_computed_by_hand() -> None:
    # The inputs of the convolution and of the transform, and the exponential.
    assert kept_bytes_of(_FOURIER, _Fourier(), _whole_input(), _LEARNED) == 3 * 64 * _CELL


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("boxing, (split(2),) -> (split(0),)", True),
        ("adjoint of boxing, (split(2),) -> (broadcast,)", True),
        ("boxing, (split(0), split(2, sizes=[28, 21])) -> (split(0), split(0))", True),
        ("boxing, (split(0), split(1)) -> (split(0), split(1, sizes=[8, 6]))", True),
        ("boxing, (partial_sum, split(0)) -> (broadcast, broadcast)", True),
        ("boxing, (broadcast,) -> (broadcast,)", True),
        ("boxing, (split(0),) -> (broadcast, broadcast)", True),
        ("boxing, (partial_sum,) -> (broadcast,) + boxing, (split(1),) -> (split(0),)", True),
        ("boxing, (partial_sum,) -> (broadcast,)", False),
        ("adjoint of boxing, (partial_sum, split(0)) -> (split(1), split(0))", False),
        ("halo_exchange", False),
        ("adjoint of torch.roll", False),
        ("sum of 2 gradients (parameters 0 to 1) over 2 workers", False),
    ],
)
def test_a_boxing_that_does_more_than_a_sum_is_a_repartition(operator: str, expected: bool) -> None:
    assert repartitions(operator) == expected


def test_missing_numbers_are_infinitely_wrong() -> None:
    x = torch.ones(2)
    expected: Record = {"gradient": {"weight": x, "unused": None}}
    others: list[dict[str, torch.Tensor | None]] = [
        {"weight": x},
        {"weight": x, "unused": None, "more": x},
        {"weight": None, "unused": None},
        {"weight": x, "unused": x},
        {"weight": x[:1], "unused": None},
        {"weight": x.float() if x.dtype == torch.float64 else x.double(), "unused": None},
        {"weight": x * float("nan"), "unused": None},
    ]
    for gradients in others:
        assert max(differences(expected, {"gradient": gradients}))[0] == float("inf"), gradients
    assert max(differences(expected, expected))[0] == 0


def test_rounding_of_a_gradient_that_is_zero_is_no_error() -> None:
    expected: Record = {"gradient": {"weight": torch.ones(2), "bias": torch.zeros(2)}}
    found: Record = {"gradient": {"weight": torch.ones(2), "bias": torch.full((2,), 1e-15)}}
    assert max(differences(expected, found))[0] == pytest.approx(1e-11)


def test_four_networks_may_be_refused_and_none_wrong() -> None:
    right = [Verdict(f"p/{i}", "3", verdict="right", error=0.0) for i in range(9)]
    refused = [Verdict(f"p/r{i}", "3", verdict="refused", text="why") for i in range(5)]
    wrong = Verdict("p/0", "2x1", verdict="wrong", error=1.0, what="gradient bias")
    assert passes([*right, *refused[:4]])
    assert not passes([*right, *refused])
    assert not passes([*right, wrong])
    assert not passes([*right, Verdict("p/0", "2x1", verdict="right", error=0.0, planned_bytes=8)])
    assert verdict_of([right[0], wrong]) == "wrong"
    assert "p/0 on 2x1: wrong, error 1.0e+00, gradient bias" in table([*right, wrong])


def _grid_of(name: str) -> str:
    return list(GRIDS)[DOZEN.index(name) % len(GRIDS)]
