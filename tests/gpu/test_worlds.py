"""Foundations of the other tests of this folder; needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.layouts import LAYOUTS, laid_out
from tests.gpu.operators import grid_of
from tests.gpu.worlds import A_RANK_A_GPU, ONE_RANK, environment, gpus, why_there_is_no


def test_environment_is_restored() -> None:
    os.environ["GPUDIST_TEST_SET"] = "before"
    with environment({"GPUDIST_TEST_SET": "", "GPUDIST_TEST_NEW": "here"}):
        assert "GPUDIST_TEST_SET" not in os.environ
        assert os.environ["GPUDIST_TEST_NEW"] == "here"
    assert os.environ.pop("GPUDIST_TEST_SET") == "before"
    assert "GPUDIST_TEST_NEW" not in os.environ


@pytest.mark.parametrize(
    "size, grid", [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7)), (8, (2, 4))]
)
def test_grid(size: int, grid: tuple[int, int]) -> None:
    assert grid_of(size) == grid


def test_layouts_differ_in_memory_alone() -> None:
    x = torch.arange(120.0).reshape(2, 3, 4, 5)
    made = [laid_out(x, layout) for layout in LAYOUTS]
    assert all(torch.equal(y, x) for y in made)
    assert len({(y.stride(), y.storage_offset()) for y in made}) == len(LAYOUTS)


def test_worlds_that_there_are() -> None:
    assert why_there_is_no(ONE_RANK) == ""
    assert (why_there_is_no(A_RANK_A_GPU) == "") == (gpus() >= 2)
