"""The remedies that errors of functions without a rule name: each is one that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpudist
from gpudist import ConversionError, PartitionError, ShapeError, distribute
from gpudist.geometry.layout import broadcast as B, split
from gpudist.sbp.placement import Placement
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of, random

REGISTER = "or register a rule with gpudist.sbp.registry.register"


@distributed(ranks=2, transports=("loopback",))
def test_functions_without_rule(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    whole = random((4, 6))
    x = global_of(whole, placement, (split(0),))

    def refusal(call: Callable[[Any], Any]) -> str:
        with pytest.raises(NotImplementedError, match="has no signatures") as caught:
            call(x)
        return str(caught.value)

    # Shapes follow from shapes, so a rule can be registered; or from values, so none can.
    assert refusal(lambda x: x.diag()).endswith(REGISTER)
    for call in (lambda x: x.nonzero(), lambda x: x.unique(), lambda x: x.masked_select(x > 0)):
        text = refusal(call)
        assert "x.full_tensor()" in text and "register" not in text
        assert torch.equal(call(x.full_tensor()), call(whole))
    # Another form of the function has a rule.
    text = refusal(lambda x: torch.embedding(x, torch.tensor([1, 2])))
    assert "torch.nn.functional.embedding has them: use it" in text
    text = refusal(lambda x: x.cumsum_(0))
    assert "torch.Tensor.cumsum has them: use x.copy_(...) of its result" in text
    copied: Any = x.clone().copy_(x.cumsum(0))
    assert torch.equal(copied.full_tensor(), whole.cumsum(0))
    # In place.
    text = refusal(lambda x: x.fill_diagonal_(7))
    assert "whole = x.full_tensor(), and use x.copy_(gpudist.to_global(whole, x.placement" in text
    changed: Any = x.full_tensor()
    x.copy_(gpudist.to_global(changed.fill_diagonal_(7), x.placement, gpudist.sbp.broadcast))
    assert torch.equal(x.full_tensor(), whole.clone().fill_diagonal_(7))


@distributed(ranks=4, transports=("loopback",))
def test_plain_tensors_and_placements(P_world: Partition) -> None:
    whole = random((4, 6))
    x: Any = global_of(whole, Placement("cpu", [[0, 1], [2, 3]], P_world), (split(0), split(1)))
    with pytest.raises(PartitionError, match="broadcast if each rank has all of it"):
        _ = x + whole
    y = x + gpudist.to_global(whole, x.placement, gpudist.sbp.broadcast)
    assert torch.equal(y.full_tensor(), 2 * whole)
    with pytest.raises(ShapeError, match=r"gpudist.sbp.split\(dim\) does for a block"):
        _ = x + x.to_local()
    cut = [gpudist.sbp.split(0), gpudist.sbp.split(1)]
    y = x + gpudist.to_global(x.to_local(), x.placement, cut)
    assert torch.equal(y.full_tensor(), 2 * whole)
    other: Any = global_of(whole, Placement("cpu", [[1, 0], [3, 2]], P_world), x.sbp)
    with pytest.raises(PartitionError, match=r"\[\[1, 0\].* x.to_global\(y.placement, sbp\)"):
        _ = x + other
    y = x + other.to_global(x.placement, x.sbp)
    assert torch.equal(y.full_tensor(), 2 * whole)
    with pytest.raises(PartitionError, match=r"gpudist.to_global\(x, gpudist.placement.of\(P_x\)"):
        gpudist.to_global(whole)
    P_x = P_world.grid(2, 2)
    y = gpudist.to_global(whole, gpudist.placement.of(P_x), [gpudist.sbp.split(0)] * 2)
    assert y.shape == (16, 6)


@distributed(ranks=2, transports=("loopback",))
def test_functions_about_memory(P_world: Partition) -> None:
    x = global_of(random((4, 6)), Placement("cpu", [0, 1], P_world), (split(0),))
    names = ("untyped_storage", "share_memory_", "__dlpack__", "const_data_ptr")
    for name in [name for name in names if hasattr(torch.Tensor, name)]:
        with pytest.raises(NotImplementedError, match=rf"use {name} of x\.to_local\(\)"):
            getattr(x, name)()
        assert getattr(x.to_local(), name)() is not None
    with pytest.raises(NotImplementedError, match="global tensor is on 'cpu'"):
        x.cuda()


@distributed(ranks=2, transports=("loopback",))
def test_answers_without_messages(P_world: Partition) -> None:
    x = global_of(random((4, 6)), Placement("cpu", [0, 1], P_world), (split(0),))
    if P_world.rank == 1:
        return  # A message of the other rank would wait.
    assert x._base is None and not x._is_view() and x.name is None and x.output_nr == 0
    assert not (x.is_shared() or torch.is_conj(x) or torch.is_neg(x) or torch.is_distributed(x))
    assert torch.get_device(x) == -1 and x.dim_order() == (0, 1)


@distributed(ranks=2)
def test_numpy(P_world: Partition) -> None:
    whole = random((4, 6))
    x = global_of(whole, Placement("cpu", [0, 1], P_world), (split(0),))
    assert np.array_equal(np.asarray(x), whole.numpy())
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    assert np.array_equal(np.stack([x, x]), np.stack([whole, whole]))
    with pytest.raises(RuntimeError, match="requires grad"):
        np.asarray(x.requires_grad_())
    assert complex(x.detach()[1, 2]) == complex(whole[1, 2])


class Unique(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@distributed(ranks=2, transports=("loopback",))
def test_refusals_of_converted_networks(P_world: Partition) -> None:
    P_x, x = P_world.grid(2, 1), torch.ones(2, 3)
    for function, can_register in ((lambda x: x.unique(), False), (lambda x: x.diag(), True)):
        for options in (dict[str, Any](unknown="refuse"), dict[str, Any](gather_limit_bytes=1)):
            with pytest.raises(ConversionError, match="use functions with a rule") as caught:
                distribute(Unique(function), P_x, **options)(x)
            assert ("or register one" in str(caught.value)) == can_register
            assert ("unknown='gather'" in str(caught.value)) == ("unknown" in options)


@distributed(ranks=2, transports=("loopback",))
def test_names_of_types(P_world: Partition) -> None:
    P_x = P_world.grid(2, 1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(2, 3, dtype=dtype)
        net = distribute(Unique(lambda x: x.half() if x.type() == "torch.FloatTensor" else x), P_x)
        assert net(x).dtype == (torch.float16 if dtype == torch.float32 else dtype)
    y = global_of(random((4, 6)), Placement("cpu", [0, 1], P_world), (B,))
    assert y.type() == "torch.DoubleTensor" and y.type("torch.FloatTensor").dtype == torch.float32
    assert y.type(torch.half).dtype == torch.half
