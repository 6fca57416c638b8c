"""Continues all prompts of a file, each exactly once, however often it is killed."""
