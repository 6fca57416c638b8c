"""Acceptance rules without draws: rounds by hand, and rules integrated exactly."""

import jax
import numpy as np

from jaxspec.types import Draft

# The largest number below 1: no uniform is above it.
ALMOST_1 = 1 - 2.0**-24


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


def joint(rule, tables, fixed=None, valid=None):
    """The distribution of the next `nodes + 1` tokens under a rule, integrated exactly.

    Over all drafts, or of one `fixed` draft that is told as certain; and over the
    uniforms: each node's split [0, 1) in two cells at the probability ratio, where the
    rule must be constant: it is asked at both ends and in the middle of each. Tokens
    after the round's own come from the target.
    """
    size, nodes = tables.size, tables.nodes
    drafts = np.array(list(np.ndindex(*(size,) * nodes)) if fixed is None else [fixed])
    target = rows_of(tables.target, drafts)
    draft = rows_of(tables.draft, drafts)
    if fixed is not None:
        draft = np.eye(size)[drafts]
    own = drafts[:, :, None]
    drawn = np.take_along_axis(draft, own, axis=-1)[..., 0]
    wanted = np.take_along_axis(target[:, :-1], own, axis=-1)[..., 0]
    split = np.minimum(wanted / np.where(drawn > 0, drawn, 1), 1)

    places = np.array(list(np.ndindex(*(6,) * nodes)))  # 3 points in each of 2 cells
    below = [0 * split, split / 2, split * (1 - 1e-5)]
    above = [split * (1 + 1e-5), (1 + split) / 2, 0 * split + ALMOST_1]
    points = np.stack([*below, *above], axis=-1)
    lengths = np.repeat(np.stack([split, 1 - split], axis=-1), 3, axis=-1)
    node = np.arange(nodes)
    uniforms = np.minimum(points[:, node, places], ALMOST_1)
    weights = drawn.prod(axis=-1)[:, None] * lengths[:, node, places].prod(axis=-1)

    repeated = [np.repeat(a, len(places), axis=0) for a in (target, drafts, draft)]
    if valid is not None:
        valid = np.tile(valid, (len(repeated[0]), 1))
    told = None if fixed is not None else logs(repeated[2])
    verdict = rule(
        logs(repeated[0]),
        make_draft(repeated[1], told, valid),
        uniforms.reshape(-1, nodes).astype(np.float32),
    )
    accepted = np.asarray(verdict.count).reshape(weights.shape) - 1
    following = probabilities(verdict).reshape(*weights.shape, size)
    assert np.isfinite(following).all()

    cells = places // 3 @ (2**node)
    total = np.zeros((size,) * (nodes + 1))
    for row, tokens in enumerate(drafts):
        for cell in range(2**nodes):
            here = np.flatnonzero(cells == cell)
            if weights[row, here[0]] == 0:
                continue
            count = accepted[row, here[0]]
            assert (accepted[row, here] == count).all()
            assert (following[row, here] == following[row, here[0]]).all()
            prefix = tuple(tokens[:count])
            share = weights[row, here[0]] * following[row, here[0]].astype(float)
            for token in range(size):
                after = (*prefix, token)
                rest = tables.continuation(after) if len(after) <= nodes else 1.0
                total[after] += share[token] * rest
    return total


def rows_of(tables, drafts):
    """The conditional rows along each draft."""
    along = [[t[tuple(d[:i])] for i, t in enumerate(tables)] for d in drafts]
    return np.array(along)
