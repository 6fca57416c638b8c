"""Stop texts: one place ends text, ids, log-probabilities and statistics.

The target writes scripts, so that a test chooses what is accepted when. What a row must
give is found from its whole text, decoded id by id on the host.
"""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.tokenizer import Tokenizer
from tests import fakes, quick, tokenizers_made

VOCAB, CAPACITY, ROWS, NODES = 400, 64, 4, 8
PROMPT = 3  # ids; the first of them names the row's script


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["reader", "script"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Script:
    """Prefers, at every position of a row, the id that its script has there."""

    reader: Any
    script: Any

    config = SimpleNamespace(max_positions=CAPACITY)
    vocab_size = VOCAB

    @classmethod
    def of(cls, texts):
        script = np.zeros((ROWS, CAPACITY + 1), np.int32)
        for row, ids in enumerate(texts):
            script[row, PROMPT : PROMPT + len(ids)] = ids
        table = jnp.zeros((3, 2, 1, 1))
        return cls(fakes.TableModel(table, windows=(None,)), script)

    def init_hidden(self, rows):
        return jnp.zeros((rows, 2))

    def init_cache(self, *sizes):
        return self.reader.init_cache(*sizes)

    def init_scratch(self, *sizes):
        return self.reader.init_scratch(*sizes)

    def norm(self, hidden):
        return hidden

    def unembed(self, normed, ids=None):
        assert ids is None
        row, position = normed.astype(int)[..., 0], normed.astype(int)[..., 1]
        return 10.0 * jax.nn.one_hot(self.script[row, position + 1], VOCAB)

    def __call__(self, tokens, positions, cache, scratch, *rest, **options):
        output, scratch = self.reader(
            tokens, positions, cache, scratch, *rest, **options
        )
        stored = cache.block(0, 0)[0][0, 0, 0].astype(int)
        row = jnp.where(positions[0] == 0, tokens[0], stored)
        rows = jnp.broadcast_to(row, positions.shape)
        hidden = jnp.stack([rows, positions], -1).astype("f4")
        return output._replace(hidden=hidden), scratch


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    with quick.generators():
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(tokenizers_made.write_folder(folder))


@pytest.fixture(scope="module")
def generator(tokenizer):
    model = Script.of([])
    target = jaxspec.LanguageModel("script", model, tokenizer)
    return jaxspec.Generator(target, DraftModel(model, NODES), capacity=CAPACITY)


@pytest.fixture
def play(generator, tokenizer):
    """Has the generator write texts; where `wrong`, the draft is."""

    def play(texts, wrong=(), **options):
        scripts = [
            tokenizer.encode(text) if isinstance(text, str) else text for text in texts
        ]
        model = Script.of(scripts)
        draft = model.script.copy()
        draft[:, [PROMPT + place for place in wrong]] = VOCAB - 1
        decoder = dataclasses.replace(model, script=draft)
        generator.target = jaxspec.LanguageModel("script", model, tokenizer)
        generator.drafter = DraftModel(decoder, NODES)
        prompts = [[row, 50, 51] for row in range(len(texts))]
        given = {"max_new_tokens": [len(ids) for ids in scripts], "log_probs": 1}
        # There for every call, so that all are one program.
        given |= {"min_new_tokens": 0, "stop_sequences": [[VOCAB - 2] * 2]}
        given |= {"batch_size": ROWS} | options
        before = [program.compilations for program in generator.programs]
        results = generator.generate(prompts, **given)
        after = [program.compilations for program in generator.programs]
        assert before == after or max(before) == 0, "a stop text compiles nothing"
        return results

    return play


def first_stop(tokenizer, ids, stops, least=1):
    """After how many tokens the first stop is complete, and the text before it."""
    for count in range(least, len(ids) + 1):
        before, text = (tokenizer.decode(ids[:n]) for n in (count - 1, count))
        known = len(before.rstrip("\ufffd"))
        found = []
        for stop in stops:
            ends = [i + len(stop) for i in range(len(text)) if text.startswith(stop, i)]
            found += [(end, end - len(stop)) for end in ends if end > known]
        if found:
            end, start = min(found)
            return count, text[:start], text[:end]
    return None


def assert_result(result, tokenizer, ids, stops, include=False, least=1):
    found = first_stop(tokenizer, ids, stops, least)
    if found is None:
        assert result.token_ids == ids and result.finish_reason == "length"
        assert result.text == tokenizer.decode(ids)
    else:
        count, without, with_stop = found
        assert result.token_ids == ids[:count] and result.finish_reason == "stop"
        assert result.text == (with_stop if include else without)
    for values in dataclasses.astuple(result.log_probs)[:2]:
        assert len(values) == len(result.token_ids)
    assert len(result.log_probs.alternatives) == len(result.token_ids)
    assert len(result.from_draft) == len(result.token_ids)


TEXT = "hello END hello world 2024 12 hello é 你好 ENDING 🍵 to END"


def assert_cut_as_by_length(play, result, texts, row, **options):
    """All but the text is what `max_new_tokens` would have given."""
    lengths = [len(result.token_ids)] * len(texts)
    limited = play(texts, max_new_tokens=lengths, **options)[row]
    assert limited.token_ids == result.token_ids
    assert limited.from_draft == result.from_draft
    assert limited.log_probs == result.log_probs
    timed = ("prefill_seconds", "decode_seconds", "tokens_per_second")
    same = dict.fromkeys((*timed, "compile_seconds"), 0)
    assert dataclasses.replace(limited.stats, **same) == dataclasses.replace(
        result.stats, **same
    )


def test_bl22_a_stop_that_the_second_of_eight_accepted_tokens_completes(
    play, tokenizer
):
    # Token 0 is prefill's; tokens 1 to 8 are accepted, the bonus token is the next.
    ids = tokenizer.encode("a END and so on, for a while and more")
    pieces = [tokenizer.decode([token]) for token in ids[:5]]
    assert pieces == ["a", " ", "E", "N", "D"]
    for stop, count in ((" E", 3), ("E", 3), ("a E", 3), (" ", 2), ("a", 1)):
        [result] = play([ids], stop=stop)
        assert_result(result, tokenizer, ids, [stop])
        assert len(result.token_ids) == count
        assert result.stats.rounds == (count > 1)
        assert result.stats.accepted == result.stats.drafted == count - 1
        assert_cut_as_by_length(play, result, [ids], 0)


@pytest.mark.parametrize("wrong", [(), (3, 4, 11), range(60)], ids=str)
def test_a_stop_over_several_tokens_and_rounds(play, tokenizer, wrong):
    """At each offset of blocks of nine, of unequal ones, and of one token a round."""
    ids = tokenizer.encode(TEXT)
    offsets = set()
    for start in range(0, len(TEXT) - 3):
        stop = TEXT[start : start + 3]
        [result] = play([ids], wrong, stop=stop)
        assert_result(result, tokenizer, ids, [stop])
        assert stop not in result.text
        offsets.add((len(result.token_ids) - 1) % (NODES + 1))
    assert len(offsets) >= NODES
    assert_cut_as_by_length(play, result, [ids], 0, wrong=wrong)


def test_statistics_end_with_the_stop_wherever_the_round_is_cut(play, tokenizer):
    ids = tokenizer.encode(TEXT)
    for wrong in ((), (5, 6, 13, 20)):
        for start in range(0, len(TEXT) - 1, 4):
            [result] = play([ids], wrong, stop=TEXT[start : start + 2])
            assert_cut_as_by_length(play, result, [ids], 0, wrong=wrong)
            assert sum(result.from_draft) == result.stats.accepted


def test_the_stop_is_left_in_if_asked(play, tokenizer):
    ids = tokenizer.encode(TEXT)
    for stop in ("END", "hello w", "你", "é 你好"):
        [without] = play([ids], stop=stop)
        [result] = play([ids], stop=stop, include_stop=True)
        assert_result(result, tokenizer, ids, [stop], include=True)
        assert result.text == without.text + stop
        assert result.token_ids == without.token_ids


STOPS = {
    "the one that ends first": ["hello world", "o w"],
    "one within another": ["END hello", "END"],
    "one that begins first but never ends": ["hello ENDS", "o E"],
    "two that end together": ["o END", "END"],
    "later ones": ["ENDING", "world", "2024"],
    "none of them": ["nowhere", "ENDED"],
    "the whole text": [TEXT],
    "its beginning": ["h"],
    "its end": ["to END"],
    "characters of several tokens": ["你"],
    "a character of four bytes": ["🍵"],
    "an accent": ["é"],
}


@pytest.mark.parametrize("name", STOPS)
def test_of_several_stops_the_first_that_is_complete(play, tokenizer, name):
    ids, stops = tokenizer.encode(TEXT), STOPS[name]
    for order in itertools.permutations(stops):
        [result] = play([ids], stop=list(order))
        assert_result(result, tokenizer, ids, stops)


def test_an_unfinished_character_completes_no_stop(play, tokenizer):
    ids = tokenizer.encode("a 🍵!")
    pieces = len(ids) - 2
    assert pieces >= 4  # the cup takes as many tokens
    [result] = play([ids[:-1]], stop="🍵")
    assert result.token_ids == ids[:-1] and result.text == "a "
    # Cut within the character: no stop, and the text says that something is missing.
    [result] = play([ids[:-2]], stop="🍵")
    assert result.finish_reason == "length" and result.text == "a \ufffd"


@pytest.mark.parametrize("least", [1, 5, 6, 7, 30])
def test_before_min_new_tokens_no_stop_is_looked_for(play, tokenizer, least):
    ids = tokenizer.encode(TEXT)
    assert first_stop(tokenizer, ids, ["END"])[0] == 5
    for stop in ("END", "D"):
        [result] = play([ids], stop=stop, min_new_tokens=least)
        assert_result(result, tokenizer, ids, [stop], least=least)


def test_a_stop_does_not_begin_in_the_prompt(play, tokenizer):
    # The prompt's last id is 51.
    before = tokenizer.decode([50, 51])
    ids = tokenizer.encode("abc")
    [result] = play([ids], stop=before[-1] + "a")
    assert result.token_ids == ids and result.finish_reason == "length"


def test_rows_end_by_themselves_and_do_not_move_each_other(play, tokenizer):
    texts = [TEXT, "other text END of it", "1 2 3 4 5 6 7 8 9", TEXT[::-1]]
    scripts = [tokenizer.encode(text) for text in texts]
    stops = [["END"], ["text", "END"], None, ["hello"]]
    free = play(scripts)
    together = play(scripts, stop=stops)
    for row, (ids, own) in enumerate(zip(scripts, stops, strict=True)):
        assert free[row].token_ids == ids
        assert_result(together[row], tokenizer, ids, own or [])
        assert_cut_as_by_length(play, together[row], scripts, row)
    assert [result.finish_reason for result in together] == [
        *("stop", "stop", "length", "length")
    ]
    # In another order, and one by one in batches of the same shape.
    alone = [
        play([*scripts[:row], ids], stop=[None] * row + [stops[row]])[row]
        for row, ids in enumerate(scripts)
    ]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.log_probs == other.log_probs


def test_eos_length_and_stop_ids_beside_a_stop_text(play, tokenizer):
    ids = tokenizer.encode("a END! so on")
    assert [tokenizer.decode([t]) for t in ids[2:5]] == ["E", "N", "D"]
    # An id that ends the row in the text's middle: before, at and after the stop.
    for place, reason in ((3, "eos"), (4, "eos"), (5, "stop")):
        [result] = play([ids], stop="END", eos_ids=[ids[place]])
        assert result.finish_reason == reason
        assert result.token_ids == ids[: min(place, 4) + 1]
        assert result.text == ("a EN" if place == 3 else "a ")
        [result] = play([ids], stop="END", stop_sequences=[ids[place : place + 1]])
        assert result.finish_reason == "stop"
        assert result.token_ids == ids[: min(place, 4) + 1]
    for new, reason in ((4, "length"), (5, "stop")):
        [result] = play([ids], stop="END", max_new_tokens=new)
        assert result.finish_reason == reason and len(result.token_ids) == new
        assert result.text == ("a EN" if new == 4 else "a ")


def test_special_tokens_are_no_text(play, tokenizer):
    ids = [*tokenizer.encode("E"), tokenizers_made.IM_START, *tokenizer.encode("ND a")]
    [result] = play([ids], stop="END", eos_ids=[])
    assert result.text == "" and result.token_ids == ids[:4]
    [result] = play([ids], stop="<|im_start|>", eos_ids=[])
    assert result.finish_reason == "length"


@pytest.mark.parametrize("wrong", [(), range(60)], ids=["blocks", "one by one"])
def test_a_stream_never_shows_what_a_stop_takes_back(play, generator, tokenizer, wrong):
    ids = tokenizer.encode(TEXT)
    stops = [["END"], ["hello world"], ["o E", "hello ENDS"], ["你好"], ["🍵"], ["é"]]
    stops += [["nowhere"], ["to ENDED"], ["ENDI", "2024 13"], []]
    for own, include in itertools.product(stops, (False, True)):
        options = {"stop": own, "include_stop": include}
        [result] = play([ids], wrong, **options)
        assert_result(result, tokenizer, ids, own, include)
        pieces = list(generator.stream([0, 50, 51], max_new_tokens=len(ids), **options))
        # Pieces only ever add to what the text is in the end.
        assert "".join(pieces) == result.text
        assert len(pieces) == len(ids) + 1 if wrong and not own else len(pieces) > 1


def test_a_stream_of_nothing_is_empty(play, generator):
    play(["abc"])
    assert "".join(generator.stream([0, 50, 51], max_new_tokens=0, stop="a")) == ""
