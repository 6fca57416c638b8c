from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints.load import load_decoder
from jaxspec.tokenizer import Tokenizer
from tests import models_on_disk
from tests.models import theirs
from tests.models.forwards import feed, largest_difference, one_shot

pytestmark = pytest.mark.parity

LIMIT = 1e-3
SHORT = 64
SMOLLM2 = "smollm2-135m-instruct"
QWEN_SMALL = "qwen2.5-coder-0.5b-instruct"
QWEN_LARGE = "qwen2.5-coder-1.5b-instruct"
GEMMA = "gemma-3-270m"


@pytest.fixture(scope="module", autouse=True)
def the_parity_extra():
    theirs.require()


def text_ids(file, length):
    licence = Path(theirs.ROOT, "LICENSE").read_text(encoding="utf-8")
    ids = Tokenizer.from_gguf(file).encode(theirs.TEXT + licence)[:length]
    assert len(ids) == length
    return np.array(ids, np.int32)


def assert_close(ours, wanted, what):
    difference = largest_difference(ours, wanted)
    print(f"{what}: largest difference {difference:.1e}")
    assert wanted.std() > 0.5
    assert difference < LIMIT


@pytest.mark.parametrize(
    "name",
    (
        SMOLLM2,
        pytest.param(QWEN_SMALL, marks=pytest.mark.models),
        pytest.param(QWEN_LARGE, marks=pytest.mark.models),
    ),
)
def test_a_short_text(name):
    file = models_on_disk.path(name)
    ids = text_ids(file, SHORT)
    wanted = theirs.of_gguf(file, ids)
    assert_close(one_shot(load_decoder(file), ids).logits[0], wanted, name)


class Gemma:
    """A text of two windows' length; one run of transformers serves three tests."""

    length, before_edge = 1100, 505
    last = np.arange(1100 - SHORT, 1100)
    edge = np.arange(505, 521)

    def __init__(self):
        file = models_on_disk.path(GEMMA)
        self.ids = text_ids(file, self.length)
        positions = np.concatenate([np.arange(SHORT), self.edge, self.last])
        logits = theirs.of_gguf(file, self.ids, positions)
        self.wanted_first, self.wanted_edge, self.wanted_last = np.split(
            logits, [SHORT, SHORT + len(self.edge)]
        )
        self.model = load_decoder(file)


@pytest.fixture(scope="module")
def gemma():
    return Gemma()


@pytest.mark.models
def test_gemma_on_a_short_text(gemma):
    # Theirs are those of the long text: what comes later changes nothing.
    ours = one_shot(gemma.model, gemma.ids[:SHORT]).logits[0]
    assert_close(ours, gemma.wanted_first, GEMMA)


@pytest.mark.models
def test_gemma_past_its_window_in_one_piece(gemma):
    at = np.concatenate([gemma.edge, gemma.last])
    ours = one_shot(gemma.model, gemma.ids, at=at).logits[0]
    assert_close(ours[-SHORT:], gemma.wanted_last, "last 64 of 1,100")
    assert_close(ours[:-SHORT], gemma.wanted_edge, "505 to 520 of 1,100")


@pytest.mark.models
def test_gemma_token_by_token_across_the_edge_of_its_window(gemma):
    assert gemma.model.config.windows[0] == 512
    start, count = gemma.before_edge, len(gemma.edge)
    chunks = [(start, start), *[(1, 1)] * count]
    ids = gemma.ids[: start + count]
    ours = feed(gemma.model, ids, chunks, at=gemma.edge).logits[0]
    assert_close(ours, gemma.wanted_edge, "505 to 520, decoded")
