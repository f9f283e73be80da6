"""Adapters: how a user of each library would run a case."""
