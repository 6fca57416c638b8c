"""What a row has written, at each slot of a draft: endings, counts, matches."""

import numpy as np
import pytest

from jaxspec.batching import pack_sequences
from jaxspec.core import tree
from jaxspec.core.history import Counts, History, ends_with, path_counts
from jaxspec.core.sampling import Sampling, Sequences
from tests import oracles

VOCAB, CAPACITY = 9, 12
CHAIN, TREE = [0, 1, 2], [0, 0, 1, 2]
ONES = np.ones(2, np.float32)


def history(texts, prompt_lengths=None, garbage=7):
    tokens = np.full((len(texts), CAPACITY), garbage, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = np.array([len(text) for text in texts], np.int32)
    return History(tokens, length, length if prompt_lengths is None else prompt_lengths)


def paths_of(drafted, parents):
    drafted = np.int32(drafted)
    ancestors = tree.ancestry(np.tile(np.int32(parents), (len(drafted), 1)))
    return tree.paths(drafted, ancestors, int(tree.depths(ancestors).max()))


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_ending_of_a_slot_is_that_of_its_own_text(parents, width):
    rng = np.random.default_rng(width)
    texts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 5, CAPACITY)]
    drafted = rng.integers(0, VOCAB, (4, len(parents)))
    found = np.asarray(history(texts).ending(*paths_of(drafted, parents), width))
    for row, slot in np.ndindex(4, len(parents) + 1):
        path = [drafted[row, s - 1] for s in oracles.ancestors(parents, slot)[1:]]
        text = [-1] * width + texts[row] + path
        assert found[row, slot].tolist() == text[-width:]


def test_without_a_draft_it_is_the_committed_texts():
    none = np.zeros((2, 1, 0), np.int32), np.zeros((2, 1), np.int32)
    found = np.asarray(history([[4], [5, 6, 8]]).ending(*none, 2))
    assert found.tolist() == [[[-1, 4]], [[6, 8]]]
    assert history([[4]]).ending(none[0][:1], none[1][:1], 0).shape == (1, 1, 0)


def test_a_text_ends_with_a_sequence_or_not():
    endings = np.int32([[[1, 2, 3], [-1, 2, 3], [-1, -1, 3], [3, 3, 3]]])
    sequences = [[3], [2, 3], [1, 2, 3], [3, 3, 3]]
    found = np.asarray(ends_with(endings, pack([sequences], 3)))
    assert found[0].tolist() == [
        [True, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
        [True, False, False, True],
    ]


def pack(rows, width):
    packed = pack_sequences(rows, len(rows))
    assert packed is not None
    return Sequences(packed.tokens[..., -width:], packed.length)


def test_what_pads_sequences_is_never_found():
    # Four places are packed; -1 also stands where a text has not begun.
    packed = pack_sequences([[[2]], []], 2)
    endings = np.int32([[[-1, -1, -1, -1], [-1, -1, -1, 2]]] * 2)
    found = np.asarray(ends_with(endings, packed))
    assert found[0].tolist() == [[False] * 4, [True, False, False, False]]
    assert not found[1].any()


def test_sequences_are_packed_at_their_ends_in_few_shapes():
    packed = pack_sequences([[[1], [2, 3]], [[4, 5, 6]]], 3)
    assert packed.tokens[0, :2].tolist() == [[-1, -1, -1, 1], [-1, -1, 2, 3]]
    assert packed.tokens[1, 0].tolist() == [-1, 4, 5, 6]
    assert packed.length.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [0] * 4]
    assert pack_sequences([[], []], 2) is None
    assert pack_sequences([[[1] * 5] * 5], 1).tokens.shape == (1, 8, 8)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_slot_counts_its_own_path(parents):
    rng = np.random.default_rng(5)
    drafted = rng.integers(0, 3, (6, len(parents)))
    found = np.asarray(path_counts(*paths_of(drafted, parents), VOCAB))
    for row, slot in np.ndindex(6, len(parents) + 1):
        path = [drafted[row, s - 1] for s in oracles.ancestors(parents, slot)[1:]]
        assert found[row, slot].tolist() == np.bincount(path, minlength=VOCAB).tolist()


def test_prompt_and_output_are_counted_apart():
    prompt = np.int32([[1, 1, 4, 8], [2, 5, 5, 5]])
    sampling = Sampling(ONES, repetition_penalty=ONES, frequency_penalty=ONES)
    counts = Counts.init(sampling, prompt, np.int32([3, 1]), VOCAB)
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(counts.in_prompt)]
    assert seen == [[1, 4], [2]] and not np.asarray(counts.in_output).any()
    counts = counts.add(np.int32([[3, 3, 0], [8, 8, 8]]), np.int32([3, 0]))
    counts = counts.add(np.int32([[3, 6, 6], [0, 7, 7]]), np.int32([1, 2]))
    assert counts.in_output[0].tolist() == [1, 0, 0, 3, 0, 0, 0, 0, 0]
    assert counts.in_output[1].tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert seen == [np.flatnonzero(r).tolist() for r in np.asarray(counts.in_prompt)]


def test_counts_are_there_only_for_those_who_ask():
    prompt, length = np.int32([[1, 2]] * 2), np.int32([2, 2])

    def counts(**options):
        return Counts.init(Sampling(ONES, **options), prompt, length, VOCAB)

    biased = {"logit_bias": np.zeros((2, VOCAB)), "min_new_tokens": length}
    banned = pack_sequences([[[1]]], 2)
    assert counts() is counts(**biased, banned=banned, top_k=length) is None
    for name in ("presence_penalty", "frequency_penalty"):
        assert counts(**{name: ONES}).in_prompt is None
    assert counts(repetition_penalty=ONES).in_prompt is not None
