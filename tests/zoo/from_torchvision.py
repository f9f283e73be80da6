"""Networks of torchvision."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.optical_flow import raft
from torchvision.models.optical_flow._utils import make_coords_grid
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.video import MViT, SwinTransformer3d, VideoResNet
from torchvision.models.video.mvit import MSBlockConfig
from torchvision.models.video.resnet import BasicBlock, Conv2Plus1D, R2Plus1dStem

from tests.zoo.network import Inputs, Network, Size, cells, video


def _two_images(size: Size) -> Inputs:
    return {"image1": cells(size), "image2": cells(size)}


def _coordinates(*sizes: Any, **options: Any) -> torch.Tensor:
    return make_coords_grid(*sizes, **options).double()


def _raft(size: Size) -> nn.Module:
    # Its integer coordinates are cast to float32, which weights of float64 do not take.
    raft.make_coords_grid = _coordinates
    return raft.raft_small()


def _convnext(size: Size) -> nn.Module:
    widths = [(16, 32, 1), (32, 48, 2), (48, None, 1)]
    return ConvNeXt([CNBlockConfig(*each) for each in widths], 0.2, layer_scale=1.0, num_classes=10)


def _swin_v2(size: Size) -> nn.Module:
    return models.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [2, 4],
        [4, 4],
        stochastic_depth_prob=0.0,
        num_classes=10,
        block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2,
    )


def _mvit(size: Size) -> nn.Module:
    block = partial(MSBlockConfig, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3])
    settings = [
        block(1, 16, 32, stride_q=[1, 1, 1], stride_kv=[1, 2, 2]),
        block(2, 32, 32, stride_q=[1, 2, 2], stride_kv=[1, 1, 1]),
        block(2, 32, 32, stride_q=[1, 1, 1], stride_kv=[1, 1, 1]),
    ]
    return MViT(size, 8, settings, True, True, True, True, dropout=0.0, num_classes=10)


NETWORKS = [
    Network(
        "torchvision/resnet18",
        lambda size: models.resnet18(num_classes=10),
        (64, 64),
        (67, 61),
        classes=10,
    ),
    Network(
        "torchvision/densenet",
        lambda size: models.DenseNet(8, (2, 3, 2, 2), 16, num_classes=10),
        (64, 64),
        (71, 67),
        classes=10,
    ),
    Network(
        "torchvision/googlenet",
        lambda size: models.GoogLeNet(10, init_weights=False, dropout=0.0, dropout_aux=0.0),
        (96, 96),
        (101, 97),
    ),
    Network(
        "torchvision/shufflenet_v2",
        lambda size: models.ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 256], num_classes=10),
        (64, 64),
        (67, 61),
        classes=10,
    ),
    Network("torchvision/convnext", _convnext, (64, 64), (67, 61), classes=10, random=True),
    Network("torchvision/swin_v2", _swin_v2, (64, 64), (67, 61), classes=10),
    Network(
        "torchvision/fpn_backbone",
        lambda size: resnet_fpn_backbone(
            backbone_name="resnet18", weights=None, trainable_layers=5
        ),
        (64, 64),
        (67, 61),
    ),
    Network(
        "torchvision/raft_small",
        _raft,
        (128, 128),
        (136, 128),
        inputs=_two_images,
        call=lambda net, given: net(given["image1"], given["image2"], num_flow_updates=2),
    ),
    Network(
        "torchvision/r2plus1d",
        lambda size: VideoResNet(BasicBlock, [Conv2Plus1D] * 4, [1, 1, 1, 1], R2Plus1dStem, 10),
        (32, 32),
        (35, 33),
        inputs=video(4),
        classes=10,
    ),
    Network(
        "torchvision/deeplabv3",
        lambda size: deeplabv3_mobilenet_v3_large(
            weights_backbone=None, num_classes=3, aux_loss=True
        ),
        (64, 64),
        (67, 61),
    ),
    Network("torchvision/mvit", _mvit, (32, 32), (40, 40), inputs=video(8), classes=10),
    Network(
        "torchvision/swin3d",
        lambda size: SwinTransformer3d(
            [2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], stochastic_depth_prob=0.0, num_classes=10
        ),
        (32, 32),
        (37, 35),
        inputs=video(4),
        classes=10,
    ),
]
