import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import causal, run_rows
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.train.batches import HELD_OUT, Batches
from jaxspec.train.corpus import Corpus
from jaxspec.train.texts import ANSWER, answer_prompts
from tests.train import made


def test_texts_are_the_prompts_with_the_target_s_answers(model, corpus):
    """Even rows are greedy, odd ones drawn at temperature 1 with the row's own seed."""
    generator = Generator(model, capacity=64)
    part, rows = 1, made.RECIPE.rows
    texts, prompts = corpus.texts(part), made.prompts()[rows : 2 * rows]
    seeds = made.RECIPE.seeds(part, ANSWER)
    for row in (0, 1, 5):
        result = generator.generate(
            prompts[row],
            max_new_tokens=24,
            temperature=float(row % 2),
            seed=seeds[row],
        )
        text = list(texts.each())[row]
        assert text.tolist() == prompts[row] + result.token_ids
        assert texts.starts[row] == len(prompts[row])
    assert texts.written == 24 * rows
    assert len(set(seeds) | set(made.RECIPE.seeds(0, ANSWER))) == 2 * rows


def test_an_interrupted_job_goes_on_with_the_same_texts(model, corpus, tmp_path):
    generator = Generator(model, capacity=64)
    again = Corpus.create(tmp_path, made.RECIPE.to_json())
    job = answer_prompts(generator, again, made.RECIPE, made.prompts())
    assert [next(job), next(job)] == [0, 16]
    job.close()
    # What a killed process leaves of a file that it was writing.
    (tmp_path / ".texts-00001.safetensors.77").write_bytes(b"torn")
    assert len(again) == 1
    rest = answer_prompts(generator, again, made.RECIPE, made.prompts())
    assert list(rest) == [16, 32, 40]
    for part in range(3):
        for one, other in zip(corpus.texts(part), again.texts(part), strict=True):
            np.testing.assert_array_equal(one, other)


def test_states_are_the_target_s_own(model, corpus):
    decoder = model.decoder
    text = list(corpus.texts(2).each())[3]
    at = int(corpus.texts(2).lengths[:3].sum())
    states = corpus.states(2, made.TAPS)
    lanes = jnp.arange(text.size)
    output, _ = run_rows(
        decoder,
        decoder.init_cache(1, 64, text.size),
        decoder.init_scratch(1, text.size),
        jnp.asarray(text)[None],
        lanes[None],
        lanes,
        causal(1, text.size),
        made.TAPS,
    )
    logits = decoder.unembed(decoder.norm(output.hidden))[0]
    mine = [each[at : at + text.size] for each in states]
    # bfloat16 has 8 bits; a forward of other shapes moves small numbers by 1e-6.
    near = {"rtol": 2**-8, "atol": 1e-5}
    np.testing.assert_allclose(mine[0].astype("f4"), output.hidden[0], **near)
    np.testing.assert_allclose(mine[1].astype("f4"), output.taps[0], **near)
    total = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    np.testing.assert_allclose(mine[2], total, atol=1e-5)
    np.testing.assert_array_equal(mine[3], logits.argmax(-1))


def test_batches_hold_every_text_once_an_epoch_but_those_held_out(corpus):
    batches = Batches(corpus, made.TAPS, rows=4, longest=64, seed=0)
    held_out = list(batches.held_out())
    assert len(held_out) == 1 and HELD_OUT < 40 and HELD_OUT % 2 == 1

    def texts_of(batch):
        rows = zip(batch.tokens, batch.written, strict=True)
        # A text ends with what the target wrote; a row without any is padding.
        return [
            tuple(tokens[: np.flatnonzero(written)[-1] + 1].tolist())
            for tokens, written in rows
            if written.any()
        ]

    aside = {text for batch in held_out for text in texts_of(batch)}
    every = {
        tuple(text.tolist()) for part in range(3) for text in corpus.texts(part).each()
    }
    assert len(aside) == 2
    for epoch in range(2):
        steps = range(epoch * batches.steps, (epoch + 1) * batches.steps)
        seen = [text for step in steps for text in texts_of(batches.at(step))]
        assert len(seen) == len(set(seen)) == 36
        assert set(seen) <= every - aside
    first, again = batches.at(0), Batches(corpus, made.TAPS, 4, 64, seed=0).at(0)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    others = Batches(corpus, made.TAPS, 4, 64, seed=1).at(0)
    assert (first.tokens != others.tokens).any()


def test_a_batch_says_what_the_target_wrote(corpus):
    batch = Batches(corpus, made.TAPS, rows=4, longest=20, seed=0).at(0)
    assert batch.tokens.shape == batch.written.shape == (4, 128)
    assert not batch.written[:, 20:].any()
    # Answers have 24 tokens: cut at 20, all that follows the prompt is written.
    begins = batch.written.argmax(axis=1)
    assert (batch.written.sum(axis=1) == 20 - begins).all()
    assert ((begins >= 2) & (begins <= 6)).all()


def test_other_texts_do_not_get_into_a_folder(model, corpus):
    other = dataclasses.replace(made.RECIPE, seed=4)
    with pytest.raises(UserError, match="`seed` is 3, but 4 is asked for"):
        Corpus.create(corpus.folder, other.to_json())


def test_texts_of_another_model_are_refused(corpus):
    corpus.refuse_other("tiny", "0" * 64)
    with pytest.raises(UserError, match="these texts are of tiny, not of tall"):
        corpus.refuse_other("tall", "1" * 64)


@pytest.mark.parametrize("name", ["tokens", "lengths", "starts"])
def test_a_broken_file_of_texts_is_refused(corpus, tmp_path, name):
    texts = corpus.texts(0)
    broken = texts._replace(**{name: getattr(texts, name)[:-1]})
    other = Corpus(tmp_path)
    other.write_texts(0, broken)
    with pytest.raises(UserError, match="do not fit its tokens"):
        other.texts(0)


def test_states_that_are_not_of_the_texts_are_refused(corpus, tmp_path):
    other = Corpus(tmp_path)
    other.write_texts(0, corpus.texts(0))
    other.write_states(0, made.TAPS, corpus.states(1, made.TAPS))
    batches = Batches(other, made.TAPS, rows=4, longest=64, seed=0)
    with pytest.raises(UserError, match="`hidden` is not there for each of"):
        batches.at(0)


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no training texts; make them with"):
        Corpus.open(tmp_path / "nowhere")
