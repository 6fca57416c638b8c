"""Where a stop text is found, against searches by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.stopping import StopText
from jaxspec.tokenizer import Tokenizer
from tests import tokenizers_made
from tests.test_stop_texts import first_stop


class Letters:
    """A tokenizer whose ids are texts, decoded one by one."""

    def stream_decoder(self):
        return SimpleNamespace(push="".join, flush=lambda: "")


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_and_stops_against_a_search_by_hand(include):
    rng = np.random.default_rng(0)
    found = 0

    def word(least, most):
        return "".join(rng.choice(["a", "b"], rng.integers(least, most)))

    for _ in range(3000):
        tokens = [word(0, 4) for _ in range(rng.integers(1, 12))]
        stops = [word(1, 6) for _ in range(rng.integers(0, 4))]
        least = int(rng.integers(0, 6))
        reader = StopText(Letters(), stops, include, least)
        shown = ""
        for token in tokens:
            ended = reader.push(token)
            assert ended == reader.is_complete
            shown += reader.text[len(shown) : reader.safe]
            if ended:
                break
        reader.finish()
        wanted = by_hand(tokens, stops, include, least)
        assert (reader.text, reader.count) == wanted
        assert reader.text.startswith(shown)
        if ended:
            found += 1
            assert shown == reader.text
    assert 500 < found < 2500


def by_hand(tokens, stops, include, least):
    before = 0
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        for end in range(before + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending and count >= least:
                start = end - max(map(len, ending))
                return text[: end if include else start], count
        before = len(text)
    return "".join(tokens), len(tokens)


def test_a_sentencepiece_text_is_read_as_it_is_decoded(tmp_path):
    """Its decoder takes the first space away; a stop is found in what is left."""
    reader = Tokenizer.from_gguf(tokenizers_made.write_llama_gguf(tmp_path))
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(300):
        # Pieces, spaces, and bytes of é and of nothing.
        ids = rng.choice([259, 260, 261, 262, 263, 264, 265, 3 + 0xC3, 3 + 0xA9], 8)
        ids, stops = (
            ids.tolist(),
            [["b ab"], [" a", "é"], ["aab", "c "]][rng.integers(3)],
        )
        own = StopText(reader, stops)
        for token in ids:
            if own.push(token):
                break
        own.finish()
        wanted = first_stop(reader, ids, stops)
        if wanted is None:
            assert not own.is_complete
            # Bytes that are no text may be marked otherwise.
            known = reader.decode(ids)
            assert own.text == known or "\ufffd" in known
        else:
            found += 1
            assert (own.count, own.text) == wanted[:2]
    assert 50 < found < 250
