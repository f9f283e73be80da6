"""Convolutions, linear layers and embeddings: broadcast, compute on local blocks, sum."""
