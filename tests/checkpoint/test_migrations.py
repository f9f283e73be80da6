"""Modules that convert state dicts when they load, in every function; DTensors; random numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, weight_norm

import gpudist
from gpudist import Plan, checkpoint
from gpudist.errors import CheckpointError
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed
from tests.torchs_group import torchs_group

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


DOORS: list[Any] = [checkpoint.load_full_state_dict, checkpoint.load]


class Scaled(nn.Module):
    """Version 2 holds the logarithm of the scale that version 1 held."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.log_scale = nn.Conv2d(1, 2, 3, padding=1), nn.Parameter(torch.zeros(1))
        self.loaded, self.from_version, self.extra, self.noted = 0, 2, "new", ""
        self.seen: list[str] = []
        self.register_load_state_dict_pre_hook(Scaled.note)
        self.register_load_state_dict_post_hook(Scaled.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * self.log_scale.exp()

    def note(self, state: Any, prefix: str, *rest: Any) -> None:
        self.noted = f"{prefix}: {sorted(state)}"
        self.seen.append(prefix)

    def count(self, keys: Any) -> None:
        self.loaded += 1

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.from_version = metadata.get("version") or 1
        if self.from_version < 2:
            state[prefix + "log_scale"] = state[prefix + "log_scale"].log()
            state[prefix + "_extra_state"] = "old"
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def scaled() -> tuple[nn.Module, dict[str, Any]]:
    state = Scaled().state_dict()
    return Scaled(), {**state, "log_scale": torch.tensor([3.0])}


class Plain(nn.Conv2d):
    """Its state dict has no versions."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(super().state_dict(*args, **kwargs))


def hooked() -> tuple[nn.Module, dict[str, Any]]:
    def double(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = 2 * state[prefix + "weight"]

    layer = Plain(1, 2, 3)
    layer.register_load_state_dict_pre_hook(double)
    return layer, dict(layer.state_dict())


def counted() -> tuple[nn.Module, dict[str, Any]]:
    state = nn.BatchNorm2d(1).state_dict()
    return nn.BatchNorm2d(1), {k: v + 1 for k, v in state.items() if "num" not in k}


def normed() -> tuple[nn.Module, dict[str, Any]]:
    with pytest.warns(FutureWarning):
        state = weight_norm(nn.Conv2d(1, 2, 3)).state_dict()
    return parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), dict(state)


def assert_loaded(net: Any, whole: Any) -> None:
    full = checkpoint.full_state_dict(net, to_all=True)
    assert full.keys() == whole.state_dict().keys()
    for name, want in whole.state_dict().items():
        assert torch.equal(full[name], want) if "extra" not in name else full[name] == want, name
    for name in ("from_version", "noted", "seen"):
        assert getattr(net, name, None) == getattr(whole, name, None)
    assert bool(getattr(net, "loaded", 0)) == bool(getattr(whole, "loaded", 0))


@distributed(ranks=2, transports=["loopback"])
def test_modules_convert_what_they_load(P_world: Partition, tmp_path: Path) -> None:
    P_x, root = grid(P_world, [1, 1, 2, 1]), P_world.rank == 0
    for make in (scaled, hooked, counted, normed):
        network, state = make()
        whole = copy.deepcopy(network)
        whole.load_state_dict(copy.deepcopy(state))
        path = tmp_path / make.__name__
        if root:
            dcp.save({"model": copy.deepcopy(state)}, checkpoint_id=path, no_dist=True)
        P_world.barrier()
        split = Plan()
        if make is scaled:
            split.split_weight("conv", [1, 2, 1, 1, 1])
        for plan in (None, split):
            for load in DOORS:
                net = gpudist.distribute(copy.deepcopy(network), P_x, plan)
                load(net, path if load is checkpoint.load else state if root else None)
                assert_loaded(net, whole)
        net = gpudist.distribute(copy.deepcopy(network), P_x)
        net.load_state_dict(copy.deepcopy(state))
        assert_loaded(net, whole)
        # What these modules have saved is of their own version; the hook converts it again.
        saved = tmp_path / f"{make.__name__}.saved"
        checkpoint.save(net, saved)
        if make is not hooked:
            for load in DOORS:
                again = gpudist.distribute(make()[0], P_x)
                if root:
                    again.register_load_state_dict_post_hook(lambda *_: None)
                full = checkpoint.full_state_dict(net)
                load(again, saved if load is checkpoint.load else full)
                for name, want in checkpoint.full_state_dict(net, to_all=True).items():
                    got = checkpoint.full_state_dict(again, to_all=True)[name]
                    assert torch.equal(got, want) if "extra" not in name else got == want


def draws(P_world: Partition, path: Path, is_saved: bool) -> list[torch.Tensor]:
    P_x = P_world.grid(1, P_world.size)
    net = nn.ModuleList([gpudist.distribute(nn.Sequential(nn.Dropout(0.5)), P_x)])
    x = torch.ones(4, 12 // P_world.size)
    if is_saved:
        net[0](x)
        checkpoint.save(net, path)
    else:
        checkpoint.load(net, path)
    return [net[0](x).full_tensor() for _ in range(2)]


def test_random_numbers_go_on_with_any_number_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    wanted = run_distributed(draws, 2, path, True)[0]
    for workers in (1, 2, 3):
        resumed = run_distributed(draws, workers, path, False)[0]
        assert all(map(torch.equal, resumed, wanted))


@distributed(ranks=2, transports=["host"])
def test_parameters_of_fsdp_are_whole_in_files(P_world: Partition, tmp_path: Path) -> None:
    P_x, whole = P_world.grid(2, 1, 1, 1), nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    torch.manual_seed(1)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    with torchs_group(P_world, str(tmp_path / "group")):
        mesh = P_x.create_device_mesh([0])
        made = [copy.deepcopy(whole) for _ in range(3)]
        nets: list[Any]
        nets = [fully_shard(gpudist.distribute(x, P_x.along([1, 2, 3])), mesh=mesh) for x in made]
        checkpoint.load_full_state_dict(nets[0], {k: v + 1 for k, v in whole.state_dict().items()})
        checkpoint.save(nets[0], tmp_path / "saved")
        checkpoint.load(nets[1], tmp_path / "saved")
        plain = copy.deepcopy(whole)
        checkpoint.load(plain, tmp_path / "saved")
        for net in (nets[0], nets[1], plain):
            full = checkpoint.full_state_dict(net, to_all=True)
            for name, value in whole.state_dict().items():
                assert type(full[name]) is torch.Tensor and torch.equal(full[name], value + 1)
        optimizer = torch.optim.Adam(nets[2].parameters())
        with pytest.raises(CheckpointError, match="DTensors"):
            checkpoint.save(nets[2], tmp_path / "saved", optimizer)
