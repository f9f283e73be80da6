"""Which distributed layer stands for which layer of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpudist import nn
from gpudist.convert.values import Pooled, resized
from gpudist.partition import CartesianPartition

# From a layer of torch.nn, the partition of its input, and whether all users hold the parameters.
Factory = Callable[[Any, CartesianPartition, bool], torch.nn.Module]

# These compute every cell from the same cell alone, and have no parameters.
POINT_WISE_LAYERS: frozenset[type[torch.nn.Module]] = frozenset(
    {
        torch.nn.CELU,
        torch.nn.ELU,
        torch.nn.GELU,
        torch.nn.Hardshrink,
        torch.nn.Hardsigmoid,
        torch.nn.Hardswish,
        torch.nn.Hardtanh,
        torch.nn.Identity,
        torch.nn.LeakyReLU,
        torch.nn.LogSigmoid,
        torch.nn.Mish,
        torch.nn.ReLU,
        torch.nn.ReLU6,
        torch.nn.SELU,
        torch.nn.SiLU,
        torch.nn.Sigmoid,
        torch.nn.Softplus,
        torch.nn.Softshrink,
        torch.nn.Softsign,
        torch.nn.Tanh,
        torch.nn.Tanhshrink,
        torch.nn.Threshold,
    }
)


def _with_weight(*names: str, **fixed: str) -> Callable[[str], Factory]:
    """Factories of layers with a weight, from a layer's attributes of these names."""

    def factory_of(name: str) -> Factory:
        def make(layer: Any, P_x: CartesianPartition, replicate: bool) -> torch.nn.Module:
            options = {argument: getattr(layer, argument) for argument in names}
            options |= {argument: getattr(layer, own) for argument, own in fixed.items()}
            dtype = next((p.dtype for p in (*layer.parameters(), *layer.buffers())), None)
            return getattr(nn, name)(
                P_x, **options, device=P_x.device, dtype=dtype, replicate_parameters=replicate
            )

        return make

    return factory_of


def _without_weight(*names: str) -> Callable[[str], Factory]:
    """Factories of layers without parameters, from a layer's attributes of these names."""

    def factory_of(name: str) -> Factory:
        def make(layer: Any, P_x: CartesianPartition, replicate: bool) -> torch.nn.Module:
            options = {argument: getattr(layer, argument) for argument in names}
            return getattr(nn, name)(P_x, **options)

        return make

    return factory_of


def _with_bias(factory_of: Callable[[str], Factory]) -> Callable[[str], Factory]:
    """As ``factory_of``, told whether there is a bias: torch's layers do not keep the argument."""

    def with_bias(name: str) -> Factory:
        def make(layer: Any, P_x: CartesianPartition, replicate: bool) -> torch.nn.Module:
            return factory_of(name)(_HasBias(layer), P_x, replicate)

        return make

    return with_bias


