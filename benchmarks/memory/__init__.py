"""Predicted memory of training steps beside the memory of real ones."""
