import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from jaxspec import tokenizer as module
from jaxspec.errors import UserError
from jaxspec.tokenizer import Tokenizer
from tests import models_on_disk

GOLDEN = json.loads(
    Path(__file__).with_name("golden").joinpath("tokenizer_ids.json").read_text("utf-8")
)
LARGE = ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct", "gemma-3-270m")
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BOS, EOS, IM_START, IM_END, END_OF_TEXT = range(5)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TEXTS = [text for text in GOLDEN["texts"].values() if "<" not in text]


@pytest.fixture(scope="session")
def tiny() -> dict:
    """The tokenizer.json of a byte-level BPE trained on a few words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world 2024 12 é 你好 hello\n" * 5], trainer)
    return json.loads(backend.to_str())


@pytest.fixture
def folder(tmp_path, tiny):
    def write(*, tokenizer=tiny, jinja=None, **files) -> Path:
        files["tokenizer"] = tokenizer
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def chat(folder):
    def make(template: str) -> Tokenizer:
        return Tokenizer.from_folder(folder(jinja=template))

    return make


def with_bos(tiny, *, eos=False):
    backend = tokenizers.Tokenizer.from_str(json.dumps(tiny))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    return json.loads(backend.to_str())


def write_gguf(path, *, model, tokens, types=None, scores=None, merges=None, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for key, values in (("token_type", types), ("scores", scores), ("merges", merges)):
        if values is not None:
            writer.add_array(f"tokenizer.ggml.{key}", values)
    template = fields.pop("chat_template", None)
    if template is not None:
        writer.add_string("tokenizer.chat_template", template)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in fields.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def bpe_gguf(tmp_path, tiny):
    vocab = tiny["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)

    def write(extra=(), **changes) -> Path:
        every = [*tokens, *(text for text, _ in extra)]
        values = {
            "model": "gpt2",
            "tokens": every,
            "types": [3] * 5 + [1] * (len(tokens) - 5) + [kind for _, kind in extra],
            "merges": [" ".join(pair) for pair in tiny["model"]["merges"]],
            "pre": "gpt-2",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }
        return write_gguf(tmp_path / "tiny.gguf", **(values | changes))

    return write


def llama_vocabulary(pieces=("▁", "a", "b", "ab", "▁a", "▁ab", "c")):
    """Tokens, types and scores of a SentencePiece BPE with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return {"tokens": tokens, "types": types, "scores": scores}


@pytest.fixture
def llama_gguf(tmp_path):
    def write(pieces=(), **changes) -> Path:
        values = llama_vocabulary(*([pieces] if pieces else []))
        values |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        values["pre"] = "default"
        return write_gguf(tmp_path / "llama.gguf", model="llama", **(values | changes))

    return write


# --- Encoding and decoding ---


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_encoded_text_back(folder, text):
    tokenizer = Tokenizer.from_folder(folder())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_empty_text_gives_bos_or_nothing(folder, tiny):
    assert Tokenizer.from_folder(folder()).encode("") == []
    with_prefix = Tokenizer.from_folder(folder(tokenizer=with_bos(tiny)))
    assert with_prefix.encode("") == [BOS]
    assert with_prefix.encode("", add_bos=False) == []


def test_a_plain_text_gets_one_bos_if_the_tokenizer_adds_it(folder, tiny):
    plain = Tokenizer.from_folder(folder(tokenizer_config={"bos_token": "<s>"}))
    adding = Tokenizer.from_folder(folder(tokenizer=with_bos(tiny)))
    ids = plain.encode("hello")
    assert BOS not in ids and not plain.adds_bos
    assert adding.encode("hello") == plain.encode("hello", add_bos=True) == [BOS, *ids]
    assert adding.encode("<s>hello") == [BOS, *ids]


def test_the_end_token_of_a_post_processor_is_not_put_after_a_prompt(folder, tiny):
    tokenizer = Tokenizer.from_folder(folder(tokenizer=with_bos(tiny, eos=True)))
    assert tokenizer.bos_id == BOS
    assert EOS not in tokenizer.encode("hello")


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_of_the_config_decides(folder, tiny, adds):
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": adds}
    data = tiny if adds else with_bos(tiny)
    tokenizer = Tokenizer.from_folder(folder(tokenizer=data, tokenizer_config=config))
    assert tokenizer.adds_bos is adds
    assert (tokenizer.encode("hello")[0] == BOS) is adds


