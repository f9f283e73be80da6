"""Long runs: nothing grows, no result is wrong, and no process ends badly."""
