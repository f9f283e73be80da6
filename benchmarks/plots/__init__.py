"""Pictures of result files, one kind a file."""
