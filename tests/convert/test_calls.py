"""Inputs and outputs of a converted network: blocks and whole tensors in, global tensors out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist import ConversionError, ShapeError, distribute
from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.placement import Placement
from gpudist.world.partition import Partition
from tests.convert.networks import OneCell, Pyramid, Several
from tests.convert.training import assert_as_alone, assert_whole
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

BOTH = pytest.mark.parametrize("replicate", [True, False])
SHAPE = (2, 2, 9, 7)


@BOTH
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [1, 1, 3, 1]], ids=str)
@distributed(ranks=5, transports=["loopback"])
def test_block_at_several_resolutions(P_world: Partition, shape: Any, replicate: bool) -> None:
    for extent in (9, 14):
        net = assert_as_alone(
            Pyramid, grid(P_world, shape), [(2, 2, extent, extent)], replicate_parameters=replicate
        )
        assert net.block.norm.num_batches_tracked == 8


@BOTH
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [1, 1, 3, 1], [2, 1, 1, 2]], ids=str)
@distributed(ranks=5, transports=["loopback"])
def test_one_cell_beside_many(P_world: Partition, shape: Any, replicate: bool) -> None:
    assert_as_alone(OneCell, grid(P_world, shape), [(3, 2, 5, 7)], replicate_parameters=replicate)


@distributed(ranks=4, transports=["loopback"])
def test_blocks_that_are_not_balanced(P_world: Partition) -> None:
    """One image and two, where balanced blocks have two and one."""
    P_x = grid(P_world, [2, 1, 1, 2])
    assert P_x.index is not None
    torch.manual_seed(3)
    alone = OneCell().double()
    whole = random_like_all((3, 2, 5, 7), 1)
    images = slice(0, 1) if P_x.index[0] == 0 else slice(1, 3)
    columns = slice(0, 4) if P_x.index[3] == 0 else slice(4, 7)
    y = distribute(copy.deepcopy(alone), P_x)(whole[images, :, :, columns])
    assert_whole(y, alone(whole), "output")
    assert torch.equal(y.to_local().detach(), y.full_tensor()[images, :, :, columns].detach())


@BOTH
@distributed(ranks=4, transports=["loopback"])
def test_several_tensors(P_world: Partition, replicate: bool) -> None:
    """Tensors are passed by position and by name, and outputs are nested."""
    P_x = grid(P_world, [1, 1, 2, 2])
    for mask in ((3, 1, 6, 7), (3, 2, 6, 7)):
        shapes = [(3, 2, 6, 7), mask]
        net = assert_as_alone(Several, P_x, shapes, replicate_parameters=replicate)
        assert net.P_y == {"mixed": P_x, "rest": P_x}
        blocks = [own_block(random_like_all(shape, 1), P_x) for shape in shapes]
        by_name = net(mask=blocks[1], x=blocks[0])["mixed"].to_local()
        assert torch.equal(by_name, net(*blocks)["mixed"].to_local())


class _Weighted(nn.Module):
    """Takes an image, and anything that is multiplied with it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, by: Any = 1.0, *, shift: Any = 0.0) -> torch.Tensor:
        y = self.conv(x)
        return y * by + shift


def weighted(P_world: Partition, **options: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return the network alone, converted, an image and this worker's block of it."""
    torch.manual_seed(3)
    alone = _Weighted().double()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1]), **options)
    whole = random_like_all(SHAPE, 1)
    return alone, net, whole, own_block(whole, net.P_x)


@distributed(ranks=3)
def test_whole_tensors_beside_blocks(P_world: Partition) -> None:
    """Whole tensors have other numbers of dims than P_x; one rank takes no part."""
    alone, net, whole, block = weighted(P_world)
    by, shift = random_like_all((9, 7), 2).requires_grad_(), random_like_all((7,), 3)
    expected = alone(whole, by, shift=shift)
    expected.sum().backward()
    gradient, by.grad = by.grad, None
    found = net(block, by, shift=shift)
    assert_whole(found, expected, "output")
    found.sum().backward()
    if net.P_x.active:
        torch.testing.assert_close(by.grad, gradient)
    assert_whole(net(block, 2.0), alone(whole, 2.0), "output by a number")


@distributed(ranks=3)
def test_global_tensors_are_taken_as_they_lie(P_world: Partition) -> None:
    alone, net, whole, _ = weighted(P_world)
    placement = Placement.of(grid(P_world, [2]))
    for sbp in (split(2), split(0), broadcast):
        x = gpudist.to_global(whole, placement, broadcast).to_global(sbp=sbp)
        assert_whole(net(x), alone(whole), f"output of {sbp}")


