"""Convolutions, linear layers and embeddings: broadcast, compute on the own block, sum."""
