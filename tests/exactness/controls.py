"""Wrong samplers side by side: what every test of them needs.

The rows of a batch are served in turn by the right part of the product and by wrong
ones, so that many wrong samplers are one program; the right ones among them must pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests import runs
from tests.exactness import tables
from tests.exactness.chi_square import ACCEPTABLE, DAMNING, draw, law_of
from tests.exactness.tables import TARGET

WARM, COLD = {"temperature": 1.0}, {"temperature": 0.5}
SAMPLES = 4000


def in_turn(*parts):
    """Serves row 0 by the first part, row 1 by the second, and so on, round and round.

    Each part sees the whole batch; what it returns has rows first.
    """

    def pick(*leaves):
        turn = jnp.arange(leaves[0].shape[0]) % len(parts)
        turn = turn.reshape(-1, *(1,) * (leaves[0].ndim - 1))
        return jnp.select([turn == place for place in range(len(parts))], leaves)

    def mixed(*args):
        return jax.tree.map(pick, *(part(*args) for part in parts))

    return mixed


class Control(NamedTuple):
    """One of the samplers of a program.

    Attributes:
        part: what serves the rows.
        case: the options of the rows.
        right: whether the rows have the law nevertheless.
    """

    part: Any
    case: dict = WARM
    right: bool = False


def smallest_p_values(
    controls, drafter, target=TARGET, patch=None, compiler_options=None, **loop
):
    """The smallest p value of each control's rows, all from one program.

    `patch` is what is replaced meanwhile: a module or class, the name of a part, and
    what takes its place.
    """
    cases = [control.case for control in controls.values()]
    present = {name for case in cases for name in case} - {"temperature"}
    batch = tables.batch(cases, present=sorted(present))
    # Prefill is shared with other tests: traced before anything is replaced.
    runs.start(target, drafter, batch)
    with pytest.MonkeyPatch.context() as replaced:
        if patch:
            replaced.setattr(*patch)
        made = runs.programs(compiler_options)._replace(prefill=runs.OPTIMIZED.prefill)
        repeats = -(-SAMPLES * len(cases) // tables.ROWS)
        drawn = draw(drafter, batch, repeats, target, made, **loop)
    laws = [law_of(case, target) for case in cases]
    return {
        name: min(law.p_values(drawn.turn(place, len(cases)).texts).values())
        for place, (name, law) in enumerate(zip(controls, laws, strict=True))
    }


def check(controls, found, name):
    print(f"{name}: p = {found[name]:.1e}")
    if controls[name].right:
        assert found[name] > ACCEPTABLE
    else:
        assert found[name] < DAMNING
