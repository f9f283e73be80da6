"""Measure gpudist, the GPU's own copy and torch on a GPU; benchmarks/README.md has the method."""

SUBJECTS = (
    *("copy", "packing", "latency", "enqueue", "self_messages", "self_halo", "adjoint"),
    *("unet_step", "norms", "dropout"),
)
# Subjects with messages, for several ranks; all others measure the work of one rank.
SEVERAL_RANKS = ("enqueue",)
