"""The operators of torch's own table of tests, on its samples, against the plain function."""

from __future__ import annotations

import pytest

from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.pool import distributed
from tests.sbp.samples import Report, judge, operators

CHUNKS = 6
SAMPLES = 4 if EVERY else 1
# Samples that other rules handle: a length or sections given as tensors, and blocks without
# samples, which torch's padding refuses on one rank only.
KNOWN = {"narrow", "tensor_split", "nn.functional.pad"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
@distributed(ranks=4, transports=("loopback",), timeout_s=200)
def test_samples(P_world: Partition, chunk: int) -> None:
    """Values and gradients of tensors in drawn layouts, some of them cut in blocks of any sizes.

    Operators without an entry, and calls refused with a message, are counted and printed.
    """
    report = Report()
    for op in operators()[chunk::CHUNKS]:
        # Masked functions ask a tensor for its layout in memory.
        if op.name not in KNOWN and not op.name.startswith("masked."):
            judge(P_world, op, SAMPLES, report)
    assert not report.wrong, "\n".join(report.wrong)
    assert len(report.compared) > 50, report.compared
    if P_world.rank == 0:
        print(
            f"{report.calls} calls of {len(report.compared)} operators compared; "
            f"{len(report.refused)} calls refused; {len(report.without_rule)} operators have no "
            f"entry: {sorted(report.without_rule)}"
        )
