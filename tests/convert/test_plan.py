"""A plan predicts without a world what the network does; its edits are followed."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from benchmarks.resnet import ResNet18
from gpudist import ConversionError, Plan, distribute, plan_of
from gpudist.sbp import broadcast
from gpudist.sbp.call_cache import without_cache
from gpudist.sbp.methods import METHODS
from gpudist.sbp.scope import PlanRow, Record
from gpudist.world.partition import Partition
from tests.convert.networks import NETWORKS, Classifier, LeNet5, UNet3d
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed


def test_plan_prints_as_a_table() -> None:
    lines = str(plan_of(LeNet5(), (1, 1, 2, 1), (4, 1, 28, 28))).splitlines()
    assert lines[0].split() == ["path", "function", "in", "out", "sent"]
    assert lines[1].split() == ["conv1", "conv2d", "2", "2", "896"]
    assert lines[2].split() == ["relu", "2", "2"]


TYPICAL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "lenet": (LeNet5, (1, 1, 2, 2), (4, 1, 28, 28)),
    "resnet": (partial(ResNet18, 4, 5), (1, 1, 2, 2), (2, 3, 64, 48)),
    "unet": (UNet3d, (1, 1, 1, 2, 2), (1, 1, 16, 16, 16)),
    "convnext": (Classifier, (1, 1, 3, 1), (3, 3, 18, 14)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (1, 4, 1),
        (2, 8, 8)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*are gathered")
@pytest.mark.parametrize("name", TYPICAL)
def test_a_table_fits_a_terminal(name: str) -> None:
    make, grid_shape, shape = TYPICAL[name]
    table = str(plan_of(make(), grid_shape, shape))
    widest = max(table.splitlines(), key=len)
    assert len(widest) <= 80, widest


class Calling(nn.Module):
    """Functions that torch makes of others."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.attention = nn.Flatten(), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = F.normalize(self.flat(x.unflatten(2, (2, 2))))
        x[:, 0] = 0
        return F.smooth_l1_loss(x.clone().unsqueeze(0).mul_(2), torch.zeros(1, 2, 12))


def test_plans_take_the_names_of_rows() -> None:
    call = partial(plan_of, Calling(), (2, 1, 1), (2, 3, 4))
    found = call()
    assert ["flat", "flatten"] in [line.split()[:2] for line in str(found).splitlines()]
    names = {(row.path, row.called or row.function.rpartition(".")[2]) for row in found.rows[:-1]}
    assert ("flat", "flatten") in names and len(names) > 8
    for path, name in names:
        edits = Plan()
        edits.layout(path, broadcast, function=name)
        call(plan=edits)


def test_plan_prints_by_rich() -> None:
    rich_console = pytest.importorskip("rich.console")
    written = io.StringIO()
    layouts = "(split(0), broadcast)", "(partial_sum,)"
    row = PlanRow("fc", "torch.nn.functional.linear", *layouts, 9, 1234, False, True)
    rich_console.Console(file=written, width=100).print(Plan([row]))
    text = written.getvalue()
    assert all(word in text for word in ("linear", "0,copy", "sum", "1,234", "everywhere"))


def test_plan_takes_shapes() -> None:
    with pytest.raises(
        ConversionError, match=r"plan_of needs the global shapes .* plan_of\(network, P_x"
    ):
        plan_of(LeNet5(), (1, 1, 2, 1))
    with pytest.raises(ConversionError, match=r"ranks \[2\] are not on a grid"):
        plan_of(LeNet5(), (1, 1, 2, 1), (4, 1, 28, 28), ranks=2)
    with pytest.raises(ConversionError, match="cannot be planned for these inputs"):
        plan_of(LeNet5(), (1, 1, 2, 1), (4, 2, 28, 28))


def test_plan_of_many_ranks_without_a_world() -> None:
    """The first one has one neighbour an axis, those in the middle have two."""
    network, shape = UNet3d(), (1, 1, 32, 32, 32)
    corner = plan_of(network, (1, 1, 4, 4, 4), shape)
    inner = plan_of(network, (1, 1, 4, 4, 4), shape, ranks=21)
    both = plan_of(network, (1, 1, 4, 4, 4), shape, ranks=[0, 21])
    assert 0 < corner.sent_bytes < inner.sent_bytes
    assert both.sent_bytes == corner.sent_bytes + inner.sent_bytes
    assert [row.function for row in both.rows] == [row.function for row in corner.rows]
    assert {row.path for row in corner.of("down.0")} == {f"down.0.{i}" for i in range(6)}
    assert all(p.device.type == "cpu" for p in network.parameters())


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*are gathered")
@pytest.mark.parametrize("name", NETWORKS)
@distributed(ranks=3, transports=["loopback", "host"])
def test_rows_and_bytes_are_those_of_a_run(P_world: Partition, name: str) -> None:
    make, shape, shapes = NETWORKS[name]
    (grid_shape,) = [s for s in shapes if max(s) == 3]
    network = make()
    P_x = grid(P_world, grid_shape)
    (argument,) = inspect.signature(network.forward).parameters
    # Without the shape, ranks would agree on it at every call.
    net: Any = distribute(network, P_x, inputs={argument: shape})
    block = own_block(random_like_all(shape, 1).float(), P_x, requires_grad=False)
    with torch.no_grad():
        net(block)
        record = net._gpudist_conversion.scope.record = Record(lambda: sent_bytes(P_world))
        with without_cache():
            net(block)
        net._gpudist_conversion.scope.record = None
        before = sent_bytes(P_world)
        net(block)
    counted = sent_bytes(P_world) - before
    assert P_world.rank is not None
    plan = plan_of(network, P_x, shape, ranks=P_world.rank)
    assert plan.rows == record.rows
    assert plan.sent_bytes == counted


