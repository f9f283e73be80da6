"""Arguments of public names, tensors whose memory can be read, and digests that ranks compare."""
