"""Transport over shared memory between the processes of one node."""