@distributed(ranks=4, transports=["loopback", "host", "gloo"])
def test_bytes_of_a_block_that_a_cpu_convolves_in_place(P_world: Partition) -> None:
    """Messages of faces have the corners twice, and a GPU would copy this block."""
    shape, network = (1, 8, 384, 384), nn.Conv2d(8, 2, 3, padding=1)
    P_x = grid(P_world, [1, 1, 2, 2])
    net: Any = distribute(network, P_x, inputs={"input": shape})
    block = own_block(random_like_all(shape, 1).float(), P_x, requires_grad=False)
    with torch.no_grad():
        net(block)
        before = sent_bytes(P_world)
        net(block)
    assert P_world.rank is not None
    plan = plan_of(network, P_x, shape, ranks=P_world.rank)
    assert plan.sent_bytes == sent_bytes(P_world) - before


def sent_bytes(P_world: Partition) -> int:
    return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))


MOVES: dict[str, Callable[[Plan], None]] = {
    "batch in the middle": lambda plan: (
        plan.repartition("1", (3, 1, 1, 1)), plan.repartition("3", (1, 1, 2, 2)))[0],
    "one worker": lambda plan: plan.repartition("2", (1, 1, 1, 1)),
    "fewer": lambda plan: plan.repartition("1", (1, 1, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@pytest.mark.parametrize("case", MOVES)
@distributed(ranks=5, transports=["loopback"])
def test_moved_inputs(P_world: Partition, case: str, replicate: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)
        )

    assert_as_alone(make, grid(P_world, [1, 1, 2, 2]), [(3, 2, 7, 8)], MOVES[case],
        replicate_parameters=replicate)  # fmt: skip


CUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows and columns": ((1, 4, 1), (1, 1, 4)),
    "both": ((1, 2, 2), (2, 1, 2)),
    "fewer workers": ((1, 3, 1), (1, 2, 1)),
    "batch": ((4, 1, 1), (2, 2, 1)),
}


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@pytest.mark.parametrize("case", CUTS)
@distributed(ranks=4, transports=["loopback"])
def test_cut_weights(P_world: Partition, case: str, replicate: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5, bias=False))

    def edit(plan: Plan) -> None:
        for path, shape in zip("02", CUTS[case], strict=True):
            plan.split_weight(path, shape)

    P_x = grid(P_world, [4, 1])
    assert_as_alone(make, P_x, [(7, 6)], edit, replicate_parameters=replicate)


REFUSED: dict[str, tuple[Callable[[Plan], None], str]] = {
    "unknown": (
        lambda p: p.repartition("head", (2, 1)),
        r"has no modules \['head'\]",
    ),
    "unknown weight": (lambda p: p.split_weight("head", (1, 2, 1)), r"has no modules \['head'\]"),
    "no linear layer": (
        lambda p: p.split_weight("conv2", (1, 2, 1)),
        "conv2: .* a Conv2d and a grid",
    ),
    "too few axes": (
        lambda p: p.split_weight("fc2", (2, 1)),
        r"fc2: .* Linear and a grid \[2, 1\]",
    ),
    "too many workers": (lambda p: p.repartition("fc1", (3, 1)), "fc1: .* needs 3 workers"),
    "weight on too many": (lambda p: p.split_weight("fc2", (2, 2, 1)), "fc2: .* needs 4 workers"),
}


@pytest.mark.parametrize("case", REFUSED)
@distributed(ranks=2, transports=["loopback"])
def test_edits_that_are_refused(P_world: Partition, case: str) -> None:
    edit, message = REFUSED[case]
    plan = Plan()
    edit(plan)
    with pytest.raises(ConversionError, match=message):
        distribute(LeNet5(), grid(P_world, [1, 1, 2, 1]), plan)
    with pytest.raises(ConversionError, match=message):
        plan_of(LeNet5(), (1, 1, 2, 1), (4, 1, 28, 28), plan=plan)


@distributed(ranks=2, transports=["loopback"])
def test_edits_that_do_not_fit_the_input(P_world: Partition) -> None:
    plan = Plan()
    plan.repartition("conv2", (2, 1))
    net: Any = distribute(LeNet5(), grid(P_world, [1, 1, 2, 1]), plan)
    with pytest.raises(ConversionError, match=r"conv2, input: .* \[2, 1\], but the input"):
        net(torch.ones(4, 1, 14, 28))


class Asking(nn.Module):
    """A forward that asks for values of what it made itself."""

    steps: torch.Tensor

    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.register_buffer("steps", torch.arange(4))
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) if self.ask(self.steps) else x


