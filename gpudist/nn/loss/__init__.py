"""Losses: one value on every worker, with the sequential gradient."""
