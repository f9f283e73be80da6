"""Layers whose weights are split over a line of workers, and how tensors enter and leave them."""
