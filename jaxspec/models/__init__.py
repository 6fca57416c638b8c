"""The decoder: one config-driven Flax NNX module for every supported family."""
