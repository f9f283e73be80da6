"""Random values of global tensors, the same for every partition."""
