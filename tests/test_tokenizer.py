import json
import subprocess
import sys

import pytest
import tokenizers

from jaxspec.errors import UserError
from jaxspec.tokenizer import Tokenizer
from tests import tokenizers_made as made
from tests.tokenizers_made import BOS, EOS, IM_END, IM_START


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    return Tokenizer.from_folder(made.write_folder(tmp_path))


@pytest.mark.parametrize("text", made.TEXTS)
def test_decoding_gives_the_encoded_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_empty_text_gives_bos_or_nothing(tmp_path, tokenizer):
    assert tokenizer.encode("") == []
    adding = Tokenizer.from_folder(made.write_folder(tmp_path, made.with_bos()))
    assert adding.encode("") == [BOS]
    assert adding.encode("", add_bos=False) == []


def test_a_plain_text_gets_exactly_one_bos(tmp_path, tokenizer):
    adding = Tokenizer.from_folder(made.write_folder(tmp_path, made.with_bos()))
    ids = tokenizer.encode("hello")
    assert BOS not in ids
    assert adding.encode("hello") == [BOS, *ids]
    assert adding.encode("<s>hello") == [BOS, *ids]


def test_a_bos_can_be_asked_for(tmp_path):
    path = made.write_folder(tmp_path, tokenizer_config={"bos_token": "<s>"})
    plain = Tokenizer.from_folder(path)
    ids = plain.encode("hello")
    assert not plain.adds_bos and BOS not in ids
    assert plain.encode("hello", add_bos=True) == [BOS, *ids]


def test_a_bos_that_does_not_exist_is_refused(tokenizer):
    with pytest.raises(UserError, match="has no BOS"):
        tokenizer.encode("a", add_bos=True)


def test_special_tokens_in_the_text_stay_whole(tokenizer):
    ids = tokenizer.encode("a<|im_start|>b</s>")
    assert ids[1] == IM_START and ids[-1] == EOS and len(ids) == 4
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_start|>b</s>"


def test_cutting_padding_and_dropout_asked_by_the_file_are_not_done(
    tmp_path, tokenizer
):
    backend = tokenizers.Tokenizer.from_str(json.dumps(made.byte_level(dropout=1.0)))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    strange = Tokenizer.from_folder(made.write_folder(tmp_path, backend.to_str()))
    usual = tokenizer.encode("hello world " * 3)
    assert strange.encode("hello world " * 3) == usual and len(usual) > 3


@pytest.mark.parametrize("text", [7, None, ["a"], "\ud800"])
def test_what_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(UserError, match="not a str of valid Unicode"):
        tokenizer.encode(text)


def test_ids_past_the_vocabulary_have_no_text_but_a_name(tokenizer):
    ids = [*tokenizer.encode("hello"), tokenizer.vocab_size, 10**12]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.token(IM_END) == "<|im_end|>"
    assert "999999" in tokenizer.token(999_999)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", made.TEXTS)
def test_streamed_pieces_join_to_the_text_without_broken_characters(
    tmp_path, kind, size, text
):
    write = {"byte level": made.write_byte_level_gguf}.get(kind, made.write_llama_gguf)
    tokenizer = Tokenizer.from_gguf(write(tmp_path))
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_bytes_of_one_character_are_held_until_it_is_whole(tokenizer):
    ids = tokenizer.encode("👍")
    assert len(ids) == 4
    stream = tokenizer.stream_decoder()
    assert [stream.push([i]) for i in ids] == ["", "", "", "👍"]
    assert stream.flush() == ""


def test_a_character_never_finished_comes_out_at_the_end(tokenizer):
    stream = tokenizer.stream_decoder()
    assert stream.push(tokenizer.encode("hello 👍")[:-1]) == "hello "
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("hello")) == "hello"


def test_broken_bytes_do_not_hide_the_text_after_them(tokenizer):
    thumb = tokenizer.encode("👍")
    ids = [*thumb[1:], *thumb[1:], *thumb, *tokenizer.encode("hello")]
    stream = tokenizer.stream_decoder()
    pieces = [stream.push([i]) for i in ids]
    assert pieces[9].endswith("👍") and "".join(pieces) == tokenizer.decode(ids)


def test_special_tokens_do_not_stop_a_stream(tokenizer):
    stream = tokenizer.stream_decoder()
    assert stream.push([IM_START, *tokenizer.encode("hello"), IM_END]) == "hello"


def test_the_end_of_turn_in_a_chat_template_ends_a_generation(tmp_path):
    def eos_ids(tokenizer=None, **config):
        config["eos_token"] = "</s>"
        path = made.write_folder(tmp_path, tokenizer, tokenizer_config=config)
        return Tokenizer.from_folder(path).eos_ids

    assert eos_ids(chat_template=made.CHATML) == {EOS, IM_END}
    assert eos_ids() == {EOS}
    ordinary = made.byte_level()
    ordinary["added_tokens"][IM_END]["special"] = False
    assert eos_ids(ordinary, chat_template=made.CHATML) == {EOS}


@pytest.mark.parametrize("template_bos", ["", "<s>", "{{ bos_token }}"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_has_at_most_one_bos(tmp_path, template_bos, adds_bos):
    path = made.write_folder(
        tmp_path,
        made.with_bos() if adds_bos else None,
        tokenizer_config={"bos_token": "<s>"},
        jinja=template_bos + made.CHATML,
    )
    tokenizer = Tokenizer.from_folder(path)
    ids = tokenizer.encode_chat(made.HELLO)
    assert ids.count(BOS) == int(adds_bos or bool(template_bos))
    assert ids == tokenizer.encode(tokenizer.render_chat(made.HELLO))
    assert ids.count(IM_START) == 2 and ids.count(IM_END) == 1


def test_a_model_without_a_template_names_the_fix(tokenizer):
    with pytest.raises(UserError, match="no chat template; encode the prompt as plain"):
        tokenizer.encode_chat(made.HELLO)


def test_equal_vocabularies_have_no_difference(tmp_path, tokenizer):
    twin = Tokenizer.from_gguf(made.write_byte_level_gguf(tmp_path))
    assert tokenizer.first_difference(twin) is None


def test_the_first_different_token_is_named(tmp_path, tokenizer):
    text = json.dumps(made.byte_level()).replace("<|im_end|>", "<|other|>")
    other = Tokenizer.from_folder(made.write_folder(tmp_path, text))
    assert tokenizer.first_difference(other) == (IM_END, "<|im_end|>", "<|other|>")
    assert other.first_difference(tokenizer) == (IM_END, "<|other|>", "<|im_end|>")


def test_unused_entries_do_not_count_as_a_difference(tmp_path):
    def read(*extra):
        return Tokenizer.from_gguf(made.write_byte_level_gguf(tmp_path, extra))

    plain, padded = read(), read(("[PAD1]", 5), ("[PAD2]", 5))
    longer, other = read(("<new>", 3), ("[PAD2]", 5)), read(("<other>", 3))
    assert padded.vocab_size == plain.vocab_size + 2
    assert plain.first_difference(padded) is None
    assert padded.first_difference(longer) is None
    assert longer.first_difference(other) == (plain.vocab_size, "<new>", "<other>")


def test_importing_the_tokenizer_does_not_import_its_libraries():
    code = (
        "import sys, jaxspec, jaxspec.tokenizer; "
        "print(sorted({'tokenizers', 'jinja2', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
