"""Networks of the ledger, each made for blocks of a given size."""

# Packages of networks may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.networks import UNet3d
from tests.zoo.operators import declare_missing_operators

Size = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A network and its input.

    Attributes:
        make: returns the network for inputs of that spatial size, or that number of tokens.
        size: global spatial size of the input, or number of tokens; the first dim is split.
        inputs: channels of the input; 0 for tokens.
        least: a small size, for the time of the host.
        package: package on PyPI that it needs, ``""`` for none.
        layouts: memory formats to count.
        ranks: numbers of ranks.
    """

    make: Callable[[Size], nn.Module]
    size: Size
    inputs: int
    least: Size
    package: str = ""
    layouts: tuple[str, ...] = ("contiguous", "channels_last")
    ranks: tuple[int, ...] = (1, 2, 4)

    def block(self, size: Size, ranks: int) -> Size:
        """Return the spatial size of one rank's block."""
        return (size[0] // ranks, *size[1:])

    def input(self, size: Size, ranks: int) -> torch.Tensor:
        """Return a rank's block of the input, with random numbers."""
        if self.inputs == 0:
            return torch.randint(_WORDS, (_SAMPLES, *self.block(size, ranks)))
        return torch.randn(1, self.inputs, *self.block(size, ranks))

    def grid(self, ranks: int) -> list[int]:
        """Return the shape of the partition of the input."""
        return [1, ranks] if self.inputs == 0 else [1, 1, ranks, *(1 for _ in self.size[1:])]


_WORDS = 50
# GPT flattens samples and tokens, which then are split in samples.
_SAMPLES = 4


def _unet(norm: str) -> Callable[[Size], nn.Module]:
    def normalization(channels: int) -> nn.Module:
        kind: Any = nn.BatchNorm3d if norm == "batch" else nn.InstanceNorm3d
        return kind(channels, affine=True)

    def make(size: Size) -> nn.Module:
        network = UNet3d(1, 2, width=8, levels=3)
        if norm != "group":
            for module in list(network.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.GroupNorm):
                        setattr(module, name, normalization(child.num_channels))
        return network

    return make


def _plain_conv_unet(size: Size) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return PlainConvUNet(
        1, 3, (8, 16, 32), nn.Conv3d, 3, (1, 2, 2), 2, 3, 2, True, nn.InstanceNorm3d,
        {"affine": True}, None, None, nn.LeakyReLU, {"inplace": True},
    )  # fmt: skip


def _resnet50(size: Size) -> nn.Module:
    declare_missing_operators()
    from torchvision.models import resnet50

    return resnet50(num_classes=10)


def _vit(size: Size) -> nn.Module:
    declare_missing_operators()
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=size, embed_dim=64, depth=4, num_heads=4,
        pos_drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1,
    )  # fmt: skip


def _swin(size: Size) -> nn.Module:
    declare_missing_operators()
    import timm

    return timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=10, img_size=size, embed_dim=32,
        depths=(2, 2), num_heads=(2, 4), proj_drop_rate=0.1, attn_drop_rate=0.1,
    )  # fmt: skip


def _gpt(size: Size) -> nn.Module:
    declare_missing_operators()
    import transformers

    config = transformers.GPT2Config(
        vocab_size=_WORDS, n_positions=256, n_embd=64, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


SUBJECTS: dict[str, Subject] = {
    "U-Net, group norm": Subject(_unet("group"), (32, 32, 32), 1, (16, 8, 8)),
    "U-Net, batch norm": Subject(_unet("batch"), (32, 32, 32), 1, (16, 8, 8)),
    "U-Net, instance norm": Subject(_unet("instance"), (32, 32, 32), 1, (16, 8, 8)),
    "U-Net, group norm, 128^3": Subject(
        _unet("group"), (128, 128, 128), 1, (), layouts=("contiguous",), ranks=(2,)
    ),
    "PlainConvUNet": Subject(
        _plain_conv_unet, (32, 32, 32), 1, (16, 8, 8), "dynamic-network-architectures"
    ),
    "ResNet-50": Subject(_resnet50, (128, 128), 3, (256, 64), "torchvision"),
    "Swin": Subject(_swin, (224, 112), 3, (224, 56), "timm"),
    "ViT": Subject(_vit, (128, 128), 3, (64, 32), "timm"),
    "GPT": Subject(_gpt, (128,), 0, (32,), "transformers", ("contiguous",)),
}
