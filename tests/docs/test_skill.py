"""The ten tasks of docs/skill.md, each alone, and the mistakes that its check is to find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gpudist
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.docs.pages import ROOT
from tests.docs.skill import LIMIT_S, PAGE, RANKS, execute, main, outcome, tasks

TASKS = tasks()
CHECK = TASKS[0].check


def test_there_are_ten() -> None:
    assert [task.title.split(".")[0] for task in TASKS] == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize("number", range(1, 11))
def test_a_task_alone(number: int) -> None:
    found = outcome(TASKS[number - 1])
    assert found.is_right, found


@pytest.mark.parametrize("number", range(1, 11))
def test_a_task_compares_values_and_gradients(number: int) -> None:
    text = TASKS[number - 1].solution.text
    assert "assert_close" in text or "check(net" in text
    assert "check(net" in text or "check_gradients(net" in text or "optimizer.step()" in text


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        ("check(net, network, net(images), network(images))", "ShapeError"),
        ("check(net, network, net(gpudist.scatter(image, P_x)), network(images))", "'image'"),
        ("net(gpudist.scatter(images, P_x))", "nothing was compared"),
    ],
)
def test_the_command_finds_a_wrong_solution(
    solution: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = "check(net, network, net(gpudist.scatter(images, P_x)), network(images))"
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert right in TASKS[0].solution.text
    (page := tmp_path / "skill.md").write_text(text.replace(right, solution, 1), encoding="utf-8")
    assert main(["--page", str(page), "--task", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"WRONG: .*{words}", printed)
    assert printed.endswith("0 of 1 tasks equal the sequential network\n")


def test_a_loss_of_copies_is_found() -> None:
    def body(P_world: Partition) -> None:
        names = execute(P_world, CHECK)
        torch.manual_seed(0)
        network = torch.nn.Conv2d(1, 2, 3, padding=1).double()
        images = torch.randn(1, 1, 8, 8).double()
        P_x = P_world.grid(1, 1, 2, 2)
        net = gpudist.distribute(network, P_x)
        net(gpudist.scatter(images, P_x)).full_tensor().square().mean().backward()
        network(images).square().mean().backward()
        with pytest.raises(AssertionError):
            names["check_gradients"](net, network)

    run_distributed(body, RANKS, timeout=LIMIT_S)
