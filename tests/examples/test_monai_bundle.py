"""The example of a MONAI bundle whose volume is split."""

from __future__ import annotations

from tests.examples import trainers

trainers.needs("monai", "ignite", "nibabel")


def test_probabilities_are_those_of_the_sequential_network() -> None:
    done = trainers.train("monai_bundle", "--size", 16, "--compare")
    assert done.returncode == 0, done.stderr
    assert "probabilities" in done.stdout


def test_difference_is_a_failure() -> None:
    options = ("--size", 16, "--compare", "--tolerance", -1)
    done = trainers.train("monai_bundle", *options)
    assert done.returncode == 1
    assert "monai_bundle.py: probabilities differs by" in done.stderr
