"""The sample inputs with which torch tests its own operators, as calls of global tensors."""

from __future__ import annotations

import random as python_random
import sys
import threading
import types
import unittest
import warnings
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any
from unittest import mock

import torch

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import GlobalTensor, Placement
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S
from tests.sbp.tables import cut_somewhere

# Results that depend on memory, on chance, or that are not unique.
NOT_COMPARABLE = {
    "bernoulli", "cauchy", "empty_like", "empty_strided", "exponential", "geometric",
    "log_normal", "multinomial", "new_empty", "new_empty_strided", "normal", "rand_like",
    "randint_like", "randn_like", "resize_", "resize_as_", "uniform",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
}  # fmt: skip
MOST_CELLS = 20_000
GRIDS: list[Any] = [range(4), [[0, 1], [2, 3]]]
_lock = threading.Lock()


@dataclass
class Report:
    """Outcomes of the calls."""

    calls: int = 0
    compared: set[str] = field(default_factory=set)
    without_rule: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def stand_in_for_expecttest() -> None:
    """Let torch's tables be imported, which ask for a package that they do not need."""
    try:
        import expecttest  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in


@cache
def operators() -> list[Any]:
    """Torch's table of functions with samples of their arguments."""
    stand_in_for_expecttest()
    # Importing it would forbid the rest of the process to set flags of backends.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.name not in NOT_COMPARABLE]


_known: dict[tuple[str, int], tuple[bool, list[Any]]] = {}


def samples_of(op: Any, count: int) -> tuple[bool, list[Any]]:
    """Whether they can be differentiated, and samples: the same objects for all ranks' threads."""
    with _lock:
        key = (op.formatted_name, count)
        if key not in _known:
            _known[key] = _drawn(op, count)
        return _known[key]


def _drawn(op: Any, count: int) -> tuple[bool, list[Any]]:
    torch.default_generator.manual_seed(len(op.name))
    known = op.supported_dtypes("cpu")
    options = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
    dtype = next((one for one in options if one in known), None)
    if dtype is None:
        return False, []
    differentiable = op.supports_autograd and dtype in (torch.float64, torch.float32)
    found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=False), 60))
    # The most different ones: from all over the list.
    step = max(1, len(found) // count)
    return differentiable, found[::step][:count]


def judge(P_world: Partition, op: Any, count: int, report: Report) -> None:
    """Compare ``op`` on split samples with ``op`` on whole ones."""
    differentiable, samples = samples_of(op, count)
    for number, sample in enumerate(samples):
        chosen = python_random.Random(f"{op.formatted_name} {number}")
        call = (sample.input, *sample.args), sample.kwargs
        given = tensors_in(call)
        if not given or sum(x.numel() for x in given) > MOST_CELLS:
            continue
        if any(x.is_sparse or x.layout != torch.strided for x in given):
            continue
        if _draws(sample):
            continue
        placement = Placement("cpu", chosen.choice(GRIDS), P_world)
        sbps = [_drawn_sbp(x, placement, chosen, i == 0) for i, x in enumerate(given)]
        shapes = [list(x.shape) for x in given]
        what = f"{op.formatted_name} of {shapes}, {sbps}, {_told(call)}"
        _judge_call(op, call, given, sbps, placement, differentiable, what, report)


def _drawn_sbp(
    x: torch.Tensor, placement: Placement, chosen: python_random.Random, is_first: bool
) -> NdSbp:
    dims = [S(d) for d in range(x.dim())]
    # Terms are exact only up to rounding, which not all functions forgive.
    first = chosen.choice(dims if is_first and dims else [*dims, B])
    rest = [chosen.choice([*dims, B]) for _ in placement.shape[1:]]
    return cut_somewhere((first, *rest), placement.shape, x.shape, chosen)


def _draws(sample: Any) -> bool:
    named = sample.kwargs.get("dropout_p", 0)
    at = sample.args[9:10]
    return bool(named) or any(isinstance(one, float) and one > 0 for one in at)


def _told(call: Any) -> str:
    return str(map_tree(call, lambda one: "x" if isinstance(one, torch.Tensor) else one))[:200]


def _judge_call(
    op: Any,
    call: Any,
    given: list[torch.Tensor],
    sbps: list[Any],
    placement: Placement,
    differentiable: bool,
    what: str,
    report: Report,
) -> None:
    def filled_by(xs: list[Any]) -> Any:
        left = iter(xs)
        return map_tree(call, lambda one: next(left) if isinstance(one, torch.Tensor) else one)

    def leaf(x: torch.Tensor) -> torch.Tensor:
        learns = differentiable and x.is_floating_point()
        return x.detach().clone().requires_grad_(learns)

    whole = [leaf(x) for x in given]
    args, kwargs = filled_by(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _lock:
                expected = op.op(*args, **kwargs)
        except Exception:
            return
        parts = [
            global_of(x, placement, sbp, x.requires_grad)
            for x, sbp in zip(whole, sbps, strict=True)
        ]
        args, kwargs = filled_by(parts)
        report.calls += 1
        try:
            found = op.op(*args, **kwargs)
        except NotImplementedError as refused:
            if "has no signatures" in str(refused):
                report.without_rule.add(f"{op.formatted_name}: {str(refused).split(' has no')[0]}")
            else:
                report.refused.append(f"{what}: {refused}")
            return
        except Exception as wrong:
            report.wrong.append(f"{what}: {type(wrong).__name__}: {wrong}"[:900])
            return
        report.compared.add(op.formatted_name)
        try:
            _compare(found, expected, parts, whole)
        except Exception as wrong:
            report.wrong.append(f"{what}: {type(wrong).__name__}: {wrong}"[:900])


def _compare(found: Any, expected: Any, parts: list[Any], whole: list[torch.Tensor]) -> None:
    ys, xs = tensors_in(found), tensors_in(expected)
    assert len(ys) == len(xs), "the number of results"
    if not xs:
        assert found == expected, f"{found} instead of {expected}"
    for y, x in zip(ys, xs, strict=True):
        assert isinstance(y, GlobalTensor)
        assert tuple(y.shape) == tuple(x.shape) and y.dtype == x.dtype, "shape or dtype"
        box = y.global_layout.box(y.placement.index or ())
        assert tuple(y.to_local().shape) == box.shape, "the shape of a part"
        torch.testing.assert_close(y.full_tensor(), x, equal_nan=True)
    ends = [i for i, x in enumerate(xs) if x.requires_grad and not x.dtype.is_complex]
    starts = [i for i, x in enumerate(whole) if x.requires_grad]
    if not ends or not starts:
        return
    seeds = [
        torch.linspace(0.5, 1.5, xs[i].numel()).to(xs[i].dtype).view(xs[i].shape) for i in ends
    ]
    slopes = torch.autograd.grad(
        [xs[i] for i in ends], [whole[i] for i in starts], seeds, allow_unused=True
    )
    others: Any = torch.autograd.grad(
        [ys[i] for i in ends], [parts[i] for i in starts], seeds, allow_unused=True
    )
    for one, other in zip(slopes, others, strict=True):
        expected = torch.zeros(()) if one is None else one
        got = torch.zeros(()) if other is None else other.full_tensor()
        if one is None or other is None:
            assert not expected.any() and not got.any(), "a gradient is missing"
            continue
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m: f"gradient: {m}")


def _weights(y: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, y.numel()).to(y.dtype).view(y.shape)
