"""Gpudist on a GPU, beside the GPU's own copy and torch; docs/benchmarks.md explains the method."""

SUBJECTS = ("copy", "packing", "latency", "enqueue", "self_halo", "adjoint", "overlap")
# Subjects with messages, for several ranks; the others measure the work of one rank.
SEVERAL_RANKS = ("enqueue", "overlap")
