"""Predictions of the planner beside measurements that others have published."""
