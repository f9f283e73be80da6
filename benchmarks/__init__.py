"""Benchmarks: one subject per file; each result is a ratio to a peer measured in the same run."""
