"""Attention over a sequence that is split over workers."""
