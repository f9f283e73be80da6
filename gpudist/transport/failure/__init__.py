"""How the failure of one rank reaches all the others, and what they print."""
