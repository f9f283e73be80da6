"""Modules that let programs written for other libraries run on gpudist."""
