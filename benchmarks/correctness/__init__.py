"""The same cases through gpudist and its peers, judged against the sequential module."""
