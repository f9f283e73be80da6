"""NCCL between GPUs."""
