"""Acceptance on trees, integrated exactly over all drafts and all uniforms.

The oracle finds by float64 below which uniform each node is accepted when its turn
comes; the thresholds split the uniforms into cells, and the rule is asked in each.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.accept import coupled, rejection, typical
from jaxspec.types import Draft
from tests.core.enumeration import ALMOST_1, MARGIN, logs

TOLERANCE = 1e-6
# Parents of the nodes; the same trees numbered by levels and along their branches.
TREES = {
    "two leaves": (0, 0),
    "three leaves": (0, 0, 0),
    "(2, 1) by levels": (0, 0, 1, 2),
    "(2, 1) by branches": (0, 1, 0, 3),
    "(1, 2)": (0, 1, 1),
    "one branch is longer": (0, 0, 1, 3),
    "(1, 2, 1) by levels": (0, 1, 1, 2, 3),
    "(1, 2, 1) by branches": (0, 1, 2, 1, 4),
}
by_tree = pytest.mark.parametrize("parents", TREES.values(), ids=list(TREES))
by_kind = pytest.mark.parametrize(
    "kind", ["any", "zeros", pytest.param("equal", marks=pytest.mark.full)]
)
# Asked at once: one shape, so one program, for each tree.
SIZE, ROWS = 3, 1024


def depths_of(parents):
    levels = [0]
    for parent in parents:
        levels.append(levels[parent] + 1)
    return levels


def path_of(parents, tokens, slot):
    """The tokens on the way to a slot."""
    way = []
    while slot:
        way.append(int(tokens[slot - 1]))
        slot = parents[slot - 1]
    return tuple(way[::-1])


class Texts:
    """A target and a draft that depend on everything before."""

    def __init__(self, kind, depth, seed=0):
        rng = np.random.default_rng([seed, depth])
        self.depth, self.kind, self.target, self.draft = depth, kind, {}, {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(SIZE), repeat=length):
                self.target[prefix] = self.row(rng)
                self.draft[prefix] = self.row(rng)
        if kind == "equal":
            self.draft = self.target

    def row(self, rng):
        probs = rng.dirichlet(np.ones(SIZE))
        if self.kind == "zeros":
            probs = np.where(probs > 0.2, probs, 0)
        return np.exp(logs(probs / probs.sum()).astype(float))

    def joint(self, prefix=()):
        """The target's law of the depth + 1 tokens after the prefix."""
        own = self.target[prefix]
        if len(prefix) == self.depth:
            return own
        rest = [self.joint((*prefix, token)) for token in range(SIZE)]
        return np.stack([p * r for p, r in zip(own, rest, strict=True)])


def all_drafts(parents, texts):
    """Each draft without replacement: (probability, tokens, valid).

    A child that cannot be drawn, because too few ids are left, is not valid.
    """

    def extend(tokens, valid, weight, node):
        if node == len(parents):
            yield weight, tokens, valid
            return
        parent = parents[node]
        before = [n for n in range(node) if parents[n] == parent]
        q = texts.draft[path_of(parents, tokens, parent)].copy()
        for sibling in before:
            q[tokens[sibling]] = 0
        there = (parent == 0 or valid[parent - 1]) and q.sum() > 0
        if not there:
            yield from extend((*tokens, 0), (*valid, False), weight, node + 1)
            return
        for token, share in enumerate(q / q.sum()):
            if share > 0:
                yield from extend(
                    (*tokens, token), (*valid, True), weight * share, node + 1
                )

    yield from extend((), (), 1.0, 0)


def thresholds(parents, tokens, valid, texts, certain):
    """Below which uniform each node is accepted, if its turn comes."""
    found = np.ones(len(parents))
    for slot in range(len(parents) + 1):
        prefix = path_of(parents, tokens, slot)
        p, q = texts.target[prefix].copy(), texts.draft[prefix].copy()
        for node in (n for n in range(len(parents)) if parents[n] == slot):
            if not valid[node]:
                continue
            x = tokens[node]
            own = np.eye(SIZE)[x] if certain else q / q.sum()
            found[node] = min(1.0, p[x] / own[x])
            excess = np.maximum(p - own, 0)
            p = excess / excess.sum() if excess.sum() > 1e-12 else p
            q[x] = 0
    return found


def rows_of(table, parents, tokens, valid):
    """Rows by slot; of a node that is not there any."""
    rows = []
    for slot in range(len(parents) + 1):
        there = slot == 0 or valid[slot - 1]
        rows.append(table[path_of(parents, tokens, slot) if there else ()])
    return np.array(rows)


@functools.cache
def jitted(rule, depth):
    return jax.jit(lambda *args: rule(*args, depth))


