"""Types of ``spmd_types`` on parts, and its checker beside the table of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import all_sum_reduce
from gpudist.errors import PartitionError
from gpudist.sbp import Placement, to_typed_local
from gpudist.sbp.typed import mesh_axes
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, random

REASON = "spmd_types is not installed"


def types() -> Any:
    return pytest.importorskip("spmd_types", reason=REASON)


# Processes, not threads: the checker changes torch.autograd.Function for the whole process.
@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_parts_carry_types(P_world: Partition) -> None:
    t = types()
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    outer, inner = mesh_axes(placement)
    assert outer == t.MeshAxis.of(2, 2) and inner == t.MeshAxis.of(2, 1)
    for one, word in ((B, t.R), (P, t.P), (S(0), t.V), (S(1), t.V)):
        x = global_of(random((5, 3)), placement, (one, S(1)))
        local = to_typed_local(x)
        assert t.get_axis_local_type(local, outer) is word
        assert t.get_axis_local_type(local, inner) is t.V
        own = {S(0): ((outer,), (inner,)), S(1): (None, (outer, inner))}.get(one, (None, (inner,)))
        expected = t.normalize_partition_spec(t.PartitionSpec(*own))
        assert t.get_partition_spec(local) == expected
    with pytest.raises(PartitionError, match="evenly spaced"):
        mesh_axes(Placement("cpu", [0, 1, 3], P_world))


@distributed(ranks=2, transports=("host",), timeout_s=240.0)
def test_the_checker_finds_the_types_of_the_table(P_world: Partition) -> None:
    """Typed operators on global tensors pass in strict mode, with the types of the table."""
    t = types()
    checker: Any = pytest.importorskip("spmd_types.checker", reason=REASON)
    placement = Placement("cpu", [0, 1], P_world)
    (axis,) = mesh_axes(placement)
    a, b = random((4, 6)), random((6, 2), 1)
    words = {"broadcast": t.R, "partial_sum": t.P, "split": t.V}
    for sbps in ((S(0), B), (B, S(1)), (P, B), (B, B)):
        x, w = (global_of(v, placement, (one,)) for v, one in zip((a, b), sbps, strict=True))
        with checker.typecheck("strict"):
            y: Any = x @ w
            product = to_typed_local(x) @ to_typed_local(w)
            assert t.get_axis_local_type(product, axis) is words[y.sbp[0].kind]
            z: Any = y.tanh()
        assert_global(z, torch.tanh(a @ b))
    terms = to_typed_local(global_of(a, placement, (P,)))
    with checker.typecheck("strict"), pytest.raises(t.SpmdTypeError):
        terms.tanh()


@distributed(ranks=2, transports=("host",), timeout_s=240.0)
def test_movements_pass_the_checker(P_world: Partition) -> None:
    """Movements are typed by hand with their results, so the checker accepts them."""
    t = types()
    checker: Any = pytest.importorskip("spmd_types.checker", reason=REASON)
    placement = Placement("cpu", [0, 1], P_world)
    (axis,) = mesh_axes(placement)
    x = random((4, 6))
    terms = global_of(x, placement, (P,), True)
    with checker.typecheck("strict"):
        local = to_typed_local(terms)
        total = t.assert_type(all_sum_reduce(local, placement.partition, [0]), {axis: t.R})
        doubled = total + total
        assert t.get_axis_local_type(doubled, axis) is t.R
        y: Any = terms.to_global(sbp=B) * 3
        y.backward(torch.ones_like(x))
    torch.testing.assert_close(doubled, 2 * x)
    assert terms.grad is not None
    assert_global(terms.grad, torch.full_like(x, 3.0))
