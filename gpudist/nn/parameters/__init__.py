"""Parameters of distributed layers: owners, users and gradient sums."""
