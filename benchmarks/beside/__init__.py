"""Time and memory of the same work by gpudist and by libraries for split tensors."""
