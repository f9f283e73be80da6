"""Every dtype through the native core, bitwise as over gloo, where torch packs and adds."""

from __future__ import annotations

import pytest
import torch

from gpudist import all_gather, all_sum_reduce, halo_exchange, sum_scatter
from gpudist.exchange import carry_out
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.native.plans import DTYPES
from tests.pool import distributed, the_pool

RANKS = 4


def block(rank: int, dtype: torch.dtype, rows: int = 6) -> torch.Tensor:
    """Values of many magnitudes, in memory that is not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((2, 10, rows), generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-3, 4, x.shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(x[0], x[1]).to(dtype).t()
    if dtype.is_floating_point:
        return x[0].to(dtype).t()
    return (x[0] > 0).t() if dtype == torch.bool else (x[0] * 50).to(torch.int64).to(dtype).t()


def exchange_everything(P_world: Partition, dtype: torch.dtype) -> list[bytes]:
    """Operators that copy, that fill and that add; the bits of their outputs."""
    assert P_world.rank is not None
    P_x = P_world.create_cartesian_topology_partition([RANKS, 1])
    x = block(P_world.rank, dtype)
    halo = [(3, 2), (1, 0)]
    outputs = [
        halo_exchange(x, P_x, halo=halo, periodic=(True, False), padding_value=1.0),
        halo_exchange(x, P_x, halo=halo, padding_value=1.0, nested=True),
        all_gather(x, P_x, axes=[0]),
    ]
    if dtype != torch.bool:
        operator = HaloExchange(P_x, halo=halo, periodic=True)
        adjoint = operator.movement(x).T
        rows = block(P_world.rank, dtype, adjoint.input_shape[0]).repeat(1, 2)
        outputs += carry_out([adjoint], [rows[:, : adjoint.input_shape[1]]])
        outputs += [all_sum_reduce(x, P_x, axes_reduce=[0]), sum_scatter(x, P_x, axes=[0])]
    return [y.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for y in outputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_core_is_torch_in_every_bit(dtype: torch.dtype) -> None:
    over_gloo, over_host = (
        the_pool().run(RANKS, exchange_everything, (dtype,), transport=name)
        for name in ("gloo", "host")
    )
    assert over_host == over_gloo
    assert run_distributed(exchange_everything, RANKS, dtype) == over_gloo
    assert all(len(bits) > 0 for rank in over_gloo for bits in rank)


@distributed(5, transports=("host", "loopback"))
@pytest.mark.parametrize(
    ("dtype", "one"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str
)
def test_narrow_sums_are_rounded_once(P_world: Partition, dtype: torch.dtype, one: float) -> None:
    P_x = P_world.create_cartesian_topology_partition([5])
    # Each of the four is half a unit beside 1: alone, rounding to even would drop it.
    x = torch.tensor([1.0 if P_world.rank == 0 else one], dtype=dtype)
    y = all_sum_reduce(x, P_x, axes_reduce=[0])
    assert y.dtype == dtype
    assert y.item() == 1 + 4 * one
