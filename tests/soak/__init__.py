"""Long runs: that nothing grows, nothing is wrong in the end, and no process ends badly."""
