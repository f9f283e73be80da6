"""Global tensors: from and to local ones, gradients by convention, parameters, texts."""

# Operators of global tensors are typed as torch types them: their results are Tensors.
# pyright: reportAttributeAccessIssue=false
# pyright: reportUnusedExpression=false

from __future__ import annotations

import copy
import pickle
import re
from itertools import product
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

import gpudist
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.sbp import GlobalTensor, Placement, to_global
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, part_of, random, whole_of


@distributed(ranks=4, transports=("loopback",))
def test_local_to_global_and_back(P_world: Partition) -> None:
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((7, 3))
    for sbp in product((S(0), S(1), B, P), repeat=2):
        layout = placement.layout(sbp, (7, 3))
        part = part_of(x, layout, P_world.rank or 0)
        y = to_global(part, placement, sbp)
        assert y.sbp == sbp and y.placement == placement
        assert_global(y, x)
        assert torch.equal(y.to_local(), part)
        np.testing.assert_allclose(y.numpy(), x.numpy())
        torch.testing.assert_close(y.full_tensor(), x)


@distributed(ranks=4, transports=("loopback",))
def test_first_copy_wins(P_world: Partition) -> None:
    """The others' data is not used, and not overwritten."""
    rank = P_world.rank or 0
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    mine = torch.full((2, 3), float(rank), dtype=torch.float64)
    y = to_global(mine, placement, (B, S(0)))
    assert torch.equal(y.to_local(), torch.full_like(mine, rank % 2))
    assert torch.equal(mine, torch.full_like(mine, rank))
    assert tuple(y.shape) == (4, 3)


@distributed(ranks=4, transports=("loopback",))
def test_conversions_have_exact_adjoints(P_world: Partition) -> None:
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    other = Placement("cpu", [3, 1, 0], P_world)
    for sbp in product((S(0), B, P), repeat=2):
        layout = placement.layout(sbp, (5, 2))
        x = part_of(random((5, 2)), layout, P_world.rank or 0)
        for target in (S(1), B, P):

            def there(t: torch.Tensor, a: Any = sbp, b: Any = target) -> torch.Tensor:
                # Copies of a leaf would have its full gradient on every rank.
                terms = to_global(t, placement, [P if one == B else one for one in a])
                return terms.to_global(sbp=a).to_global(other, b).to_local()

            assert_adjoint(there, x, P_world)


