"""The example of a pipeline of diffusers with a split autoencoder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples import trainers

trainers.needs("diffusers", "transformers")

SMALL = ("--size", 32, "--steps", 2, "--inference-steps", 2)


def test_image_is_the_sequential_pipelines_and_training_goes_on(tmp_path: Path) -> None:
    kept, picture = tmp_path / "checkpoint", tmp_path / "picture.png"
    first = ("--compare", "--tolerance", -1, "--save", kept, "--picture", picture)
    done = trainers.train("diffusers_vae", *SMALL, *first)
    # Any difference is a failure, and both are of rounding.
    assert done.returncode == 1, done.stderr
    found = re.findall(r"diffusers_vae\.py: (\w+) differs by (\S+), more than -1", done.stderr)
    assert [name for name, _ in found] == ["loss", "pixels"]
    assert all(float(apart) < 1e-4 for _, apart in found)
    assert len(trainers.losses(done)) == len(trainers.losses(done, "sequential")) == 2
    assert "pixels" in done.stdout and picture.stat().st_size > 0
    # Elsewhere, after the last step.
    grid = ("--grid", 4, 1)
    done = trainers.train("diffusers_vae", *SMALL, *grid, "--bf16", "--resume", kept)
    assert done.returncode == 0, done.stderr
    assert "sequential" not in done.stdout
    assert trainers.losses(done)[0] < 0.9 * 0.79
