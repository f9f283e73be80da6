"""Wires behind one protocol."""
