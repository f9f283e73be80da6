"""A converted network that knows the shape of the whole input takes blocks of it alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.errors import ShapeError
from gpudist.partition import CartesianPartition, Partition
from tests.nn.compare import grid, own_block
from tests.ops.dense import operations
from tests.pool import distributed

WHOLE = (2, 1, 7, 6)


class Two(nn.Module):
    """Two inputs, of which one is given by name, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * scale * mask


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU())


def image(batch: int = 2) -> torch.Tensor:
    return torch.arange(42.0 * batch).reshape(batch, *WHOLE[1:])


def in_four(P_world: Partition) -> CartesianPartition:
    return grid(P_world, (1, 1, 2, 2), range(4))


@pytest.mark.parametrize("replicated", [True, False])
@distributed(ranks=5)
def test_scatter_forgotten_is_refused_on_every_rank(P_world: Partition, replicated: bool) -> None:
    """Before any message; also on the rank outside the partition, and by a copy of the network."""
    P_x = in_four(P_world)
    net = gpudist.distribute(network(), P_x, replicate_parameters=replicated, global_shape=WHOLE)
    before = operations(P_world)
    words = (
        r"input 'input', rank . .*got \[2, 1, 7, 6\], the whole tensor; .* of the global shape "
        r"\[2, 1, 7, 6\] is \[2, 1, [34], 3\]: was scatter forgotten\? call gpudist\.scatter"
        if P_x.active
        else r"input 'input': got \[2, 1, 7, 6\] on a rank outside of the partition"
    )
    for each in (net, copy.deepcopy(net)):
        with pytest.raises(ShapeError, match=words):
            each(image())
    # But for the one that is counted by counting.
    assert operations(P_world) == before + 1


@distributed(ranks=4)
def test_one_wrong_block_is_told_to_all(P_world: Partition) -> None:
    P_x = in_four(P_world)
    net = gpudist.distribute(network(), P_x, global_shape=WHOLE)
    words = r"rank 2 .*got \[2, 1, 4, 3\], another block; .* is \[2, 1, 3, 3\]: give it the bal"
    with pytest.raises(ShapeError, match=words):
        net(torch.ones(2, 1, 4, 3) if P_world.rank == 2 else own_block(image(), P_x))
        P_world.barrier()


@distributed(ranks=4, transports=("loopback", "host"))
def test_one_wrong_number_of_dims_is_told_to_all(P_world: Partition) -> None:
    P_x = in_four(P_world)
    net = gpudist.distribute(network(), P_x, global_shape=WHOLE)
    x = own_block(image(), P_x)
    with pytest.raises(ShapeError, match=r"rank 1 .*got \[1, 4, 3\], another block"):
        net(x[0] if P_world.rank == 1 else x)
        P_world.barrier()


@pytest.mark.parametrize("replicated", [True, False])
@distributed(ranks=5)
def test_blocks_of_the_whole_are_taken(P_world: Partition, replicated: bool) -> None:
    """Any batch passes, since it is not cut; names stay, and `sequential` drops the check."""
    P_x, alone = in_four(P_world), network()
    net = gpudist.distribute(alone, P_x, replicate_parameters=replicated, global_shape=list(WHOLE))
    for batch in (2, 3, 1):
        found = gpudist.gather(net(gpudist.scatter(image(batch), P_x)), P_x, root=0)
        if P_world.rank == 0:
            torch.testing.assert_close(found, alone(image(batch)))
    assert list(net.state_dict()) == list(alone.state_dict())
    back = gpudist.sequential(net)
    if back is not None:
        torch.testing.assert_close(back(image()), alone(image()))


@distributed(ranks=4, transports=("loopback", "host"))
def test_batch_that_is_cut_is_looked_at(P_world: Partition) -> None:
    P_x = grid(P_world, (4, 1, 1, 1), range(4))
    net = gpudist.distribute(network(), P_x, global_shape=(8, 1, 7, 6))
    with pytest.raises(ShapeError, match=r"got \[8, 1, 7, 6\], the whole tensor; .* is \[2, 1,"):
        net(image(8))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("forgotten", ["", "x", "mask"])
@distributed(ranks=4, transports=("loopback", "host"))
def test_every_input_has_a_shape(P_world: Partition, named: bool, forgotten: str) -> None:
    """In the order of the inputs or by name, given by position or by name."""
    P_x, mask = in_four(P_world), (1, *WHOLE[1:])
    shapes: Any = {"mask": mask, "x": WHOLE} if named else [WHOLE, mask]
    net = gpudist.distribute(Two(), P_x, global_shape=shapes)
    wholes = {"x": image(), "mask": torch.ones(mask)}
    given = {
        name: whole if name == forgotten else own_block(whole, P_x)
        for name, whole in wholes.items()
    }
    if not forgotten:
        assert torch.equal(net(given["x"], mask=given["mask"]), net(**given))
        return
    with pytest.raises(ShapeError, match=rf"input '{forgotten}', rank .*the whole tensor"):
        net(**given) if named else net(given["x"], mask=given["mask"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (WHOLE, r"global_shape is \(2, 1, 7, 6\), but the inputs are \['x', 'mask'\]; give one"),
        ([WHOLE], r"but the inputs are \['x', 'mask'\]"),
        ({"x": WHOLE, "y": WHOLE}, r"but the inputs are \['x', 'mask'\]"),
        ([WHOLE, WHOLE[1:]], r"shape \[1, 7, 6\] of 'mask' must have 4 extents, one for each axis"),
        ([WHOLE, (2, 1, -7, 6)], r"shape \[2, 1, -7, 6\] of 'mask' must have 4 extents"),
    ],
)
@distributed(ranks=4, transports=("loopback",))
def test_other_shapes_are_refused_by_the_conversion(
    P_world: Partition, given: Any, words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        gpudist.distribute(Two(), in_four(P_world), global_shape=given)
