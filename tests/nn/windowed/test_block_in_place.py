"""When a windowed layer uses its block in place: by bytes and faces, on CPUs and on GPUs."""

from __future__ import annotations

import pytest
import torch

from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.nn.windowed.block_in_place import convolves_in_place, least_block_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("on_cpu", "faces", "block_bytes", "expected"),
    [
        (True, 2, MIB, True),
        (True, 6, MIB // 2, False),
        # Blocks of float32 measured on an H200, and what was faster there without gradients.
        (False, 4, 256 * MIB, True),  # [1,64,1024,1024]: 0.95 of the time next to a copy
        (False, 6, 256 * MIB, True),  # [1,32,128,128,128]: 1.01
        (False, 4, 16 * MIB, False),  # [1,64,256,256]: 1.92
        (False, 6, 32 * MIB, False),  # [1,32,64,64,64]: 1.50
    ],
)
def test_smallest_blocks(on_cpu: bool, faces: int, block_bytes: int, expected: bool) -> None:
    assert (block_bytes >= least_block_bytes(on_cpu, faces)) == expected


def test_gradients_on_a_gpu_are_computed_next_to_a_copy() -> None:
    x = torch.ones(1)
    assert convolves_in_place(x)
    with as_on_gpu():
        assert not convolves_in_place(x)
        with torch.no_grad():
            assert convolves_in_place(x)
