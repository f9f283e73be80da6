"""Networks of MONAI."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from monai.networks import nets

from tests.zoo.network import Inputs, Network, Size, cells, image, numbers, whole


def _two_volumes(size: Size) -> Inputs:
    return {"moving": cells(size, 1), "fixed": cells(size, 1)}


def _noised(size: Size) -> Inputs:
    return {"x": cells(size, 1), "timesteps": numbers(1000, 2), "context": whole(2, 5, 12)}


def _controlled(size: Size) -> Inputs:
    controlled = {"x": cells(size, 1), "timesteps": numbers(1000, 2)}
    return {**controlled, "controlnet_cond": cells(tuple(8 * n for n in size), 1)}


_STAGES: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}

NETWORKS = [
    Network(
        "monai/unet_3d",
        lambda size: nets.UNet(3, 1, 2, **_STAGES, num_res_units=2),
        (16, 16, 16),
        (20, 28, 12),
        image(1),
    ),
    Network(
        "monai/basic_unet_plus_plus",
        lambda size: nets.BasicUNetPlusPlus(2, 1, 2, (8, 8, 16, 16, 32, 8), deep_supervision=True),
        (32, 32),
        (37, 35),
        image(1),
    ),
    Network(
        "monai/segresnet_ds",
        lambda size: nets.SegResNetDS(3, 8, 1, 2, blocks_down=(1, 2, 2), dsdepth=3),
        (16, 16, 16),
        (20, 20, 12),
        image(1),
    ),
    Network(
        "monai/vnet", lambda size: nets.VNet(2, 1, 2, dropout_dim=2), (64, 64), (80, 48), image(1)
    ),
    Network(
        "monai/unetr",
        lambda size: nets.UNETR(
            1, 2, size, feature_size=4, hidden_size=24, mlp_dim=48, num_heads=4
        ),
        (32, 32, 32),
        (32, 48, 32),
        image(1),
    ),
    Network(
        "monai/swin_unetr",
        lambda size: nets.SwinUNETR(
            1,
            2,
            feature_size=12,
            depths=(1, 1, 1, 1),
            num_heads=(1, 2, 4, 8),
            window_size=4,
            spatial_dims=2,
        ),
        (64, 64),
        (64, 96),
        image(1),
    ),
    Network(
        "monai/dynunet",
        lambda size: nets.DynUNet(
            3,
            1,
            2,
            [3, 3, 3, 3],
            [1, 2, 2, 2],
            [2, 2, 2],
            filters=(8, 16, 16, 32),
            deep_supervision=True,
            deep_supr_num=2,
            res_block=True,
        ),
        (16, 16, 16),
        (16, 24, 16),
        image(1),
    ),
    Network(
        "monai/var_autoencoder",
        lambda size: nets.VarAutoEncoder(2, (1, *size), 1, 8, (8, 16), (2, 2)),
        (32, 32),
        (40, 36),
        image(1),
        random=True,
    ),
    Network(
        "monai/voxelmorph",
        lambda size: nets.VoxelMorph(
            nets.VoxelMorphUNet(3, 2, 32, (16, 32, 32, 32, 32, 32), (16, 16)), integration_steps=3
        ),
        (16, 16, 16),
        (16, 16, 16),
        _two_volumes,
    ),
    Network(
        "monai/diffusion_unet",
        lambda size: nets.DiffusionModelUNet(
            2,
            1,
            1,
            (1, 1),
            (8, 16),
            (False, True),
            4,
            num_head_channels=8,
            with_conditioning=True,
            cross_attention_dim=12,
        ),
        (16, 16),
        (22, 18),
        _noised,
    ),
    Network(
        "monai/controlnet",
        lambda size: nets.ControlNet(
            2,
            1,
            (1, 1),
            (8, 16),
            (False, True),
            4,
            num_head_channels=8,
            conditioning_embedding_num_channels=(4, 8, 8, 8),
        ),
        (16, 16),
        (22, 18),
        _controlled,
    ),
    Network(
        "monai/mednext",
        lambda size: nets.MedNeXt(
            3,
            4,
            1,
            2,
            kernel_size=3,
            deep_supervision=True,
            use_residual_connection=True,
            blocks_down=(1, 1, 1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1, 1, 1),
        ),
        (32, 32, 32),
        (32, 48, 32),
        image(1),
    ),
    Network(
        "monai/flexible_unet",
        lambda size: nets.FlexibleUNet(
            3, 2, "efficientnet-b0", decoder_channels=(32, 24, 16, 16, 8)
        ),
        (64, 64),
        (67, 61),
        random=True,
    ),
    Network(
        "monai/patch_discriminator",
        lambda size: nets.MultiScalePatchDiscriminator(2, 2, 2, 8, 1, minimum_size_im=64),
        (64, 64),
        (67, 65),
        image(1),
    ),
]
