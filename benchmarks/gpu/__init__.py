"""What gpudist does on a GPU, beside the GPU's own copy and torch; docs/benchmarks.md says how."""

SUBJECTS = ("copy", "packing", "latency", "enqueue", "self_halo", "adjoint", "overlap")
# With messages, where there are several ranks; the others have one rank's work alone.
SEVERAL_RANKS = ("enqueue", "overlap")
