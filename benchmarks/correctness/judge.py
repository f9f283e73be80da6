"""Verdicts on the answers of ranks, against the sequential module in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Literal

import numpy as np

from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import Answer, Arrays, Lost, NoSuchFunction, Raised, Result

Kind = Literal["right", "refused", "silently wrong", "crash/hang", "not offered"]
KINDS: tuple[Kind, ...] = ("right", "refused", "silently wrong", "crash/hang", "not offered")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case.

    Attributes:
        kind: one of ``KINDS``.
        detail: the exception, the part that is wrong, or how a rank ended.
        error: largest difference of any part, relative to its largest value and to 1; ``None``
            where there is nothing to compare.
    """

    kind: Kind
    detail: str = ""
    error: float | None = None


def expected(case: Case, layout: Layout) -> Arrays:
    """Return the result of the sequential module, in float64."""
    module = case.module(layout).double()
    x = case.input(layout).double().requires_grad_()
    y = module(x)
    backward(case, (y * cotangent(y.shape)).sum(), x, whole=lambda gradient: gradient)
    return Arrays.of(Result(y, x.grad, [each.grad for each in module.parameters()]))


def judge(right: Arrays, answers: Sequence[Answer], tolerance: float) -> Verdict:
    """Return the verdict on the answers of all ranks.

    An exception of any rank ends the job with a message, even if other ranks then wait: refused.
    """
    if any(isinstance(each, NoSuchFunction) for each in answers):
        return Verdict("not offered")
    for each in answers:
        if isinstance(each, Raised):
            return Verdict("refused", each.text)
    for each in answers:
        if isinstance(each, Lost):
            return Verdict("crash/hang", each.how)
    parts = [
        _compared(part, wanted, each.parts.get(part), tolerance)
        for each in answers
        if isinstance(each, Arrays)
        for part, wanted in right.parts.items()
    ]
    return max(parts, key=lambda each: inf if each.error is None else each.error)


def _compared(
    part: str, wanted: np.ndarray | None, found: np.ndarray | None, tolerance: float
) -> Verdict:
    if wanted is None and found is None:
        return Verdict("right", error=0.0)
    if found is None:  # A gradient that is missing is zero.
        part, found = f"{part} missing", np.zeros_like(wanted)
    if wanted is None:
        wanted = np.zeros_like(found)
    if wanted.shape != found.shape:
        shapes = f"{list(found.shape)} instead of {list(wanted.shape)}"
        return Verdict("silently wrong", f"{part}: shape {shapes}")
    difference = float(np.abs(wanted - found).max(initial=0.0))
    if isnan(difference):
        return Verdict("silently wrong", f"{part}: not a number")
    error = difference / max(1.0, float(np.abs(wanted).max(initial=0.0)))
    if error <= tolerance:
        return Verdict("right", error=error)
    return Verdict("silently wrong", part, error)
