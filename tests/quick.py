"""What a generator compiles, without the optimisations of its machine code."""

import contextlib

import jax
import pytest

from tests import runs


@contextlib.contextmanager
def generators():
    """Within it, what a generator compiles is compiled so."""
    with pytest.MonkeyPatch.context() as patch:
        compile_as_it_is = jax.stages.Lowered.compile
        patch.setattr(
            *(jax.stages.Lowered, "compile"),
            lambda lowered: compile_as_it_is(lowered, runs.QUICK),
        )
        yield
