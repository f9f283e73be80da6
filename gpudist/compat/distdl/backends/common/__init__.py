"""Name under which DistDL's fork keeps its partitions."""
