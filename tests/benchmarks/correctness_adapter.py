"""Adapter of a library that is right, or wrong in a way that the name of the case chooses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, NotOffered, Result


def start() -> About:
    return About("0", None)


def run(case: Case, layout: Layout) -> Result:
    module, x = case.module(layout), case.input(layout).requires_grad_()
    y = module(x)
    backward(case, (y * cotangent(y.shape)).sum(), x, whole=lambda gradient: gradient)
    result = Result(y.detach(), x.grad, [each.grad for each in module.parameters()])
    is_last = os.environ["RANK"] == str(layout.ranks - 1)
    return WAYS[case.name](result) if is_last and case.name in WAYS else result


def _output(result: Result) -> Result:
    result.output.view(-1)[-1] += 1e-6
    return result


def _not_a_number(result: Result) -> Result:
    result.output.view(-1)[0] = torch.nan
    return result


def _input_gradient(result: Result) -> Result:
    return Result(result.output, None, result.parameter_gradients)


def _parameter_gradient(result: Result) -> Result:
    weight, bias = result.parameter_gradients
    assert weight is not None
    return Result(result.output, result.input_gradient, [2 * weight, bias])


def _shape(result: Result) -> Result:
    return Result(result.output[..., 1:], result.input_gradient, result.parameter_gradients)


def _raise(result: Result) -> Result:
    raise ValueError("not this kernel")


def _hang(result: Result) -> Result:
    time.sleep(3600)
    return result


def _die(result: Result) -> Result:
    os.abort()


def _lack(result: Result) -> Result:
    raise NotOffered


WAYS: dict[str, Callable[[Result], Result]] = {
    "conv 3": _output,
    "conv 5, padding 2": _not_a_number,
    "conv 1": _input_gradient,
    "conv 2": _parameter_gradient,
    "conv 4, padding 1": _shape,
    "conv 3, stride 2": _raise,
    "conv 3, stride 3": _hang,
    "conv 3, circular": _die,
    "conv 3, reflect": _lack,
}
