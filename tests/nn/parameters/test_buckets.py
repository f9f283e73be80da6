"""Which tensors share a message."""

from __future__ import annotations

import pytest
import torch

from gpudist.nn.parameters.buckets import concatenate_cells, messages


@pytest.mark.parametrize(
    ("copied_bytes", "bucket_bytes", "parts"),
    [
        (0, 200, [[3], [5], [7], [8]]),
        (80, 200, [[5, 7], [3], [8]]),
        (96, 200, [[3, 5, 7], [8]]),
        (96, 112, [[3, 5], [7], [8]]),
        (96, 10, [[3], [5], [7], [8]]),
        (1000, 32, [[3], [5, 7], [8]]),
        (1000, 1000, [[3, 5, 7, 8]]),
    ],
)
def test_small_tensors_share_a_bucket(
    copied_bytes: int, bucket_bytes: int, parts: list[list[int]]
) -> None:
    nbytes = {3: 96, 5: 16, 7: 16, 8: 500}
    assert messages(nbytes, bucket_bytes, copied_bytes) == parts


def test_nothing_to_send() -> None:
    assert messages({}) == []


def test_cells_of_all() -> None:
    a, b = torch.arange(6.0).view(2, 3).T, torch.tensor(7.0)
    assert concatenate_cells([a, b]).tolist() == [0, 3, 1, 4, 2, 5, 7]
    whole = torch.arange(4.0).view(2, 2)
    assert concatenate_cells([whole]).data_ptr() == whole.data_ptr()
