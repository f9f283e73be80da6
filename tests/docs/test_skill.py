"""The ten tasks of docs/skill.md, each alone, and the mistakes that its check is to find."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import gpudist
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.docs.pages import ROOT, Block, read

PAGE = "docs/skill.md"
CHECK, *TASKS = [block for block in read(PAGE).blocks if block.is_snippet]
RANKS = 4
LIMIT_S = 120.0


def run(P_world: Partition, *blocks: Block) -> dict[str, Any]:
    names: dict[str, Any] = {"P_world": P_world, "__name__": "__docs__"}
    for block in blocks:
        exec(block.code("P_world"), names)
    return names


def test_there_are_ten() -> None:
    titles = re.findall(r"^### (\d+)\. ", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == [str(number) for number in range(1, 11)]
    assert len(TASKS) == 10


@pytest.mark.parametrize("number", range(1, 11))
def test_a_task_alone(number: int) -> None:
    run_distributed(run, RANKS, CHECK, TASKS[number - 1], timeout=LIMIT_S)


@pytest.mark.parametrize("number", range(1, 11))
def test_a_task_compares_values_and_gradients(number: int) -> None:
    text = TASKS[number - 1].text
    assert "assert_close" in text or "check(net" in text
    assert "check(net" in text or "check_gradients(net" in text or "optimizer.step()" in text


def test_a_whole_input_is_found() -> None:
    def body(P_world: Partition) -> None:
        names = run(P_world, CHECK, TASKS[0])
        network, images = names["network"], names["images"]
        net = gpudist.distribute(network, names["P_x"])
        with pytest.raises(AssertionError):
            names["check"](net, network, net(images), network(images))

    run_distributed(body, RANKS, timeout=LIMIT_S)


def test_a_loss_of_copies_is_found() -> None:
    def body(P_world: Partition) -> None:
        names = run(P_world, CHECK)
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