class _HasBias:
    """A layer whose ``bias`` says whether there is one."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self.bias = layer.bias is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _per_dims(stem: str, factory_of: Callable[[str], Factory]) -> dict[str, Factory]:
    return {f"{stem}{d}d": factory_of(f"Distributed{stem}{d}d") for d in (1, 2, 3)}


_conv = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
_running = ("num_features", "eps", "momentum", "affine", "track_running_stats", "bias")
_sliding = ("kernel_size", "stride", "padding", "ceil_mode")


def _named() -> dict[str, Factory]:
    factories: dict[str, Factory] = {}
    for stem, factory_of in {
        "Conv": _with_bias(_with_weight(*_conv, "padding_mode", "bias")),
        "ConvTranspose": _with_bias(_with_weight(*_conv, "output_padding", "padding_mode", "bias")),
        "BatchNorm": _with_bias(_with_weight(*_running)),
        "InstanceNorm": _with_bias(_with_weight(*_running)),
        "MaxPool": _without_weight(*_sliding, "dilation", "return_indices"),
        "LPPool": _without_weight("norm_type", "kernel_size", "stride", "ceil_mode"),
        "AdaptiveAvgPool": _without_weight("output_size"),
        "AdaptiveMaxPool": _without_weight("output_size", "return_indices"),
        "ConstantPad": _without_weight("padding", "value"),
        "ZeroPad": _without_weight("padding"),
        "ReflectionPad": _without_weight("padding"),
        "ReplicationPad": _without_weight("padding"),
        "CircularPad": _without_weight("padding"),
        "Dropout": _without_weight("p"),
    }.items():
        factories |= _per_dims(stem, factory_of)
    average = (*_sliding, "count_include_pad")
    interpolation = ("size", "scale_factor")
    for name, factory_of in {
        "AvgPool1d": _without_weight(*average),
        "AvgPool2d": _without_weight(*average, "divisor_override"),
        "AvgPool3d": _without_weight(*average, "divisor_override"),
        "GroupNorm": _with_bias(
            _with_weight("num_groups", "num_channels", "eps", "affine", "bias")
        ),
        "LayerNorm": _with_bias(
            _with_weight("normalized_shape", "eps", "elementwise_affine", "bias")
        ),
        "RMSNorm": _with_weight("normalized_shape", "eps", "elementwise_affine"),
        "Linear": _with_bias(_with_weight("in_features", "out_features", "bias")),
        "Embedding": _with_weight(
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "scale_grad_by_freq",
            "sparse",
        ),
        "Dropout": _without_weight("p"),
        "AlphaDropout": _without_weight("p"),
        "FeatureAlphaDropout": _without_weight("p"),
        "Softmax": _without_weight("dim"),
        "Softmin": _without_weight("dim"),
        "LogSoftmax": _without_weight("dim"),
        "Softmax2d": _without_weight(),
        "PixelShuffle": _without_weight("upscale_factor"),
        "PixelUnshuffle": _without_weight("downscale_factor"),
        "ChannelShuffle": _without_weight("groups"),
        "UpsamplingNearest2d": _without_weight(*interpolation),
        "UpsamplingBilinear2d": _without_weight(*interpolation),
        "Upsample": _without_weight(
            *interpolation, "mode", "align_corners", "recompute_scale_factor"
        ),
    }.items():
        factories[name] = factory_of(f"Distributed{name}")
    return factories


LAYERS: dict[type[torch.nn.Module], Factory] = {
    getattr(torch.nn, name): factory for name, factory in _named().items()
}


def is_layer(kind: type[torch.nn.Module]) -> bool:
    """Whether layers of this class are converted as one, from one tensor."""
    return kind in LAYERS or kind in (torch.nn.PReLU, torch.nn.Flatten)


_ADAPTIVE = tuple(
    getattr(torch.nn, f"Adaptive{kind}Pool{d}d") for kind in ("Avg", "Max") for d in (1, 2, 3)
)
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
# Of layers whose outputs have the extents of their inputs, in dims that are split.
_KEEPING = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.Softmax,
    torch.nn.Softmin,
    torch.nn.LogSoftmax,
    torch.nn.Softmax2d,
)


def output_partition(layer: torch.nn.Module, P_x: CartesianPartition) -> CartesianPartition:
    """The partition of what ``layer`` makes of a tensor on ``P_x``."""
    if isinstance(layer, torch.nn.Embedding):
        return P_x.create_cartesian_topology_partition([*P_x.shape, 1])
    if isinstance(layer, _ADAPTIVE):
        return Pooled.of(P_x) if pools_to_one(layer.output_size) else resized(P_x)
    if isinstance(layer, _KEEPING):
        return P_x
    if isinstance(layer, _CONVOLUTIONS) and _keeps_extents(layer):
        return P_x
    return resized(P_x)


def _keeps_extents(layer: Any) -> bool:
    """Whether every cell of the input has one of the output."""
    if set(layer.stride) != {1}:
        return False
    if isinstance(layer.padding, str):
        return layer.padding == "same"
    along = zip(layer.kernel_size, layer.dilation, layer.padding, strict=True)
    return all(dilation * (kernel - 1) == 2 * padding for kernel, dilation, padding in along)


def pools_to_one(output_size: Any) -> bool:
    """Whether an adaptive pool has one output per spatial dim."""
    return output_size == 1 or (isinstance(output_size, Sequence) and set(output_size) == {1})
