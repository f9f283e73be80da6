"""Workers that give a network different values, or modules of other modes and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.transport.base import Transport
from gpudist.world import runtime
from tests.pool import distributed
from tests.transport.worlds import outcomes


class Net(nn.Module):
    """A network whose functions take numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(2, 4)
        self.norm = nn.BatchNorm2d(4)
        self.drop, self.act, self.pool = nn.Dropout(0.5), nn.LeakyReLU(0.1), nn.AvgPool2d(1)
        self.factor, self.power, self.top, self.shift, self.dim = 1.5, 2, 9.0, 1, 1
        self.function, self.doubles, self.dtype = torch.sin, False, torch.float32

    def forward(
        self, x: Any, t: torch.Tensor, labels: Any = None, k: float = 1.0, flag: bool = False
    ) -> Any:
        y = self.conv(x) * k + self.time(t)[:, :, None, None]
        y = self.act(self.drop(self.norm(y))) * self.factor
        y = (y**self.power).clamp(max=self.top).roll(self.shift, 1).softmax(self.dim)
        if self.doubles or flag:
            y = y * 2
        if labels is not None:
            y = y * labels["y"][:, None, None, None]
        return self.function(self.pool(y)).to(self.dtype)


class Job:
    """Two converted networks of a rank, and the arguments of its next call."""

    def __init__(self, P_world: Any) -> None:
        torch.manual_seed(0)
        self.P_world, P_x = P_world, P_world.grid(1, 1, P_world.size, 1)
        self.net, self.other = (gpudist.distribute(Net(), P_x) for _ in range(2))
        self.x = gpudist.scatter(torch.randn(2, 1, 8, 6), P_x)
        self.t = torch.ones(2, 2)
        self.labels: Any = {"y": torch.tensor([1, 2])}
        self.options: dict[str, Any] = {}
        for net in (self.net, self.other):
            net.train()
            self.call(net)

    def call(self, net: Any) -> Any:
        return net(self.x, self.t, labels=self.labels, **self.options).full_tensor()


def swap(job: Job) -> None:
    job.net, job.other = job.other, job.net


# What one rank changes, and what GPUDIST_CHECK=1 says of it.
CHANGES: dict[str, tuple[Callable[[Job], object], str]] = {
    "tensor": (lambda job: job.t.mul_(2), r"t=torch.float32 \[2, 2\] \[\[2.0"),
    "new_tensor": (lambda job: setattr(job, "t", torch.zeros(2, 2)), "t=torch.float32"),
    "indices": (lambda job: job.labels["y"].add_(1), r"labels=torch.int64 \[2\] \[2, 3\]"),
    "dtype": (lambda job: job.labels.update(y=job.labels["y"].int()), "labels=torch.int32"),
    "number": (lambda job: job.options.update(k=0.5), "k=0.5"),
    "flag": (lambda job: job.options.update(flag=True), "flag=True"),
    "mode": (lambda job: job.net.drop.eval(), "dropout"),
    "mode_of_norm": (lambda job: job.net.norm.eval(), "disagree about the operation"),
    "rate": (lambda job: setattr(job.net.drop, "p", 0.25), "0.25"),
    "eps": (lambda job: setattr(job.net.norm, "eps", 0.1), "batch_norm.*0.1"),
    "momentum": (lambda job: setattr(job.net.norm, "momentum", 0.7), "batch_norm.*0.7"),
    "slope": (lambda job: setattr(job.net.act, "negative_slope", 0.3), "0.3"),
    "factor": (lambda job: setattr(job.net, "factor", 1.25), "1.25"),
    "power": (lambda job: setattr(job.net, "power", 3), "pow"),
    "bound": (lambda job: setattr(job.net, "top", 8.0), "8.0"),
    "shift": (lambda job: setattr(job.net, "shift", 2), "roll"),
    "dim": (lambda job: setattr(job.net, "dim", -1), "softmax"),
    "function": (lambda job: setattr(job.net, "function", torch.cos), "cos"),
    "extra": (lambda job: setattr(job.net, "doubles", True), "mul"),
    "cast": (lambda job: setattr(job.net, "dtype", torch.float64), "float64"),
    "order": (swap, "of rank 1 differs from that of rank 0"),
}  # fmt: skip
# Read on a device: compared under GPUDIST_CHECK=1 alone.
LARGE = {
    "weights": (lambda job: job.net.time.weight.data.mul_(2), "'time.weight'"),
    "large": (lambda job: job.t.mul_(2), r"t=torch.float32 \[40, 2\] with digest"),
}


def change_on_one(P_world: Any, name: str, checks: bool) -> None:
    P_world.wire.compares_every_call = checks
    job = Job(P_world)
    if name == "large":
        job.t, job.labels = torch.ones(40, 2), None
        job.x = job.x[:1].expand(40, 1, *job.x.shape[2:]).contiguous()
    if P_world.rank == 1:
        {**CHANGES, **LARGE}[name][0](job)
    for _ in range(2):
        job.call(job.net)
        job.call(job.other)


