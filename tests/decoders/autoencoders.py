"""Autoencoders of diffusers, unmodified and of small width."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch

import gpudist
from gpudist.world.partition import CartesianPartition, Partition
from tests.zoo.operators import declare_missing_operators

CHANNELS = 4
IMAGE, VIDEO = (1, CHANNELS), (1, CHANNELS, 3)
_VIDEO_LEVELS = {
    "base_dim": 8,
    "z_dim": CHANNELS,
    "num_res_blocks": 1,
    "dim_mult": [1, 2],
    "temperal_downsample": [True],
}
# Leading dims of the latents and options, by the name of the class. Images and videos have twice
# the height and width of their latents.
DECODERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "AutoencoderKL": (
        IMAGE,
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
    ),
    "AutoencoderKLWan": (VIDEO, _VIDEO_LEVELS),
    "AutoencoderKLHunyuanVideo": (
        VIDEO,
        {
            "latent_channels": CHANNELS,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "spatial_compression_ratio": 2,
        },
    ),
    "AutoencoderKLQwenImage": (VIDEO, _VIDEO_LEVELS),
}


def latents(name: str, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*DECODERS[name][0], *size, generator=generator)


def autoencoder(name: str) -> Any:
    """Return the network, equal on all ranks."""
    declare_missing_operators()
    import diffusers  # takes seconds

    torch.manual_seed(0)
    return getattr(diffusers, name)(**DECODERS[name][1]).eval()


def partition(name: str, P_world: Partition, *grid: int) -> CartesianPartition:
    return P_world.create_cartesian_topology_partition((1,) * len(DECODERS[name][0]) + grid)


def distributed(name: str, P_x: CartesianPartition) -> Any:
    """Return the converted network, which splits latents that every worker has."""
    network = autoencoder(name)
    return gpudist.distribute(network, P_x, inputs={"z": "split"}, methods=("decode",))