def test_special_tokens_in_the_text_stay_whole(folder):
    tokenizer = Tokenizer.from_folder(folder())
    ids = tokenizer.encode("a<|im_start|>b</s>")
    assert ids[1] == IM_START and ids[-1] == EOS and len(ids) == 4
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_start|>b</s>"


def test_cutting_padding_and_dropout_asked_by_the_file_are_not_done(folder, tiny):
    backend = tokenizers.Tokenizer.from_str(json.dumps(tiny))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    data = json.loads(backend.to_str())
    data["model"]["dropout"] = 1.0
    usual = Tokenizer.from_folder(folder()).encode("hello world " * 3)
    strange = Tokenizer.from_folder(folder(tokenizer=data)).encode("hello world " * 3)
    assert strange == usual and len(usual) > 3


@pytest.mark.parametrize(
    ("text", "fault"), [(7, "type int"), (None, "NoneType"), ("\ud800", "surrogates")]
)
def test_what_is_no_text_is_refused(folder, text, fault):
    with pytest.raises(UserError, match=fault):
        Tokenizer.from_folder(folder()).encode(text)


def test_a_bos_that_does_not_exist_is_refused(folder):
    with pytest.raises(UserError, match="has no BOS"):
        Tokenizer.from_folder(folder()).encode("a", add_bos=True)


def test_ids_past_the_vocabulary_have_no_text_but_a_name(folder):
    tokenizer = Tokenizer.from_folder(folder())
    ids = [*tokenizer.encode("hello"), tokenizer.vocab_size, 10**12]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.token(IM_END) == "<|im_end|>"
    assert "999999" in tokenizer.token(999_999)


# --- Streaming ---


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text_without_broken_characters(
    folder, llama_gguf, kind, size, text
):
    if kind == "byte level":
        tokenizer = Tokenizer.from_folder(folder())
    else:
        tokenizer = Tokenizer.from_gguf(llama_gguf())
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_bytes_of_one_character_are_held_until_it_is_whole(folder):
    tokenizer = Tokenizer.from_folder(folder())
    ids = tokenizer.encode("👍")
    assert len(ids) == 4
    stream = tokenizer.stream_decoder()
    assert [stream.push([i]) for i in ids] == ["", "", "", "👍"]
    assert stream.flush() == ""


def test_a_character_never_finished_comes_out_at_the_end(folder):
    tokenizer = Tokenizer.from_folder(folder())
    stream = tokenizer.stream_decoder()
    assert stream.push(tokenizer.encode("hello 👍")[:-1]) == "hello "
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("hello")) == "hello"


def test_broken_bytes_do_not_hide_the_text_after_them(folder):
    tokenizer = Tokenizer.from_folder(folder())
    thumb = tokenizer.encode("👍")
    ids = [*thumb[1:], *thumb[1:], *thumb, *tokenizer.encode("hello")]
    stream = tokenizer.stream_decoder()
    pieces = [stream.push([i]) for i in ids]
    assert pieces[9].endswith("👍") and "".join(pieces) == tokenizer.decode(ids)


def test_special_tokens_do_not_stop_a_stream(folder):
    tokenizer = Tokenizer.from_folder(folder())
    stream = tokenizer.stream_decoder()
    assert stream.push([IM_START, *tokenizer.encode("hello"), IM_END]) == "hello"


# --- End of generation (BL-25) ---


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
def test_eos_ids_are_the_union_of_all_files(folder, generation, model, own, expected):
    path = folder(
        generation_config={"eos_token_id": generation},
        config={"eos_token_id": model},
        tokenizer_config={"eos_token": own},
    )
    assert Tokenizer.from_folder(path).eos_ids == expected


def test_eos_ids_of_a_gguf_join_turn_and_message_ends(bpe_gguf):
    path = bpe_gguf(eot_token_id=IM_END, eom_token_id=END_OF_TEXT)
    assert Tokenizer.from_gguf(path).eos_ids == {EOS, IM_END, END_OF_TEXT}


def test_the_end_of_turn_in_a_chat_template_ends_a_generation(folder, tiny):
    config = {"eos_token": "</s>"}
    chat = folder(tokenizer_config=config | {"chat_template": CHATML})
    assert Tokenizer.from_folder(chat).eos_ids == {EOS, IM_END}
    base = folder(tokenizer_config=config)
    assert Tokenizer.from_folder(base).eos_ids == {EOS}
    plain = json.loads(json.dumps(tiny))
    plain["added_tokens"][IM_END]["special"] = False
    ordinary = folder(
        tokenizer=plain, tokenizer_config=config | {"chat_template": CHATML}
    )
    assert Tokenizer.from_folder(ordinary).eos_ids == {EOS}


