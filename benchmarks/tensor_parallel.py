"""Tensor-parallel layers: training steps of a GPT, compared with DTensor's."""

from benchmarks.transformer import cases, sides

__all__ = ["cases", "sides"]
