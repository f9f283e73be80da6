"""Test doubles of CUDA's runtime and of NCCL: no result of theirs is a result of CUDA or NCCL."""
