"""The definitions in float64 NumPy, one row at a time, as slow and plain as possible.

Nothing here comes from jaxspec: a test that compares with it compares two authors.
"""

import numpy as np


def kept(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, slack=0.0):
    """Which tokens the options keep, by a full sort; ties at a threshold are kept.

    `slack` widens (or, negative, narrows) what top-p and min-p ask for by that share,
    so that float32 arithmetic can be held between two bounds.
    """
    distance = distance_below(logits, temperature)
    cut = np.inf
    if 0 < top_k <= distance.size:
        cut = np.sort(distance)[top_k - 1]
    if top_p < 1:
        best_first = np.sort(distance[distance <= cut])
        mass = np.cumsum(np.exp(-best_first))
        reached = mass / mass[-1] >= top_p + slack
        cut = best_first[np.argmax(reached) if reached.any() else -1]
    ratio = np.exp(-distance)
    return (distance <= cut) & (ratio >= min_p * (1 - slack)) & (distance < np.inf)


def warp(logits, temperature, **options):
    """Probabilities after the options in their order; greedy rows (0) have none."""
    if temperature == 0:
        return softmax(np.asarray(logits, np.float64))
    keep = kept(logits, temperature, **options)
    return softmax(np.where(keep, -distance_below(logits, temperature), -np.inf))


def distance_below(logits, temperature):
    """How far each logit lies below the largest one, in units of the temperature."""
    logits = np.asarray(logits, np.float64)
    return (logits.max() - logits) / temperature


def softmax(values):
    """Along the last axis."""
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def residual(target_probs, draft_probs):
    """The normalised positive part of the difference; the target if there is none."""
    excess = np.maximum(np.asarray(target_probs) - np.asarray(draft_probs), 0.0)
    return excess / excess.sum() if excess.sum() > 0 else np.asarray(target_probs)


def verify(target_probs, draft_probs, tokens, uniforms, valid=None):
    """One verification of a chain: accepted tokens and the next token's distribution.

    `target_probs[k + 1, V]`; `draft_probs[k, V]`, None for certain (one-hot) drafts.
    """
    for i, token in enumerate(tokens):
        if valid is not None and not valid[i]:
            return i, target_probs[i]
        own = np.eye(len(target_probs[i]))[token]
        draft = own if draft_probs is None else draft_probs[i]
        if not uniforms[i] * draft[token] < target_probs[i][token]:
            return i, residual(target_probs[i], draft)
    return len(tokens), target_probs[len(tokens)]


def ancestors(parents, slot):
    """The slots on the way from the root to `slot`, both included."""
    return [0] if slot == 0 else [*ancestors(parents, parents[slot - 1]), slot]
