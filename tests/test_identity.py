"""Real models: whatever drafts, the ids are those that the target writes alone.

Each identity prints the smallest gap between the two best logits that the plain run
met, and delta, the largest change of a logit between the shapes in use: ids may only
differ where the gap is under 2 delta, and the tests want it above 10 delta.
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


def gaps_and_delta(model: LanguageModel, results, blocks) -> tuple[np.ndarray, float]:
    """The top-two gap at every emitted token, and delta over forwards of `blocks`."""
    gaps, delta = [], 0.0
    for result in results:
        prompt = model.tokenizer.encode(result.prompt)
        text = np.array([prompt + result.token_ids], np.int32)
        length = text.shape[1]
        text = np.pad(text, ((0, 0), (0, -length % 64)))
        logits = np.asarray(runs.replay(model.decoder, text, 1))
        for block in blocks:
            other = np.asarray(runs.replay(model.decoder, text, block))
            # Of the text alone: what stands in the padding is nobody's choice.
            change = np.abs(other - logits)[:, :length]
            delta = max(delta, float(change.max()))
        best = np.sort(logits[0], axis=-1)[:, -2:]
        begin = len(prompt) - 1
        gaps.append((best[:, 1] - best[:, 0])[begin : begin + len(result.token_ids)])
    return np.concatenate(gaps), delta


def assert_identical(model, plain, others, blocks):
    gaps, delta = gaps_and_delta(model, plain, blocks)
    print(f"smallest gap {gaps.min():.2e}, delta {delta:.2e}, {gaps.size} tokens")
    for name, results in others.items():
        ids = [result.token_ids for result in results]
        assert ids == [result.token_ids for result in plain], name
    assert gaps.min() > 10 * delta


@pytest.fixture(scope="module")
def smollm2():
    models_on_disk.path("smollm2-135m-instruct")
    return jaxspec.load("smollm2-135m-instruct")


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
