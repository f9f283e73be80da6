"""Losses: one value on every worker, with the gradient of the sequential loss."""
