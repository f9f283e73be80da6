"""Adapters: how a user of each library would do the work of a case."""
