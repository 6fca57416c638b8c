"""Programs compiled without XLA's optimisations, in half the time.

For tests of what a program does and not of how: the loop's own tests compile in full.
"""

import contextlib

import jax
import pytest

from jaxspec.decoding.loop import decode, prefill
from tests import runs

OPTIONS = {"xla_backend_optimization_level": 0}
PROGRAMS = runs.Programs(
    jax.jit(lambda *args: prefill(*args), static_argnums=6, compiler_options=OPTIONS),
    jax.jit(lambda *args: decode(*args), compiler_options=OPTIONS),
)


@contextlib.contextmanager
def generators():
    """Within it, what a generator compiles is compiled so."""
    with pytest.MonkeyPatch.context() as patch:
        compile_as_it_is = jax.stages.Lowered.compile
        patch.setattr(
            *(jax.stages.Lowered, "compile"),
            lambda lowered: compile_as_it_is(lowered, OPTIONS),
        )
        yield
