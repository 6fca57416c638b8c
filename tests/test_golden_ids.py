"""Real models' tokenizers, against ids that transformers gave."""

import pytest
from tokenizers import pre_tokenizers

from jaxspec.tokenizer import Tokenizer
from tests import models_on_disk
from tests.tokenizers_made import GOLDEN

SMOLLM2 = "smollm2-135m-instruct"
LARGE = ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct", "gemma-3-270m")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(models_on_disk.path(SMOLLM2))


def assert_golden(tokenizer: Tokenizer, short_name: str) -> None:
    expected = GOLDEN["models"][short_name]
    for name, ids in expected["texts"].items():
        text = GOLDEN["texts"][name]
        assert tokenizer.encode(text) == ids, name
        stream = tokenizer.stream_decoder()
        pieces = [stream.push([i]) for i in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids), name
    for name, ids in expected["chats"].items():
        assert tokenizer.encode_chat(GOLDEN["chats"][name]) == ids, name


def test_smollm2_has_the_golden_ids(smollm2):
    assert_golden(smollm2, SMOLLM2)
    assert GOLDEN["models"][SMOLLM2]["chats"]
    assert smollm2.eos_ids == {2} and smollm2.vocab_size == 49152


def test_the_golden_ids_tell_a_wrong_pre_tokenizer_apart():
    wrong = Tokenizer.from_gguf(models_on_disk.path(SMOLLM2))
    wrong._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(AssertionError):
        assert_golden(wrong, SMOLLM2)


@pytest.mark.parity
def test_transformers_still_gives_the_golden_ids():
    from tests.golden import make_tokenizer_ids as maker

    path = models_on_disk.path(SMOLLM2)
    assert maker.golden_ids(SMOLLM2, path) == GOLDEN["models"][SMOLLM2]
    assert (GOLDEN["texts"], GOLDEN["chats"]) == (maker.TEXTS, maker.CHATS)


@pytest.mark.models
@pytest.mark.parametrize("short_name", LARGE)
def test_large_models_have_the_golden_ids(short_name):
    tokenizer = Tokenizer.from_gguf(models_on_disk.path(short_name))
    assert_golden(tokenizer, short_name)


@pytest.mark.models
def test_the_qwen_pair_shares_a_tokenizer_and_others_do_not(smollm2):
    small, large = (Tokenizer.from_gguf(models_on_disk.path(n)) for n in LARGE[:2])
    assert small.first_difference(large) is None
    assert small.first_difference(smollm2) == (0, "!", "<|endoftext|>")
