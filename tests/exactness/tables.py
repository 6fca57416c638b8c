"""A target and a draft given by tables, and the exact law of what must be written.

The law of a text follows from the tables by float64 NumPy: all texts are gone through,
so that a distribution may depend on everything before it.
"""

import dataclasses

import numpy as np

from jaxspec.batching import pack_sequences
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, oracles, runs

VOCAB, NODES, NEW, ROWS = 6, 4, 7, 1920
# Stands in the places that a text has left empty.
END = VOCAB
# The ending has occurred before, so that lookup drafts from the first round on.
PROMPT = [2, 4, 1, 0, 5, 3, 2, 4, 1]

PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {0: 0.5, 5: -1.0},
    # The first new token would be the first to break it.
    "banned": ((1, 3),),
}
KINDS = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "penalties": PENALTIES,
}
CASES = {
    f"T={temperature}, {kind}": {"temperature": temperature, **options}
    for temperature in (0.7, 1.0, 1.3)
    for kind, options in KINDS.items()
}
UNCUT = tuple(CASES)
CASES["everything, and stops"] = {
    "temperature": 0.9,
    **PENALTIES,
    "top_k": 5,
    "top_p": 0.95,
    "min_p": 0.02,
    "min_new_tokens": 3,
    "stops": ((4,), (0, 2)),
}

# What a row is given that does not ask for the option, if the program has it.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "logit_bias": {},
    "banned": (),
    "stops": (),
}
ALL = tuple(NEUTRAL)
# Of a text without such an id; so that every row has a sequence.
NEVER = (END, END)
TRUNCATIONS = ("top_k", "top_p", "min_p")
LOSSLESS = ("rejection", "block", "coupled")


def that_continues(prompt, liking=2.3):
    """A random target that likes what the prompt did: then lookups are accepted.

    It has one layer: what a second could do wrong is looked for in tests/decoding.
    """
    model = fakes.TableModel.random(VOCAB, seed=0, windows=(None,))
    table = np.array(model.table)
    for before, own, after in zip(prompt, prompt[1:], prompt[2:], strict=False):
        table[:, before + 1, own, after] += liking
    return dataclasses.replace(model, table=table)


TARGET = that_continues(PROMPT)
DRAFT = TARGET.near(seed=1, noise=1.0)
PLAIN = Autoregressive()
TREE = Topology.branching((2, 2, 1, 1))
DRAFTERS = {
    "draft model": DraftModel(DRAFT, NODES),
    "prompt lookup": PromptLookup(NODES, min_ngram=1),
}
TREES = {
    "tree": DraftModel(DRAFT, TREE),
    "dynamic tree": DraftModel(DRAFT, DynamicTree(depth=4, top_k=2, nodes=9)),
    "tree of the likeliest": fakes.Certain(DraftModel(DRAFT, TREE)),
}


def with_table(logits):
    """A model that always has these logits: the target's program, other numbers."""
    table = np.broadcast_to(np.float32(logits), TARGET.table.shape)
    return dataclasses.replace(TARGET, table=np.array(table))


def bias_row(bias, size=VOCAB):
    """`logit_bias` as an array of all ids."""
    return np.array([bias.get(token, 0.0) for token in range(size)], np.float32)


def batch(cases, prompts=(PROMPT,), present=ALL, **fields):
    """Rows that take the cases (options by name), and the prompts, in turn."""
    rows, size = fields.pop("rows", ROWS), fields.pop("vocabulary", VOCAB)
    asked = {"temperature": 1.0} | {name: NEUTRAL[name] for name in present}
    by_case = [{name: case.get(name, asked[name]) for name in asked} for case in cases]
    for case in cases:
        assert set(case) <= set(asked), "an option that the program does not have"
    turn = np.arange(rows) % len(cases)
    columns = {}
    for name in asked:
        values = [case[name] for case in by_case]
        if name in ("banned", "stops"):
            own = [[*values[case], NEVER] for case in turn]
            columns[name] = pack_sequences(own, rows)
        elif name == "logit_bias":
            columns[name] = np.stack([bias_row(value, size) for value in values])[turn]
        else:
            whole = name in ("top_k", "min_new_tokens")
            columns[name] = np.array(values, np.int32 if whole else np.float32)[turn]
    return runs.Batch(
        [prompts[row % len(prompts)] for row in range(rows)],
        temperature=columns.pop("temperature"),
        stops=columns.pop("stops", None),
        options=columns,
        **{"new": NEW, "capacity": 32, "chunk": 16} | fields,
    )


def walk(step, weights=1.0, new=NEW):
    """All texts of 1, 2, ... tokens that have a weight, and their weights.

    `step(texts[m, n], weights[m, ...])` are the weights `[m, tokens, ...]` of each
    text with one more token.
    """
    texts, weights = np.zeros((1, 0), np.int8), np.array([weights])
    for _ in range(new):
        weights = step(texts, weights)
        at, token = np.nonzero(weights.reshape(*weights.shape[:2], -1).any(axis=-1))
        texts = np.concatenate([texts[at], token[:, None].astype(np.int8)], axis=1)
        weights = weights[at, token]
        yield texts, weights


def next_logits(model, case, texts, prompt=PROMPT):
    """Logits `[m, V]` after the prompt and `texts[m, n]`, all options up to sampling.

    None of the texts may have ended.
    """
    table = np.asarray(model.table, np.float64)
    whole = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    logits = table[(whole.shape[1] - 1) % 3, whole[:, -2] + 1, whole[:, -1]]
    not_here = ("temperature", "stops", *TRUNCATIONS)
    given = {name: value for name, value in case.items() if name not in not_here}
    if "logit_bias" in given:
        given["logit_bias"] = bias_row(given["logit_bias"])
    ends = [ids[0] for ids in case.get("stops", ()) if len(ids) == 1]
    return oracles.adjusted_rows(logits, whole, len(prompt), ends, **given)


def next_probs(model, case, texts):
    """Probabilities `[m, V]` of the token after `texts[m, n]`."""
    given = {name: case[name] for name in TRUNCATIONS if name in case}
    logits = next_logits(model, case, texts)
    return oracles.warp_rows(logits, case["temperature"], **given)


def has_ended(case, texts):
    """Which of `texts[m, n]` have ended by a stop sequence, now or before."""
    written = texts.shape[1]
    ended = np.zeros(len(texts), bool) if written == 0 else texts[:, -1] == END
    if written >= case.get("min_new_tokens", 0):
        for ids in case.get("stops", ()):
            ended |= oracles.ending_in(texts, ids)
    return ended


def plainly(case, model=TARGET):
    """The step of `walk` that writes what the model alone writes."""

    def step(texts, weights):
        going = ~has_ended(case, texts)
        rows = np.where(going[:, None], 0.0, np.eye(VOCAB + 1)[END])
        rows[going, :VOCAB] = next_probs(model, case, texts[going])
        return weights[:, None] * rows

    return step
