"""Random cells of a global tensor, the same for every partition."""
