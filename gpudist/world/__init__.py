"""Launcher variables, joining the world, and partitions of its ranks."""
