"""torch on every rank's part of the batch, without messages: a bound for networks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from benchmarks.beside import work
from benchmarks.beside.adapters import ours
from benchmarks.case import Case, Side
from benchmarks.correctness.ranks import About
from benchmarks.rows import NO_COMMUNICATION
from benchmarks.training import is_right


def start() -> About:
    return About(f"torch {torch.__version__}", torch.version.git_version)


def sides(case: Case) -> Mapping[str, Side]:
    """Return the side: a rank's rows of the volume, or its share of the samples."""
    is_unet = case.parameters["work"] == work.UNET
    whole = work.unet(case) if is_unet else ours.block(case)
    part = whole.part(work.ROWS if is_unet else 0, int(os.environ["RANK"]), case.ranks)
    training = part.alone()
    return {
        NO_COMMUNICATION: Side(
            training.step, lambda r: is_right(r, part.expected), training.start_again
        )
    }
