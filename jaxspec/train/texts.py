"""Training texts: what the target itself writes.

A drafter guesses what its target says, so that the target's own samples are the data
to learn from, and no data set is needed: even the questions can be its own, drawn from
the bare beginning of a chat (Xu et al. 2024, Magpie).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.requests import Prompt, prompt_ids
from jaxspec.tokenizer import Tokenizer
from jaxspec.train.corpus import Corpus, Texts

# Stands for what the user says, to see what the chat template puts before it.
_MARK = "\ue000"
QUESTION, ANSWER = range(2)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How texts are drawn, part by part.

    Attributes:
        model: the reference of the target.
        sha256: of its files.
        rows: texts of a part; they are one batch.
        question_tokens: at most, of a question that the target asks itself.
        answer_tokens: at most.
        temperatures: of the answers, in turn; questions are drawn at 1.
        seed: of all of them.
        prompts: a hash of the given prompts; None: the target asks itself.
        writer: a hash of the draft model that answers; None: the target itself.
        texts: a hash of given texts that nobody draws.
    """

    model: str
    sha256: str
    rows: int = 16
    question_tokens: int = 96
    answer_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    prompts: str | None = None
    writer: str | None = None
    texts: str | None = None

    def to_json(self) -> dict[str, Any]:
        """What `Corpus.create` holds the folder against."""
        return dataclasses.asdict(self)

    def seeds(self, part: int, stage: int) -> list[int]:
        """The seed of each row: of nothing but the recipe, the part and the stage."""
        state = np.random.SeedSequence((self.seed, part, stage))
        return state.generate_state(self.rows).tolist()


def write_texts(
    asker: Generator, writer: Generator, corpus: Corpus, recipe: Recipe, tokens: int
) -> Iterator[int]:
    """Adds parts until answers have `tokens`; yields how many they have so far.

    Args:
        asker: of the target.
        writer: of the target too, or of the draft that is to learn from what it writes
            itself: the on-policy samples of Zhou et al. 2024 (DistillSpec), 3.
        corpus: that the parts are added to.
        recipe: of the texts.
        tokens: the least that are written.
    """
    written = sum(corpus.texts(part).written for part in range(len(corpus)))
    yield written
    while written < tokens:
        part = len(corpus)
        questions = ask(asker, recipe, part)
        if not questions:
            raise UserError(
                f"{asker.target.reference} asked itself nothing: no question of "
                f"{recipe.rows} ended within {recipe.question_tokens} tokens; give it "
                "prompts to answer"
            )
        texts = answer(writer, recipe, part, questions)
        corpus.write_texts(part, texts)
        written += texts.written
        yield written


def answer_prompts(
    writer: Generator, corpus: Corpus, recipe: Recipe, prompts: Sequence[Prompt]
) -> Iterator[int]:
    """Adds the answers to given prompts; yields how many there are so far."""
    parts = -(-len(prompts) // recipe.rows)
    for part in range(len(corpus), parts):
        yield part * recipe.rows
        given = prompts[part * recipe.rows : (part + 1) * recipe.rows]
        corpus.write_texts(part, answer(writer, recipe, part, given))
    yield len(prompts)


def ask(generator: Generator, recipe: Recipe, part: int) -> list[Prompt]:
    """Questions that the target asks itself, as chats."""
    tokenizer = generator.target.tokenizer
    if tokenizer is None:
        raise UserError(f"{generator.target.reference} has no tokenizer")
    results = generator.generate(
        [chat_prefix(tokenizer)] * recipe.rows,
        max_new_tokens=recipe.question_tokens,
        temperature=1.0,
        seed=recipe.seeds(part, QUESTION),
    )
    # One that was cut or is empty is no question.
    questions = [r.text.strip() for r in results if r.finish_reason == "eos"]
    return [[{"role": "user", "content": text}] for text in questions if text]


def chat_prefix(tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat up to where the user begins to speak."""
    chat = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    before, mark, _ = chat.partition(_MARK)
    if not mark:
        raise UserError(f"the chat template of {tokenizer.source} drops the user")
    return tokenizer.encode(before)


def answer(
    writer: Generator, recipe: Recipe, part: int, prompts: Sequence[Prompt]
) -> Texts:
    """The writer's answers, as texts that begin with their prompts."""
    heat = recipe.temperatures
    rows = range(len(prompts))
    given = [prompt_ids(writer.target, prompt) for prompt in prompts]
    results = writer.generate(
        given,
        max_new_tokens=recipe.answer_tokens,
        temperature=[heat[row % len(heat)] for row in rows],
        seed=recipe.seeds(part, ANSWER)[: len(prompts)],
        batch_size=recipe.rows,
    )
    whole = [ids + r.token_ids for ids, r in zip(given, results, strict=True)]
    return Texts(
        np.concatenate([np.array(ids, np.int32) for ids in whole]),
        np.array([len(ids) for ids in whole], np.int32),
        np.array([len(ids) for ids in given], np.int32),
    )
