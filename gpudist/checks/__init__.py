"""Checks of arguments and tensor memory, and digests that ranks compare."""
