"""Ranks that disagree about a joint operation: an error on all, and never a wrong number."""
