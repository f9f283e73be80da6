"""Layers with DistDL's arguments against torch's."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.compat import distdl
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from gpudist.compat.distdl.functional import ZeroVolumeCorrectorFunction
from gpudist.compat.distdl.nn.interpolate import Interpolate
from gpudist.compat.distdl.utilities.torch import zero_volume_tensor
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.pool import distributed

LOCAL = ("loopback", "host")


def grid_of(P: MPIPartition, ranks: Sequence[int], shape: Sequence[int]) -> MPICartesianPartition:
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


class Between:
    """Scatter from rank 0 to ``P_x``, apply a layer, and gather from ``P_y``."""

    def __init__(
        self, P: MPIPartition, P_x: MPICartesianPartition, P_y: MPICartesianPartition
    ) -> None:
        root = P.create_partition_inclusive([0])
        P_0 = root.create_cartesian_topology_partition([1] * P_x.dim)
        self.is_root = P_0.active
        self.scatter = distdl.nn.Repartition(P_0, P_x)
        self.gather = distdl.nn.Repartition(P_y, P_0)

    def compare(self, layer: Any, sequential: Any, shape: Sequence[int]) -> None:
        """Assert that layers of equal parameters give the same output and input gradient."""
        x = zero_volume_tensor(dtype=torch.float64)
        if self.is_root:
            x = torch.randn(shape, dtype=torch.float64)
        y = self.gather(layer(self.scatter(x.requires_grad_())))
        gradient = torch.randn(y.shape, dtype=torch.float64)
        y.backward(gradient)
        if not self.is_root:
            return
        same = x.detach().requires_grad_()
        expected = sequential(same)
        expected.backward(gradient)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-10, atol=1e-10)


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return make(*args, **kwargs).double()


@distributed(ranks=4)
def test_feature_convolution(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([1, 1, 2, 2])
    arguments = dict(kernel_size=3, stride=2, padding=1, dilation=2, bias=True)
    layer = seeded(
        distdl.nn.DistributedConv2d, P_x, in_channels=2, out_channels=3,
        buffer_manager=MPIBufferManager(), **arguments,
    )  # fmt: skip
    assert isinstance(layer, distdl.nn.conv_feature.DistributedFeatureConv2d)
    assert layer.P_wb_cart.active == layer.stores_weight == layer.stores_bias == (P.rank == 0)
    sequential = seeded(torch.nn.Conv2d, 2, 3, **arguments)
    between = Between(P, P_x, P_x)
    # The size may change between calls.
    for shape in ((2, 2, 9, 11), (1, 2, 7, 8)):
        between.compare(layer, sequential, shape)
    # Positional arguments are in DistDL's order: the padding mode follows the padding.
    layer = seeded(distdl.nn.DistributedFeatureConv2d, P_x, 2, 4, 3, 1, 1, "circular", 1, 2, False)
    sequential = seeded(
        torch.nn.Conv2d, 2, 4, 3, padding=1, padding_mode="circular", groups=2, bias=False
    )
    assert layer.bias is None and not layer.stores_bias
    between.compare(layer, sequential, (2, 2, 6, 5))


@distributed(ranks=4, transports=LOCAL)
def test_channel_and_general_convolutions(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x, P_y = grid_of(P, [0, 1], [1, 2, 1]), grid_of(P, [2, 3], [1, 2, 1])
    P_w = P.create_cartesian_topology_partition([2, 2, 1])
    layer = seeded(
        distdl.nn.DistributedConv1d, P_x, P_y, P_w, in_channels=3, out_channels=5, kernel_size=3
    )
    assert isinstance(layer, distdl.nn.DistributedChannelConv1d)
    assert layer.stores_bias == (P_w.index[1] == 0)
    Between(P, P_x, P_y).compare(layer, seeded(torch.nn.Conv1d, 3, 5, 3), (2, 3, 7))
    weight = layer.conv_layer.weight
    assert weight.grad.shape == weight.shape == (3 - P_w.index[0], 2 - P_w.index[1], 3)
    assert (layer.conv_layer.bias.numel() > 0) == layer.stores_bias

    P_x, P_w = grid_of(P, [1, 3], [1, 1, 2]), P.create_cartesian_topology_partition([2, 1, 2])
    P_y = grid_of(P, [3, 2, 1, 0], [1, 2, 2])
    layer = seeded(distdl.nn.DistributedConv1d, P_x, P_y, P_w, 3, 5, 3, padding=1)
    assert isinstance(layer, distdl.nn.DistributedGeneralConv1d)
    assert layer.stores_weight == (P_w.index[2] == 0)
    Between(P, P_x, P_y).compare(layer, seeded(torch.nn.Conv1d, 3, 5, 3, padding=1), (2, 3, 7))
    with pytest.raises(ValueError, match="P_y and P_w belong together"):
        distdl.nn.DistributedConv1d(P_x, P_y)


@distributed(ranks=4, transports=LOCAL)
def test_linear(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x, P_y = grid_of(P, [0, 1], [1, 2]), grid_of(P, [2, 3], [1, 2])
    P_w = P.create_cartesian_topology_partition([2, 2])
    layer = seeded(distdl.nn.DistributedLinear, P_x, P_y, P_w, 7, 5)
    assert layer.sublinear.weight is layer.weight and layer.sublinear.bias is layer.bias
    between = Between(P, P_x, P_y)
    for batch in (3, 2):
        between.compare(layer, seeded(torch.nn.Linear, 7, 5), (batch, 7))
    assert set(layer.state_dict()) == {"weight", "bias"}


@distributed(ranks=4, transports=LOCAL)
def test_pools(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([1, 1, 2, 2])
    between = Between(P, P_x, P_x)
    # The default stride is 1.
    layer = distdl.nn.DistributedMaxPool2d(P_x, 3, padding=1)
    between.compare(layer, torch.nn.MaxPool2d(3, 1, 1), (2, 2, 9, 8))
    layer = distdl.nn.DistributedMaxPool2d(P_x, (2, 3), (2, 1), 1, (1, 2), MPIBufferManager())
    between.compare(layer, torch.nn.MaxPool2d((2, 3), (2, 1), 1, (1, 2)), (2, 2, 9, 8))
    layer = distdl.nn.DistributedAvgPool2d(P_x, kernel_size=2, stride=2)
    between.compare(layer, torch.nn.AvgPool2d(2), (1, 2, 9, 8))


@distributed(ranks=4, transports=LOCAL)
def test_batch_norm(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([2, 1, 2])
    layer = seeded(distdl.nn.DistributedBatchNorm, P_x, num_features=3, eps=1e-4, momentum=0.2)
    sequential = seeded(torch.nn.BatchNorm1d, 3, eps=1e-4, momentum=0.2)
    assert layer.gamma is layer.weight and layer.beta is layer.bias
    torch.nn.init.constant_(layer.gamma, 2)
    torch.nn.init.constant_(sequential.weight, 2)
    between = Between(P, P_x, P_x)
    for shape in ((4, 3, 10), (3, 3, 6)):
        between.compare(layer, sequential, shape)
    layer.eval()
    sequential.eval()
    between.compare(layer, sequential, (4, 3, 10))


@pytest.mark.parametrize(
    "mode, align_corners", [("nearest", False), ("linear", True), ("linear", False)]
)
@distributed(ranks=4, transports=LOCAL)
def test_upsampling(P_world: Partition, mode: str, align_corners: bool) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([1, 1, 2, 2])
    torchs: dict[str, Any] = dict(mode="nearest")
    if mode == "linear":
        torchs = dict(mode="bilinear", align_corners=align_corners)
    ours: dict[str, Any] = dict(mode=mode, align_corners=align_corners)
    between = Between(P, P_x, P_x)
    layer = distdl.nn.DistributedUpsample(P_x, MPIBufferManager(), scale_factor=1.5, **ours)
    between.compare(layer, torch.nn.Upsample(scale_factor=1.5, **torchs), (2, 1, 13, 17))
    # The size is that of the whole output.
    layer = distdl.nn.DistributedUpsample(P_x, size=[2, 1, 20, 9], **ours)
    between.compare(layer, torch.nn.Upsample(size=(20, 9), **torchs), (2, 1, 13, 17))


@distributed(ranks=2, transports=("loopback",))
def test_upsampling_by_default_is_linear(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([1, 1, 2, 1, 1])
    layer = distdl.nn.DistributedUpsample(P_x, scale_factor=2)
    sequential = torch.nn.Upsample(scale_factor=2, mode="trilinear")
    Between(P, P_x, P_x).compare(layer, sequential, (1, 1, 3, 2, 2))
    with pytest.raises(ShapeError, match="mode is 'cubic'; it must be"):
        distdl.nn.DistributedUpsample(P_x, scale_factor=2, mode="cubic")
    with pytest.raises(ShapeError, match="size has 3 entries but P_x has 5 axes"):
        distdl.nn.DistributedUpsample(P_x, size=[3, 3, 3])
    with pytest.raises(ValueError, match="give one of them"):
        distdl.nn.DistributedUpsample(P_x)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scale_factor", [None, 2.3])
def test_interpolate_computes_a_part(
    mode: str, align_corners: bool, scale_factor: float | None
) -> None:
    x = torch.randn(2, 3, 13, 17, dtype=torch.float64)
    size = (29, 39)
    torchs: dict[str, Any] = dict(mode="nearest")
    if mode == "linear":
        torchs = dict(mode="bilinear", align_corners=align_corners)
    scale: dict[str, Any] = dict(size=size)
    if scale_factor is not None:
        scale = dict(scale_factor=scale_factor)
    whole = torch.nn.functional.interpolate(x, **scale, **torchs)
    assert whole.shape[2:] == size
    layer = Interpolate(
        [0, 0, 2, 4], [2, 3, 11, 16], x.shape, [0, 0, 7, 12], [2, 3, 21, 30], whole.shape,
        scale_factor=scale_factor, mode=mode, align_corners=align_corners,
    )  # fmt: skip
    part = x[:, :, 2:11, 4:16].clone().requires_grad_()
    torch.testing.assert_close(layer(part), whole[:, :, 7:21, 12:30])
    assert torch.autograd.gradcheck(layer, [part[:1, :1].detach().requires_grad_()], fast_mode=True)
    short = Interpolate(
        [0, 0, 9, 4], [2, 3, 13, 16], x.shape, [0, 0, 7, 12], [2, 3, 21, 30], whole.shape, mode=mode
    )
    with pytest.raises(ShapeError, match=r"dim 2: outputs .* read cells"):
        short(x[:, :, 9:, 4:16])


LOSSES: list[tuple[Any, Any]] = [
    (distdl.nn.DistributedL1Loss, torch.nn.L1Loss),
    (distdl.nn.DistributedMSELoss, torch.nn.MSELoss),
    (distdl.nn.DistributedPoissonNLLLoss, torch.nn.PoissonNLLLoss),
    (distdl.nn.DistributedBCELoss, torch.nn.BCELoss),
    (distdl.nn.DistributedBCEWithLogitsLoss, torch.nn.BCEWithLogitsLoss),
    (distdl.nn.DistributedKLDivLoss, torch.nn.KLDivLoss),
]


@pytest.mark.parametrize("row", range(len(LOSSES)))
@distributed(ranks=5, transports=LOCAL)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_losses(P_world: Partition, row: int) -> None:
    ours, torchs = LOSSES[row]
    P = MPIPartition(P_world)
    # Rank 0 of the partition is not that of the world, and one worker is outside.
    P_x = grid_of(P, [3, 1, 2, 0], [2, 2])
    torch.manual_seed(1)
    whole, target = torch.rand(2, 7, 5, dtype=torch.float64)
    for reduction in ours._valid_reductions:
        start = distdl.utilities.slicing.compute_start_index
        x = zero_volume_tensor(dtype=torch.float64, requires_grad=True)
        y = zero_volume_tensor(dtype=torch.float64)
        if P_x.active:
            index = distdl.utilities.slicing.assemble_slices(
                start(P_x.shape, P_x.index, whole.shape),
                distdl.utilities.slicing.compute_stop_index(P_x.shape, P_x.index, whole.shape),
            )
            x, y = whole[index].clone().requires_grad_(), target[index]
        loss = ours(P_x, reduction=reduction)(x, y)
        same = whole.clone().requires_grad_()
        expected = torchs(reduction=reduction)(same, target)
        if reduction == "none":
            assert not P_x.active or torch.equal(loss, expected[index])
            continue
        loss.backward()
        expected.backward()
        assert loss.shape == () and loss.dtype == torch.float64
        # As in DistDL, rank 0 has the value.
        torch.testing.assert_close(loss, expected if P_x.rank == 0 else torch.zeros_like(expected))
        if P_x.active:
            assert same.grad is not None
            torch.testing.assert_close(x.grad, same.grad[index])
    with pytest.raises(ValueError, match="reduction is 'median'"):
        ours(P_x, reduction="median")


def test_zero_volume_corrector() -> None:
    for shape in ((0,), (3, 0)):
        x = torch.zeros(shape, requires_grad=True)
        y = ZeroVolumeCorrectorFunction.apply(x)
        y.backward()
        assert y.item() == 0 and x.grad is not None and x.grad.shape == shape
    x = torch.ones(2, requires_grad=True)
    ZeroVolumeCorrectorFunction.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1]


class Recorder(distdl.nn.Module):
    """Layer that records when it is set up and torn down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._shape: torch.Size | None = None

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        self.calls.append(f"up {list(input[0].shape)}")
        self._distdl_is_setup, self._shape = True, input[0].shape

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None:
        self.calls.append("down")
        self._distdl_is_setup = False

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        return input[0].shape != self._shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_module_is_set_up_when_its_input_changes() -> None:
    layer = Recorder()
    for size in (2, 2, 3):
        layer(torch.zeros(size))
    assert layer.calls == ["up [2]", "down", "up [3]"]
    assert layer._distdl_backend is distdl.backend.backend
    assert isinstance(layer, torch.nn.Module) and distdl.nn.Module()._distdl_is_setup is False
