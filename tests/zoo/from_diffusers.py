"""Networks of diffusers."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from tests.zoo.network import Input, Inputs, Network, Size, cells, image, numbers, whole


def _noised(channels: int) -> Any:
    return lambda size: {"sample": cells(size, channels), "timestep": numbers(1000, 2)}


def _conditioned(size: Size) -> Inputs:
    return {**_noised(4)(size), "encoder_hidden_states": whole(2, 5, 12)}


def _controlled(size: Size) -> Inputs:
    return {**_conditioned(size), "controlnet_cond": cells(tuple(8 * n for n in size))}


def _classes(size: Size) -> Inputs:
    return {
        "hidden_states": cells(size, 4),
        "timestep": numbers(1000, 2),
        "class_labels": numbers(10, 2),
    }


def _described(size: Size) -> Inputs:
    return {
        "hidden_states": cells(size, 4),
        "encoder_hidden_states": whole(2, 5, 12),
        "pooled_projections": whole(2, 20),
        "timestep": numbers(1000, 2),
    }


def _clip(size: Size) -> Inputs:
    return {
        "hidden_states": Input(torch.randn(2, 4, 3, *size), (3, 4)),
        "timestep": numbers(1000, 2),
        "encoder_hidden_states": whole(2, 5, 12),
    }


def _encode_decode(net: Any, given: Mapping[str, torch.Tensor]) -> Any:
    (x,) = given.values()
    latent = net.encode(x).latent_dist
    return latent.mean, latent.logvar, net.decode(latent.mode()).sample


_DOWN = ("DownBlock2D", "AttnDownBlock2D")
_UP = ("AttnUpBlock2D", "UpBlock2D")
_COARSE = ("DownEncoderBlock2D", "DownEncoderBlock2D")
_FINE = ("UpDecoderBlock2D", "UpDecoderBlock2D")

NETWORKS = [
    Network(
        "diffusers/unet_2d",
        lambda size: diffusers.UNet2DModel(
            size,
            3,
            3,
            down_block_types=_DOWN,
            up_block_types=_UP,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
        ),
        (16, 16),
        (22, 18),
        _noised(3),
    ),
    Network(
        "diffusers/unet_2d_condition",
        lambda size: diffusers.UNet2DConditionModel(
            size[0],
            4,
            4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=2,
            cross_attention_dim=12,
        ),
        (16, 16),
        (22, 18),
        _conditioned,
    ),
    Network(
        "diffusers/unet_1d",
        lambda size: diffusers.UNet1DModel(
            size[0],
            in_channels=2,
            out_channels=2,
            extra_in_channels=64,
            block_out_channels=(32, 32, 64),
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
        ),
        (64,),
        (80,),
        _noised(2),
    ),
    Network(
        "diffusers/autoencoder_kl",
        lambda size: diffusers.AutoencoderKL(
            3, 3, _COARSE, _FINE, (8, 16), 1, norm_num_groups=4, latent_channels=4
        ),
        (32, 32),
        (38, 34),
        image(3, "x"),
        methods=("encode", "decode"),
        call=_encode_decode,
    ),
    Network(
        "diffusers/vq",
        lambda size: diffusers.VQModel(
            3,
            3,
            _COARSE,
            _FINE,
            (8, 16),
            1,
            norm_num_groups=4,
            latent_channels=4,
            num_vq_embeddings=16,
        ),
        (32, 32),
        (38, 34),
        image(3, "sample"),
    ),
    Network(
        "diffusers/dit",
        lambda size: diffusers.DiTTransformer2DModel(
            2, 8, 4, num_layers=2, sample_size=size[0], num_embeds_ada_norm=10, norm_num_groups=4
        ),
        (16, 16),
        (20, 20),
        _classes,
        random=True,
    ),
    Network(
        "diffusers/sd3",
        lambda size: diffusers.SD3Transformer2DModel(
            size[0],
            2,
            4,
            2,
            8,
            2,
            joint_attention_dim=12,
            caption_projection_dim=16,
            pooled_projection_dim=20,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        (16, 16),
        (20, 14),
        _described,
    ),
    Network(
        "diffusers/wan",
        lambda size: diffusers.WanTransformer3DModel(
            (1, 2, 2), 2, 12, 4, 4, text_dim=12, freq_dim=16, ffn_dim=32, num_layers=2
        ),
        (16, 16),
        (20, 14),
        _clip,
        tolerance=1e-5,
        why="computes its layer norms in float32",
    ),
]