def verdicts(rule, parents, *arrays):
    """The rule's verdicts, asked for a fixed number of rows at a time."""
    rows, found = len(arrays[0]), []
    step = min(ROWS, 1 << (rows - 1).bit_length())
    for start in range(0, rows, step):
        places = np.minimum(np.arange(start, start + step), rows - 1)
        parts = (None if each is None else each[places] for each in arrays)
        found.append(_verdicts(rule, parents, *parts))
    return [np.concatenate(each)[:rows] for each in zip(*found, strict=True)]


def _verdicts(rule, parents, tokens, valid, target, draft, uniforms):
    rows = len(tokens)
    made = Draft(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(np.tile(np.int32(parents), (rows, 1))),
        jnp.asarray(valid, bool),
        # Rows only up to the last slot with a child.
        None if draft is None else jnp.asarray(logs(draft[:, : max(parents) + 1])),
    )
    uniforms = jnp.asarray(uniforms, jnp.float32)
    decide = jitted(rule, max(depths_of(parents)))
    verdict = decide(jnp.asarray(logs(target)), made, uniforms)
    return (
        np.asarray(verdict.path),
        np.asarray(verdict.count),
        np.exp(np.asarray(verdict.next_log_probs, float)),
    )


def integrate(parents, texts, drafts, certain=False, rule=rejection):
    """The law of the next depth + 1 tokens under the rule, and the accepted paths."""
    nodes = len(parents)
    asked, weights = [], []
    corners = np.array(list(itertools.product((0, 1), repeat=nodes)))
    for weight, tokens, valid in drafts:
        split = thresholds(parents, tokens, valid, texts, certain)
        for place in (0, 0.5, 1):
            below = split * (place * (1 - 2 * MARGIN) + MARGIN)
            above = split + (1 - split) * (place * (1 - 2 * MARGIN) + MARGIN)
            uniforms = np.where(corners, np.minimum(above, ALMOST_1), below)
            share = np.where(corners, 1 - split, split).prod(axis=1) / 3
            target = rows_of(texts.target, parents, tokens, valid)
            draft = rows_of(texts.draft, parents, tokens, valid)
            for uniform, part in zip(uniforms, share * weight, strict=True):
                if part > 0:
                    asked.append((tokens, valid, target, draft, uniform))
                    weights.append(part)
    tokens, valid, target, draft, uniforms = map(np.array, zip(*asked, strict=True))
    paths, counts, following = verdicts(
        rule, parents, tokens, valid, target, None if certain else draft, uniforms
    )
    total = np.zeros((SIZE,) * (texts.depth + 1))
    for row, weight in enumerate(weights):
        way = paths[row, : counts[row]]
        assert way[0] == 0
        assert all(parents[s - 1] == before for before, s in itertools.pairwise(way))
        assert all(valid[row, s - 1] for s in way[1:])
        prefix = tuple(tokens[row, s - 1] for s in way[1:])
        for token, share in enumerate(weight * following[row]):
            after = (*prefix, token)
            rest = texts.joint(after) if len(after) <= texts.depth else 1.0
            total[after] += share * rest
    return total


@by_kind
@by_tree
def test_children_without_replacement_keep_the_law(parents, kind):
    texts = Texts(kind, max(depths_of(parents)))
    found = integrate(parents, texts, all_drafts(parents, texts))
    np.testing.assert_allclose(found, texts.joint(), atol=TOLERANCE)


@by_kind
@by_tree
def test_certain_children_keep_the_law(parents, kind):
    """Each slot's children are its likeliest ids, whatever their probabilities."""
    texts = Texts(kind, max(depths_of(parents)))
    tokens = []
    for node, parent in enumerate(parents):
        rank = sum(p == parent for p in parents[:node])
        prefix = path_of(parents, tokens, parent)
        tokens.append(int(np.argsort(-texts.draft[prefix], kind="stable")[rank]))
    drafts = [(1.0, tuple(tokens), (True,) * len(parents))]
    found = integrate(parents, texts, drafts, certain=True)
    np.testing.assert_allclose(found, texts.joint(), atol=TOLERANCE)


@pytest.mark.parametrize("certain", [False, True])
def test_a_wrong_order_of_refusals_is_found(certain):
    """The control: a rule that tests each child against the whole target."""

    def independent(target_log_probs, draft, uniforms, depth):
        chosen = rejection(target_log_probs, draft, uniforms, depth)
        first = draft._replace(valid=draft.valid.at[:, 1:].set(False))
        alone = rejection(target_log_probs, first, uniforms, depth)
        return chosen._replace(next_log_probs=alone.next_log_probs)

    parents = TREES["two leaves"]
    texts = Texts("any", 1)
    drafts = list(all_drafts(parents, texts))
    if certain:
        drafts = [(1.0, drafts[0][1], drafts[0][2])]
    found = integrate(parents, texts, drafts, certain, independent)
    assert np.abs(found - texts.joint()).max() > 1e-3


