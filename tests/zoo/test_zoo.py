"""Small networks of the zoo, and the detection of a wrong gradient."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.judge import GRIDS, Verdict, judge
from tests.zoo.networks import missing_packages
from tests.zoo.record import Record, differences
from tests.zoo.results import passes, table, verdict_of

# At least one of each package; small, and none that needs processes.
DOZEN = (
    "torchvision/densenet",
    "torchvision/swin_v2",
    "monai/unet_3d",
    "monai/voxelmorph",
    "dynamic-network-architectures/plain_conv_unet_2d",
    "segmentation_models_pytorch/pspnet",
    "timm/xcit",
    "timm/convnext_v2",
    "diffusers/unet_2d_condition",
    "diffusers/autoencoder_kl",
    "transformers/gpt2",
    "neuraloperator/tfno",
)
LIMIT_S = 60.0

needs_packages = pytest.mark.skipif(
    bool(missing_packages()),
    reason=f"not installed: {', '.join(missing_packages())}; `make zoo` installs them",
)
# Warnings of the packages are ignored.
pytestmark = pytest.mark.filterwarnings("ignore")


@needs_packages
@pytest.mark.parametrize("name", DOZEN)
def test_converted_network_is_right(name: str) -> None:
    found = judge(name, _grid_of(name), limit_s=LIMIT_S)
    assert found.verdict == "right", (found.what, found.error, found.text)
    assert found.planned_bytes == found.forward_bytes > 0


@needs_packages
def test_network_alone_is_right() -> None:
    assert judge("monai/unet_3d", "2x1", "sequential", LIMIT_S).verdict == "right"


@needs_packages
@pytest.mark.parametrize("grid", GRIDS)
def test_gradient_that_is_a_thousandth_larger_on_one_rank_is_wrong(grid: str) -> None:
    found = judge("monai/unet_3d", grid, "tampered", LIMIT_S)
    assert found.verdict == "wrong"
    assert found.error == pytest.approx(1e-3, rel=1e-3)
    assert found.what.startswith("gradient ")


def test_missing_numbers_are_infinitely_wrong() -> None:
    x = torch.ones(2)
    expected: Record = {"gradient": {"weight": x, "unused": None}}
    others: list[dict[str, torch.Tensor | None]] = [
        {"weight": x},
        {"weight": x, "unused": None, "more": x},
        {"weight": None, "unused": None},
        {"weight": x, "unused": x},
        {"weight": x[:1], "unused": None},
        {"weight": x.float() if x.dtype == torch.float64 else x.double(), "unused": None},
        {"weight": x * float("nan"), "unused": None},
    ]
    for gradients in others:
        assert max(differences(expected, {"gradient": gradients}))[0] == float("inf"), gradients
    assert max(differences(expected, expected))[0] == 0


def test_rounding_of_a_gradient_that_is_zero_is_no_error() -> None:
    expected: Record = {"gradient": {"weight": torch.ones(2), "bias": torch.zeros(2)}}
    found: Record = {"gradient": {"weight": torch.ones(2), "bias": torch.full((2,), 1e-15)}}
    assert max(differences(expected, found))[0] == pytest.approx(1e-11)


def test_four_networks_may_be_refused_and_none_wrong() -> None:
    right = [Verdict(f"p/{i}", "3", verdict="right", error=0.0) for i in range(9)]
    refused = [Verdict(f"p/r{i}", "3", verdict="refused", text="why") for i in range(5)]
    wrong = Verdict("p/0", "2x1", verdict="wrong", error=1.0, what="gradient bias")
    assert passes([*right, *refused[:4]])
    assert not passes([*right, *refused])
    assert not passes([*right, wrong])
    assert not passes([*right, Verdict("p/0", "2x1", verdict="right", error=0.0, planned_bytes=8)])
    assert verdict_of([right[0], wrong]) == "wrong"
    assert "p/0 on 2x1: wrong, error 1.0e+00, gradient bias" in table([*right, wrong])


def _grid_of(name: str) -> str:
    return list(GRIDS)[DOZEN.index(name) % len(GRIDS)]