# --- Chats (BL-34) ---


@pytest.mark.parametrize("template_bos", ["", "<s>", "{{ bos_token }}"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_has_at_most_one_bos(folder, tiny, template_bos, adds_bos):
    path = folder(
        tokenizer=with_bos(tiny) if adds_bos else tiny,
        tokenizer_config={"bos_token": "<s>"},
        jinja=template_bos + CHATML,
    )
    tokenizer = Tokenizer.from_folder(path)
    ids = tokenizer.encode_chat(HELLO)
    assert ids.count(BOS) == int(adds_bos or bool(template_bos))
    assert ids == tokenizer.encode(tokenizer.render_chat(HELLO))


def test_a_chat_renders_as_its_template_says(chat):
    tokenizer = chat(CHATML)
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer.render_chat(HELLO) == turn + "<|im_start|>assistant\n"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == turn
    ids = tokenizer.encode_chat(HELLO)
    assert ids.count(IM_START) == 2 and ids.count(IM_END) == 1


def test_the_template_file_goes_before_the_config(folder):
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    config = {"chat_template": named}
    path = folder(tokenizer_config=config)
    assert Tokenizer.from_folder(path).render_chat(HELLO) == "d"
    path = folder(tokenizer_config=config, jinja="file")
    assert Tokenizer.from_folder(path).render_chat(HELLO) == "file"


def test_the_template_of_a_gguf_is_used(bpe_gguf):
    path = bpe_gguf(chat_template="{{ eos_token }}{{ messages[0].content }}")
    assert Tokenizer.from_gguf(path).render_chat(HELLO) == "</s>Hello"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{i}}"
         "{% endfor %}", "01"),
        ("{% for m in messages %}{{ loop.last }}{% endfor %}", "True"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}x{% else %}y{% endif %}{{ 'a' ~ 1 ~ none }}", "ya1None"),
        ("a {%- generation -%} b {%- endgeneration %}", "ab"),
        ("{{ 2 * 5 }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ '%s!' % 'c' }}", "10abab8c!"),
        ("{% set n = namespace(x=0) %}{% for i in [2, 3] %}{% set n.x = n.x + i %}"
         "{% endfor %}{{ n.x }}", "5"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ [{'n': 1}] | join(attribute='n') }}{{ 'aXb' | replace('X', '') }}", "1ab"),
        ("{{ 'aXb'.replace('X', '-') }}{{ '{:>3}|'.format(1) }}", "a-b  1|"),
        ("{{ ' x '.strip() }}{{ 'a b'.split(' ')[1] }}{{ 'x' | indent(2) }}", "xbx"),
        ("{{ messages[1:] | length }}{{ messages | map(attribute='role') | first }}",
         "0user"),
    ],
)  # fmt: skip
def test_what_templates_use_is_there(chat, template, expected):
    assert chat(template).render_chat(HELLO) == expected


def test_a_model_without_a_template_names_the_fix(folder):
    with pytest.raises(UserError, match="no chat template; encode the prompt as plain"):
        Tokenizer.from_folder(folder()).encode_chat(HELLO)


@pytest.mark.parametrize(
    "messages",
    [
        "Hello",
        [],
        None,
        ["Hello"],
        [{"role": "user"}],
        [{"content": "Hello"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "Hello"}],
        {"role": "user", "content": "Hello"},
    ],
)
def test_malformed_messages_are_refused(chat, messages):
    with pytest.raises(UserError, match="expected a list of"):
        chat(CHATML).render_chat(messages)


def test_all_malformed_messages_are_named_at_once(chat):
    with pytest.raises(UserError, match=r"message 0: 'role'.*message 2 is of type str"):
        chat(CHATML).render_chat([{"content": ""}, *HELLO, "x"])


