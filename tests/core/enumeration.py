"""Acceptance rules without draws: rounds by hand, and rules integrated exactly."""

import jax
import numpy as np

from jaxspec.types import Draft
from tests import oracles

# The largest number below 1: no uniform is above it.
ALMOST_1 = 1 - 2.0**-24
# How near to a cell's edge a rule is asked: float32 places the edge no better.
MARGIN = 1e-5


def logs(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64)).astype(np.float32)


def make_draft(tokens, log_probs=None, valid=None):
    if not isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens, np.int32)
    valid = np.ones(tokens.shape, bool) if valid is None else valid
    parents = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    return Draft(tokens, parents, valid, log_probs)


def probabilities(verdict):
    return np.exp(np.asarray(verdict.next_log_probs))


class Tables:
    """A target and a draft that depend on everything before: random, with zeros."""

    def __init__(self, seed, size, nodes, kind):
        rng = np.random.default_rng([seed, size, nodes])
        self.size, self.nodes = size, nodes
        self.target = [self.rows(rng, i, kind) for i in range(nodes + 1)]
        self.draft = [self.rows(rng, i, "zeros") for i in range(nodes)]
        if kind == "equal":
            self.draft = self.target[:-1]

    def rows(self, rng, depth, kind):
        probs = rng.dirichlet(np.ones(self.size), (self.size,) * depth)
        if kind == "zeros":
            probs = np.where(probs > 0.15, probs, 0)
        if kind == "one-hot":
            probs = (probs == probs.max(axis=-1, keepdims=True)).astype(float)
        # As float32 holds it, so that both sides start from the same numbers.
        return np.exp(logs(probs / probs.sum(axis=-1, keepdims=True)).astype(float))

    def continuation(self, prefix):
        """The target's joint distribution of all tokens after the prefix."""
        own = self.target[len(prefix)][prefix]
        if len(prefix) == self.nodes:
            return own
        rest = [self.continuation((*prefix, token)) for token in range(self.size)]
        return np.stack([p * r for p, r in zip(own, rest, strict=True)])


def joint(rule, tables, fixed=None, valid=None, thresholds=oracles.ratios):
    """The distribution of the next `nodes + 1` tokens under a rule, integrated exactly.

    Over all that can happen (see `outcomes`). Tokens after the round's own come from
    the target.
    """
    total = np.zeros((tables.size,) * (tables.nodes + 1))
    for weight, prefix, following in outcomes(rule, tables, fixed, valid, thresholds):
        for token, share in enumerate(weight * following):
            after = (*prefix, token)
            rest = tables.continuation(after) if len(after) <= tables.nodes else 1.0
            total[after] += share * rest
    return total


def mean_accepted(rule, tables, fixed=None, valid=None, thresholds=oracles.ratios):
    """How many draft tokens a round accepts in expectation, integrated exactly."""
    happens = outcomes(rule, tables, fixed, valid, thresholds)
    return sum(weight * len(prefix) for weight, prefix, _ in happens)


def outcomes(rule, tables, fixed, valid, thresholds):
    """What can happen in a round: (probability, accepted tokens, what follows them).

    Over all drafts, or of one `fixed` draft that is told as certain; and over the
    uniforms: the `thresholds` of a draft's nodes split each [0, 1) in two, and in each
    of these 2 ** nodes cells the rule must be constant: it is asked at both ends and in
    the middle, at 6 ** nodes points a draft.
    """
    size, nodes = tables.size, tables.nodes
    drafts = np.array(list(np.ndindex(*(size,) * nodes)) if fixed is None else [fixed])
    target = rows_of(tables.target, drafts)
    draft = rows_of(tables.draft, drafts)
    if fixed is not None:
        draft = np.eye(size)[drafts]
    drawn = np.take_along_axis(draft, drafts[:, :, None], axis=-1)[..., 0]
    known = zip(target, draft, drafts, strict=True)
    split = np.array([thresholds(*rows, valid) for rows in known])
    places = np.array(list(np.ndindex(*(6,) * nodes)))  # 3 points in each of 2 cells
    uniforms, lengths = points_of(split, places)
    weights = drawn.prod(axis=-1)[:, None] * lengths.prod(axis=-1)

    told = None if fixed is not None else logs(draft)
    accepted, following = ask(rule, logs(target), drafts, told, valid, uniforms)
    cells = places // 3 @ (2 ** np.arange(nodes))
    for row, tokens in enumerate(drafts):
        for cell in range(2**nodes):
            here = np.flatnonzero(cells == cell)
            if weights[row, here[0]] == 0:
                continue
            count = accepted[row, here[0]]
            assert (accepted[row, here] == count).all()
            assert (following[row, here] == following[row, here[0]]).all()
            yield weights[row, here[0]], tuple(tokens[:count]), following[row, here[0]]


def points_of(split, places):
    """The uniforms at each of a draft's points, and the widths of the cells there."""
    below = [0 * split, split / 2, split * (1 - MARGIN)]
    above = [split * (1 + MARGIN), (1 + split) / 2, 0 * split + ALMOST_1]
    points = np.minimum(np.stack([*below, *above], axis=-1), ALMOST_1)
    lengths = np.repeat(np.stack([split, 1 - split], axis=-1), 3, axis=-1)
    node = np.arange(split.shape[1])
    return points[:, node, places], lengths[:, node, places]


def ask(rule, target, drafts, told, valid, uniforms):
    """The verdict on each draft at each of its points, in one call."""
    rows, points, nodes = uniforms.shape
    target, drafts = (np.repeat(each, points, axis=0) for each in (target, drafts))
    if told is not None:
        told = np.repeat(told, points, axis=0)
    if valid is not None:
        valid = np.tile(valid, (rows * points, 1))
    flat = uniforms.reshape(-1, nodes).astype(np.float32)
    verdict = rule(target, make_draft(drafts, told, valid), flat)
    accepted = np.asarray(verdict.count).reshape(rows, points) - 1
    following = probabilities(verdict).reshape(rows, points, -1).astype(float)
    assert np.isfinite(following).all()
    return accepted, following


def rows_of(tables, drafts):
    """The conditional rows along each draft."""
    along = [[t[tuple(d[:i])] for i, t in enumerate(tables)] for d in drafts]
    return np.array(along)
