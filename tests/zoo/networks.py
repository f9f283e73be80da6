"""The list of the zoo: 120 networks of ten packages, one file per package."""

from __future__ import annotations

import importlib
import importlib.util

from tests.zoo.network import Network
from tests.zoo.operators import declare_missing_operators

# By the names on PyPI; each has a file, and all but one are imported by a name that is alike.
PACKAGES = (
    "torchvision",
    "monai",
    "dynamic-network-architectures",
    "segmentation_models_pytorch",
    "timm",
    "diffusers",
    "transformers",
    "neuraloperator",
    "torch-harmonics",
    "x-transformers",
)
_IMPORTED = {"neuraloperator": "neuralop"}
# Those that the suite judges: small ones of eight packages, of which none needs processes.
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


def missing_packages() -> list[str]:
    """Packages of the zoo that are not installed."""
    modules = {p: _IMPORTED.get(p, p.replace("-", "_")) for p in PACKAGES}
    return [p for p, module in modules.items() if importlib.util.find_spec(module) is None]


def networks_of(package: str) -> list[Network]:
    """Import the package, and return its networks in the order of its file."""
    declare_missing_operators()
    file = importlib.import_module(f"tests.zoo.from_{package.replace('-', '_')}")
    return file.NETWORKS


def all_networks() -> list[Network]:
    return [network for package in PACKAGES for network in networks_of(package)]


def network_named(name: str) -> Network:
    """The one of that name. Imports its package alone."""
    package = name.partition("/")[0]
    found = [n for n in networks_of(package) if n.name == name] if package in PACKAGES else []
    if len(found) != 1:
        raise ValueError(f"the zoo has {len(found)} networks of the name {name!r}, expected one")
    return found[0]
