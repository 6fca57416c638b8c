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


def ratios(target_probs, draft_probs, tokens, valid=None):
    """Below which uniform `verify` accepts each node, whatever becomes of the others.

    `target_probs[k + 1, V]`, `draft_probs[k, V]`.
    """
    pairs = zip(target_probs[:-1], draft_probs, tokens, strict=True)
    return np.array([min(1.0, p[x] / q[x]) if q[x] > 0 else 1.0 for p, q, x in pairs])


def block_prefixes(target_probs, draft_probs, tokens):
    """The p_0 to p_k of block verification: how much of each prefix is kept."""
    kept = [1.0]
    for p, q, x in zip(target_probs[:-1], draft_probs, tokens, strict=True):
        joint = kept[-1] * p[x]
        # A token that the draft cannot draw is never given but by hand.
        kept.append(min(1.0, joint / q[x]) if q[x] > 0 else float(joint > 0))
    return kept


def block_thresholds(target_probs, draft_probs, tokens, valid=None):
    """Below which uniform block verification accepts each prefix; 0 past the draft.

    Sun et al. 2024, equation 4.
    """
    length = leading(np.ones(len(tokens)) if valid is None else valid)
    kept = block_prefixes(target_probs, draft_probs, tokens)
    thresholds = np.zeros(len(tokens))
    for i in range(1, length):
        share = np.maximum(kept[i] * target_probs[i] - draft_probs[i], 0).sum()
        rest = 1 - kept[i]
        thresholds[i - 1] = share / (share + rest) if rest > 0 else 1.0
    if length:
        thresholds[length - 1] = kept[length]
    return thresholds


def block_verify(target_probs, draft_probs, tokens, uniforms, valid=None):
    """`verify`, by blocks: the longest prefix that passes, and what follows it."""
    length = leading(np.ones(len(tokens)) if valid is None else valid)
    if draft_probs is None:
        draft_probs = np.eye(target_probs.shape[-1])[tokens]
    thresholds = block_thresholds(target_probs, draft_probs, tokens, valid)
    passed = [i + 1 for i in range(length) if uniforms[i] < thresholds[i]]
    count = max(passed, default=0)
    if count == length:
        return count, target_probs[count]
    scaled = block_prefixes(target_probs, draft_probs, tokens)[count]
    excess = np.maximum(scaled * target_probs[count] - draft_probs[count], 0)
    return count, excess / excess.sum() if excess.sum() > 0 else target_probs[count]


def leading(flags):
    """How many are true before the first that is not."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def gumbel_match(target_probs, draft_probs):
    """How often two arg-maxes with one Gumbel noise are the same id.

    Daliri, Musco, Suresh 2025: the sum over x of 1 / sum_y max(p_y/p_x, q_y/q_x).
    """
    p, q = np.asarray(target_probs, float), np.asarray(draft_probs, float)
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both)


def gumbel_chain(rows, noise):
    """Plain sampling: token after token, each with the noise of its position.

    `rows[i][tokens so far]` are log-probabilities, `noise[k, V]`.
    """
    tokens = ()
    for row, gumbel in zip(rows, noise, strict=True):
        tokens += (int(np.argmax(row[tokens] + gumbel)),)
    return tokens


def is_typical(target_probs, token, epsilon=0.09, delta=0.3):
    """Medusa's test (Cai et al. 2024, section 2.3.1) of one token."""
    entropy = -sum(p * np.log(p) for p in target_probs if p > 0)
    return target_probs[token] > min(epsilon, delta * np.exp(-entropy))


def adjusted(logits, prompt, output, order=None, **options):
    """Logits of the token after `prompt` and `output`, one option after another.

    `options` are those of `ADJUSTMENTS` and `FILTERS`; `order` is by default theirs.
    """
    values = np.minimum(np.asarray(logits, np.float64), np.finfo(np.float32).max)
    steps = ADJUSTMENTS | FILTERS
    for name in order or steps:
        if name in options:
            values = steps[name](values.copy(), list(prompt), list(output), options)
    return values


def _bias(values, prompt, output, options):
    for token, bias in options["logit_bias"].items():
        values[token] += bias
    return values


