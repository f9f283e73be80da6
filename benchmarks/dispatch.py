"""Torch functions on global tensors, as in converted networks, compared with plain blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Case, Side
from gpudist.sbp import GlobalTensor, split
from gpudist.sbp.interception import intercept
from gpudist.sbp.placement import Placement
from gpudist.sbp.scope import Scope
from gpudist.world.partition import Partition

SHAPE = (1, 4, 8, 8)  # Small, so that the call dominates rather than the arithmetic.
CALLS = 100

_weight, _bias = torch.ones(4, 4, 1, 1), torch.ones(4)
# These functions move no data if rows are split.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.relu": torch.relu,
    "F.relu": F.relu,
    "add": lambda x: x + x,
    "mul by a number": lambda x: x * 2.0,
    "conv2d 1x1": lambda x: torch.conv2d(x, _weight, _bias),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "getitem": lambda x: x[:, 1:],
    "cat": lambda x: torch.cat([x, x], 1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8)),
    "shape": lambda x: x.shape,
}


def cases(ranks: int) -> list[Case]:
    """Return the cases, of a hundred calls each; bytes are a rank's block."""
    if ranks != 2:
        return []
    words = ",".join(map(str, SHAPE))
    found: list[Case] = []
    for name in FUNCTIONS:
        parameters = {"what": name, "shape": SHAPE}
        found.append(
            Case("dispatch", f"{CALLS} x {name}, global [{words}]", ranks, 512, parameters)
        )
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; the peer is the same function of an ordinary tensor, this rank's block."""
    function, shape = FUNCTIONS[case.parameters["what"]], case.parameters["shape"]
    placement = Placement("cpu", list(range(P_world.size)), P_world)
    torch.manual_seed(0)
    whole = torch.rand(shape)
    block = whole.tensor_split(P_world.size, 2)[P_world.rank or 0].contiguous()
    x: Any = GlobalTensor._wrap(block, placement, (split(2),), tuple(shape))
    expected = function(whole)

    @torch.no_grad()
    def ours() -> Any:
        with intercept(Scope(placement)):
            for _ in range(CALLS):
                y = function(x)
        return _whole_of(y)

    @torch.no_grad()
    def local() -> Any:
        for _ in range(CALLS):
            y = function(block)
        return y

    alone = local()
    return {
        "gpudist": Side(ours, lambda y: _is_alike(y, expected)),
        "local torch": Side(local, lambda y: _is_alike(y, alone)),
    }


def _whole_of(y: Any) -> Any:
    return y.full_tensor() if isinstance(y, GlobalTensor) else y


def _is_alike(y: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return y == expected
    return y.shape == expected.shape and torch.allclose(y, expected, atol=1e-6)
