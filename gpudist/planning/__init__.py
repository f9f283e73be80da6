"""Which partition is best: predicted from the plans, before any worker is started."""
