"""Gradients of gradients of dropout of global tensors."""

# Operators of global tensors are typed as torch types them: their results are Tensors.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.sbp import Placement
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.world.partition import Partition
from tests.nn.random.test_dropout import by_mask, slopes
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random

X = random((4, 6, 5))
PROBABILITY = 0.4
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, PROBABILITY),
    "dropout1d": lambda x: F.dropout1d(x, PROBABILITY),
    "alpha": lambda x: F.alpha_dropout(x, PROBABILITY, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, PROBABILITY, True),
}
LAYOUTS = ((B, B), (S(0), S(1)), (S(1), B), (S(2), S(0)))


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor().detach()


@pytest.mark.parametrize("name", FUNCTIONS)
@distributed(ranks=4, transports=("loopback",))
def test_double_backward(P_world: Partition, name: str) -> None:
    """Gradients of gradients drop the cells of their forward, also after another call."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    for sbp in LAYOUTS:
        x: Any = global_of(X, placement, sbp, True)
        with enter_scope(Scope(placement, seed=3)):
            y = FUNCTIONS[name](x)
            FUNCTIONS[name](x)
        alone = X.clone().requires_grad_()
        expected = slopes(by_mask(alone, whole(y), PROBABILITY, "alpha" in name), alone)
        for found, one in zip(slopes(y, x), expected, strict=True):
            torch.testing.assert_close(whole(found), one, rtol=1e-12, atol=1e-12)
