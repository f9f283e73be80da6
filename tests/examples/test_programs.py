"""Examples that print what they find, as a user starts them."""

from __future__ import annotations

import re

from tests.examples import trainers


def test_sbp_2d_finds_the_results_of_oneflows_page() -> None:
    done = trainers.start("sbp_2d")
    assert done.returncode == 0, done.stderr
    shapes = "global_x: torch.Size([2, 2, 8]), pred: torch.Size([2, 2, 2]) (broadcast, split(0))"
    for rank in range(4):
        assert f"rank: {rank}, local_x:" in done.stdout
        assert f"rank: {rank}, {shapes}" in done.stdout
    assert "(broadcast, split(0)) x (split(1), broadcast) = (split(1), split(0))\n" in done.stdout
    assert re.search(r"= \(split\(1\), split\(0\), partial_sum\)", done.stdout)


def test_batches_of_any_length() -> None:
    done = trainers.start("variable_batches", "--steps", 20)
    assert done.returncode == 0, done.stderr
    assert "[6, 4] tokens arrive as [4, 6]: other documents" in done.stdout
    assert "[4, 5] tokens do not arrive: ranks disagree about the operation" in done.stdout
    assert "on 4 ranks: 20 batches of as many shapes" in done.stdout


def test_one_worker_is_out_of_memory_and_four_are_not() -> None:
    trainers.needs()
    limit_mb = 230
    options = ("--size", 64, "--steps", 1, "--limit-mb", limit_mb, "--compare")
    done = trainers.start("too_big", *options)
    assert done.returncode == 0, done.stderr
    assert re.search("one worker: .*(can't allocate memory|could not create)", done.stderr)
    *used, unlimited = [int(mb) for mb in re.findall(r"(\d+) MB +│ 0\.", done.stdout)]
    assert len(used) == 4 and max(used) <= limit_mb < unlimited
    assert "largest relative difference of a loss" in done.stdout


def test_a_network_that_fits_one_worker_shows_nothing() -> None:
    trainers.needs()
    done = trainers.start("too_big", "--size", 8, "--steps", 1, "--limit-mb", 2000)
    assert done.returncode != 0
    assert "2000 MB are enough for one worker; lower --limit-mb" in done.stderr


def test_monai_bundle_finds_the_probabilities_of_the_sequential_network() -> None:
    """Any difference is a failure, and theirs is of rounding."""
    trainers.needs("monai", "ignite", "nibabel")
    done = trainers.train("monai_bundle", "--size", 16, "--compare", "--tolerance", -1)
    assert done.returncode == 1, done.stderr
    (apart,) = re.findall(r"monai_bundle\.py: probabilities differs by (\S+), more", done.stderr)
    assert float(apart) < 1e-4
    assert "probabilities" in done.stdout
