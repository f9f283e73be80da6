"""Benchmarks: one subject per file; each result is a ratio to a peer measured in the same run."""

SUBJECTS = (
    *("messages", "halo", "broadcast", "sum_reduce", "all_sum_reduce", "operators", "dynamic"),
    *("repartition", "conv", "linear", "tensor_parallel", "layers", "losses", "attention"),
    *("halo_region", "parameters", "networks", "kernels", "scaling", "planning", "batch"),
    *("dispatch", "fourier", "scan"),
)