def test_a_refusal_by_the_template_is_shown(chat):
    with pytest.raises(UserError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}").render_chat(HELLO)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ ''.__class__ }}", "access to '__class__'"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to '__class__'"),
        ("{{ messages['__class__'] }}", "access to '__class__'"),
        ("{{ messages | attr('__class__') }}", "access to '__class__'"),
        ("{{ '{0.__class__}'.format(messages) }}", "access to '__class__'"),
        ("{{ raise_exception.__globals__ }}", "access to '__globals__'"),
        ("{{ range.__init__ }}", "access to '__init__'"),
        ("{{ messages.append(1) }}", "access to 'append'"),
        ("{% set x = cycler.__init__.__globals__.os %}", "access to '__init__'"),
        ("{% include 'tokenizer.json' %}", "no loader"),
    ],
)
def test_escapes_from_the_sandbox_are_refused(chat, template, fault):
    with pytest.raises(UserError, match=fault):
        chat(template).render_chat(HELLO)


DOUBLING = (
    "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set n.s = STEP %}{% endfor %}"
)
NUMBER = "a number above"
FORMAT = "a format that widens"
STEPS = "loop steps and calls"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for i in range(100001) %}{% endfor %}", "a range of more than 100000"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
         STEPS),
        ("{% set t = 'x' * 99999 %}{% for i in t %}{% for j in t %}{% endfor %}"
         "{% endfor %}", STEPS),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
         "{% endmacro %}{{ f(60) }}", STEPS),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "a text of more"),
        ("{{ 'x' * 999999999 }}", NUMBER),
        ("{{ 999999999 * [0] }}", NUMBER),
        ("{{ 9 ** 9 ** 9 }}", NUMBER),
        ("{{ 'x' | center(999999999) }}", NUMBER),
        ("{{ 'x'.ljust(999999999) }}", NUMBER),
        ("{{ 'x'.ljust(width=999999999) }}", NUMBER),
        ("{{ ('x' * 99999) | replace('x', 'y' * 99999) }}", NUMBER),
        ("{{ ('x' * 99999).replace('x', 'y' * 99999) }}", NUMBER),
        ("{{ (['x' * 99999] * 99999) | join }}", NUMBER),
        ("{{ ('x' * 99999).join('y' * 99999) }}", NUMBER),
        ("{{ '%999999999d' % 1 }}", FORMAT),
        ("{{ '%*d' % (999999999, 1) }}", FORMAT),
        ("{{ '%999999999d' | format(1) }}", FORMAT),
        ("{{ '{:999999999}'.format(1) }}", FORMAT),
        ("{{ '{:{}}'.format(1, 999999999) }}", FORMAT),
        ("{{ strftime_now('%999999999d') }}", FORMAT),
        (DOUBLING.replace("STEP", "n.s + n.s"), NUMBER),
        (DOUBLING.replace("STEP", "n.s ~ n.s"), "a text of more than"),
        ("x" * (module.MAX_TEMPLATE + 1), "more than 65536"),
    ],
)  # fmt: skip
def test_work_and_sizes_are_bounded(chat, template, fault):
    with pytest.raises(UserError, match=fault):
        chat(template).render_chat(HELLO)


def test_the_bounds_leave_room_for_a_long_chat(chat):
    turns = [{"role": "user", "content": "x" * 1000}] * 2000
    assert len(chat(CHATML).render_chat(turns)) > 2_000_000


def test_a_template_that_does_not_parse_is_refused(chat):
    with pytest.raises(UserError, match="does not compile"):
        chat("{% if %}").render_chat(HELLO)


# --- Comparing two tokenizers ---


def test_equal_vocabularies_have_no_difference(folder, bpe_gguf):
    one, two = Tokenizer.from_folder(folder()), Tokenizer.from_gguf(bpe_gguf())
    assert one.first_difference(two) is None


def test_the_first_different_token_is_named(folder, tiny):
    one = Tokenizer.from_folder(folder())
    text = json.dumps(tiny).replace("<|im_end|>", "<|other|>")
    two = Tokenizer.from_folder(folder(tokenizer=text))
    assert one.first_difference(two) == (IM_END, "<|im_end|>", "<|other|>")
    assert two.first_difference(one) == (IM_END, "<|other|>", "<|im_end|>")


def test_unused_entries_at_the_end_do_not_count(bpe_gguf):
    plain = Tokenizer.from_gguf(bpe_gguf())
    padded = Tokenizer.from_gguf(bpe_gguf([("[PAD1]", 5), ("[PAD2]", 5)]))
    longer = Tokenizer.from_gguf(bpe_gguf([("<new>", 3), ("[PAD2]", 5)]))
    assert padded.vocab_size == plain.vocab_size + 2
    assert plain.first_difference(padded) is None
    assert padded.first_difference(longer) is None
    other = Tokenizer.from_gguf(bpe_gguf([("<other>", 3)]))
    assert longer.first_difference(other) == (plain.vocab_size, "<new>", "<other>")


