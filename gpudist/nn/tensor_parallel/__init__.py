"""Layers whose weights are split over a line of workers, and the operators at their borders."""