def test_siblings_of_one_id_count_once():
    """A drafter that repeats itself gains and breaks nothing."""
    texts = Texts("any", 1)
    drafts = [(1.0, (2, 2, 1), (True,) * 3)]
    found = integrate((0, 0, 0), texts, drafts, certain=True)
    np.testing.assert_allclose(found, texts.joint(), atol=TOLERANCE)


def ask(rule, parents, tokens, target, noise, draft=None, valid=None):
    valid = np.ones(len(parents), bool) if valid is None else valid
    args = [np.asarray(each)[None] for each in (tokens, valid, target)]
    given = None if draft is None else np.asarray(draft)[None]
    paths, counts, following = verdicts(
        rule, parents, *args, given, np.asarray(noise)[None]
    )
    return paths[0, : counts[0]].tolist(), following[0]


def test_coupled_follows_the_child_that_the_target_draws():
    parents = (0, 0, 1, 2, 2)
    rng = np.random.default_rng(0)
    ways = set()
    for _ in range(200):
        target = rng.dirichlet(np.ones(SIZE), 6)
        gumbel = rng.gumbel(size=(3, SIZE))
        tokens = [0, 1, *rng.integers(0, SIZE, 1), 1, 2]
        way, slot = [0], 0
        for depth in range(2):
            drawn = int((np.log(target[slot]) + gumbel[depth]).argmax())
            children = [
                n for n in range(5) if parents[n] == slot and tokens[n] == drawn
            ]
            if not children:
                break
            slot = children[0] + 1
            way.append(slot)
        found, following = ask(coupled, parents, tokens, target, gumbel)
        assert found == way
        np.testing.assert_allclose(following, target[slot], atol=1e-6)
        ways.add(tuple(way))
    assert len(ways) == 6


def test_typical_takes_the_longest_typical_path():
    target = np.tile([0.6, 0.39, 0.01], (6, 1))
    parents = (0, 0, 2, 3)
    # Both children of the root are typical: the second goes on.
    assert ask(typical, parents, [0, 1, 0, 2], target[:5], np.zeros(4))[0] == [0, 2, 3]
    assert ask(typical, parents, [0, 2, 0, 0], target[:5], np.zeros(4))[0] == [0, 1]


def test_bl15_the_likeliest_child_is_accepted_by_the_targets_own_probability():
    target = np.array([[0.51, 0.49, 0]] * 3)
    for uniform in (0.5, 0.509, 0.511, 0.99):
        found, following = ask(rejection, (0,), [0], target[:2], np.full(1, uniform))
        assert (found == [0, 1]) == (uniform < 0.51)
        wanted = target[1] if uniform < 0.51 else [0, 1, 0]
        np.testing.assert_allclose(following, wanted, atol=1e-6)
        # Offered both, the second is certain once the first is refused.
        both = ask(rejection, (0, 0), [0, 1], target, np.full(2, uniform))[0]
        assert both == ([0, 1] if uniform < 0.51 else [0, 2])


def test_a_greedy_target_goes_down_by_id():
    parents, tokens = (0, 0, 1, 2, 2), [0, 1, 2, 0, 2]
    target = np.eye(SIZE)[[1, 0, 2, 0, 0, 1]]
    draft = np.random.default_rng(0).dirichlet(np.ones(SIZE), 6)
    for uniform in (0.0, 0.5, ALMOST_1):
        for given in (None, draft):
            found, following = ask(
                rejection, parents, tokens, target, np.full(5, uniform), given
            )
            assert found == [0, 2, 5]
            np.testing.assert_allclose(following, np.eye(SIZE)[1], atol=1e-6)


@pytest.mark.parametrize("gap", [10, 90, 100, 1000])
def test_what_is_left_of_a_nearly_certain_draft_still_counts(gap):
    """The second child's probability underflows; among what is left it is certain."""
    log_probs = np.array([[[0.0, -gap, -gap - 5]], [[-gap - 5, 0.0, -gap]]], "f4")
    target = np.full((2, 3, SIZE), 1 / 3)
    target[0, 0], target[1, 0] = [0, 1, 0], [0, 0, 1]
    draft = Draft(
        jnp.array([[0, 1], [1, 2]]),
        jnp.zeros((2, 2), jnp.int32),
        jnp.ones((2, 2), bool),
        jnp.asarray(log_probs),
    )
    uniforms = jnp.full((2, 2), ALMOST_1, jnp.float32)
    verdict = jitted(rejection, 1)(jnp.asarray(logs(target)), draft, uniforms)
    assert verdict.path.tolist() == [[0, 2], [0, 2]]
    assert verdict.count.tolist() == [2, 2]


def test_rows_that_are_not_numbers_refuse_all_children():
    target = np.random.default_rng(1).dirichlet(np.ones(SIZE), 4)
    draft = np.full((4, SIZE), np.nan)
    found, following = ask(rejection, (0, 0, 0), [0, 1, 2], target, np.zeros(3), draft)
    assert found == [0]
    np.testing.assert_allclose(following, target[0], atol=1e-6)