# --- GGUF ---


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_gguf_gives_the_ids_of_its_folder(folder, bpe_gguf, text):
    from_folder = Tokenizer.from_folder(folder())
    assert Tokenizer.from_gguf(bpe_gguf()).encode(text) == from_folder.encode(text)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġ12"]),
        ("smollm", ["Ġ", "1", "2"]),
        ("qwen2", ["Ġ", "1", "2"]),
        ("llama-bpe", ["<s>", "Ġ", "12"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(bpe_gguf, pre, expected):
    tokenizer = Tokenizer.from_gguf(bpe_gguf(pre=pre))
    assert [tokenizer.token(i) for i in tokenizer.encode(" 12")] == expected


def test_only_qwen2_composes_accents(bpe_gguf):
    qwen = Tokenizer.from_gguf(bpe_gguf(pre="qwen2"))
    assert qwen.decode(qwen.encode("e\u0301")) == "é"
    smollm = Tokenizer.from_gguf(bpe_gguf(pre="smollm"))
    assert smollm.decode(smollm.encode("e\u0301")) == "e\u0301"


def test_llama_bpe_takes_a_word_that_is_a_token_whole(bpe_gguf):
    word = [("xyz", 1)]
    assert len(Tokenizer.from_gguf(bpe_gguf(word, pre="llama-bpe")).encode("xyz")) == 2
    assert len(Tokenizer.from_gguf(bpe_gguf(word, pre="gpt-2")).encode("xyz")) == 3


def test_add_bos_token_of_a_gguf_decides(bpe_gguf, llama_gguf):
    assert not Tokenizer.from_gguf(bpe_gguf()).adds_bos
    assert Tokenizer.from_gguf(bpe_gguf(add_bos_token=True)).encode("") == [BOS]
    assert Tokenizer.from_gguf(llama_gguf()).encode("") == [1]
    assert Tokenizer.from_gguf(llama_gguf(add_bos_token=False)).encode("") == []


def test_user_defined_tokens_of_a_gguf_stay_whole_and_visible(bpe_gguf):
    tokenizer = Tokenizer.from_gguf(bpe_gguf([("<tool>", 4)]))
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
def test_merges_from_scores_join_pieces_as_sentencepiece_does(llama_gguf, seed):
    draw = random.Random(seed)
    words = {"".join(draw.choices("ab", k=draw.randint(2, 5))) for _ in range(25)}
    pieces = ["▁", "a", "b", *sorted(words)]
    scores = [-float(s) for s in draw.sample(range(100), len(pieces))]
    values = llama_vocabulary(pieces)
    values["scores"] = values["scores"][:259] + scores
    path = llama_gguf(pieces, **values, add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(path)
    by_piece = dict(zip(pieces, scores, strict=True))
    for _ in range(20):
        text = "".join(draw.choices("ab", k=30))
        ids = tokenizer.encode(text)
        assert [tokenizer.token(i) for i in ids] == sentencepiece_pieces(text, by_piece)


def test_a_sentencepiece_gguf_puts_a_space_before_unless_told(llama_gguf):
    usual = Tokenizer.from_gguf(llama_gguf())
    assert [usual.token(i) for i in usual.encode("ab")] == ["<s>", "▁ab"]
    assert usual.decode(usual.encode("ab")) == "ab"
    without = Tokenizer.from_gguf(llama_gguf(add_space_prefix=False))
    assert [without.token(i) for i in without.encode("ab")] == ["<s>", "ab"]
    assert without.decode(without.encode(" ab")) == " ab"


def test_characters_outside_the_vocabulary_fall_back_to_bytes(llama_gguf):
    tokenizer = Tokenizer.from_gguf(llama_gguf(add_space_prefix=False))
    ids = tokenizer.encode("aé")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "a", "<0xC3>", "<0xA9>"]


def test_runs_of_spaces_are_found_under_the_space_mark(llama_gguf):
    values = llama_vocabulary(("▁", "a", "  ", "   "))
    values["types"][-2:] = [4, 4]
    values["scores"][-2:] = [-1000.0, -1000.0]
    path = llama_gguf(**values, add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(path)
    ids = tokenizer.encode("a   a")
    assert [tokenizer.token(i) for i in ids] == ["a", "▁▁▁", "a"]
    assert tokenizer.decode(ids) == "a   a"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pre": "mystery"}, r"tokenizer.ggml.pre is 'mystery', expected one of gpt-2"),
        ({"model": "rwkv"}, r"tokenizer.ggml.model is 'rwkv'"),
        ({"eos_token_id": 99_999}, "eos_token_id 99999 is not an id"),
        ({"merges": ["a zzz"]}, r"merge 0 names 'zzz'"),
        ({"merges": ["a b c"]}, "merge 0 .* is not a pair"),
        ({"merges": ["#version x"]}, "not a usable tokenizer"),
        ({"merges": None}, "merges is missing"),
        ({"types": [1, 1]}, "token_type does not match"),
        ({"tokens": ["a", "a"], "types": None}, "token 'a' occurs twice"),
        ({"tokens": [1, 2]}, "tokens is missing or no texts"),
        ({"model": "llama"}, "scores does not match"),
    ],
)
def test_faults_of_a_gguf_are_named(bpe_gguf, changes, fault):
    path = bpe_gguf(**changes)
    with pytest.raises(UserError, match=fault) as caught:
        Tokenizer.from_gguf(path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 2000])
