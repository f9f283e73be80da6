"""Benchmarks: one subject per file; each result is a ratio to a peer measured in the same run."""

SUBJECTS = (
    *("messages", "halo", "broadcast", "sum_reduce", "all_sum_reduce", "operators"),
    *("repartition", "conv", "layers", "attention", "networks", "planning", "batch"),
)