class _Words(nn.Module):
    """Its masks have as many dims as its input."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).cumsum(1)


@pytest.mark.parametrize("kind", ["whole", "block", "dynamic", "shape"])
@distributed(ranks=3, transports=["loopback", "host"])
def test_inputs_decide(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 3])
    x, mask = random_like_all((2, 7), 1), random_like_all((2, 7), 2)
    given: Any = (2, 7) if kind == "shape" else kind
    net: Any = distribute(_Words(), P_x, inputs={"mask": given})
    for _ in range(2):
        y = net(own_block(x, P_x), mask if kind == "whole" else own_block(mask, P_x))
        assert_whole(y, (x * mask).cumsum(1), "output")


@pytest.mark.parametrize("shape", [[1, 1, 2, 1], [1, 1, 2, 2], [1, 1, 1, 1]], ids=str)
@distributed(ranks=5, transports=["loopback", "host"])
def test_input_that_the_network_splits(P_world: Partition, shape: Any) -> None:
    """Every rank passes the whole image; its gradient is whole, and no message cuts it."""
    torch.manual_seed(3)
    alone = nn.Conv2d(2, 3, 1).double()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, shape), inputs={"input": "split"})
    x = random_like_all(SHAPE, 1).requires_grad_()
    expected = alone(x)
    expected.square().sum().backward()
    gradient, x.grad = x.grad, None
    y = net(x)
    assert_whole(y, expected, "output")
    y.square().sum().backward()
    if net.P_x.active:
        assert y.to_local().shape == own_block(expected, net.P_x).shape
        torch.testing.assert_close(x.grad, gradient)
    plan = gpudist.plan_of(alone, shape, SHAPE, inputs={"input": "split"})
    assert plan.rows[-1].sent_bytes == 0 and plan.outputs.shape == expected.shape
    with pytest.raises(ShapeError, match=r"shape \[2, 9, 7\]; 'split' needs one dim for each of"):
        net(x[0])


@distributed(ranks=3, transports=["loopback", "host"])
def test_dynamic_inputs_may_change(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 3])
    net: Any = distribute(nn.Softmax(1), P_x, inputs={"input": "dynamic"})
    for length in (7, 3, 8):
        whole = random_like_all((2, length), length)
        assert_whole(net(own_block(whole, P_x)), whole.softmax(1), f"output of {length}")


@distributed(ranks=2, transports=["loopback", "host"])
def test_second_block_of_one_cell_may_be_anything(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 2])
    net: Any = distribute(_Words(), P_x)
    with pytest.raises(ShapeError, match=r"'mask' of shape \[2, 1\] has one cell .* say which"):
        net(torch.ones(2, 3), torch.ones(2, 1))


@distributed(ranks=4)
def test_wrong_block_is_told_to_all(P_world: Partition) -> None:
    """A block of the wrong shape raises on all ranks: the whole tensor on every rank, or on one."""
    P_x = grid(P_world, [1, 1, 2, 2])
    whole = random_like_all(SHAPE, 1)
    for is_wrong in (True, P_world.rank == 1):
        net: Any = distribute(nn.Conv2d(2, 2, 3).double(), P_x, inputs={"input": SHAPE})
        with pytest.raises(ShapeError, match="input 'input'"):
            net(whole if is_wrong else own_block(whole, P_x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": {"y": "whole"}}, r"inputs names \['y'\], but the arguments .* \['input'\]"),
        ({"inputs": {"input": "part"}}, r"inputs\['input'\] is 'part'"),
        ({"methods": ("encode",)}, "Conv2d has no method 'encode'"),
        ({"unknown": "guess"}, "unknown is 'guess'"),
        (
            {"global_shape": (2, 2, 4, 4)},
            r"does not take global_shape=.*inputs=\{'input': \(...\)\}",
        ),
    ],
)
@distributed(ranks=2, transports=["loopback"])
def test_options_that_are_refused(P_world: Partition, options: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        distribute(nn.Conv2d(2, 2, 3), grid(P_world, [1, 1, 2, 1]), **options)


class _Coder(nn.Module):
    """Called by its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return self.down(image)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.up(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


@distributed(ranks=2)
def test_methods_are_entries(P_world: Partition) -> None:
    torch.manual_seed(3)
    alone = _Coder().double()
    P_x = grid(P_world, [1, 1, 2, 1])
    net: Any = distribute(copy.deepcopy(alone), P_x, methods=("forward", "encode", "decode"))
    whole = random_like_all((2, 2, 8, 6), 1)
    block = own_block(whole, P_x)
    code = net.encode(block)
    assert_whole(code, alone.encode(whole), "code")
    assert_whole(net.decode(code), alone(whole), "decoded")
    assert_whole(net(block), alone(whole), "output")
    net.decode(code).sum().backward()
    alone(whole).sum().backward()
    torch.testing.assert_close(net.down.weight.grad, alone.down.weight.grad)


@distributed(ranks=2, transports=["loopback"])
def test_parts_are_refused_outside_of_entries(P_world: Partition) -> None:
    net: Any = distribute(_Coder(), grid(P_world, [1, 1, 2, 1]))
    block = torch.ones(2, 2, 4, 6)
    for call in (net.encode, net.down):
        with pytest.raises(ConversionError, match=r"Conv2d: .* outside .*methods="):
            call(block)


class _Facts(nn.Module):
    """A tensor beside values that are the same on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(2.0).view(2, 1, 1))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        y = x + self.shift
        return {"y": y, "shift": self.shift, "others": [5, "five", y.shape], "none": None}


@distributed(ranks=3, transports=["loopback"])
def test_all_tensors_that_leave_are_global(P_world: Partition) -> None:
    alone, P_x = _Facts().double(), grid(P_world, [1, 1, 1, 2])
    net: Any = distribute(copy.deepcopy(alone), P_x)
    with pytest.raises(ConversionError, match=r"has not been called yet.*plan_of"):
        print(net.P_y)
    whole = random_like_all((3, 2, 4, 6), 1)
    expected, found = alone(whole), net(own_block(whole, P_x))
    assert net.P_x == P_x and net.P_y["y"] == P_x
    assert net.P_y["shift"].size == 1 and net.P_y["others"] == [None, None, (None,) * 4]
    for name in ("y", "shift"):
        assert_whole(found.pop(name), expected.pop(name), name)
    assert found == expected


CRITERIA: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mse": (nn.MSELoss, "real"),
    "l1": (nn.L1Loss, "real"),
    "smooth l1": (nn.SmoothL1Loss, "real"),
    "huber": (lambda: nn.HuberLoss(reduction="sum"), "real"),
    "logits": (nn.BCEWithLogitsLoss, "share"),
    "cross entropy": (nn.CrossEntropyLoss, "classes"),
    "smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), "classes"),
    "of shares": (nn.CrossEntropyLoss, "share"),
    "likelihood": (nn.NLLLoss, "classes"),
    "divergence": (lambda: nn.KLDivLoss(reduction="batchmean"), "share"),
    "soft margin": (nn.SoftMarginLoss, "sign"),
    "poisson": (nn.PoissonNLLLoss, "share"),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", CRITERIA)
@distributed(ranks=3, transports=["loopback"])
def test_criteria_of_torch(P_world: Partition, name: str) -> None:
    """With a global target, criteria return the whole loss; a block as the target is refused."""
    make, kind = CRITERIA[name]
    alone, net, whole, block = weighted(P_world)
    criterion = make()
    target = random_like_all((2, 3, 9, 7), 5)
    if kind == "classes":
        target = target.argmax(1)
    elif kind != "real":
        target = target.sigmoid() if kind == "share" else target.sign()
    expected = criterion(alone(whole), target)
    expected.backward()
    y = net(block)
    own = target.tensor_split(2, 1 if kind == "classes" else 2)[P_world.rank or 0 if
        net.P_x.active else 0]  # fmt: skip
    placed = gpudist.to_global(own, y.placement, split(1 if kind == "classes" else 2))
    loss = criterion(y, placed)
    assert_whole(loss, expected, "loss")
    loss.backward()
    if net.P_x.active:
        torch.testing.assert_close(net.conv.weight.grad, alone.conv.weight.grad)
    wrong = (
        rf"shape \[2, {'' if kind == 'classes' else '3, '}\d, 7\].* global one of shape \[2, 3, 9"
    )
    with pytest.raises(ShapeError, match=wrong):
        criterion(y, own)


@distributed(ranks=2, transports=["loopback"])
def test_sizes_that_do_not_fit(P_world: Partition) -> None:
    """Raise as torch does, but on every rank."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, F.relu(x) + self.conv(x)], 1)

    net = distribute(Sum(), grid(P_world, [1, 1, 2]))
    with pytest.raises((ShapeError, RuntimeError), match=r"[34]"):
        net(torch.ones(1, 1, 2))


class FramesAside(nn.Module):
    """Frames become the split dim by way of tokens, then a convolution over images follows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.permute(0, 2, 3, 4, 1).flatten(1, 3)
        y = tokens.tanh().unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)
        return self.conv(y) + y


@distributed(ranks=2, transports=["loopback"])
def test_thin_blocks_are_split_like_the_input_again(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1, 1, 2, 1])
    net = assert_as_alone(FramesAside, P_x, [(1, 2, 3, 16, 5)])
    y = net(own_block(random_like_all((1, 2, 3, 16, 5), 2), P_x))
    assert y.sbp == (split(3),)
