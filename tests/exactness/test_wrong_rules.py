"""Wrong acceptance rules, the classic ones too: chi-square must find them all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspec.core import tree
from jaxspec.core.accept import Rule, rejection
from jaxspec.core.distributions import log_softmax, residual_log_probs
from jaxspec.core.refusal import after_refusals, at_nodes, draft_probs, row
from jaxspec.core.topology import Topology
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.types import Verdict
from tests import fakes
from tests.exactness.controls import COLD, Control, check, in_turn, smallest_p_values
from tests.exactness.tables import DRAFT, DRAFTERS, NODES, TREES, VOCAB


def always_accept(log_probs, draft, uniforms, depth=None):
    return rejection(log_probs, draft, jnp.zeros_like(uniforms))


def told(retell):
    """The rule is told another draft distribution than the tokens were drawn from."""

    def rule(log_probs, draft, uniforms, depth=None):
        wrong = draft._replace(log_probs=log_softmax(retell(draft.log_probs)))
        return rejection(log_probs, wrong, uniforms)

    return rule


def after_a_refusal(replace):
    """`replace(target row, draft row, refused id)` instead of the residual."""

    def rule(log_probs, draft, uniforms, depth=None):
        verdict = rejection(log_probs, draft, uniforms)
        refused = jnp.minimum(verdict.count - 1, NODES - 1)[:, None, None]
        rows = [log_probs, jax.nn.one_hot(draft.tokens, VOCAB)]
        rows.append(rows[-1] if draft.log_probs is None else jnp.exp(draft.log_probs))
        own, token, probs = (
            jnp.take_along_axis(each, refused, axis=1)[:, 0] for each in rows
        )
        was_refused = (verdict.count <= NODES) & draft.valid[:, 0]
        wrong = replace(own, probs, token)
        following = jnp.where(was_refused[:, None], wrong, verdict.next_log_probs)
        return verdict._replace(next_log_probs=following)

    return rule


residual = after_a_refusal(lambda own, probs, token: residual_log_probs(own, probs))
target_itself = after_a_refusal(lambda own, probs, token: own)
softmax_of_the_excess = after_a_refusal(
    lambda own, probs, token: log_softmax(jnp.maximum(jnp.exp(own) - probs, 0))
)
only_the_refused_id_removed = after_a_refusal(
    lambda own, probs, token: log_softmax(jnp.where(token == 1, -jnp.inf, own))
)


def bonus_from_the_draft(log_probs, draft, uniforms, depth=None):
    verdict = rejection(log_probs, draft, uniforms)
    all_accepted = (verdict.count == NODES + 1)[:, None]
    wrong = jnp.where(all_accepted, draft.log_probs[:, -1], verdict.next_log_probs)
    return verdict._replace(next_log_probs=wrong)


# A draft distribution of temperature 0.5 is the raw one's squares.
RULE_CONTROLS = {
    "right": Control(rejection, right=True),
    "residual by hand": Control(residual, right=True),
    "always accepted": Control(always_accept),
    "softmax of the excess": Control(softmax_of_the_excess),
    "target itself on a refusal": Control(target_itself),
    "only the refused id removed": Control(only_the_refused_id_removed),
    "bonus from the draft": Control(bonus_from_the_draft),
    "drawn warped, told raw": Control(told(lambda q: q / 2), COLD),
    # These two get a draft that is drawn from the raw distribution.
    "drawn raw, told raw": Control(rejection, COLD, right=True),
    "drawn raw, told warped": Control(told(lambda q: q * 2), COLD),
}


def raw_in_the_end(self, target, state, context, noise, propose=DraftModel.propose):
    """A draft that knows no options in the last two rows of each turn."""
    others = len(RULE_CONTROLS) - 2
    raw = lambda logits, path_tokens, path_count: log_softmax(logits)  # noqa: E731
    warp = in_turn(*[context.warp] * others, raw, raw)
    return propose(self, target, state, context._replace(warp=warp), noise)


@functools.cache
def by_rule():
    parts = [control.part for control in RULE_CONTROLS.values()]
    return smallest_p_values(
        RULE_CONTROLS,
        DRAFTERS["draft model"],
        patch=(DraftModel, "propose", raw_in_the_end),
        rule=Rule("in turn", in_turn(*parts)),
    )


@pytest.mark.parametrize("name", RULE_CONTROLS)
def test_a_wrong_rule_is_found(name):
    check(RULE_CONTROLS, by_rule(), name)


LOOKUP_CONTROLS = {
    "right": Control(rejection, right=True),
    "residual by hand": Control(residual, right=True),
    "always accepted": Control(always_accept),
    "refused id not removed": Control(target_itself),
}


@functools.cache
def by_lookup():
    rule = Rule("in turn", in_turn(*[each.part for each in LOOKUP_CONTROLS.values()]))
    return smallest_p_values(LOOKUP_CONTROLS, DRAFTERS["prompt lookup"], rule=rule)


@pytest.mark.parametrize("name", LOOKUP_CONTROLS)
def test_a_wrong_rule_for_looked_up_tokens_is_found(name):
    """BL-14."""
    check(LOOKUP_CONTROLS, by_lookup(), name)


def siblings_one_by_one(log_probs, draft, uniforms, depth=None):
    """Every sibling is tried against the whole target, as if it were the first."""
    accepted = uniforms * draft_probs(draft) < jnp.exp(at_nodes(log_probs, draft))
    accepted &= draft.valid
    earlier = tree.earlier_siblings(draft.parents)
    accepted &= ~(earlier & accepted[:, None, :]).any(axis=-1)
    path, count, last = tree.longest_path(draft.parents, accepted, depth)
    return Verdict(path, count + 1, after_refusals(log_probs, draft, last))


def siblings_taken_from_nothing(log_probs, draft, uniforms, depth=None):
    """However many siblings were refused, the target itself is drawn from."""
    verdict = rejection(log_probs, draft, uniforms, depth)
    last = (verdict.count - 1)[:, None]
    last = jnp.take_along_axis(verdict.path, last, axis=1)[:, 0]
    return verdict._replace(next_log_probs=row(log_probs, last))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Pruned(fakes.Certain):
    """Draws children, keeps the likeliest of them, and tells them as drawn."""

    def propose(self, target, state, context, noise):
        draft, state = self.inner.propose(target, state, context, noise)
        scores = at_nodes(draft.log_probs, draft)
        best = (scores == scores.max(axis=1, keepdims=True)) & draft.valid
        return draft._replace(valid=best), state


def test_drawn_children_pruned_by_their_score_are_found():
    """Why a dynamic tree draws nothing."""
    star = Pruned(DraftModel(DRAFT, Topology.branching((3,))))
    controls = {"pruned": Control(rejection)}
    check(controls, smallest_p_values(controls, star), "pruned")


TREE_CONTROLS = {
    "right": Control(rejection, right=True),
    "each sibling against the whole target": Control(siblings_one_by_one),
    "the target itself on a refusal": Control(siblings_taken_from_nothing),
}


@functools.cache
def by_tree():
    rule = Rule("in turn", in_turn(*[each.part for each in TREE_CONTROLS.values()]))
    return smallest_p_values(TREE_CONTROLS, TREES["tree"], rule=rule)


@pytest.mark.parametrize("name", TREE_CONTROLS)
def test_a_wrong_rule_for_siblings_is_found(name):
    check(TREE_CONTROLS, by_tree(), name)
