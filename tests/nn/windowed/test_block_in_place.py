"""When a windowed layer uses its block in place: by bytes and faces, on CPUs and on GPUs."""

from __future__ import annotations

import pytest

from gpudist.nn.gpu_rates import GpuRates, rates_of
from gpudist.nn.windowed.block_in_place import saves_time

MIB = 1 << 20
H100, H200 = rates_of("NVIDIA H100 80GB HBM3"), rates_of("NVIDIA H200")


@pytest.mark.parametrize(
    ("gpu", "mib", "faces", "sends", "forward", "training"),
    [
        (None, 1, 2, True, True, True),
        (None, 0.5, 6, True, False, False),
        # Blocks measured on an H200 by themselves, beside a copy: their forward took
        (H200, 256, 4, False, True, False),  # [1,64,1024,1024] in float32: 0.95 of the time
        (H200, 256, 6, False, True, False),  # [1,32,128,128,128]: 1.01
        (H200, 16, 4, False, False, False),  # [1,64,256,256]: 1.92
        (H200, 32, 6, False, False, False),  # [1,32,64,64,64]: 1.50
        # With neighbours; half the bytes in a 16-bit dtype.
        (H200, 64, 1, True, True, True),
        (H200, 32, 1, True, True, False),
        (H200, 256, 4, True, True, False),
        (H200, 512, 4, True, True, True),
        (H100, 256, 4, True, True, True),
        (H100, 128, 4, True, True, False),
        (H100, 32, 1, True, True, True),
        (H100, 16, 1, True, True, False),
        (H100, 8, 1, True, False, False),
    ],
)
def test_decisions(
    gpu: GpuRates | None, mib: float, faces: int, sends: bool, forward: bool, training: bool
) -> None:
    given = gpu, int(mib * MIB), faces, sends
    found = [saves_time(*given, trains=trains) for trains in (False, True)]
    assert found == [forward, training]


def test_an_unknown_gpu_counts_as_the_fastest() -> None:
    assert rates_of("") == rates_of("NVIDIA A100") == H200 != H100
