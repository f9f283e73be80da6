"""Attention over a sequence split over workers."""
