"""The judge of an assistant's solutions, with one that is right and two that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.assistant.__main__ import TASKS, main, numbers

SALIENCY = 10
# A solution of the last task, and its place for a mistake.
SOLUTION = """
import json
import gpudist
import torch
from torch import nn

P_world = gpudist.init()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
network = nn.Sequential(
    nn.Conv2d(3, 8, 5, padding=2, padding_mode="circular"),
    nn.Softplus(),
    nn.AvgPool2d(3, 2),
    nn.Conv2d(8, 1, 3),
)
P_x = P_world.grid(1, 1, 2, 2)
net = gpudist.distribute(network, P_x)
block = gpudist.scatter(torch.randn(3, 3, 21, 23), P_x).requires_grad_()
y = net(block)
(gradient,) = torch.autograd.grad(y.square().mean(), block)
gradient = gpudist.to_global(gradient, y.placement, y.sbp)
norms = gradient.square().sum(dim=(1, 2, 3)).sqrt().full_tensor().tolist()
numbers = [y.sum().full_tensor().item(), *norms, gradient.abs().max().full_tensor().item()]
if P_world.rank == 0:
    print("NUMBERS", json.dumps(numbers))
"""


def test_there_are_ten_tasks() -> None:
    assert [task.stem for task in TASKS] == [f"task_{n:02d}" for n in range(1, 11)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.stem)
def test_a_task_has_numbers(task: Path) -> None:
    found, error = numbers(task)
    assert found, error


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("", "", "task_10: right"),
        ("gradient.abs().max().full_tensor()", "gradient.to_local().abs().max()", "wrong: "),
        ("P_x = P_world.grid(1, 1, 2, 2)", "P_x = P_world.grid(1, 1, 2)", "no numbers: "),
    ],
)
def test_a_solution_is_judged(
    right: str, wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task_10.py").write_text(SOLUTION.replace(right, wrong), encoding="utf-8")
    status = main([str(tmp_path), "--task", str(SALIENCY)])
    assert words in capsys.readouterr().out and status == ("right" not in words)


def test_a_missing_solution_is_not_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--task", str(SALIENCY)]) == 1
    assert "0 of 1 solutions" in capsys.readouterr().out
