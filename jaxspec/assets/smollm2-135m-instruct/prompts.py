"""Prompts of many kinds for the model to answer, made of parts by a seed.

    python prompts.py COUNT SEED ROWS > prompts.jsonl

The questions that a model asks itself are all of a kind, and easier than those that
people ask. These are of the kinds that people ask, and none is of a test set. Those
that are answered in one batch of ROWS are of like length.
"""

import json
import pathlib
import random
import sys

PARTS = pathlib.Path(__file__).with_name("prompt_parts.json")


class Maker:
    """Draws from the lists of parts."""

    def __init__(self, lists: dict[str, list[str]], seed: int):
        self._lists, self._rng = lists, random.Random(seed)

    def of(self, name: str) -> str:
        """One of a list."""
        return self.one(self._lists[name])

    def one(self, choices: list[str]) -> str:
        """One of those given."""
        return self._rng.choice(choices)

    def some(self, name: str, fewest: int, most: int) -> str:
        """Several of a list of templates, one after the other."""
        count = self._rng.randint(fewest, most)
        return " ".join(self.fill(name) for _ in range(count))

    def fill(self, name: str) -> str:
        """One of a list of templates, its gaps filled."""
        number, sample = self._rng.randint, self._rng.sample
        people, places = (sample(self._lists[n], 3) for n in ("people", "places"))
        things = sample(self._lists["things"], 3)
        return self.of(name).format(
            name=people[0],
            name2=people[1],
            name3=people[2],
            place=places[0],
            place2=places[1],
            thing=self.of("inventions") if name == "facts" else things[0],
            thing2=things[1],
            thing3=things[2],
            topic=self.of("topics"),
            last=self.of("lasts"),
            day=self.of("days"),
            shop=self.of("shops"),
            plan=self.of("plans"),
            land=self.of("lands"),
            event=self.of("events"),
            word=self.of("words"),
            noun=self.of("nouns"),
            year=number(1890, 2023),
            n=number(2, 90),
            a=number(8, 40),
            b=number(2, 12),
            m=number(2, 9),
            h=number(5, 12) * 20,
            p=number(1, 9) * 10,
        )


def _writing(make: Maker) -> str:
    about = make.one([make.of("topics"), f"a trip to {make.of('places')}"])
    return f"Write {make.of('forms')} about {about}."


def _roleplay(make: Maker) -> str:
    return (
        f"Pretend to be {make.of('roles')}. Stay in character. What do you think of "
        f"{make.of('topics')}, and what would you tell {make.of('people')}?"
    )


def _coding(make: Maker) -> str:
    what, language = make.of("tasks"), make.of("languages")
    begin = make.one(["Write a function that", "Implement a program that"])
    return f"{begin} {what} in {language}."


def _extraction(make: Maker) -> str:
    form = make.one(["JSON", "a table", "a list", "CSV"])
    what = "the names, places, days and numbers"
    return f"Extract {what} of this text as {form}:\n{make.some('news', 3, 6)}"


def _stem(make: Maker) -> str:
    begin = make.one(["Explain", "How would you test", "What causes"])
    return f"{begin} {make.of('topics')}? Describe the {make.of('fields')} behind it."


def _humanities(make: Maker) -> str:
    return (
        f"Discuss how {make.of('topics')} and {make.of('topics')} are related, from "
        f"the point of view of {make.of('fields')}. Give examples."
    )


def _translation(make: Maker) -> str:
    return f"Translate German to English: {make.fill('german')}"


def _summarization(make: Maker) -> str:
    return f"Summarize: {make.some('news', 8, 14)}"


def _rag(make: Maker) -> str:
    asked = ["What happened in", "Who is known in", "What is planned in"]
    question = make.one(asked)
    return (
        f"{make.some('news', 4, 7)}\n\n{make.some('news', 3, 5)}\n\n"
        f"Use the text above to answer: {question} {make.of('places')}?"
    )


KINDS = (
    _writing,
    _roleplay,
    lambda make: make.fill("riddles"),
    lambda make: make.fill("maths"),
    _coding,
    _extraction,
    _stem,
    _humanities,
    _translation,
    _summarization,
    lambda make: make.fill("facts"),
    lambda make: make.fill("sums"),
    _rag,
)


def different(count: int, seed: int) -> list[str]:
    """So many prompts, of all kinds in turn, none of them twice."""
    make = Maker(json.loads(PARTS.read_text(encoding="utf-8")), seed)
    # A dict, not a set: it keeps the order.
    made: dict[str, None] = {}
    turn = 0
    while len(made) < count:
        made[KINDS[turn % len(KINDS)](make)] = None
        turn += 1
    return list(made)


def in_batches(prompts: list[str], rows: int, seed: int) -> list[str]:
    """Those of like length together, since a batch costs what its longest does."""
    by_size = sorted(prompts, key=len)
    batches = [by_size[first : first + rows] for first in range(0, len(prompts), rows)]
    # So that what an interrupted job has made is of all lengths.
    random.Random(seed).shuffle(batches)
    return [prompt for batch in batches for prompt in batch]


if __name__ == "__main__":
    count, seed, rows = map(int, sys.argv[1:])
    for prompt in in_batches(different(count, seed), rows, seed):
        print(json.dumps({"prompt": prompt}))
