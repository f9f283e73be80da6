"""Networks of torch-harmonics."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from torch import nn
from torch_harmonics import ResampleS2, SpectralConvS2
from torch_harmonics.examples.models import SphericalFourierNeuralOperator

from tests.zoo.network import Network, Size, image


def _spectral(size: Size) -> nn.Module:
    return SpectralConvS2(size, size, 2, 3, bias=True)


def _resample(size: Size) -> nn.Module:
    return ResampleS2(*size, 2 * size[0], 2 * size[1])


def _sfno(size: Size) -> nn.Module:
    return SphericalFourierNeuralOperator(
        size, scale_factor=2, in_chans=2, out_chans=1, embed_dim=8, num_layers=2
    )


NETWORKS = [
    Network(
        "torch-harmonics/spectral_conv",
        _spectral,
        (16, 32),
        (17, 34),
        image(2),
        tolerance=1e-5,
        why="computes its transforms in float32",
    ),
    Network("torch-harmonics/resample", _resample, (16, 32), (17, 34), image(2)),
    Network(
        "torch-harmonics/sfno",
        _sfno,
        (16, 32),
        (17, 34),
        image(2),
        tolerance=1e-5,
        why="is float32, which its forward casts to",
        single=True,
    ),
]