def _repetition(values, prompt, output, options):
    penalty = options["repetition_penalty"]
    for token in {*prompt, *output}:
        values[token] *= 1 / penalty if values[token] > 0 else penalty
    return values


def _presence(values, prompt, output, options):
    for token in set(output):
        values[token] -= options["presence_penalty"]
    return values


def _frequency(values, prompt, output, options):
    for token in output:
        values[token] -= options["frequency_penalty"]
    return values


def _banned(values, prompt, output, options):
    text = prompt + output
    for *before, last in options["banned"]:
        start = len(text) - len(before)
        if start >= 0 and text[start:] == before:
            values[last] = -np.inf
    return values


def _min_new_tokens(values, prompt, output, options):
    if len(output) < options["min_new_tokens"]:
        values[list(options["ends"])] = -np.inf
    return values


def _temperature(values, prompt, output, options):
    return values / options["temperature"]


def _keep(name):
    def step(values, prompt, output, options):
        if not (values > -np.inf).any():
            return values
        keep = kept(values, 1.0, **{name: options[name]})
        return np.where(keep, values, -np.inf)

    return step


ADJUSTMENTS = {
    "logit_bias": _bias,
    "repetition_penalty": _repetition,
    "presence_penalty": _presence,
    "frequency_penalty": _frequency,
    "banned": _banned,
    "min_new_tokens": _min_new_tokens,
}
FILTERS = {
    "temperature": _temperature,
    "top_k": _keep("top_k"),
    "top_p": _keep("top_p"),
    "min_p": _keep("min_p"),
}


def adjusted_rows(
    logits,
    texts,
    prompt,
    ends=(),
    logit_bias=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    banned=(),
    min_new_tokens=0,
):
    """`adjusted` by `ADJUSTMENTS`, for many texts at once; `logit_bias` is an array.

    `logits[n, V]` follow `texts[n, L]`, whose first `prompt` tokens are the prompt;
    `ends` are the ids that end a text.
    """
    logits, texts = np.array(logits, np.float64) + logit_bias, np.asarray(texts)
    is_id = texts[:, :, None] == np.arange(logits.shape[-1])
    written = is_id[:, prompt:].sum(axis=1)
    less_likely = np.where(
        logits > 0, logits / repetition_penalty, logits * repetition_penalty
    )
    logits = np.where(is_id.any(axis=1), less_likely, logits)
    logits = logits - presence_penalty * (written > 0) - frequency_penalty * written
    for *before, last in banned:
        logits[ending_in(texts, before), last] = -np.inf
    if texts.shape[1] - prompt < min_new_tokens:
        logits[:, list(ends)] = -np.inf
    return logits


def ending_in(texts, ids):
    """Which of `texts[n, L]` end in the ids."""
    if len(ids) > texts.shape[1]:
        return np.zeros(len(texts), bool)
    return (texts[:, texts.shape[1] - len(ids) :] == list(ids)).all(axis=1)


def kept_rows(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, slack=0.0):
    """`kept` for many rows at once."""
    logits = np.asarray(logits, np.float64)
    distance = (logits.max(axis=-1, keepdims=True) - logits) / temperature
    best_first = np.sort(distance, axis=-1)
    cut = np.full((len(logits), 1), np.inf)
    if 0 < top_k <= logits.shape[-1]:
        cut = best_first[:, top_k - 1 : top_k]
    if top_p < 1:
        weights = np.where(best_first <= cut, np.exp(-best_first), 0)
        mass = np.cumsum(weights, axis=-1)
        short = (mass / mass[:, -1:] < top_p + slack) & (weights > 0)
        # Nothing reaches a `top_p` that slack has put above 1.
        last = np.minimum(short.sum(axis=-1), (weights > 0).sum(axis=-1) - 1)
        cut = np.take_along_axis(best_first, last[:, None], axis=-1)
    least = min_p * (1 - slack)
    return (distance <= cut) & (np.exp(-distance) >= least) & (distance < np.inf)


def warp_rows(logits, temperature, **options):
    """`warp` for many rows at once, at a temperature above 0."""
    keep = kept_rows(logits, temperature, **options)
    return softmax(np.where(keep, np.asarray(logits) / temperature, -np.inf))
