"""No function of the table makes torch import its compiler at its first call."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gpudist.sbp import Placement
from gpudist.sbp.registry import name_of, signatures
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.sbp.compare import global_of
from tests.sbp.parts import S

ROOT = Path(__file__).resolve().parents[2]
# Of arguments that a function does not take.
RAISES = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
FEWEST = 400


def _call_all(P_world: Partition) -> tuple[int, str]:
    """Return how many functions took some arguments, and the first to import the compiler."""
    placement = Placement("cpu", [0], P_world)
    x = global_of(torch.rand(4, 4), placement, (S(0),))
    images = global_of(torch.rand(2, 4, 4, 4), placement, (S(0),))
    kernel = global_of(torch.rand(4, 4, 3, 3), placement, (S(0),))
    firsts: list[Any] = [(x,), (images,), (images, kernel), ([x, x],)]
    rests: list[Any] = [(), (x,), (1,), (2, 2), (0, 1), (x, x), (x, x, x, 0.1)]
    calls = 0
    for function in signatures:
        for first, rest in product(firsts, rests):
            try:
                function(*first, *rest)
            except RAISES:
                continue
            calls += 1
            break
        if "torch._dynamo" in sys.modules:
            return calls, name_of(function)
    return calls, ""


def main() -> None:
    """Print what :func:`_call_all` returns."""
    warnings.simplefilter("ignore")
    assert "torch._dynamo" not in sys.modules
    print(*run_distributed(_call_all, 1, timeout=100.0))


def test_no_function_imports_the_compiler() -> None:
    program = "from tests.sbp.test_unneeded_compiler import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    calls, importing = ast.literal_eval(ended.stdout)
    assert not importing and calls > FEWEST