class AsRank:
    """Call of a function on a rank of a transport; processes get it pickled."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        self.body, self.args = body, args

    def __call__(self, wire: Transport) -> None:
        runtime.run_as_rank(self.body, wire, self.args, {})


def errors_of(transport: str, name: str, checks: bool = False) -> list[Any]:
    ends = outcomes(transport, 2, AsRank(change_on_one, name, checks))
    return [end.error for end in ends]


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_raises_on_all_workers(name: str) -> None:
    for transport in ("loopback", "gloo", "host"):
        if transport == "loopback" or name in ("tensor", "factor"):
            errors = errors_of(transport, name)
            assert [type(error) for error in errors] == [gpudist.PlanMismatch] * 2, errors
            assert "ranks disagree about" in str(errors[0])


@pytest.mark.parametrize("name", [*CHANGES, *LARGE])
def test_checks_name_the_first_difference(name: str) -> None:
    text = {**CHANGES, **LARGE}[name][1]
    for transport in (
        ("loopback", "nccl") if name in ("tensor", "factor", "mode") else ("loopback",)
    ):
        for error in errors_of(transport, name, checks=True):
            with pytest.raises(gpudist.PlanMismatch, match=text):
                raise error


@distributed(ranks=4)
def test_rows_of_workers_have_other_data(P_world: Any) -> None:
    """Each row has a network of its own, numbers and tensors; gradients are summed over rows."""
    row = P_world.rank // 2
    P_row = P_world.create_partition_inclusive([2 * row, 2 * row + 1]).grid(1, 1, 2, 1)
    torch.manual_seed(0)
    net = gpudist.distribute(Net(), P_row)
    torch.manual_seed(P_world.rank)
    for step in range(3):
        net.train(step == row)
        x = torch.randn(2, 1, 4, 6)
        net(x, torch.full((2, 2), float(row)), k=row + 1.0).sum().backward()
        p: Any
        for p in net.parameters():
            p.grad = gpudist.all_sum_reduce(p.grad, P_world.grid(2, 2), [0], shape="dynamic")
    P_world.barrier()


@distributed(ranks=3)
def test_what_may_differ(P_world: Any) -> None:
    """Other weights before a broadcast, buffers, seeds, devices; a rank outside with anything."""
    P_x = P_world.create_partition_inclusive([0, 1]).grid(1, 1, 2, 1)
    torch.manual_seed(P_world.rank)
    network = Net().eval()
    network.norm.running_mean += P_world.rank
    net = gpudist.distribute(
        network, P_x, broadcast_parameters=True, local_buffers=("norm.running_mean",)
    )
    for step in range(3):
        x = torch.randn(2, 1, 4, 6) if P_x.active else torch.zeros(0)
        t = torch.full((2, 2), float(step)) if P_x.active else torch.randn(2, 2)
        if P_x.active or step == 0:
            y: Any = net(x, t, k=step if P_x.active else 5)
        if P_world.rank == 0:
            value: Any = F.relu(y.mean((0, 1)))[0]
            assert value.to_local().ndim == 1
    P_world.barrier()


@distributed(ranks=2, transports=("loopback",))
def test_copies_are_drawn_alike_or_not_at_all(P_world: Any) -> None:
    """Outside of networks, ranks with other seeds draw no copies, and blocks as they like."""
    placement = gpudist.placement("cpu", [0, 1])
    copies: Any = gpudist.to_global(torch.ones(2, 3), placement, gpudist.sbp.broadcast)
    blocks = gpudist.to_global(torch.ones(2, 3), placement, gpudist.sbp.split(0))
    functions = torch.rand_like, torch.bernoulli, F.gumbel_softmax, nn.init.uniform_
    for function in (*functions, torch.Tensor.normal_):
        torch.manual_seed(0)
        drawn: Any = function(copies)
        values = drawn.to_local().flatten().tolist()
        assert P_world.allgather_data(values) == [values] * 2
        torch.manual_seed(P_world.rank)
        function(blocks)
        with pytest.raises(gpudist.PlanMismatch, match=r"call torch\.manual_seed"):
            function(copies)
        assert F.dropout(copies).shape == (2, 3)


@pytest.mark.parametrize("transport", ["loopback", "gloo", "host"])
def test_other_roots_raise_at_once(transport: str) -> None:
    for name in ("gather", "scatter", "broadcast"):
        for end in outcomes(transport, 3, AsRank(call_with_root, name), timeout_s=60.0):
            assert type(end.error) is gpudist.PlanMismatch, end


def call_with_root(P_world: Any, name: str) -> None:
    P_x = P_world.grid(3)
    for roots in ((0, 0, 0), (2, 2, 2), (0, 1, 1)):
        root = roots[P_world.rank]
        x: Any = torch.ones(3)
        if name == "broadcast":
            P_root = P_x.create_partition_inclusive([root]).grid(1)
            gpudist.broadcast(x if P_root.active else x[:0], P_root, P_x)
        else:
            getattr(gpudist, name)(x, P_x, root)
    P_world.barrier()
