"""The whole warp against the logits processors of transformers, in their own order.

Where ours differs, a test says how, with both results.
"""

import dataclasses

import numpy as np
import pytest

from tests.core.adjusting import ENDS, INF, VOCAB, warped
from tests.models import theirs

pytestmark = pytest.mark.parity

PROMPT, OUTPUT = [0, 1, 0], [2, 0, 2, 4]
ROWS = 32


@pytest.fixture(scope="module", autouse=True)
def the_parity_extra():
    theirs.require()


@pytest.fixture(scope="module")
def their_model(the_parity_extra):
    from tests.models.forwards import tiny_values

    return theirs.random_model({**tiny_values("llama"), "vocab_size": VOCAB})


def their_processors(model, prompt, eos=ENDS, **options):
    """What `generate` of transformers would apply, and in its order."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, eos_token_id=list(eos), pad_token_id=0, **options
    )
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.zeros((1, 0), dtype=torch.long),
        prefix_allowed_tokens_fn=None,
        logits_processor=[],
        device="cpu",
        model_kwargs={},
    )


def their_probs(model, logits, prompt, output, **options):
    import torch

    processors = their_processors(model, prompt, **options)
    ids = torch.tensor([[*prompt, *output]] * len(logits))
    scores = processors(ids, torch.tensor(logits))
    return torch.softmax(scores, dim=-1).numpy()


def our_probs(logits, prompt, output, **options):
    rows = len(logits)
    return np.exp(warped(logits, [options] * rows, [prompt] * rows, [output] * rows))


def random_logits(seed=0):
    return np.random.default_rng(seed).normal(0.5, 2, (ROWS, VOCAB)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Same:
    """One choice, as both say it."""

    ours: dict
    theirs: dict


SAME = {
    "temperature": Same({}, {}),
    "bias": Same(
        {"logit_bias": {0: 1.5, 4: -2.0, 9: 0.25}},
        {"sequence_bias": {(0,): 1.5, (4,): -2.0, (9,): 0.25}},
    ),
    "a bias of minus infinity": Same(
        {"logit_bias": {0: -INF}}, {"sequence_bias": {(0,): -INF}}
    ),
    "repetition": Same({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "repetition below 1": Same(
        {"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}
    ),
    "banned": Same(
        {"banned": [[9], [4, 8], [0, 2, 4, 1], [2, 9], [5] * 9]},
        {"bad_words_ids": [[9], [4, 8], [0, 2, 4, 1], [2, 9], [5] * 9]},
    ),
    "too early to end": Same({"min_new_tokens": 5}, {"min_new_tokens": 5}),
    "may end": Same({"min_new_tokens": 4}, {"min_new_tokens": 4}),
    "top-k": Same({"top_k": 4}, {"top_k": 4}),
    "top-k over the vocabulary": Same({"top_k": 99}, {"top_k": 99}),
    "top-p": Same({"top_p": 0.8}, {"top_p": 0.8}),
    "min-p": Same({"min_p": 0.2}, {"min_p": 0.2}),
}


def joined(names):
    pairs = [SAME[name] for name in names]
    ours = {key: value for pair in pairs for key, value in pair.ours.items()}
    return ours, {key: value for pair in pairs for key, value in pair.theirs.items()}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("name", SAME)
def test_each_option_does_what_theirs_does(their_model, name, temperature):
    ours, others = joined([name])
    logits = random_logits()
    # top_k: they keep 50 unless told otherwise, which is more than there are.
    given = {"temperature": temperature}
    wanted = their_probs(their_model, logits, PROMPT, OUTPUT, **given, **others)
    found = our_probs(logits, PROMPT, OUTPUT, **given, **ours)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    plain = our_probs(logits, PROMPT, OUTPUT, **given)
    unseen = {"temperature", "may end", "top-k over the vocabulary"}
    assert (np.abs(found - plain).max() < 1e-6) == (name in unseen)


def test_all_options_together_are_in_the_same_order(their_model):
    names = ["bias", "repetition", "banned", "too early to end", "top-k", "top-p"]
    ours, others = joined([*names, "min-p"])
    for seed, temperature in ((1, 0.7), (2, 1.3)):
        logits = random_logits(seed)
        given = {"temperature": temperature}
        wanted = their_probs(their_model, logits, PROMPT, OUTPUT, **given, **others)
        found = our_probs(logits, PROMPT, OUTPUT, **given, **ours)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_order_of_their_processors_is_ours(their_model):
    _, others = joined(["bias", "repetition", "banned", "too early to end"])
    filters = {"top_k": 4, "top_p": 0.8, "min_p": 0.2, "temperature": 0.7}
    processors = their_processors(their_model, PROMPT, **others, **filters)
    assert [type(each).__name__ for each in processors] == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_presence_and_frequency_penalties_are_not_theirs(their_model):
    from transformers import GenerationConfig

    config = GenerationConfig().to_dict()
    assert not {"presence_penalty", "frequency_penalty"} & set(config)


def both(model, logits, ours, others, prompt=PROMPT, output=OUTPUT):
    logits = np.float32([logits])
    found = our_probs(logits, prompt, output, temperature=1.0, **ours)
    wanted = their_probs(model, logits, prompt, output, temperature=1.0, **others)
    return found[0], wanted[0]


def test_ties_at_the_top_p_threshold_are_kept_here_and_cut_there(their_model):
    logits = [-INF] * VOCAB
    logits[:4] = np.log([0.4, 0.2, 0.2, 0.2])
    ours, others = both(their_model, logits, {"top_p": 0.5}, {"top_p": 0.5})
    assert np.count_nonzero(ours) == 4
    # Theirs keeps as many as reach top-p, and of equals the ones its sort puts last.
    assert np.count_nonzero(others) == 2


def test_ties_at_the_top_k_threshold_are_kept_by_both(their_model):
    logits = [-INF] * VOCAB
    logits[:4] = np.log([0.4, 0.2, 0.2, 0.2])
    for found in both(their_model, logits, {"top_k": 2}, {"top_k": 2}):
        assert np.count_nonzero(found) == 4


def test_an_eos_may_be_banned_here_and_not_there(their_model):
    banned = [[ENDS[0]], [9]]
    ours, others = both(
        their_model, [0.0] * VOCAB, {"banned": banned}, {"bad_words_ids": banned}
    )
    assert np.flatnonzero(ours == 0).tolist() == [ENDS[0], 9]
    assert np.flatnonzero(others == 0).tolist() == [9]


def test_plus_infinity_is_a_certainty_here_and_nan_there(their_model):
    logits = [0.0] * VOCAB
    logits[5] = INF
    ours, others = both(their_model, logits, {}, {})
    assert ours.tolist() == np.eye(VOCAB)[5].tolist()
    assert np.isnan(others).any()


def test_padding_on_the_left_is_text_to_their_penalty(their_model):
    """In a batch theirs counts the ids that pad a shorter prompt; ours has none."""
    options = {"repetition_penalty": 2.0}
    logits = [1.0] * VOCAB
    alone, _ = both(their_model, logits, options, options, [6], [])
    _, padded = both(their_model, logits, options, options, [0, 0, 6], [])
    np.testing.assert_allclose(alone[0], alone[1])
    assert padded[0] < padded[1]
