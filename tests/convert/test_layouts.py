"""Layouts that a plan prescribes: of modules, of functions between them, on grids factored anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist import ConversionError, Plan, PlanMismatch, distribute, plan_of, sequential, stats
from gpudist.convert.converted import conversion_of
from gpudist.convert.network_plan import cells_of
from gpudist.sbp import broadcast, split
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.hazards.plans import judged
from tests.hazards.random_modules import draw
from tests.nn.compare import grid, own_block
from tests.pool import distributed

RANDOM = 30


class Skipping(nn.Module):
    """A U-Net of two levels, with a batch norm, work in place, and a block called twice."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.bottom = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.up = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.down(x), inplace=True)
        b = F.max_pool2d(a, 2)
        for _ in range(2):
            if self.recomputes:
                made: Any = checkpoint(self.bottom, b, use_reentrant=False)
                b = made + b
            else:
                b = self.bottom(b) + b
        return self.up(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))


def whole_bottom(plan: Plan) -> None:
    """Split samples over two workers, and give each pair of workers the whole of theirs."""
    plan.layout("bottom", [split(0), broadcast], at="input", call=0, grid=[2, 2])
    plan.layout("", [split(0), split(2)], function="interpolate", at="input", grid=[2, 2])


def split_channels(plan: Plan) -> None:
    """Split weights over channels, and space over others, with a pin between them."""
    plan.split_weight("bottom.0", (1, 2, 1, 1, 2))
    plan.split_weight("up", (1, 1, 2, 2, 1))
    plan.layout("bottom", [split(1), split(3)], call=1, grid=[2, 2])


PLANS: dict[str, Callable[[Plan], None]] = {
    "whole bottom": whole_bottom,
    "whole everywhere": lambda plan: plan.layout("bottom", broadcast, at="input"),
    "in place afterwards": lambda plan: plan.layout("down", [split(0), split(3)], grid=[2, 2]),
    "channels": lambda plan: plan.layout("", split(1), function="cat", at="output", grid=[4]),
    "second call": lambda plan: plan.layout("bottom", split(3), call=1, grid=[4]),
    "fewer workers": lambda plan: plan.layout("up", split(0), at="input", grid=[2]),
    "uneven": lambda plan: plan.layout("up", split(2, [5, 0, 2, 5]), grid=[4]),
    "split channels": split_channels,
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("case", PLANS)
@distributed(ranks=4, transports=["loopback"])
def test_computes_what_the_network_alone_computes(
    P_world: Partition, case: str, recomputes: bool
) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    shapes = [(3, 2, 12, 8)]
    assert_as_alone(lambda: Skipping(recomputes), P_x, shapes, PLANS[case])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(RANDOM))
def test_random_modules_under_random_plans(number: int) -> None:
    case = draw(5, number)
    verdict, _ = judged(case)
    assert verdict.how in ("right", "refused"), f"{verdict}\n{case}"


def _pool_to_itself(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, 1, 1)


class Stretch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _pool_to_itself(self.bottom(x))


def test_nothing_is_sent_among_copies() -> None:
    """Entering a stretch of copies costs an all-gather; leaving it, nothing."""
    plan = Plan()
    plan.layout("bottom", broadcast, at="input")
    plan.layout("bottom", [broadcast, broadcast, split(2), broadcast])
    rows = plan_of(Stretch(), (1, 1, 4, 1), (1, 2, 16, 8), plan=plan).rows
    sent = {(row.path, row.function.rpartition(".")[2]): row.sent_bytes for row in rows}
    block = 2 * 4 * 8 * 4
    within = ("conv2d", "group_norm", "relu")
    assert [sent[f"bottom.{i}", name] for i, name in enumerate(within)] == [0, 0, 0]
    entering, leaving = [row.sent_bytes for row in rows if row.function == "to_global"]
    assert entering == 3 * block and leaving == 0


