"""Reads model checkpoints, and fetches those that are not here yet."""
