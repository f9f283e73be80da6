"""Networks of timm."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from tests.zoo.network import Network, Size


def _network(
    name: str,
    model: str,
    even: Size = (64, 64),
    odd: Size = (67, 61),
    sized: bool = False,
    random: bool = False,
    tolerance: float = 1e-9,
    why: str = "",
    **options: Any,
) -> Network:
    def make(size: Size) -> nn.Module:
        known = {"img_size": size} if sized else {}
        return timm.create_model(model, num_classes=10, **known, **options)

    return Network(
        f"timm/{name}", make, even, odd, classes=10, random=random, tolerance=tolerance, why=why
    )


# If only the last bits of its layers' results change, a second step of the network alone changes by
# as much.
_FEW = "batch norms of few numbers amplify rounding"


NETWORKS = [
    _network(
        "vit",
        "vit_tiny_patch16_224",
        (64, 64),
        (80, 64),
        True,
        random=True,
        drop_path_rate=0.2,
        proj_drop_rate=0.1,
        embed_dim=32,
        depth=2,
        num_heads=4,
    ),
    _network(
        "swin",
        "swin_tiny_patch4_window7_224",
        (56, 56),
        (56, 56),
        True,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _network("convnext_v2", "convnextv2_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _network(
        "hiera",
        "hiera_tiny_224",
        (64, 64),
        (64, 64),
        True,
        embed_dim=16,
        num_heads=1,
        stages=(1, 1, 2, 1),
    ),
    _network("coatnet", "coatnet_nano_rw_224", (64, 64), (64, 64), True),
    _network("nfnet", "nf_regnet_b0"),
    _network("hrnet", "hrnet_w18_small", (64, 64), (64, 96)),
    _network("pvt_v2", "pvt_v2_b0", (64, 64), (67, 61), depths=(1, 1, 1, 1)),
    _network("xcit", "xcit_nano_12_p16_224", (64, 64), (80, 64), embed_dim=32, depth=2),
    _network("fastvit", "fastvit_t8", (64, 64), (67, 61)),
    _network("efficientnet", "efficientnet_b0"),
    _network("mobilenet_v3", "mobilenetv3_small_050"),
    _network("mobilenet_v4", "mobilenetv4_conv_small_050"),
    _network("regnet", "regnetx_002"),
    _network("resnext", "resnext26ts"),
    _network("sknet", "skresnet18"),
    _network("resnest", "resnest14d"),
    _network("vovnet", "ese_vovnet19b_slim_dw"),
    _network("ghostnet", "ghostnet_050"),
    _network("rexnet", "rexnet_100", tolerance=1e-6, why=_FEW),
    _network("lcnet", "lcnet_035"),
    _network("cspnet", "cs3darknet_s"),
    _network("repvgg", "repvgg_a0"),
    _network("mobileone", "mobileone_s0", tolerance=1e-8, why=_FEW),
    _network("inception_next", "inception_next_atto"),
    _network("mixer", "mixer_s32_224", (64, 64), (96, 64), True),
    _network("poolformer", "poolformer_s12"),
    _network("edgenext", "edgenext_xx_small"),
    _network("mobilevit", "mobilevit_xxs"),
    _network("mobilevit_v2", "mobilevitv2_050"),
    _network(
        "efficientvit",
        "efficientvit_b0",
        tolerance=1e-5,
        why="computes its attention in float32",
    ),
    _network("levit", "levit_128s", (64, 64), (80, 80), True),
    _network("cait", "cait_xxs24_224", (64, 64), (80, 64), True, depth=2),
    _network(
        "beit",
        "beit_base_patch16_224",
        (64, 64),
        (80, 64),
        True,
        embed_dim=32,
        depth=2,
        num_heads=2,
    ),
    _network("eva", "eva02_tiny_patch14_224", (56, 56), (70, 56), True, depth=2),
    _network("nest", "nest_tiny_jx", (64, 64), (64, 64), True),
    _network("maxvit", "maxvit_rmlp_pico_rw_256", (64, 64), (64, 96), True),
    _network(
        "davit",
        "davit_tiny",
        embed_dims=(16, 32, 64, 64),
        num_heads=(1, 2, 4, 4),
        depths=(1, 1, 1, 1),
    ),
    _network("tnt", "tnt_s_patch16_224", (64, 64), (80, 64), True, depth=2),
    _network("mambaout", "mambaout_femto"),
]
