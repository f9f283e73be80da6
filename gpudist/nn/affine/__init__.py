"""Convolutions, linear layers and embeddings: broadcast, compute on the local block, sum."""
