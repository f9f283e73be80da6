"""Gpudist between GPUs, beside torch's messages, collectives and DTensor."""

SUBJECTS = (
    *("halo", "repartition", "broadcast", "sum_reduce", "all_sum_reduce"),
    *("unet", "scaling"),
)
