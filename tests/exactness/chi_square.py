"""Texts drawn through the production loop, and Pearson's test of them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.core.accept import RULES
from tests import runs
from tests.exactness.tables import END, NEW, TARGET, plainly, walk

ACCEPTABLE, DAMNING = 1e-4, 1e-12
LEAST_EXPECTED = 5
BINS = 300


class Drawn(NamedTuple):
    """What some runs of a batch wrote and did, row after row.

    Attributes:
        texts: the new tokens `[row, NEW]`, then `END`.
        drafted: `[row, depth]`.
        accepted: `[row, depth]`.
    """

    texts: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    def turn(self, place, turns):
        """The rows whose turn it was."""
        return Drawn(*(each[place::turns] for each in self))


def run(drafter, batch, target=TARGET, made=runs.OPTIMIZED, **loop):
    """Runs the batch to its end, or for some `rounds`.

    With a `rule` that is not the batch's, prefill knows only the batch's: its token has
    the same noise under every rule, so that it need not be compiled for each.
    """
    state, options = runs.start(target, drafter, batch, made)
    if "rule" in loop:
        options = options._replace(rule=RULES.get(loop["rule"], loop["rule"]))
    rounds = jnp.int32(loop.get("rounds", runs.FOREVER))
    return runs.Run(batch, made.decode(target, drafter, state, options, rounds))


def draw(drafter, batch, repeats, *args, **kwargs):
    """Runs the batch again and again, each row of each run with a seed of its own."""
    rows, drawn = len(batch.prompts), []
    for repeat in range(repeats):
        seeds = range(repeat * rows, (repeat + 1) * rows)
        done = run(drafter, batch._replace(seeds=seeds), *args, **kwargs)
        drawn.append(_drawn(done.state, batch))
    return Drawn(*(np.concatenate(each) for each in zip(*drawn, strict=True)))


def _drawn(state, batch):
    place = batch.lengths[:, None] + np.arange(NEW)
    texts = np.take_along_axis(np.asarray(state.tokens), place, axis=1)
    texts = np.where(place < np.asarray(state.length)[:, None], texts, END)
    statistics = state.statistics
    counts = (np.asarray(each) for each in (statistics.drafted, statistics.accepted))
    return Drawn(texts.astype(np.int8), *counts)


def p_value(observed, probs):
    """Pearson's test; cells with an expectation under 5 are merged."""
    observed, probs = np.ravel(observed), np.ravel(probs)
    if observed[probs == 0].any():
        return 0.0
    order = np.argsort(probs)
    expected = probs[order] * observed.sum()
    cells = [[0.0, 0.0]]
    for seen, wanted in zip(observed[order], expected, strict=True):
        if cells[-1][1] >= LEAST_EXPECTED:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen
        cells[-1][1] += wanted
    # The largest cell comes last: it is never the one that lacks.
    seen, wanted = np.transpose(cells)
    return stats.chisquare(seen, wanted).pvalue if len(cells) > 1 else 1.0


def law_of(case, model=TARGET):
    """The law of the texts that the model alone writes."""
    return Law(*list(walk(plainly(case, model)))[-1])


class Law:
    """The distribution of a text: of its tokens, of neighbours, and as a whole.

    Texts as a whole are put into `BINS` bins of about equal probability, the rare
    texts in the first.
    """

    def __init__(self, texts, probs):
        self.codes, self.bins = codes(texts), np.zeros(len(texts), int)
        rarest_first = np.argsort(probs, kind="stable")
        share = np.cumsum(probs[rarest_first]) / probs.sum()
        self.bins[rarest_first] = np.minimum(share * BINS, BINS - 1).astype(int)
        assert (np.diff(self.codes) > 0).all(), "texts must be in order"
        self.tables = dict(self.count(texts, probs))

    def count(self, texts, weights=None):
        """How often each cell of each table occurs."""
        for i in range(NEW):
            yield f"token {i}", tally(texts[:, [i]], weights)
        for i in range(NEW - 1):
            yield f"tokens {i} and {i + 1}", tally(texts[:, i : i + 2], weights)
        found = codes(texts)
        at = np.minimum(np.searchsorted(self.codes, found), len(self.codes) - 1)
        # An impossible text has a cell of its own.
        bins = np.where(self.codes[at] == found, self.bins[at], BINS)
        yield "the text", np.bincount(bins, weights, BINS + 1)

    def p_values(self, texts):
        return {
            name: p_value(seen, self.tables[name]) for name, seen in self.count(texts)
        }


def codes(texts):
    """One number for each text, in their alphabetical order."""
    width = texts.shape[1]
    return texts.astype(int) @ (END + 1) ** np.arange(width)[::-1]


def tally(texts, weights):
    cells = (END + 1) ** texts.shape[1]
    return np.bincount(codes(texts), weights, cells)


def assert_law(found, again):
    """`found` are p values by case; `again(case)` are those with more samples."""
    smallest = min(min(values.values()) for values in found.values())
    print(f"{sum(map(len, found.values()))} tests, smallest p {smallest:.1e}")
    for case, values in found.items():
        if failures(values):
            repeated = again(case)
            print(f"{case}: {failures(values)}, again: {repeated}")
            assert failures(repeated) == {}, case


def failures(values):
    return {name: p for name, p in values.items() if not p > ACCEPTABLE}
