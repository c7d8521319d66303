"""How a rank leaves, and how the others learn of it."""
