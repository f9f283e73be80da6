"""Pooling layers: reductions over windows of cells."""
