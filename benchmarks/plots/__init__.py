"""Pictures of result files, one kind per file."""
