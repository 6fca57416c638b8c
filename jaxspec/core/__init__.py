"""The algorithm on arrays alone: no model, no I/O."""
