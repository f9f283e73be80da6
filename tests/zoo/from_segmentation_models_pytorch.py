"""Networks of segmentation_models_pytorch."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
from torch import nn

from tests.zoo.network import Network, Size

_RESNET: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
_MOBILE: dict[str, Any] = {"encoder_name": "mobilenet_v2", "encoder_weights": None, "classes": 2}
_EFFICIENT: dict[str, Any] = {
    "encoder_name": "efficientnet-b0",
    "encoder_weights": None,
    "classes": 2,
}
_MIT: dict[str, Any] = {"encoder_name": "mit_b0", "encoder_weights": None, "classes": 2}
_HEAD: dict[str, Any] = {"aux_params": {"classes": 5, "dropout": 0.0}}
_NARROW: dict[str, Any] = {"decoder_channels": (32, 32, 16, 16, 8)}


def _made(make: Any, **options: Any) -> Any:
    def network(size: Size) -> nn.Module:
        return make(**options)

    return network


def _network(name: str, make: Any, odd: Size = (64, 96), **options: Any) -> Network:
    return Network(f"segmentation_models_pytorch/{name}", _made(make, **options), (64, 64), odd)


def _dpt(size: Size) -> nn.Module:
    return smp.DPT(
        encoder_name="tu-vit_tiny_patch16_224",
        encoder_weights=None,
        encoder_depth=4,
        dynamic_img_size=True,
        decoder_intermediate_channels=(16, 16, 32, 32),
        decoder_fusion_channels=16,
        classes=2,
    )


NETWORKS = [
    _network("unet", smp.Unet, **_RESNET, **_NARROW, **_HEAD),
    _network("manet", smp.MAnet, **_RESNET, **_NARROW, decoder_pab_channels=16),
    _network("linknet", smp.Linknet, **_RESNET),
    _network("fpn", smp.FPN, **_RESNET, decoder_dropout=0.0, **_HEAD),
    _network("pspnet", smp.PSPNet, (64, 56), **_RESNET, psp_dropout=0.0),
    Network(
        "segmentation_models_pytorch/pan",
        _made(smp.PAN, **_MOBILE),
        (128, 160),
        (128, 160),
        tolerance=1e-8,
        why="inputs that differ in their last bits change its second step by up to 8e-10",
    ),
    _network("deeplabv3_plus", smp.DeepLabV3Plus, **_EFFICIENT, decoder_channels=32),
    _network("upernet", smp.UPerNet, **_RESNET, decoder_channels=32),
    _network("segformer", smp.Segformer, **_MIT, decoder_segmentation_channels=32),
    _network("unet_plus_plus", smp.UnetPlusPlus, **_RESNET, **_NARROW),
    _network("deeplabv3", smp.DeepLabV3, **_RESNET, decoder_channels=32),
    Network(
        "segmentation_models_pytorch/dpt",
        _dpt,
        (64, 64),
        (64, 64),
        tolerance=1e-6,
        why="resizes its position embeddings in float32",
    ),
]
