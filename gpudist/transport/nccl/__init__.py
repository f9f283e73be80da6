"""Transport over NCCL between GPUs."""
