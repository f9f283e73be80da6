"""The cases: one list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.correctness.case import Case, Shape

LINE, PLANE, ODD, SPACE = (1, 4, 12), (1, 4, 12, 10), (1, 4, 13, 11), (1, 4, 8, 6, 10)


class Reduce(nn.Module):
    """Reduction of some dims by a function of torch."""

    def __init__(self, name: str, dims: Sequence[int]) -> None:
        super().__init__()
        self.name, self.dims = name, tuple(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch, self.name)(x, dim=self.dims)


def _with_statistics(module: nn.Module) -> nn.Module:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return module.eval()


def _conv(*arguments: Any, dims: int = 2, **options: Any) -> Any:
    return lambda shape: getattr(nn, f"Conv{dims}d")(shape[1], *(arguments or (6, 3)), **options)


def _transposed(*arguments: Any, dims: int = 2, **options: Any) -> Any:
    return lambda shape: getattr(nn, f"ConvTranspose{dims}d")(shape[1], *arguments, **options)


def _of(kind: Any, *arguments: Any, **options: Any) -> Any:
    return lambda shape: kind(*arguments, **options)


def _in_eval(kind: Any, *arguments: Any, **options: Any) -> Any:
    return lambda shape: _with_statistics(kind(*arguments, **options))


def _curved(shape: Shape) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1))


def _normed(kind: Any, *arguments: Any) -> Any:
    return lambda shape: nn.Sequential(kind(*arguments), nn.Tanh())


def _classifier(shape: Shape) -> nn.Module:
    pooled = (shape[2] // 2) * (shape[3] // 2)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * pooled, 5),
    )


def _residual_stem(shape: Shape) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(6, 6, 3, padding=1),
    )


def _encoder_decoder(shape: Shape) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
    )


def _light(shape: Shape) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())


_plane = partial(Case, shape=PLANE)
_odd = partial(Case, shape=ODD)

CONVOLUTIONS = [
    _plane("conv 3", _conv()),
    _plane("conv 3, padding 1", _conv(6, 3, padding=1)),
    _plane("conv 5, padding 2", _conv(6, 5, padding=2)),
    _plane("conv 1", _conv(6, 1)),
    _plane("conv 2", _conv(6, 2)),
    _plane("conv 4, padding 1", _conv(6, 4, padding=1)),
    _plane("conv 4, padding same", _conv(6, 4, padding="same")),
    _plane("conv 2, stride 2", _conv(6, 2, stride=2)),
    _plane("conv 1, stride 2", _conv(6, 1, stride=2)),
    _plane("conv 3, stride 2", _conv(6, 3, stride=2)),
    _plane("conv 3, stride 2, padding 1", _conv(6, 3, stride=2, padding=1)),
    _plane("conv 3, stride 3", _conv(6, 3, stride=3)),
    _plane("conv 5, stride 3, padding 1", _conv(6, 5, stride=3, padding=1)),
    _plane("conv 7, stride 2, padding 3", _conv(6, 7, stride=2, padding=3)),
    _plane("conv 3, dilation 2, padding 2", _conv(6, 3, dilation=2, padding=2)),
    _plane("conv 3, dilation 2, stride 2", _conv(6, 3, dilation=2, stride=2)),
    _plane("conv 3, groups 2", _conv(6, 3, padding=1, groups=2)),
    _plane("conv 3, depthwise", _conv(4, 3, padding=1, groups=4)),
    _plane("conv (3, 5), stride (2, 1)", _conv(6, (3, 5), stride=(2, 1), padding=(1, 2))),
    _plane("conv 3, without bias", _conv(6, 3, padding=1, bias=False)),
    _plane("conv 3, reflect", _conv(6, 3, padding=1, padding_mode="reflect")),
    _plane("conv 3, replicate", _conv(6, 3, padding=1, padding_mode="replicate")),
    _plane("conv 3, circular", _conv(6, 3, padding=1, padding_mode="circular")),
    _plane("conv 5, stride 2, circular", _conv(6, 5, 2, 2, padding_mode="circular")),
    _plane("conv 4, same, reflect", _conv(6, 4, padding="same", padding_mode="reflect")),
    _plane("conv 5, dilation 4, padding 8", _conv(6, 5, dilation=4, padding=8)),
    _plane("conv 15, padding 7", _conv(6, 15, padding=7)),
    _odd("odd: conv 3, stride 2", _conv(6, 3, stride=2)),
    _odd("odd: conv 3, stride 2, padding 1", _conv(6, 3, stride=2, padding=1)),
    _odd("odd: conv 2, stride 2", _conv(6, 2, stride=2)),
    Case("3 samples: conv 3, padding 1", _conv(6, 3, padding=1), (3, *PLANE[1:])),
    Case("conv1d 3, padding 1", _conv(6, 3, padding=1, dims=1), LINE),
    Case("conv1d 4, stride 2, padding 1", _conv(6, 4, 2, 1, dims=1), LINE),
    Case("conv1d 3, dilation 3", _conv(6, 3, padding=3, dilation=3, dims=1), LINE),
    Case("conv3d 3, padding 1", _conv(6, 3, padding=1, dims=3), SPACE),
    Case("conv3d 3, stride 2, padding 1", _conv(6, 3, 2, 1, dims=3), SPACE),
    Case("conv3d 3, circular", _conv(6, 3, padding=1, padding_mode="circular", dims=3), SPACE),
]
TRANSPOSED = [
    _plane("transposed 2, stride 2", _transposed(6, 2, 2)),
    _plane("transposed 3, padding 1", _transposed(6, 3, padding=1)),
    _plane("transposed 3, stride 2", _transposed(6, 3, 2, padding=1, output_padding=1)),
    _plane("transposed 4, stride 2, padding 1", _transposed(6, 4, 2, 1)),
    _plane("transposed 2, stride 3", _transposed(6, 2, 3)),
    _plane("transposed 3, dilation 2", _transposed(6, 3, padding=2, dilation=2)),
    _plane("transposed 4, groups 2", _transposed(6, 4, 2, 1, groups=2)),
    Case("transposed1d 4, stride 2, padding 1", _transposed(6, 4, 2, 1, dims=1), LINE),
    Case("transposed3d 2, stride 2", _transposed(6, 2, 2, dims=3), SPACE),
]
POOLS = [
    _plane("max pool 2", _of(nn.MaxPool2d, 2)),
    _plane("max pool 2, padding 1", _of(nn.MaxPool2d, 2, padding=1)),
    _plane("max pool 3, stride 2, padding 1", _of(nn.MaxPool2d, 3, 2, 1)),
    _plane("max pool 3, stride 1, padding 1", _of(nn.MaxPool2d, 3, 1, 1)),
    _plane("max pool 3, stride 2, ceil", _of(nn.MaxPool2d, 3, 2, ceil_mode=True)),
    _plane("max pool 3, dilation 2", _of(nn.MaxPool2d, 3, 1, dilation=2)),
    _odd("odd: max pool 2", _of(nn.MaxPool2d, 2)),
    _plane("average pool 2", _of(nn.AvgPool2d, 2)),
    _plane("average pool 3, stride 2, padding 1", _of(nn.AvgPool2d, 3, 2, 1)),
    _plane("average pool 3, ceil", _of(nn.AvgPool2d, 3, 2, 1, ceil_mode=True)),
    _plane("average pool 3, pad not counted", _of(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
    _odd("odd: average pool 2", _of(nn.AvgPool2d, 2)),
    Case("average pool1d 3, stride 2", _of(nn.AvgPool1d, 3, 2, 1), LINE),
    Case("max pool3d 2", _of(nn.MaxPool3d, 2), SPACE),
    _plane("adaptive average pool 1", _of(nn.AdaptiveAvgPool2d, 1)),
    _plane("adaptive average pool (4, 5)", _of(nn.AdaptiveAvgPool2d, (4, 5))),
    _plane("adaptive average pool (5, 3)", _of(nn.AdaptiveAvgPool2d, (5, 3))),
    _plane("adaptive max pool (5, 3)", _of(nn.AdaptiveMaxPool2d, (5, 3))),
    _plane("power-average pool 2", _of(nn.LPPool2d, 2, 3, 2)),
]
NORMS = [
    _plane("batch norm, train", _of(nn.BatchNorm2d, 4)),
    _plane("batch norm, eval", _in_eval(nn.BatchNorm2d, 4)),
    _plane("batch norm, without affine", _of(nn.BatchNorm2d, 4, affine=False)),
    Case("3 samples: batch norm, train", _of(nn.BatchNorm2d, 4), (3, *PLANE[1:])),
    Case("batch norm1d, train", _of(nn.BatchNorm1d, 4), LINE),
    Case("batch norm3d, train", _of(nn.BatchNorm3d, 4), SPACE),
    _plane("instance norm, train", _of(nn.InstanceNorm2d, 4, affine=True)),
    _plane(
        "instance norm, eval",
        _in_eval(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
    ),
    _plane("group norm 2", _of(nn.GroupNorm, 2, 4)),
    _plane("group norm 2, eval", _in_eval(nn.GroupNorm, 2, 4)),
    Case("group norm 2, 3-D", _of(nn.GroupNorm, 2, 4), SPACE),
    _plane("layer norm of all", lambda shape: nn.LayerNorm([*shape[1:]])),
    _plane("layer norm of columns", lambda shape: nn.LayerNorm(shape[-1])),
    _plane("layer norm of columns, eval", lambda shape: nn.LayerNorm(shape[-1]).eval()),
    _plane("RMS norm of the plane", lambda shape: nn.RMSNorm([*shape[2:]])),
]
_UP, _ALIGNED = nn.Upsample, partial(nn.Upsample, align_corners=True)
INTERPOLATIONS = [
    _plane("nearest, twice", _of(_UP, scale_factor=2)),
    _plane("nearest, to (7, 15)", _of(_UP, (7, 15))),
    _plane("nearest-exact, 1.5 times", _of(_UP, scale_factor=1.5, mode="nearest-exact")),
    _plane("bilinear, twice", _of(_UP, scale_factor=2, mode="bilinear")),
    _plane("bilinear, 1.5 times", _of(_UP, scale_factor=1.5, mode="bilinear")),
    _plane("bilinear, to (7, 15)", _of(_UP, (7, 15), mode="bilinear")),
    _plane("bilinear aligned, twice", _of(_ALIGNED, scale_factor=2, mode="bilinear")),
    _plane("bicubic, twice", _of(_UP, scale_factor=2, mode="bicubic")),
    _plane("bicubic aligned, twice", _of(_ALIGNED, scale_factor=2, mode="bicubic")),
    Case("linear, twice", _of(_UP, scale_factor=2, mode="linear"), LINE),
    Case("trilinear, twice", _of(_UP, scale_factor=2, mode="trilinear"), SPACE),
    Case(
        "trilinear aligned, twice",
        _of(_ALIGNED, scale_factor=2, mode="trilinear"),
        SPACE,
    ),
]
REDUCTIONS = [
    _plane("softmax of a column", _of(nn.Softmax, 2)),
    _plane("softmax of a row", _of(nn.Softmax, 3)),
    _plane("log-softmax of a column", _of(nn.LogSoftmax, 2)),
    _plane("mean of a column", _of(Reduce, "mean", [2])),
    _plane("mean of the plane", _of(Reduce, "mean", [2, 3])),
    _plane("variance of the plane", _of(Reduce, "var", [2, 3])),
    _plane("maximum of a row", _of(Reduce, "amax", [3])),
]
PADS = [
    _plane("zero pad (1, 2, 0, 3)", _of(nn.ZeroPad2d, (1, 2, 0, 3))),
    _plane("reflection pad 2", _of(nn.ReflectionPad2d, 2)),
    _plane("replication pad 2", _of(nn.ReplicationPad2d, 2)),
    _plane("circular pad 2", _of(nn.CircularPad2d, 2)),
    _plane("circular pad 8", _of(nn.CircularPad2d, 8)),
    _plane("reflection pad 8", _of(nn.ReflectionPad2d, 8)),
]
NETWORKS = [
    _plane("pixel shuffle", _of(nn.PixelShuffle, 2)),
    _plane("two convolutions", _curved),
    _plane("encoder and decoder", _encoder_decoder),
    _plane("classifier", _classifier),
    Case("stem of a ResNet", _residual_stem, (1, 4, 32, 28)),
]
SECOND = [
    _plane("second order: two convolutions", _curved, order=2),
    _plane("second order: batch norm", _normed(nn.BatchNorm2d, 4), order=2),
    _plane("second order: group norm", _normed(nn.GroupNorm, 2, 4), order=2),
    _plane("second order: average pool", _normed(nn.AvgPool2d, 3, 2, 1), order=2),
]
PRECISIONS = [
    _plane("bfloat16: conv 3, padding 1", _conv(6, 3, padding=1), precision="bfloat16"),
    _plane("bfloat16: batch norm", _of(nn.BatchNorm2d, 4), precision="bfloat16"),
    _plane("bfloat16: average pool 2", _of(nn.AvgPool2d, 2), precision="bfloat16"),
    _plane(
        "bfloat16: bilinear, twice", _of(_UP, scale_factor=2, mode="bilinear"), precision="bfloat16"
    ),
    _plane("autocast: conv 3, padding 1", _conv(6, 3, padding=1), precision="autocast"),
    _plane("autocast: conv, group norm, ReLU", _light, precision="autocast"),
]

CASES: list[Case] = [
    *CONVOLUTIONS, *TRANSPOSED, *POOLS, *NORMS, *INTERPOLATIONS, *REDUCTIONS, *PADS, *NETWORKS,
    *SECOND, *PRECISIONS,
]  # fmt: skip
