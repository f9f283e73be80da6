"""Workers that start with different parameters or buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.world.texts import gather_texts
from tests.pool import distributed

BUFFERS = {
    "zeros": torch.zeros(3, 5),
    "unknown": torch.tensor([1.0, float("nan")]),
    "float8": torch.ones(9).to(torch.float8_e4m3fn),
    "complex": torch.ones(2, dtype=torch.complex64),
    "flags": torch.ones(2, 3, dtype=torch.bool),
    "count": torch.tensor(3),
    "empty": torch.empty(0, 3),
}


class Tables(nn.Sequential):
    """Two layers whose cells are ordinal numbers, and buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        for i, parameter in enumerate(self.parameters()):
            cells = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.data.copy_((cells + i).view(parameter.shape))
        for name, x in BUFFERS.items():
            self.register_buffer(name, x.clone())


def change(network: nn.Module, name: str) -> None:
    """Change the last byte of a tensor: for float32, the sign and the exponent."""
    x = {**dict(network.named_parameters()), **dict(network.named_buffers())}[name]
    x.detach().view(-1).view(torch.uint8)[-1] ^= 0x80 if x.is_floating_point() else 1


def rows(P_world: Any) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + P_world.rank


def message(P_world: Any, net: Any, x: torch.Tensor) -> str:
    """Return the text of the error of a call, which must be the same on all ranks."""
    with pytest.raises(gpudist.PlanMismatch) as caught:
        net(x)
    texts = gather_texts(P_world, str(caught.value).encode())
    assert len(set(texts)) == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ["0.bias", "zeros", "float8", "complex", "flags", "count"])
@distributed(ranks=3)
def test_difference_raises_on_every_rank(P_world: Any, name: str) -> None:
    network = Tables()
    if P_world.rank == 2:
        change(network, name)
    net = gpudist.distribute(network, P_world.grid(3, 1))
    for _ in range(2):
        text = message(P_world, net, rows(P_world))
        assert f"{name!r}" in text and "of rank 2 differs from that of rank 0" in text
        assert "1 of 10 tensors differ, on ranks [2]" in text
        assert "broadcast_parameters=True" in text
        assert ("local_buffers" in text) == (name in BUFFERS)
    net.load_state_dict(Tables().state_dict())
    assert net(rows(P_world)).shape == (6, 3)


@distributed(ranks=2)
def test_first_difference_is_named(P_world: Any) -> None:
    network = Tables()
    if P_world.rank == 1:
        for name in ("count", "1.weight", "0.weight"):
            change(network, name)
    text = message(P_world, gpudist.distribute(network, P_world.grid(2, 1)), rows(P_world))
    assert "parameter '0.weight' (float32 [3, 3])" in text and "3 of 10" in text


@distributed(ranks=2)
def test_other_dtype_or_missing_tensor(P_world: Any) -> None:
    network: Any = Tables()
    other: Any = Tables()
    if P_world.rank == 1:
        network.count = network.count.int()
        del other.empty
    net = gpudist.distribute(copy.deepcopy(network), P_world.grid(2, 1))
    text = message(P_world, net, rows(P_world))
    assert "rank 1 has buffer 'count' (int32 []), but rank 0 has buffer 'count' (int64 [])" in text
    text = message(P_world, gpudist.distribute(other, net.P_x), rows(P_world))
    assert "rank 1 has no tensor, but rank 0 has buffer 'empty'" in text
    with pytest.raises(gpudist.PlanMismatch, match=r"'count' .*build the same network"):
        gpudist.distribute(network, net.P_x, broadcast_parameters=True)


