"""The world: launcher variables, joining, and partitions of its ranks."""
