"""The example of a MONAI bundle whose volume is split."""

from __future__ import annotations

import re

from tests.examples import trainers

trainers.needs("monai", "ignite", "nibabel")


def test_probabilities_are_those_of_the_sequential_network() -> None:
    """Any difference is a failure, and theirs is of rounding."""
    options = ("--size", 16, "--compare", "--tolerance", -1)
    done = trainers.train("monai_bundle", *options)
    assert done.returncode == 1, done.stderr
    (apart,) = re.findall(r"monai_bundle\.py: probabilities differs by (\S+), more", done.stderr)
    assert float(apart) < 1e-4
    assert "probabilities" in done.stdout
