"""Parameters are drawn as torch draws them, whoever holds which block, a few rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.nn import DistributedConv2d, DistributedLinear
from gpudist.nn.parameters import parameter
from gpudist.nn.parameters.parameter import (
    bias_bound,
    kaiming_bound,
    normal_parameter,
    uniform_parameter,
)
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
GRIDS = [(1, 1), (2, 1), (1, 3), (3, 2), (7, 1)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk_cells", [1, 5, 12, 64, 1 << 22])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_those_of_torchs_layer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_cells: int
) -> None:
    monkeypatch.setattr(parameter, "_CHUNK_CELLS", chunk_cells)
    torch.manual_seed(1)
    layer = torch.nn.Linear(6, 7, dtype=dtype)
    assert layer.bias is not None
    state = torch.get_rng_state()
    for parts in GRIDS:
        weight_cut = Decomposition.balanced((7, 6), parts)
        bias_cut = Decomposition.balanced((7,), parts[:1])
        for row in range(parts[0]):
            for column in range(parts[1]):
                weight_box, bias_box = weight_cut.block((row, column)), bias_cut.block((row,))
                torch.manual_seed(1)
                weight = uniform_parameter((7, 6), kaiming_bound(6), weight_box, dtype=dtype)
                bias = uniform_parameter((7,), bias_bound(6), bias_box, dtype=dtype)
                assert torch.equal(weight, layer.weight[weight_box.slices])
                assert torch.equal(bias, layer.bias[bias_box.slices])
                assert weight.dtype == dtype and weight.is_contiguous()
                assert weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize
                assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(3, 5), (50, 3), (33, 16), (67, 1), (2, 8), (40, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normal_numbers_are_torchs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    expected = torch.empty(shape, dtype=dtype).normal_()
    state = torch.get_rng_state()
    boxes = [Box.whole(shape), Decomposition.balanced(shape, (3, 2)).block((1, 1)), None]
    for chunk_cells in (1, 48, 200, 1 << 22):
        monkeypatch.setattr(parameter, "_CHUNK_CELLS", chunk_cells)
        for box in boxes:
            torch.manual_seed(1)
            drawn = normal_parameter(shape, box, dtype=dtype)
            assert torch.equal(drawn, expected[box.slices] if box else expected.new_empty(0))
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("chunk_cells", [1, 100])
@pytest.mark.parametrize("shape", [(7, 6), (5,), (3, 2, 3, 3)])
def test_a_worker_without_a_block_draws_too(
    monkeypatch: pytest.MonkeyPatch, shape: Sequence[int], chunk_cells: int
) -> None:
    monkeypatch.setattr(parameter, "_CHUNK_CELLS", chunk_cells)
    torch.manual_seed(1)
    torch.empty(*shape).uniform_(-1, 1)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    placeholder = uniform_parameter(shape, 1.0, None, dtype=torch.float32)
    assert placeholder.shape == (0,) and placeholder.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [*DTYPES, None], ids=str)
@distributed(ranks=4)
def test_layers_leave_the_generator_as_torchs_do(
    P_world: Partition, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(1)
    torch.nn.Conv2d(4, 6, 3, groups=2, dtype=dtype)
    torch.nn.Linear(5, 7, dtype=dtype)
    torch.nn.Linear(5, 7, bias=False, dtype=dtype)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    P_x = grid(P_world, [1, 1, 2, 1])
    DistributedConv2d(P_x, 4, 6, 3, groups=2, dtype=dtype)
    P_x, P_w = grid(P_world, [1, 2]), grid(P_world, [1, 2], [1, 2])
    DistributedLinear(P_x, grid(P_world, [1, 1]), P_w, 5, 7, dtype=dtype)
    layer = DistributedLinear(grid(P_world, [2, 1]), 5, 7, bias=False, dtype=dtype)
    assert layer.weight.dtype == (dtype or torch.get_default_dtype())
    assert torch.equal(torch.get_rng_state(), state)
