"""Networks of nnU-Net, from dynamic-network-architectures."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from dynamic_network_architectures.architectures.primus import Primus, PrimusV3
from dynamic_network_architectures.architectures.resnet import ResNet18_CIFAR
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from dynamic_network_architectures.building_blocks.residual_encoders import ResidualEncoder
from torch import nn

from tests.zoo.network import Network, image


def _stages(dims: int) -> dict[str, Any]:
    """Return the stages that nnU-Net's planner chooses, but narrow."""
    return {
        "n_stages": 4,
        "features_per_stage": (8, 16, 24, 24),
        "conv_op": (nn.Conv2d, nn.Conv3d)[dims - 2],
        "kernel_sizes": 3,
        "strides": (1, 2, 2, 2),
        "conv_bias": True,
        "norm_op": (nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 2],
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
    }


def _name(name: str) -> str:
    return f"dynamic-network-architectures/{name}"


NETWORKS = [
    Network(
        _name("plain_conv_unet_2d"),
        lambda size: PlainConvUNet(
            1,
            n_conv_per_stage=2,
            num_classes=3,
            n_conv_per_stage_decoder=2,
            deep_supervision=True,
            **_stages(2),
        ),
        (32, 32),
        (40, 24),
        image(1),
    ),
    Network(
        _name("plain_conv_unet_3d"),
        lambda size: PlainConvUNet(
            1, n_conv_per_stage=1, num_classes=3, n_conv_per_stage_decoder=1, **_stages(3)
        ),
        (16, 16, 16),
        (16, 24, 16),
        image(1),
    ),
    Network(
        _name("residual_encoder_unet"),
        lambda size: ResidualEncoderUNet(
            1,
            n_blocks_per_stage=(1, 2, 2, 1),
            num_classes=3,
            n_conv_per_stage_decoder=1,
            deep_supervision=True,
            **_stages(3),
        ),
        (16, 16, 16),
        (16, 24, 16),
        image(1),
    ),
    Network(
        _name("residual_encoder"),
        lambda size: ResidualEncoder(
            1, n_blocks_per_stage=1, return_skips=True, squeeze_excitation=True, **_stages(2)
        ),
        (32, 32),
        (40, 56),
        image(1),
    ),
    Network(
        _name("resnet18"),
        lambda size: ResNet18_CIFAR(10, 1, 2, squeeze_excitation=True),
        (32, 32),
        (40, 24),
        image(1),
        classes=10,
    ),
    Network(
        _name("primus"),
        lambda size: Primus(1, 48, (8, 8, 8), 2, 2, 4, size),
        (32, 32, 32),
        (32, 40, 24),
        image(1),
    ),
    Network(
        _name("primus_v3"),
        lambda size: PrimusV3(
            1, 48, (8, 8, 8), 2, 2, 4, size, drop_path_rate=0.0, ch_per_level=(8, 8, 16, 24)
        ),
        (32, 32, 32),
        (32, 40, 24),
        image(1),
    ),
]
