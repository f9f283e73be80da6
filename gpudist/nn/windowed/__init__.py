"""Layers whose outputs each read a range of cells: padding, interpolation, chains over one halo."""