@distributed(ranks=2, transports=("loopback",))
def test_declared_gradients(P_world: Partition) -> None:
    """``grad_sbp`` replaces the dual attributes of a gradient."""
    placement = Placement("cpu", [0, 1], P_world)
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = to_global(x, placement, B)
    loss = (y.to_local() * ((P_world.rank or 0) + 1)).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, torch.full_like(x, 3.0))
    y = to_global(x, placement, B, grad_sbp=B)
    loss = (y.to_local() * ((P_world.rank or 0) + 1)).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, torch.full_like(x, 3.0))
    # Each rank computes the whole loss: its gradient is a copy, not a term.
    y = to_global(x, placement, B, grad_sbp=B)
    (gradient,) = torch.autograd.grad(y.to_local(grad_sbp=B).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    z = to_global(x, placement, B, grad_sbp=B).to_global(sbp=S(0), grad_sbp=B)
    (gradient,) = torch.autograd.grad(z.to_local().sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


@pytest.mark.parametrize("sbp", [B, P], ids=str)
@distributed(ranks=3, transports=("loopback", "host"))
def test_loss_counts_once(P_world: Partition, sbp: Any) -> None:
    """``backward`` of a global number gives the gradient of a sequential program."""
    placement = Placement("cpu", [0, 1, 2], P_world)
    x, w = random((4,)), random((4,), 1)
    a, b = global_of(x, placement, (S(0),), True), global_of(w, placement, (B,), True)
    loss = (a @ b).to_global(sbp=sbp)
    assert loss.sbp == (sbp,)
    loss.backward(retain_graph=True)
    loss.backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.sbp == (S(0),) and b.grad.sbp == (B,)
    assert_global(a.grad, 2 * w)
    assert_global(b.grad, 2 * x)


@distributed(ranks=4, transports=("loopback",))
def test_from_placement_to_placement(P_world: Partition) -> None:
    """Two stages on different ranks; every rank calls backward."""
    first = Placement("cpu", [0, 1], P_world)
    second = Placement("cpu", [2, 3], P_world)
    x, w, v = random((3, 4)), random((4, 5), 1), random((5,), 2)
    W = global_of(w, first, (S(1),), True)
    V = global_of(v, second, (B,), True)
    h = (global_of(x, first, (B,)) @ W).tanh()
    y = (h.to_global(second, S(0)) @ V).exp()
    y.backward(torch.ones(3, dtype=torch.float64))
    sw, sv = w.clone().requires_grad_(), v.clone().requires_grad_()
    ((x @ sw).tanh() @ sv).exp().sum().backward()
    assert W.grad is not None and V.grad is not None and sw.grad is not None
    assert_global(W.grad, sw.grad)
    assert sv.grad is not None
    assert_global(V.grad, sv.grad)


@distributed(ranks=2, transports=("loopback",))
def test_gradient_of_a_copied_parameter_is_summed_once(P_world: Partition) -> None:
    """However often it is used: one message for each backward."""
    placement = Placement("cpu", [0, 1], P_world)
    w = global_of(random((3,)), placement, (B,), True)
    x = global_of(random((4, 3)), placement, (S(0),))
    y = x * w + w
    before = P_world.wire.recorder.count
    y.backward(torch.ones(4, 3, dtype=torch.float64))
    assert P_world.wire.recorder.count == before + 1
    assert isinstance(w.grad, GlobalTensor)


@distributed(ranks=4, transports=("loopback",))
def test_module_and_optimizer(P_world: Partition) -> None:
    """Two steps of descent give the sequential parameters; shared ones stay shared."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ).double()
    sequential = copy.deepcopy(model)
    assert gpudist.to_global(model, placement, (B, B)) is model
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
    x = random((5, 8))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=False) for m in (model, sequential)]
    for _ in range(2):
        for m, given, optimizer in (
            (model, global_of(x, placement, (B, S(0))), optimizers[0]),
            (sequential, x, optimizers[1]),
        ):
            optimizer.zero_grad()
            m(given).backward(torch.ones(5, 2, dtype=torch.float64))
            optimizer.step()
    for p, q in zip(model.parameters(), sequential.parameters(), strict=True):
        assert_global(p, q)


@distributed(ranks=4, transports=("loopback",))
def test_example_of_two_axes(P_world: Partition) -> None:
    """OneFlow's page on 2-D SBP: pairs of ranks hold the same part of the batch."""
    placement = gpudist.placement("cpu", [[0, 1], [2, 3]], P_world)
    sbp = gpudist.sbp
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    model = gpudist.to_global(model, placement, (sbp.broadcast, sbp.broadcast))
    x = torch.randn(1, 2, 8) + (P_world.rank or 0)
    global_x = gpudist.to_global(x, placement, (sbp.broadcast, sbp.split(0)))
    assert tuple(global_x.shape) == (2, 2, 8)
    assert tuple(model(global_x).shape) == (2, 2, 2)
    local = global_x.to_local()
    assert tuple(local.shape) == (1, 2, 8)
    all_of = whole_of(local, placement.layout((S(0), S(0)), (4, 2, 8)), P_world)
    assert torch.equal(all_of[0], all_of[2]) and torch.equal(all_of[1], all_of[3])
    assert not torch.equal(all_of[0], all_of[1])


@distributed(ranks=3, transports=("loopback",))
def test_what_torch_asks_of_a_tensor(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x = random((3, 2))
    y = global_of(x, placement, (S(0),), True)
    assert y.is_leaf and y.requires_grad and y.grad is None and y.grad_fn is None
    assert y.dim() == 2 and y.size(0) == 3 and len(y) == 3 and y.numel() == 6
    assert y.dtype == torch.float64 and y.device.type == "cpu"
    twin = copy.deepcopy(y)
    assert twin.is_leaf and twin.requires_grad and twin.sbp == y.sbp
    assert twin.data_ptr() != y.data_ptr() or not placement.active
    shown = repr(y)
    assert "shape=[3, 2]" in shown and "split(0)" in shown and "ranks=[0, 1]" in shown
    part = ["this rank's block [0:2, 0:2]:\ntensor(", "this rank's block [2:3, 0:2]:\ntensor("]
    assert [*part, "no cells on this rank"][P_world.rank or 0] in shown
    assert "requires_grad=True" in shown or not placement.active
    assert "grad_fn=<MulBackward0>" in repr(y * 2) or not placement.active
    assert "this rank's term" in repr(y.to_global(sbp=P)) or not placement.active
    assert "this rank's copy" in repr(y.to_global(sbp=B)) or not placement.active
    assert not (y * 2).is_leaf and not y.detach().requires_grad
    seen: list[Any] = []
    z = y * 2
    z.register_hook(seen.append)
    z.retain_grad()
    z.backward(torch.ones(3, 2, dtype=torch.float64))
    assert z.grad is not None and seen[0].sbp == (S(0),)
    y.grad = None
    assert y.grad is None
    if placement.active:
        total = global_of(torch.tensor(2.0, dtype=torch.float64), placement, (P,))
        assert total.item() == 2.0 and float(total) == 2.0 and bool(total) and int(total) == 2


@distributed(ranks=3)
def test_backward_of_several(P_world: Partition) -> None:
    """``torch.autograd.backward`` of global tensors, and of a plain one beside them."""
    placement = Placement("cpu", [0, 1], P_world)
    whole, plain = random((3, 2)).requires_grad_(), random((2,)).requires_grad_()
    x, own = global_of(whole.detach(), placement, (S(0),), True), plain.detach().requires_grad_()
    backward: Any = torch.autograd.backward
    for w, p in ((whole, plain), (x, own)):
        backward(w.square().sum(), retain_graph=True)
        backward([w.exp().sum(), (3 * w).sum(), p.square().sum()])
        start = random((3, 2), 1)
        backward([w * w, w.mean()], [start, None], inputs=w)
        with pytest.raises(RuntimeError, match="2 tensors"):
            backward([w.sum(), w.mean()], [None])
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            backward([w.sum(), w * 2])
    assert own.grad is not None and torch.equal(own.grad, 2 * own.detach())
    assert x.grad is not None and whole.grad is not None
    assert_global(x.grad, whole.grad)


@distributed(ranks=2, transports=("loopback",))
def test_shallow_copies(P_world: Partition) -> None:
    x = global_of(random((3, 2)), Placement("cpu", [0, 1], P_world), (S(0),), True)
    for y in (x, 2 * x):
        twin = copy.copy(y)
        assert twin.is_leaf and twin.requires_grad and twin.sbp == y.sbp
        assert twin.data_ptr() == y.data_ptr()
        twin.sum().backward()
        assert twin.grad is not None and x.grad is None


@distributed(ranks=3, transports=("loopback",))
def test_blocks_that_do_not_fit(P_world: Partition) -> None:
    """All ranks see the same error, also those outside the placement."""
    placement = Placement("cpu", [0, 1], P_world)
    rank = P_world.rank or 0
    with pytest.raises(ShapeError, match=r"rank 0 has shape \[1\].*must be \[3\]"):
        to_global(torch.ones([1, 4, 9][rank]), placement, S(0))
    with pytest.raises(ShapeError, match=r"rank 1 has shape \[4\]"):
        to_global(torch.ones([1, 4, 9][rank]), placement, B)
    with pytest.raises(PlanMismatch, match="do not form one global tensor"):
        to_global(torch.ones(2, dtype=[torch.float32, torch.int64][rank % 2]), placement, S(0))
    with pytest.raises(PartitionError, match="has 1 dims"):
        to_global(torch.ones(2), placement, S(1))
    with pytest.raises(PartitionError, match="each of the 1 axes"):
        to_global(torch.ones(2), placement, (B, B))
    with pytest.raises(PartitionError, match="needs a placement"):
        to_global(torch.ones(2))
    for wrong in (
        torch.ones(2, dtype=torch.uint16),
        torch.ones((1,) * 17),
        torch.ones(2, device="meta"),
    ):
        with pytest.raises(ShapeError, match="the tensor of rank 1 is not on 'cpu', has more than"):
            to_global(wrong if rank == 1 else torch.ones(2), placement, S(0))


@distributed(ranks=2, transports=("loopback",))
def test_what_a_global_tensor_cannot_do(P_world: Partition) -> None:
    x = global_of(random((3, 2)), Placement("cpu", [0, 1], P_world), (S(0),), True)
    for start in (torch.Tensor.backward, lambda y: torch.autograd.grad(y, x)):
        with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
            start(x * 2)
    with pytest.raises(RuntimeError, match=r"has shape \[2, 2\], but .* global shape \[3, 2\]"):
        (x * 2).backward(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="leaves of the graph can be deep-copied"):
        copy.deepcopy(x * 2)
    with pytest.raises(NotImplementedError, match=r"cannot be pickled; pickle x\.to_local\(\)"):
        pickle.dumps(x)
    with pytest.raises(NotImplementedError, match=r"aten\._to_copy.*without passing through"):
        torch.asarray(x, dtype=torch.float32)


@distributed(ranks=2, transports=("loopback",))
def test_shapes_change_in_place(P_world: Partition) -> None:
    whole = random((4, 1, 6)).requires_grad_()
    x = global_of(whole.detach(), Placement("cpu", [0, 1], P_world), (S(0),)).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        x.squeeze_(1)
    y, expected = x * 1, whole * 1
    for z in (y, expected):
        assert z.squeeze_(1).transpose_(0, 1).unsqueeze_(0) is z
        z.mul_(2)
    assert y.shape == (1, 6, 4) and y.sbp == (S(2),)
    assert_global(y, expected)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert x.grad is not None and whole.grad is not None
    assert_global(x.grad, whole.grad)
    row = global_of(random((4, 6)), Placement("cpu", [0, 1], P_world), (S(0),))
    view = row.view(3, 8)  # a copy, since 3 rows do not lie in these blocks
    with pytest.raises(NotImplementedError, match=r"y = x.t\(...\)"):
        row.t_()
    assert view.shape == (3, 8) and row.shape == (4, 6)
    if P_world.rank == 1:
        del view
    with pytest.raises(NotImplementedError, match=r"y = x.t\(...\)"):
        row.t_()  # Raises on all ranks, whether they still have the view or not.
    for change in (lambda: row.resize_(2, 2), lambda: row.resize_as_(row)):
        with pytest.raises(NotImplementedError, match="make a new tensor"):
            change()


@distributed(ranks=2, transports=("loopback",))
def test_placements(P_world: Partition) -> None:
    placement = Placement("cpu", [[1], [0]], P_world)
    assert placement.shape == (2, 1) and placement == Placement("cpu", [[1], [0]], P_world)
    assert placement != Placement("cpu", [1, 0], P_world)
    assert repr(placement) == "placement(type='cpu', ranks=[[1], [0]])"
    with pytest.raises(PartitionError, match="on 'cpu'"):
        Placement("cuda", [0], P_world)
    with pytest.raises(PartitionError, match=r"\[2\] are not in"):
        Placement("cpu", [0, 2], P_world)
    with pytest.raises(PartitionError, match="more than once"):
        Placement("cpu", [0, 0], P_world)
    with pytest.raises(PartitionError, match="do not form an array"):
        Placement("cpu", 0, P_world)


def test_methods_are_installed_on_request_only() -> None:
    assert not hasattr(torch.Tensor, "to_global") and not hasattr(torch.nn.Module, "to_global")
    try:
        gpudist.sbp.install_methods()
        placement = gpudist.placement("cpu", [0])
        made: Any = torch.ones(2)
        assert made.to_global(placement, gpudist.sbp.broadcast).sbp == (B,)
        module: Any = torch.nn.Linear(2, 2)
        assert module.to_global(placement, B).weight.sbp == (B,)
    finally:
        for kind in (torch.Tensor, torch.nn.Module):
            if hasattr(kind, "to_global"):
                delattr(kind, "to_global")


@distributed(ranks=2, transports=("loopback",))
def test_values_are_read_on_ranks_with_cells(P_world: Partition) -> None:
    x = to_global(torch.tensor(2.0), Placement("cpu", [0], P_world), B)
    for convert in (bool, int, float, complex, torch.Tensor.item, torch.Tensor.tolist):
        if P_world.rank == 0:
            assert convert(x) == convert(torch.tensor(2.0))
            continue
        with pytest.raises(PartitionError, match="so it cannot read its value; move it"):
            convert(x)


@distributed(ranks=2, transports=("loopback",))
def test_sizes_are_those_of_torch(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    plain = torch.empty(3, 4, 5)
    x = gpudist.to_global(plain, placement, gpudist.sbp.broadcast)
    assert type(x.shape) is torch.Size and x.shape == x.size() == plain.shape
    assert (x.dim(), x.size(1), x.size(dim=-1)) == (3, 4, 5)
    for call in (lambda y: y.size(3), lambda y: y.size(-4), lambda y: y.size("1")):
        with pytest.raises((IndexError, RuntimeError, TypeError)) as expected:
            call(plain)
        with pytest.raises(expected.type, match=re.escape(str(expected.value).splitlines()[0])):
            call(x)


@distributed(ranks=2, transports=("loopback",))
def test_hooks_keep_no_tensor(P_world: Partition) -> None:
    """The graph that keeps a hook ends with the last tensor, without a search for garbage."""
    placement, hooked = Placement("cpu", [0, 1], P_world), torch.nn.Tanh()
    hooked.register_full_backward_hook(lambda module, given, results: None)

    def register(y: torch.Tensor) -> torch.Tensor:
        y.register_hook(torch.neg)
        return y

    for use in (register, hooked):
        for is_backward in (False, True):
            y = to_global(torch.ones(3, 2, requires_grad=True), placement, S(0)) * 2
            z = use(y)
            if is_backward:
                z.sum().backward()
            parts = [ref(part) for x in (y, z) for part in (x, x.to_local())]
            del y, z
            assert [part() for part in parts] == [None] * 4
