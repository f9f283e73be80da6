"""Peers that gpudist is measured against."""