def _written(steps: torch.Tensor) -> bool:
    mask = torch.ones(2, 3, device=steps.device)
    row = mask[1]
    row[1:] = 0
    return bool((mask.sum(1) == torch.tensor([3, 1], device=steps.device)).all())


def _spoiled(steps: torch.Tensor) -> bool:
    mask = torch.ones(2, 3, device=steps.device)
    mask[1].copy_(torch.rand(3, device=steps.device))
    return bool(mask.all())


KNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "buffer": lambda steps: steps[2] == 2,
    "range": lambda steps: torch.arange(5, device=steps.device).flip(0).cumsum(0)[-1].item() == 10,
    "written": _written,
    "moved": lambda steps: torch.full((2,), 3.0).to(steps.device).max() > 2,
    "several": lambda steps: steps.view(2, 2).max(0).values.tolist() == [2, 3],
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_what_a_forward_makes_are_known(name: str) -> None:
    plan = plan_of(Asking(KNOWN[name]), (1, 1, 2, 1), (1, 2, 8, 8))
    assert [row.function for row in plan.rows] == ["torch.nn.functional.conv2d"]


@pytest.mark.parametrize("ask", [_spoiled, lambda steps: torch.rand(1) < 2])
def test_values_that_are_drawn_are_not_known(ask: Callable[[torch.Tensor], Any]) -> None:
    place = rf"cannot be planned for these inputs: {__file__}, line \d+: it reads values"
    with pytest.raises(ConversionError, match=place):
        plan_of(Asking(ask), (1, 1, 2, 1), (1, 2, 8, 8))


class Masked(nn.Module):
    """Asks for values of a second input in blocks, and for finite ones of what it computed."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x.cumsum(1)
        if not torch.isfinite(y).all() or y.isnan().any():
            y = y.clamp(-1, 1).cumsum(1)
        if not mask.bool().all():
            y = (y * mask).cumsum(1)
        mask = mask.clone()
        mask[:, 1:] = 0
        return y.cumsum(1) if mask.sum() > len(x) else y


@distributed(ranks=2, transports=["host"])
@pytest.mark.parametrize("hidden", [0, 3])
def test_values_of_global_tensors_are_known(P_world: Partition, hidden: int) -> None:
    x, mask = torch.rand(2, 6), torch.ones(2, 6)
    mask[:, :hidden] = 0
    P_x = grid(P_world, [1, 2])
    net = distribute(Masked(), P_x)
    blocks = [own_block(each, P_x, requires_grad=False) for each in (x, mask)]
    counted = 0
    for _ in range(2):  # Ranks agree on shapes and on a seed at the first call.
        before = sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))
        net(*blocks)
        counted = sum(row.sent_bytes for row in gpudist.stats(P_world=P_world)) - before
    plan = plan_of(Masked(), P_x, (2, 6), mask, ranks=P_world.rank)
    assert plan.sent_bytes == counted
    assert [row.function for row in plan.rows].count("torch.Tensor.cumsum") == 1 + (hidden > 0)
    with pytest.raises(ConversionError, match="it reads values"):
        plan_of(Masked(), P_x, (2, 6), (2, 6))


def test_a_refusal_of_a_value_is_no_missing_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConversionError("refused by a test")

    monkeypatch.setitem(METHODS, torch.Tensor.__bool__, refuse)
    with pytest.raises(ConversionError, match="refused by a test"):
        plan_of(Masked(), (1, 2), (2, 6), torch.ones(2, 6))


class AnyArguments(nn.Conv2d):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_of_any_number_are_planned(by_name: bool) -> None:
    shape = (1, 2, 8, 6)
    net = AnyArguments(2, 3, 3, padding=1)
    given: Any = {"named": {"input": torch.empty(shape)}} if by_name else {}
    plan = plan_of(net, (1, 1, 2, 1), *([] if by_name else [shape]), **given)
    assert plan.outputs.shape == (1, 3, 8, 6)
    assert plan.sent_bytes == 2 * 6 * 4


class _WithoutAutocast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.roll(1, 2)


def test_forwards_that_disable_autocast_are_planned() -> None:
    init = torch.autocast.__init__
    plan = plan_of(_WithoutAutocast(), (1, 1, 2, 1), (1, 1, 4, 3))
    assert plan.sent_bytes == 12
    assert torch.autocast.__init__ is init


class _Writing(nn.BatchNorm2d):
    """Batch norm that also writes into another buffer, through it a view, and an argument."""

    seen: torch.Tensor
    first: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("first", self.seen[:1])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ids.add_(1)
        self.seen += 1
        assert self.first.item() == 1 and ids.tolist() == [1, 2, 3, 4]
        return super().forward(x) * ids.sum()


def test_planning_changes_neither_buffers_nor_inputs() -> None:
    net, ids = _Writing(), torch.arange(4)
    before = {name: x.clone() for name, x in net.state_dict().items()}
    plan_of(net, (1, 1, 2, 1), (2, 2, 4, 3), ids, ranks=(0, 1))
    assert torch.equal(ids, torch.arange(4))
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name]), name
