"""Benchmarks: each subject is one file; numbers are ratios to a peer measured in the same run."""
