"""Measure gpudist, the GPU's own copy and torch on a GPU; docs/benchmarks.md has the method."""

SUBJECTS = ("copy", "packing", "latency", "enqueue", "self_halo", "adjoint", "overlap", "norms")
# Subjects with messages, for several ranks; all others measure the work of one rank.
SEVERAL_RANKS = ("enqueue", "overlap")
