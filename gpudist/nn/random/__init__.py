"""Random cells of a global tensor, the same under every partition."""