@distributed(ranks=[2, 4], transports=("loopback",))
def test_a_step_sends_nothing_among_copies(P_world: Partition) -> None:
    """An all-gather enters a stretch of copies, and its adjoint leaves it in backward."""
    plan = Plan()
    plan.layout("bottom", broadcast, at="input")
    plan.layout("bottom", [broadcast, broadcast, split(2), broadcast])
    P_x = grid(P_world, [1, 1, P_world.size, 1])
    network: Any = distribute(Stretch(), P_x, plan)
    sent: dict[str, list[tuple[str, int, int]]] = {}

    def note(when: str) -> None:
        rows = stats(P_world=P_world)
        sent[when] = [(row.operator, row.messages, row.sent_bytes) for row in rows]

    def enter(module: nn.Module, args: Any) -> None:
        note("enter")
        args[0].register_hook(lambda _: note("leave backward"))

    def leave(module: nn.Module, args: Any, y: torch.Tensor) -> None:
        note("leave")
        y.register_hook(lambda _: note("enter backward"))

    network.bottom[0].register_forward_pre_hook(enter)
    network.bottom[2].register_forward_hook(leave)
    x = own_block(torch.randn(1, 2, 16, 8), P_x).requires_grad_()
    network(x).to_local().sum().backward()
    note("end")
    assert sent["enter"] == sent["leave"]
    assert sent["enter backward"] == sent["leave backward"]
    boxing = [(name, nbytes) for name, _, nbytes in sent["end"] if "boxing" in name]
    gathered = "boxing, (split(2),) -> (broadcast,)"
    block = (P_world.size - 1) * x.numel() * 4
    assert sorted(boxing) == [(f"adjoint of {gathered}", block), (gathered, block)]


def test_saved_plans_are_equal(tmp_path: Path) -> None:
    plan = Plan()
    whole_bottom(plan)
    plan.layout("up", split(2, [5, 7]), grid=[2])
    plan.repartition("down", (2, 1, 1, 1))
    plan.split_weight("head", (1, 2, 1))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert str(plan).splitlines()[0] == (
        "layout of bottom, call 0, input: (split(0), broadcast) on [2, 2]"
    )
    for text, reason in (("{}", "is not a plan"), ('{"gpudist plan": 9}', "version 9")):
        with pytest.raises(ConversionError, match=reason):
            Plan.from_text(text)
    row = {"path": "up", "sbp": ["broadcast"], "grid": None}
    facts: dict[str, Any] = {"gpudist plan": 1, "weights": {}, "layouts": [row]}
    assert Plan.from_text(json.dumps(facts)).layouts
    wrong: list[Any] = [{"function": ["cat"]}, {"grid": [[2]]}, {"path": 3}, {"call": "0"}]
    texts = [json.dumps(facts | {"layouts": [row | part]}) for part in wrong]
    for text in (*texts, json.dumps(facts | {"weights": {"up": [[2]]}}), "[" * 100000):
        with pytest.raises(ConversionError, match="is not a plan"):
            Plan.from_text(text)
    with pytest.raises(ConversionError, match="cannot be read"):
        Plan.load(tmp_path / "other.json")