def test_a_cut_gguf_is_refused(bpe_gguf, kept):
    path = bpe_gguf()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"tiny\.gguf"):
        Tokenizer.from_gguf(path)


# --- Faults of a folder ---


def broken(tiny, **changes):
    data = json.loads(json.dumps(tiny))
    data["model"] |= changes
    return data


def without_special_tokens(data):
    data["post_processor"]["special_tokens"] = {}
    return data


def two_before(data):
    data["post_processor"]["single"].insert(0, data["post_processor"]["single"][0])
    return data


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: "{not json", "not valid JSON"),
        (lambda t: "[" * 100_000, "not valid JSON"),
        (lambda t: "[]", "holds no JSON object"),
        (lambda t: {}, "has no 'model' object"),
        (lambda t: {"model": {"type": "BPE"}}, "has no 'vocab'"),
        (lambda t: broken(t, merges=None), "has no 'merges'"),
        (lambda t: broken(t, merges=[["h", "zzz"]]), "merge 0 names 'zzz'"),
        (lambda t: broken(t, merges=["h e l"]), "merge 0 .* is not a pair"),
        (lambda t: broken(t, vocab={"a": -1}), "token id -1 is outside"),
        (lambda t: broken(t, vocab={"a": 2**40}), "token id .* is outside"),
        (lambda t: broken(t, vocab={"a": "1"}), "token id '1' is outside"),
        (lambda t: t | {"added_tokens": 3}, "'added_tokens' is not a list"),
        (lambda t: t | {"decoder": {"type": "Mystery"}}, "not a usable tokenizer"),
        (lambda t: without_special_tokens(with_bos(t)), "not a usable tokenizer"),
        (lambda t: two_before(with_bos(t)), "expected at most one BOS"),
    ],
)
def test_faults_of_tokenizer_json_are_named(folder, tiny, change, fault):
    path = folder(tokenizer=change(tiny))
    with pytest.raises(UserError, match=fault) as caught:
        Tokenizer.from_folder(path)
    assert "tokenizer.json" in str(caught.value)


def test_all_faults_of_the_configs_are_named_at_once(folder):
    path = folder(
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


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*no such file"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_importing_jaxspec_does_not_import_the_tokenizer_libraries():
    code = (
        "import sys, jaxspec.tokenizer; "
        "print(sorted({'tokenizers', 'jinja2', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# --- Real models, against ids of transformers ---


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(models_on_disk.path("smollm2-135m-instruct"))


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
    assert_golden(smollm2, "smollm2-135m-instruct")
    assert GOLDEN["models"]["smollm2-135m-instruct"]["chats"]
    assert smollm2.eos_ids == {2} and smollm2.vocab_size == 49152


def test_the_golden_ids_tell_a_wrong_pre_tokenizer_apart(smollm2):
    wrong = Tokenizer.from_gguf(models_on_disk.path("smollm2-135m-instruct"))
    wrong._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(AssertionError):
        assert_golden(wrong, "smollm2-135m-instruct")


@pytest.mark.parity
def test_transformers_still_gives_the_golden_ids():
    from tests.golden import make_tokenizer_ids as maker

    name = "smollm2-135m-instruct"
    assert maker.golden_ids(name, models_on_disk.path(name)) == GOLDEN["models"][name]
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
