"""Networks of three packages on several ranks, in float64, beside themselves on one."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.world.partition import Partition
from tests.gpu.devices import ON_DOUBLES, require_gpu
from tests.gpu.operators import whole_of
from tests.gpu.worlds import World

require_gpu()

TOLERANCE = 1e-9
# An image's side, by the network of timm.
OF_TIMM = {
    "resnet18": 96,
    "convnext_atto": 96,
    "vit_tiny_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "efficientnet_b0": 96,
    "mobilenetv3_small_050": 96,
    "maxvit_rmlp_pico_rw_256": 256,
    "hrnet_w18_small": 96,
    "poolformer_s12": 96,
}
NETWORKS = (
    *(f"timm {name}" for name in OF_TIMM),
    *("torchvision deeplabv3_resnet50", "torchvision densenet121", "transformers gpt2"),
    "torch convolution",
)


def network_and_input(name: str) -> tuple[nn.Module, torch.Tensor]:
    package, model = name.split()
    if package == "timm":
        import timm

        side = OF_TIMM[model]
        found = timm.create_model(model, pretrained=False, num_classes=10, drop_path_rate=0.0)
        return found, torch.randn(2, 3, side, side)
    if package == "torchvision":
        from torchvision.models import densenet121, segmentation

        if model == "densenet121":
            return densenet121(weights=None, num_classes=10), torch.randn(2, 3, 96, 96)
        found = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=4)
        return found, torch.randn(2, 3, 96, 96)
    if package == "torch":
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *pool), torch.randn(2, 3, 16, 16)
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}
    return GPT2LMHeadModel(GPT2Config(n_positions=64, **small)), torch.randint(128, (2, 64))


def errors(P_world: Partition, name: str) -> tuple[float, float]:
    """Errors of the output and of the worst gradient, relative to the largest number."""
    torch.manual_seed(0)
    network, x = network_and_input(name)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    network = network.to(P_world.device, torch.float64)
    x = x.to(P_world.device, torch.float64 if x.is_floating_point() else x.dtype)
    shape = [1, P_world.size] if x.dim() == 2 else [1, 1, P_world.size, 1]
    P_x = P_world.create_cartesian_topology_partition(shape)
    converted = gpudist.distribute(deepcopy(network), P_x)
    outputs: list[torch.Tensor] = []
    gradients: list[dict[str, torch.Tensor]] = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for each, given in ((network, x), (converted, gpudist.scatter(x, P_x))):
            each.zero_grad(set_to_none=True)
            y = first_tensor(each(given))
            y.square().mean().backward()
            outputs.append(whole_of(y.detach()))
            named = {n: p.grad for n, p in each.named_parameters() if p.grad is not None}
            gradients.append({n: g.detach().clone() for n, g in named.items()})
    expected, found = gradients
    assert expected.keys() == found.keys()
    worst = max(_difference(found[n], g) for n, g in expected.items() if g.abs().max() > 1e-12)
    return _difference(outputs[1], outputs[0]), worst


def first_tensor(y: Any) -> torch.Tensor:
    while not isinstance(y, torch.Tensor):
        y = next(iter(y.values())) if hasattr(y, "values") else y[0]
    return y


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network(world: World, name: str) -> None:
    package, _ = name.split()
    if find_spec(package) is None:
        pytest.skip(f"there is no {package}")
    if ON_DOUBLES and package != "torch":
        pytest.skip("tests/zoo has it on CPUs")
    for output, gradient in world.run(errors, name=name):
        assert output <= TOLERANCE and gradient <= TOLERANCE, (output, gradient)
