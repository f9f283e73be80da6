"""2-D SBP: a network on an array of workers, with data split along one axis.

OneFlow's page "2D SBP" with ``gpudist`` in place of ``oneflow``. On four processes:
``torchrun --nproc-per-node 4 examples/sbp_2d.py``
"""

# Operators on global tensors have torch's types, so their results are typed as Tensor.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import nn

import gpudist
from gpudist import sbp

RANKS = [[0, 1], [2, 3]]
BROADCAST = (sbp.broadcast, sbp.broadcast)
BS0 = (sbp.broadcast, sbp.split(0))


def of_all_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the parts of the four ranks, concatenated along dim 0, on each of them."""
    everyone = gpudist.placement(x.device.type, [0, 1, 2, 3])
    return gpudist.to_global(x, everyone, sbp.split(0)).full_tensor()


def data_and_copies(device: str, rank: int) -> None:
    """Run a network of copies; every row of the array has the same data, split within the row."""
    placement = gpudist.placement(device, RANKS)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    model = gpudist.to_global(model, placement, BROADCAST)

    x = torch.randn(1, 2, 8, device=device)
    global_x = gpudist.to_global(x, placement, BS0)
    pred = model(global_x)
    local_x = global_x.to_local()
    print(f"{device}, rank: {rank}, local_x:\n{local_x}", flush=True)
    assert tuple(global_x.shape) == (2, 2, 8) and tuple(pred.shape) == (2, 2, 2)
    assert tuple(local_x.shape) == (1, 2, 8) and tuple(pred.to_local().shape) == (1, 2, 2)
    for part in (local_x, pred.to_local()):
        first, second, third, fourth = of_all_ranks(part)
        assert torch.equal(first, third) and torch.equal(second, fourth)
        assert not torch.equal(first, second)
    print(f"rank: {rank}, global_x: {global_x.shape}, pred: {pred.shape} {pred.sbp}", flush=True)


def matrix_products(device: str, rank: int) -> None:
    """Derive a signature along each axis, on two axes and on three."""
    placement = gpudist.placement(device, RANKS)
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, device=device), torch.randn(6, 8, device=device)
    whole = gpudist.to_global(x, placement, BROADCAST), gpudist.to_global(w, placement, BROADCAST)
    y = whole[0].to_global(sbp=BS0) @ whole[1].to_global(sbp=(sbp.split(1), sbp.broadcast))
    assert y.sbp == (sbp.split(1), sbp.split(0))
    torch.testing.assert_close(y.full_tensor(), x @ w)

    cube = gpudist.placement(device, [[[0], [1]], [[2], [3]]])
    a = whole[0].to_global(cube, (*BS0, sbp.split(1)))
    b = whole[1].to_global(cube, (sbp.split(1), sbp.broadcast, sbp.split(0)))
    z = a @ b
    assert z.sbp == (sbp.split(1), sbp.split(0), sbp.partial_sum)
    torch.testing.assert_close(z.full_tensor(), x @ w)
    if rank == 0:
        print(f"{BS0} x {(sbp.split(1), sbp.broadcast)} = {y.sbp}")
        print(f"{a.sbp} x {b.sbp} = {z.sbp}", flush=True)


def main() -> None:
    P_world = gpudist.init()
    if P_world.size != 4:
        raise SystemExit("start it on four processes: torchrun --nproc-per-node 4 sbp_2d.py")
    assert P_world.rank is not None
    torch.manual_seed(P_world.rank)
    data_and_copies(P_world.device.type, P_world.rank)
    matrix_products(P_world.device.type, P_world.rank)


if __name__ == "__main__":
    main()
