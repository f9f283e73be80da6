"""Propagation of a rank's failure to all other ranks, and their final output."""