REFUSED: dict[str, tuple[Callable[[Plan], None], str]] = {
    "no such module": (lambda plan: plan.layout("head", broadcast), r"no modules \['head'\]"),
    "axes": (
        lambda plan: plan.layout("up", [split(0), broadcast]),
        r"up, output: .* \[1, 1, 2, 1\] has 4 axes; give one attribute for each",
    ),
    "sizes": (
        lambda plan: plan.layout("up", split(2, [3, 4, 5]), grid=[2]),
        "has 3 sizes, but axis 0 has 2 workers",
    ),
    "function": (
        lambda plan: plan.layout("", broadcast, function="catt"),
        "torch has no function 'catt'; the function column",
    ),
    "workers": (lambda plan: plan.layout("up", split(0), grid=[3]), "needs 3 workers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_that_are_refused(case: str) -> None:
    edit, message = REFUSED[case]
    plan = Plan()
    edit(plan)
    with pytest.raises(ConversionError, match=message):
        plan_of(Skipping(), (1, 1, 2, 1), (1, 2, 12, 8), plan=plan)


def test_pins_need_the_dims_of_the_tensor() -> None:
    plan = Plan()
    plan.layout("", split(4), function="cat", grid=[2])
    with pytest.raises(ConversionError, match=r"cat, output: .* it has no dim 4"):
        plan_of(Skipping(), (1, 1, 2, 1), (1, 2, 12, 8), plan=plan)
    with pytest.raises(ConversionError, match="sbp has 1 attributes, but the grid"):
        plan.layout("up", [split(0)], grid=[2, 2])


@distributed(ranks=2, transports=["loopback"])
def test_ranks_must_follow_equal_plans(P_world: Partition) -> None:
    plan = Plan()
    plan.layout("up", split(P_world.rank or 0), grid=[2])
    P_x = grid(P_world, [1, 1, 2, 1])
    net: Any = distribute(Skipping(), P_x, plan)
    with pytest.raises(PlanMismatch, match="pass equal plans on every worker"):
        net(own_block(torch.ones(1, 2, 12, 8), P_x).float())


@distributed(ranks=2, transports=["loopback"])
def test_the_sequential_network_has_no_pins(P_world: Partition) -> None:
    plan = Plan()
    plan.layout("up", split(0), grid=[2])
    net = sequential(distribute(Skipping(), grid(P_world, [1, 1, 2, 1]), plan))
    assert net is not None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


class Joining(nn.Module):
    """Functions of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        joined = torch.cat([x, y], 1)
        total = x + y
        chosen = torch.where(x > 0, x, y)
        scaled = x * self.scale
        return torch.cat([joined, total, chosen, scaled], 1)


@pytest.mark.parametrize(
    ("sbp", "workers", "printed"),
    [
        ((broadcast,), [4], "copy"),
        ((split(3),), [4], "3"),
        ((split(0), broadcast), [2, 2], "0,copy"),
        ((split(2, [1, 9, 2, 4]),), [4], "2"),
    ],
)
def test_all_tensors_of_a_function_follow_a_pinned_input(
    sbp: tuple[Any, ...], workers: list[int], printed: str
) -> None:
    plan, names = Plan(), ("cat", "add", "where", "mul")
    for name in names:
        plan.layout("", sbp, function=name, at="input", grid=workers, call=0)
    rows = plan_of(Joining(), (1, 1, 4, 1), (2, 3, 16, 8), plan=plan).rows
    found = {cells[1]: cells[2:4] for cells in map(cells_of, rows[:-1]) if cells[1] in names}
    assert found.keys() == set(names)
    for taken, made in found.values():
        assert made == printed
        assert {one.split("->")[-1] for one in taken.split()} == {printed}


@distributed(ranks=4, transports=["loopback"])
def test_functions_of_several_tensors_compute_what_they_compute_alone(P_world: Partition) -> None:
    def edit(plan: Plan) -> None:
        for name, sbp in (("cat", split(3)), ("add", broadcast), ("where", split(0))):
            plan.layout("", sbp, function=name, at="input", grid=[4])

    assert_as_alone(Joining, grid(P_world, [1, 1, 2, 2]), [(3, 3, 8, 9)], edit)


class AddedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        y.add_(x.exp())
        return y


@pytest.mark.parametrize("workers", [[4], [3], [2, 2]])
@distributed(ranks=4, transports=["loopback"])
def test_a_copy_is_changed_in_place_by_blocks(P_world: Partition, workers: list[int]) -> None:
    """The tensor that is changed keeps its workers, and those outside follow in backward."""

    def edit(plan: Plan) -> None:
        plan.layout("", (broadcast,) * len(workers), function="mul", grid=workers)

    assert_as_alone(AddedInPlace, grid(P_world, [1, 1, 2, 2]), [(2, 3, 8, 9)], edit)


class ChangedThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        y[0] += 1
        return y + x


@distributed(ranks=2, transports=["loopback"])
def test_a_view_of_a_changed_tensor_is_moved(P_world: Partition) -> None:
    def edit(plan: Plan) -> None:
        plan.layout("", split(3), function="mul", grid=[2])
        plan.layout("", broadcast, function="add_", grid=[2])

    assert_as_alone(ChangedThroughAView, grid(P_world, [1, 1, 2, 1]), [(2, 3, 8, 9)], edit)


class ReadAgain(nn.Module):
    """Work in place whose effect is read through the tensor that was passed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.act(y) + 2 * y


@pytest.mark.parametrize("is_layout", [True, False])
@distributed(ranks=2, transports=["loopback"])
def test_work_in_place_on_what_was_moved_reaches_the_original(
    P_world: Partition, is_layout: bool
) -> None:
    def edit(plan: Plan) -> None:
        if is_layout:
            plan.layout("act", split(3), at="input", grid=[2])
        else:
            plan.repartition("act", (1, 1, 1, 2))

    assert_as_alone(ReadAgain, grid(P_world, [1, 1, 2, 1]), [(1, 2, 6, 8)], edit)


class Collecting(nn.Module):
    """Writes blocks of all workers to a new tensor like one that the plan moves."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like = self.act(x)
        y = like.new_zeros(x.shape)
        y[:, :, ::2] = x[:, :, ::2].sin() * self.act.weight
        return y


@pytest.mark.parametrize("most", [1, 2])
@distributed(ranks=4, transports=["loopback"])
def test_a_new_tensor_on_fewer_workers_takes_blocks_of_all(P_world: Partition, most: int) -> None:
    def edit(plan: Plan) -> None:
        plan.layout("act", split(3), grid=[most])

    assert_as_alone(Collecting, grid(P_world, [1, 1, 3, 1]), [(1, 2, 6, 8)], edit)


class Looking(nn.Module):
    """Notes the layouts of what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = torch.cat([x, x.tanh()], 1)
        z: Any = torch.cat([y, y], 1)
        made: Any = torch.zeros_like(z)
        self.seen = [y.sbp, z.sbp, made.sbp]
        return z


@distributed(ranks=2, transports=["loopback"])
def test_functions_return_the_pinned_layouts_at_every_call(P_world: Partition) -> None:
    plan = Plan()
    plan.layout("", split(3), function="cat", call=1, grid=[2])
    plan.layout("", broadcast, function="zeros_like", grid=[2])
    net: Any = distribute(Looking(), grid(P_world, [1, 1, 2, 1]), plan)
    for _ in range(3):
        net(own_block(torch.ones(1, 2, 6, 4), net.P_x))
        assert net.seen == [(split(2),), (split(3),), (broadcast,)]


MISSED: dict[str, tuple[Callable[[Plan], None], str]] = {
    "call": (
        lambda plan: plan.layout("bottom", broadcast, call=2),
        r"bottom, call 2, output: .*: the last in a forward is call 1",
    ),
    "function of another module": (
        lambda plan: plan.layout("bottom", broadcast, function="cat"),
        r"bottom, cat, output: .*: cat is called by the network",
    ),
    "function": (
        lambda plan: plan.layout("", broadcast, function="bmm", at="input"),
        r"the network, bmm, input: .*: the forward does not call it",
    ),
}


@pytest.mark.parametrize("case", MISSED)
@distributed(ranks=1, transports=["loopback"])
def test_layouts_that_are_not_used_are_named(P_world: Partition, case: str) -> None:
    edit, message = MISSED[case]
    plan = Plan()
    edit(plan)
    with pytest.raises(ConversionError, match=message):
        plan_of(Skipping(), (1, 1, 2, 1), (1, 2, 12, 8), plan=plan)
    net = distribute(Skipping(), grid(P_world, [1, 1, 1, 1]), plan)
    with pytest.warns(UserWarning, match=message) as warned:
        for _ in range(2):
            net(torch.ones(1, 2, 12, 8))
    assert len(warned) == 1


class Twice(nn.Module):
    """Calls the function that its module calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


@distributed(ranks=2, transports=["loopback"])
def test_only_the_module_with_a_pinned_function_takes_the_long_path(P_world: Partition) -> None:
    plan = Plan()
    plan.layout("", broadcast, function="tanh", at="input")
    net: Any = distribute(Twice(), grid(P_world, [2, 1]), plan)
    pins: Any = conversion_of(net).scope.pins
    x = own_block(torch.ones(4, 6), net.P_x)
    net(x)
    around, names = pins.around, list[str]()

    def note(scope: Any, name: str, *call: Any) -> Any:
        names.append(name)
        return around(scope, name, *call)

    pins.around = note
    assert net(x).sbp == (broadcast,)
    assert names == ["tanh"]
