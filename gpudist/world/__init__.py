"""The ranks of a run: their launcher, the transport that they join, and partitions of them."""
