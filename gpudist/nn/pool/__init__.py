"""Pools: reductions of windows of cells."""
