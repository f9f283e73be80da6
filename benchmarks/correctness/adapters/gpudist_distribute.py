"""``gpudist.distribute`` converts the sequential module; see docs/convert.md."""

from __future__ import annotations

import warnings

import torch

import gpudist
from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, Result, whole, whole_gradient
from benchmarks.environment import commit


def start() -> About:
    return About(f"{gpudist.__version__}, torch {torch.__version__}", commit())


def run(case: Case, layout: Layout) -> Result:
    warnings.simplefilter("ignore")
    x = case.input(layout)
    P_x = gpudist.init().create_cartesian_topology_partition(layout.axes_of(x.shape))
    net = gpudist.distribute(case.module(layout), P_x)
    block = gpudist.scatter(x, P_x).detach().requires_grad_()
    with case.context():
        y = net(block)
    copies = [gpudist.sbp.broadcast] * len(y.sbp)
    loss = (y * gpudist.to_global(cotangent(y.shape), y.placement, copies)).sum()
    backward(case, loss, block, whole=lambda gradient: gradient)
    gradient = (
        None
        if block.grad is None
        else gpudist.all_gather(block.grad, P_x, range(x.dim()), shape="dynamic")
    )
    return Result(whole(y), gradient, [whole_gradient(each) for each in net.parameters()])
