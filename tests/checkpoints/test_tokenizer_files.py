import pytest

from jaxspec.errors import UserError
from jaxspec.tokenizer import Tokenizer
from tests import tokenizers_made as made
from tests.tokenizers_made import BOS, EOS


def test_the_end_token_of_a_post_processor_is_not_put_after_a_prompt(tmp_path):
    path = made.write_folder(tmp_path, made.with_bos(eos=True))
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.bos_id == BOS and tokenizer.adds_bos
    assert EOS not in tokenizer.encode("hello")


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_of_the_config_decides(tmp_path, adds):
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": adds}
    data = made.byte_level() if adds else made.with_bos()
    path = made.write_folder(tmp_path, data, tokenizer_config=config)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.adds_bos is adds
    assert (tokenizer.encode("hello")[0] == BOS) is adds


@pytest.mark.parametrize(
    ("generation", "model", "own", "expected"),
    [
        ([1, 4], None, "</s>", {1, 4}),
        (1, None, "<|im_end|>", {1, 3}),
        (None, [1, 3], "<|endoftext|>", {1, 3, 4}),
        (4, 3, None, {3, 4}),
        (None, None, None, set()),
    ],
)
def test_eos_ids_are_the_union_of_all_files(tmp_path, generation, model, own, expected):
    path = made.write_folder(
        tmp_path,
        generation_config={"eos_token_id": generation},
        config={"eos_token_id": model},
        tokenizer_config={"eos_token": own},
    )
    assert Tokenizer.from_folder(path).eos_ids == expected


def test_the_template_file_goes_before_the_config(tmp_path):
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    config = {"chat_template": named}
    path = made.write_folder(tmp_path, tokenizer_config=config)
    assert Tokenizer.from_folder(path).render_chat(made.HELLO) == "d"
    path = made.write_folder(tmp_path, tokenizer_config=config, jinja="file")
    assert Tokenizer.from_folder(path).render_chat(made.HELLO) == "file"


def without_special_tokens():
    data = made.with_bos()
    data["post_processor"]["special_tokens"] = {}
    return data


def two_before():
    data = made.with_bos()
    data["post_processor"]["single"].insert(0, data["post_processor"]["single"][0])
    return data


@pytest.mark.parametrize(
    ("tokenizer", "fault"),
    [
        ("{not json", "not a usable tokenizer"),
        ("[" * 100_000, "not a usable tokenizer"),
        ("[]", "not a usable tokenizer"),
        ({}, "Model missing"),
        ({"model": {"type": "BPE"}}, "Missing vocab"),
        (made.byte_level(merges=None), "not a usable tokenizer"),
        (made.byte_level(merges=[["h", "zzz"]]), "`zzz` out of vocabulary"),
        (made.byte_level(merges=["h e l"]), "Merges text file invalid"),
        (made.byte_level(vocab={"a": -1}), "integer `-1`"),
        (made.byte_level(vocab={"a": 2**40}), "integer `1099511627776`"),
        (made.byte_level() | {"added_tokens": 3}, "not a usable tokenizer"),
        (made.byte_level() | {"decoder": {"type": "Mystery"}}, "not a usable"),
        (without_special_tokens(), "not a usable tokenizer"),
        (two_before(), "expected at most one BOS"),
    ],
)
def test_faults_of_tokenizer_json_are_named(tmp_path, tokenizer, fault):
    with pytest.raises(UserError, match=fault) as caught:
        Tokenizer.from_folder(made.write_folder(tmp_path, tokenizer))
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("vocab", "largest"), [({"a": 2**31}, 2**31), ({}, -1)], ids=["large", "empty"]
)
def test_a_vocabulary_out_of_all_proportion_is_refused(tmp_path, vocab, largest):
    data = made.byte_level(vocab=vocab, merges=[]) | {"added_tokens": []}
    with pytest.raises(UserError, match=f"largest token id is {largest},"):
        Tokenizer.from_folder(made.write_folder(tmp_path, data))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{not json", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", r"holds \[\], expected a JSON object"),
    ],
)
def test_faults_of_a_config_are_named(tmp_path, text, fault):
    path = made.write_folder(tmp_path, generation_config=text)
    with pytest.raises(UserError, match=fault) as caught:
        Tokenizer.from_folder(path)
    assert "generation_config.json" in str(caught.value)


def test_all_faults_of_the_configs_are_named_at_once(tmp_path):
    path = made.write_folder(
        tmp_path,
        generation_config={"eos_token_id": [1, 99_999]},
        config={"eos_token_id": True},
        tokenizer_config={
            "bos_token": "<none>",
            "eos_token": "\ud800",
            "chat_template": 5,
        },
    )
    with pytest.raises(UserError) as caught:
        Tokenizer.from_folder(path)
    named = ("99999", "config.json: eos_token_id True", "'<none>'", "ud800")
    for part in (*named, "chat_template is not a text"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_no_text_is_refused(tmp_path, name):
    (made.write_folder(tmp_path) / name).write_bytes(b"\xff\xfe{}")
    with pytest.raises(
        UserError, match=rf"{name}: (cannot be read|not valid JSON) \('utf-8' codec"
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*No such file"):
        Tokenizer.from_folder(tmp_path / "nowhere")
