"""The first minutes on a GPU: what to find out, in which order, and the runner."""
