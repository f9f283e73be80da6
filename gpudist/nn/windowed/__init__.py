"""Layers whose outputs read ranges of cells: padding, interpolation, chains with one halo."""
