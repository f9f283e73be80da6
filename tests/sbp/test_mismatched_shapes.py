"""Arguments whose shapes do not fit: what torch refuses, global tensors refuse.

Rules ask torch's functions of shapes, which check less than its kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import gpudist
from gpudist.errors import TransportError
from gpudist.sbp import broadcast, split
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.samples import operators, samples_of

T = torch.Tensor
# torch's own kernels read memory that is not theirs where such shapes differ.
UNSAFE = {
    "lu_unpack", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
    "nn.functional.embedding_bag",
}  # fmt: skip


def misfits(x: T) -> Iterator[tuple[str, T]]:
    """Yield tensors of other shapes than ``x``."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            yield f"less in dim {dim}", x.narrow(dim, 0, x.shape[dim] - 1)
    if x.dim() and x.shape[0]:
        yield "without dim 0", x[0]
    yield "with one more dim", x[None]
    if x.dim():
        yield "empty", x.narrow(0, 0, 0)


def call(function: Any, arguments: Any, other: T, x: T, of: Callable[[T], Any]) -> Any:
    """Call the function with ``x`` in place of ``other``, and ``of`` of all tensors."""
    first, args, kwargs = map_tree(
        arguments,
        lambda y: of(x if y is other else y.detach()) if isinstance(y, T) else y,
    )
    return function(first, *args, **kwargs)


def is_refused(call: Callable[[], object]) -> bool:
    try:
        return call() is NotImplemented
    except TransportError:
        raise
    except Exception:
        return True


@pytest.mark.filterwarnings("ignore")
@distributed(ranks=2, transports=["loopback"], timeout_s=600)
def test_what_torch_refuses_is_refused(P_world: Partition) -> None:
    placement, accepted, count = gpudist.placement("cpu", [0, 1]), list[str](), 0

    def spread(y: T) -> Any:
        return global_of(y, placement, (split(0) if y.dim() else broadcast,))

    cases = [
        (op, (sample.input, sample.args, sample.kwargs), other, name, x)
        for op in operators()
        if op.name not in UNSAFE
        for sample in samples_of(op, 4)[1]
        for other in tensors_in((sample.input, sample.args, sample.kwargs))[1:]
        if other.layout == torch.strided
        for name, x in misfits(other.detach())
    ]
    for number, (op, arguments, other, name, x) in enumerate(cases):
        if not EVERY and number % 19:
            continue
        calls = partial(call, op.op, arguments, other, x)
        if is_refused(partial(calls, torch.clone)):
            count += 1
            if not is_refused(partial(calls, spread)):
                accepted.append(f"{op.formatted_name}: {list(other.shape)} {name}")
    assert count > 60 and not accepted, f"{len(accepted)} of {count}: {accepted}"
