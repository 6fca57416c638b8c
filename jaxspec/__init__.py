"""Exact speculative decoding in JAX: a whole generation is one XLA program."""

from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel, load
from jaxspec.results import Result, Stats

__all__ = ["Generator", "LanguageModel", "Result", "Stats", "UserError", "load"]
