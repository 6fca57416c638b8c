"""TPU programs without a TPU: compiled ahead of time, measured, and planned with."""
