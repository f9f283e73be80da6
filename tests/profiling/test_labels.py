"""The operator and the partition of a label."""

from __future__ import annotations

import pytest

from gpudist.transport.labels import operator_and_partition


@pytest.mark.parametrize(
    ("label", "operator", "partition"),
    [
        ("halo_exchange on [1, 2] of [4, 6] of torch.float32", "halo_exchange", "[1, 2]"),
        ("broadcast [1] -> [3] of torch.int64", "broadcast", "[1] -> [3]"),
        ("repartition [2, 2] -> [4, 1] of [3, 5] of torch.bool", "repartition", "[2, 2] -> [4, 1]"),
        ("all_gather over axes [0, 1] of [2, 2]", "all_gather over axes [0, 1]", "[2, 2]"),
        ("adjoint of ghosts on [2] of [9], face 0", "adjoint of ghosts, face 0", "[2]"),
        ("all_reduce(max) of torch.int64 [3] on [2, 1]", "all_reduce(max)", "[2, 1]"),
        ("allgather_data on [4]", "allgather_data", "[4]"),
        ("sum of all parameters over 4 workers", "sum of all parameters over 4 workers", "[4]"),
        ("hop 1 of [2, 3] round the ring of 4", "hop 1 round the ring of 4", "[4]"),
        ("send to rank 1: float32[2] on (0, 1)", "send to rank 1", "(0, 1)"),
        ("send of 4096 bytes", "send", ""),
        ("boxing of [4, 6], split(0) -> broadcast", "boxing, split(0) -> broadcast", ""),
        ("adjoint of torch.roll of [4, 6] of torch.bfloat16", "adjoint of torch.roll", ""),
        ("a + b on [2] of [5] + a", "a + b", "[2]"),
        ("repartition of the weight, then broadcast of the weight",
         "repartition of the weight, then broadcast of the weight", ""),
    ],
)  # fmt: skip
def test_labels(label: str, operator: str, partition: str) -> None:
    assert operator_and_partition(label) == (operator, partition)
