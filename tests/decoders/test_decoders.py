"""Decoders of diffusers in blocks are the sequential ones, to rounding."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gpudist.sbp import split
from gpudist.world.partition import Partition
from tests.pool import distributed

if any(importlib.util.find_spec(name) is None for name in ("diffusers", "transformers")):
    pytest.skip("diffusers and transformers are not installed", allow_module_level=True)

from tests.decoders.autoencoders import DECODERS, distributed as converted, latents, partition
from tests.decoders.draws import Draw, errors

SIZES = ((1, 1), (9, 6))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name: str, size: tuple[int, int]) -> None:
    grid = (2, 2) if name == "AutoencoderKL" else (2, 1)
    found = errors(Draw(name, size, grid))
    assert found.is_rounding, found


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLHunyuanVideo"])
@distributed(ranks=4, transports=["loopback"])
@torch.no_grad()
def test_all_workers_decode(P_world: Partition, name: str) -> None:
    """The attention between the blocks of one sample leaves no worker idle afterwards."""
    y = converted(name, partition(name, P_world, 4, 1)).decode(latents(name, 16, 8)).sample
    assert y.sbp == (split(y.dim() - 2),)
