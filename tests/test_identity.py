"""Real models: whatever drafts, the ids are those that the target writes alone.

Each identity prints the smallest gap between the two best logits that the plain run
met, and delta, the largest change of a logit between the shapes in use. Both are taken
at the same choice: at a token with massive activations (Qwen has some) every logit
moves a hundred times more than elsewhere, which says nothing of the others. An id may
only differ where its gap is under 2 delta; the tests want every gap above 10 delta.
"""

import numpy as np
import pytest

import jaxspec
from jaxspec.loading import LanguageModel
from tests import models_on_disk, runs

PROMPTS = [
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6 7 8 9 10 11 12 1 2 3 4 5 6",
    "The three laws of motion are: first, a body at rest stays at rest; second,",
    "The capital of France is",
]


def gaps_and_deltas(model: LanguageModel, results, blocks):
    """At every emitted token: the top-two gap, and delta over forwards of `blocks`."""
    gaps, deltas = [], []
    for result in results:
        prompt = model.tokenizer.encode(result.prompt)
        text = np.array([prompt + result.token_ids], np.int32)
        choices = slice(len(prompt) - 1, text.shape[1] - 1)
        text = np.pad(text, ((0, 0), (0, -text.shape[1] % 64)))
        logits = np.asarray(runs.replay(model.decoder, text, 1))[0, choices]
        best = np.sort(logits, axis=-1)[:, -2:]
        gaps.append(best[:, 1] - best[:, 0])
        others = [
            np.asarray(runs.replay(model.decoder, text, block))[0, choices]
            for block in blocks
        ]
        deltas.append(np.abs(np.stack(others) - logits).max(axis=(0, 2)))
    return np.concatenate(gaps), np.concatenate(deltas)


def assert_identical(model, plain, others, blocks):
    gaps, deltas = gaps_and_deltas(model, plain, blocks)
    print(
        f"{gaps.size} tokens, smallest gap {gaps.min():.2e}, largest delta "
        f"{deltas.max():.2e}, smallest gap over delta {(gaps / deltas).min():.0f}"
    )
    for name, results in others.items():
        ids = [result.token_ids for result in results]
        assert ids == [result.token_ids for result in plain], name
    assert (gaps > 10 * deltas).all()


@pytest.fixture(scope="module")
def smollm2():
    models_on_disk.path("smollm2-135m-instruct")
    return jaxspec.load("smollm2-135m-instruct")


@pytest.mark.full
def test_smollm2_with_prompt_lookup(smollm2):
    plain = jaxspec.Generator(smollm2).generate(PROMPTS, max_new_tokens=48)
    lookup = jaxspec.Generator(smollm2, "prompt-lookup", draft_tokens=4)
    others = {
        "one batch": lookup.generate(PROMPTS, max_new_tokens=48),
        "one by one": lookup.generate(PROMPTS, max_new_tokens=48, batch_size=1),
    }
    assert_identical(smollm2, plain, others, blocks=(5,))
    accepted = sum(result.stats.accepted for result in others["one batch"])
    assert accepted >= 20, "too little was drafted for the test to see anything"


@pytest.mark.full
def test_smollm2_drafts_for_itself(smollm2):
    plain = jaxspec.Generator(smollm2).generate(PROMPTS[:2], max_new_tokens=32)
    own = jaxspec.Generator(smollm2, smollm2, draft_tokens=3)
    results = own.generate(PROMPTS[:2], max_new_tokens=32)
    assert_identical(smollm2, plain, {"itself": results}, blocks=(4,))
    for result in results:
        assert result.stats.acceptance_rate == 1.0
        assert result.stats.rounds == -(-31 // 4)


@pytest.mark.models
def test_qwen_pair_on_code():
    """The headline pair; README has the figures on ten HumanEval prompts."""
    target = jaxspec.load("qwen2.5-coder-1.5b-instruct")
    draft = jaxspec.load("qwen2.5-coder-0.5b-instruct")
    prompts = [
        'def is_prime(n: int) -> bool:\n    """Whether n is prime."""\n',
        "from typing import List\n\n\ndef below_zero(operations: List[int]) -> bool:\n",
    ]
    plain = jaxspec.Generator(target).generate(prompts, max_new_tokens=32, batch_size=1)
    pair = jaxspec.Generator(target, draft, draft_tokens=4)
    others = {
        "draft model": pair.generate(prompts, max_new_tokens=32, batch_size=1),
        "prompt lookup": jaxspec.Generator(target, "prompt-lookup").generate(
            prompts, max_new_tokens=32, batch_size=1
        ),
    }
    assert_identical(target, plain, others, blocks=(5,))
    for result in others["draft model"]:
        assert result.stats.tokens_per_round > 2
