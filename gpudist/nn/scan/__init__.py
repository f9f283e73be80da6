"""Recurrences and causal convolutions over a sequence that is split over workers."""
