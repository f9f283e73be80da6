"""Layers whose outputs read a range of cells: padding, interpolation, chains over one halo."""
