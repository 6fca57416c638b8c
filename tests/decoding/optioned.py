"""Batches that ask for more than ids: a rule, stop sequences, log-probabilities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.batching import pack_sequences
from jaxspec.core.accept import RULES
from jaxspec.core.report import Reporting
from tests import runs


@dataclasses.dataclass(frozen=True)
class Optioned:
    """A batch and, around it, what else its options say.

    Attributes:
        stops: stop sequences of each row, as lists of ids.
        banned: banned sequences of each row.
        alternatives: how many are reported; None: no log-probabilities.
    """

    batch: runs.Batch
    rule: str = "rejection"
    stops: Any = None
    banned: Any = None
    alternatives: int | None = None

    def __getattr__(self, name):
        return getattr(self.batch, name)

    def device(self):
        prompts, options = self.batch.device()
        rows = len(self.batch.prompts)

        def packed(sequences):
            if sequences is None:
                return None
            return jax.tree.map(jnp.asarray, pack_sequences(sequences, rows))

        sampling = options.sampling._replace(banned=packed(self.banned))
        many = self.alternatives
        return prompts, options._replace(
            sampling=sampling,
            stops=packed(self.stops),
            rule=RULES[self.rule],
            reporting=None if many is None else Reporting(many),
        )
