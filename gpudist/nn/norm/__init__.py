"""Normalizations and softmax: moments or sums over cells that several workers hold."""
