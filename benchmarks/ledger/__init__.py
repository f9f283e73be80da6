"""Costs of a training step on a GPU, counted on a CPU: launches, bytes, and time of the host."""