@distributed(ranks=3)
def test_ranks_outside_raise_too(P_world: Any) -> None:
    P_x = P_world.create_partition_inclusive([1, 2]).create_cartesian_topology_partition([2, 1])
    network = Tables()
    change(network, "0.weight") if P_world.rank == 2 else None
    x = rows(P_world) if P_x.active else torch.empty(0)
    assert "of rank 2 differs from that of rank 1" in message(
        P_world, gpudist.distribute(network, P_x), x
    )
    # Ranks without a part in the network may hold anything.
    other = Tables()
    change(other, "0.weight") if P_world.rank == 0 else None
    assert gpudist.distribute(other, P_x)(x).shape == (4, 3)


@distributed(ranks=4)
def test_only_workers_of_one_network_are_compared(P_world: Any) -> None:
    half = P_world.rank // 2
    members = P_world.create_partition_inclusive([2 * half, 2 * half + 1])
    P_x = members.create_cartesian_topology_partition([2, 1])
    network = Tables() if half else nn.Linear(3, 3)
    nn.init.constant_(next(network.parameters()), float(half))
    assert gpudist.distribute(copy.deepcopy(network), P_x)(rows(P_world)).shape == (4, 3)
    change(network, "zeros") if P_world.rank == 3 else None
    assert "'zeros'" in message(P_world, gpudist.distribute(network, P_x), rows(P_world))


@distributed(ranks=2)
def test_owned_and_split_parameters_are_not_compared(P_world: Any) -> None:
    network, P_x = Tables(), P_world.grid(2, 1)
    if P_world.rank == 1:
        change(network, "1.weight")
    owned = gpudist.distribute(copy.deepcopy(network), P_x, replicate_parameters=False)
    assert owned(rows(P_world)).shape == (4, 3)
    plan = gpudist.Plan()
    plan.split_weight("1", (1, 2, 1))
    assert gpudist.distribute(network, P_x, plan)(rows(P_world)).shape == (4, 3)


@distributed(ranks=2)
def test_later_calls_compare_nothing(P_world: Any) -> None:
    net = gpudist.distribute(Tables(), P_world.grid(2, 1))
    net(rows(P_world))
    change(net, "zeros") if P_world.rank == 1 else None
    net(rows(P_world))


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=3)
def test_broadcast_from_the_first_worker(P_world: Any, replicate: bool) -> None:
    P_x = P_world.create_partition_inclusive([2, 1]).create_cartesian_topology_partition([2, 1])
    network = Tables()
    if P_world.rank != 2:
        for name in (*dict(network.named_parameters()), *BUFFERS):
            change(network, name) if name != "empty" else None
    before = {name: x.clone() for name, x in network.state_dict().items()}
    net = gpudist.distribute(
        network,
        P_x,
        broadcast_parameters=True,
        replicate_parameters=replicate,
        local_buffers=["count"],
    )
    net(rows(P_world) if P_x.active else torch.empty(0))
    expected = Tables().state_dict() if P_x.active else before
    own = net.state_dict() if replicate else dict(net.named_buffers())
    for name, x in own.items():
        wanted = before[name] if name == "count" else expected[name]
        assert torch.equal(x.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), name


@distributed(ranks=2)
def test_local_buffers_may_differ(P_world: Any) -> None:
    network, P_x = Tables(), P_world.grid(2, 1)
    change(network, "count") if P_world.rank == 1 else None
    net = gpudist.distribute(copy.deepcopy(network), P_x, local_buffers=["count"])
    assert net(rows(P_world)).shape == (4, 3)
    with pytest.raises(gpudist.ConversionError, match=r"names \['counts'\], but .*'count'"):
        gpudist.distribute(network, P_x, local_buffers=["counts"])


@distributed(ranks=2)
def test_training_continues_like_the_first_worker(P_world: Any) -> None:
    network = Tables()
    if P_world.rank == 1:
        change(network, "0.weight")
    net = gpudist.distribute(network, P_world.grid(2, 1), broadcast_parameters=True)
    alone, x = Tables(), torch.arange(12.0).view(4, 3)
    net(x[2 * P_world.rank :][:2]).square().sum().backward()
    alone(x).square().sum().backward()
    for own, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad)
