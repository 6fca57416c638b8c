import itertools
import random

import pytest

from jaxspec.errors import UserError
from jaxspec.tokenizer import Tokenizer
from tests import tokenizers_made as made
from tests.tokenizers_made import BOS, END_OF_TEXT, EOS, IM_END


@pytest.fixture
def byte_level(tmp_path):
    def read(extra=(), **changes) -> Tokenizer:
        return Tokenizer.from_gguf(
            made.write_byte_level_gguf(tmp_path, extra, **changes)
        )

    return read


@pytest.fixture
def llama(tmp_path):
    def read(*vocabulary, **changes) -> Tokenizer:
        return Tokenizer.from_gguf(
            made.write_llama_gguf(tmp_path, *vocabulary, **changes)
        )

    return read


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize("text", made.TEXTS)
def test_a_byte_level_gguf_gives_the_ids_of_its_folder(tmp_path, byte_level, text):
    from_folder = Tokenizer.from_folder(made.write_folder(tmp_path))
    assert byte_level().encode(text) == from_folder.encode(text)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġ12"]),
        ("smollm", ["Ġ", "1", "2"]),
        ("qwen2", ["Ġ", "1", "2"]),
        ("llama-bpe", ["<s>", "Ġ", "12"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(byte_level, pre, expected):
    assert spelled(byte_level(pre=pre), " 12") == expected


def test_only_qwen2_composes_accents(byte_level):
    qwen, smollm = byte_level(pre="qwen2"), byte_level(pre="smollm")
    assert qwen.decode(qwen.encode("e\u0301")) == "é"
    assert smollm.decode(smollm.encode("e\u0301")) == "e\u0301"


def test_llama_bpe_takes_a_word_that_is_a_token_whole(byte_level):
    word = [("xyz", 1)]
    assert spelled(byte_level(word, pre="llama-bpe"), "xyz") == ["<s>", "xyz"]
    assert spelled(byte_level(word, pre="gpt-2"), "xyz") == ["x", "y", "z"]


def test_eos_ids_join_turn_and_message_ends(byte_level):
    tokenizer = byte_level(eot_token_id=IM_END, eom_token_id=END_OF_TEXT)
    assert tokenizer.eos_ids == {EOS, IM_END, END_OF_TEXT}


def test_add_bos_token_decides(byte_level, llama):
    assert not byte_level().adds_bos
    assert byte_level(add_bos_token=True).encode("") == [BOS]
    assert llama().encode("") == [1]
    assert llama(add_bos_token=False).encode("") == []


def test_the_template_of_the_file_is_used(byte_level):
    template = "{{ eos_token }}{{ messages[0].content }}"
    assert byte_level(chat_template=template).render_chat(made.HELLO) == "</s>Hello"


def test_user_defined_tokens_stay_whole_and_visible(byte_level):
    tokenizer = byte_level([("<tool>", 4)])
    ids = tokenizer.encode("a<tool>b")
    assert len(ids) == 3 and tokenizer.decode(ids) == "a<tool>b"


def sentencepiece_pieces(text, scores):
    """Joins the adjacent pair whose joint piece has the best score, until none has."""
    pieces = list(text)
    while True:
        joint = [a + b for a, b in itertools.pairwise(pieces)]
        known = [(-scores[t], i) for i, t in enumerate(joint) if t in scores]
        if not known:
            return pieces
        _, at = min(known)
        pieces[at : at + 2] = [joint[at]]


@pytest.mark.parametrize("seed", range(5))
def test_merges_from_scores_join_pieces_as_sentencepiece_does(llama, seed):
    draw = random.Random(seed)
    words = {"".join(draw.choices("ab", k=draw.randint(2, 5))) for _ in range(25)}
    pieces = ["▁", "a", "b", *sorted(words)]
    scores = [-float(s) for s in draw.sample(range(100), len(pieces))]
    tokenizer = llama(pieces, scores, add_space_prefix=False, add_bos_token=False)
    by_piece = dict(zip(pieces, scores, strict=True))
    for _ in range(20):
        text = "".join(draw.choices("ab", k=30))
        assert spelled(tokenizer, text) == sentencepiece_pieces(text, by_piece)


def test_sentencepiece_puts_a_space_before_unless_told(llama):
    usual, without = llama(), llama(add_space_prefix=False)
    assert spelled(usual, "ab") == ["<s>", "▁ab"]
    assert usual.decode(usual.encode("ab")) == "ab"
    assert spelled(without, "ab") == ["<s>", "ab"]
    assert without.decode(without.encode(" ab")) == " ab"


def test_characters_outside_the_vocabulary_fall_back_to_bytes(llama):
    tokenizer = llama(add_space_prefix=False)
    assert spelled(tokenizer, "aé") == ["<s>", "a", "<0xC3>", "<0xA9>"]


def test_user_defined_runs_of_spaces_go_before_better_scores(llama):
    tokenizer = llama(
        ("▁", "a", "▁a", "  ", "   "),
        [0.0, -1.0, -2.0, -1000.0, -1000.0],
        kinds=[1, 1, 1, 4, 4],
        add_space_prefix=False,
        add_bos_token=False,
    )
    assert spelled(tokenizer, "a   a") == ["a", "▁▁▁", "a"]
    assert tokenizer.decode(tokenizer.encode("a   a")) == "a   a"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pre": "mystery"}, r"tokenizer.ggml.pre is 'mystery', expected one of gpt-2"),
        ({"model": "rwkv"}, r"tokenizer.ggml.model is 'rwkv'"),
        ({"eos_token_id": 99_999}, "eos_token_id 99999 is not an id"),
        ({"bos_token_id": "x"}, "bos_token_id 'x' is not an id"),
        ({"merges": ["a zzz"]}, "`zzz` out of vocabulary"),
        ({"merges": ["a b c"]}, "merges is missing or not a list of pairs"),
        ({"merges": None}, "merges is missing"),
        ({"token_type": [1, 1]}, "token_type does not match"),
        ({"tokens": ["a", "a"], "token_type": None}, "token 'a' occurs twice"),
        ({"tokens": [1, 2]}, "tokens is missing or not a list of texts"),
        ({"tokens": []}, "tokens is missing or not a list of texts"),
        ({"model": "llama"}, "scores does not match"),
        ({"pre": "x", "bos_token_id": 9999}, "bos_token_id 9999 .*ggml.pre is 'x'"),
    ],
)
def test_faults_are_named(tmp_path, changes, fault):
    path = made.write_byte_level_gguf(tmp_path, **changes)
    with pytest.raises(UserError, match=fault) as caught:
        Tokenizer.from_gguf(path)
    assert path.name in str(caught.value)


def test_runs_of_spaces_that_become_one_token_are_refused(llama):
    with pytest.raises(UserError, match="'▁▁' occurs twice"):
        llama(("  ", "▁▁"))


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 2000])
def test_a_cut_file_is_refused(tmp_path, kept):
    path = made.write_byte_level_gguf(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"bytes\.gguf"):
        Tokenizer.from_gguf(path)
