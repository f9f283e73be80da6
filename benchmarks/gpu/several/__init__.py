"""Measure gpudist between GPUs, and torch's messages, collectives and DTensor."""

SUBJECTS = (
    *("halo", "repartition", "broadcast", "sum_reduce", "all_sum_reduce"),
    *("unet", "scaling"),
)
