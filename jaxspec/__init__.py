"""Exact speculative decoding in JAX: a whole generation is one XLA program."""

from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel, load
from jaxspec.results import Result, Stats
from jaxspec.sharding import Partition, make_mesh

__all__ = [
    "Generator",
    "LanguageModel",
    "Partition",
    "Result",
    "Stats",
    "UserError",
    "load",
    "make_mesh",
]
