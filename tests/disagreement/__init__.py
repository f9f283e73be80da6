"""Ranks that disagree about what they do together: an error on all, and never a wrong number."""
