"""Recovery in place: ranks are killed, and the others continue."""
