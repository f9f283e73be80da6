"""Parameters of distributed layers: owners, users and the sums of gradients."""
