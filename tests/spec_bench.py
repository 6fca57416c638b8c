"""Trained drafters on Spec-Bench questions, against plain decoding in the same run.

    python -m tests.spec_bench FILE.jsonl RESULTS.jsonl DRAFTER...
    python -m tests.spec_bench FILE.jsonl RESULTS.jsonl          # only the table

FILE.jsonl has Spec-Bench's questions (Xia et al. 2024); the first turns of the first 5
of each category are asked, one of each category after the other. A DRAFTER is one that
`Generator` takes by name, with its shape after an @: `prompt-lookup@7` is a chain of 7,
`eagle:head@4,2,1` a tree. Every question is answered by plain decoding and by all
drafters in turn, greedily and at temperature 1. Answers are added to RESULTS.jsonl; a
run that was interrupted goes on.
"""

import collections
import json
import pathlib
import sys

import jaxspec

MODEL = "smollm2-135m-instruct"
QUESTIONS, NEW = 5, 128
TEMPERATURES = (0.0, 1.0)
PLAIN = "plain"


def questions(path):
    """The first few of each category, the first of all categories first."""
    by_category = collections.defaultdict(list)
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question)
    return [
        asked[number]
        for number in range(QUESTIONS)
        for asked in by_category.values()
        if number < len(asked)
    ]


def generator(model, name):
    if name == PLAIN:
        return jaxspec.Generator(model)
    drafter, _, shape = name.partition("@")
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    if len(sizes) > 1:
        return jaxspec.Generator(model, drafter, tree=sizes)
    return jaxspec.Generator(model, drafter, draft_tokens=sizes[0] if sizes else None)


def answer(made, question, name, temperature):
    """Answers once to compile where need be, and once more to be timed."""
    chat = [{"role": "user", "content": question["turns"][0]}]

    def ask():
        return made.generate(
            chat,
            max_new_tokens=NEW,
            temperature=temperature,
            seed=question["question_id"],
        )

    result = ask()
    if result.stats.compile_seconds:
        result = ask()
    stats = result.stats
    return {
        "question": question["question_id"],
        "category": question["category"],
        "drafter": name,
        "temperature": temperature,
        "tokens": len(result.token_ids) - 1,
        "rounds": stats.rounds,
        "seconds": stats.decode_seconds,
        "ids": result.token_ids,
    }


def measure(file, results, names):
    path = pathlib.Path(results)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {
        (each["question"], each["drafter"], each["temperature"])
        for each in map(json.loads, lines)
    }
    model = jaxspec.load(MODEL)
    made = {name: generator(model, name) for name in (PLAIN, *names)}
    for question in questions(file):
        for temperature in TEMPERATURES:
            for name, each in made.items():
                if (question["question_id"], name, temperature) not in done:
                    line = json.dumps(answer(each, question, name, temperature))
                    with path.open("a") as out:
                        out.write(line + "\n")


def table(results):
    """By drafter and temperature, over all questions and by category."""
    lines = pathlib.Path(results).read_text().splitlines()
    answers = list(map(json.loads, lines))
    groups = collections.defaultdict(dict)
    for each in answers:
        key = each["drafter"], each["temperature"]
        groups[key][each["question"]] = each
    for (name, temperature), own in groups.items():
        if name == PLAIN:
            continue
        plain = groups[PLAIN, temperature]
        shared = sorted(own.keys() & plain.keys())
        report(f"{name}, temperature {temperature:g}", own, plain, shared)
        for category in sorted({own[q]["category"] for q in shared}):
            asked = [q for q in shared if own[q]["category"] == category]
            report(f"    {category}", own, plain, asked)


def report(title, own, plain, asked):
    def total(answers, name):
        return sum(answers[question][name] for question in asked)

    per_round = total(own, "tokens") / max(total(own, "rounds"), 1)
    speeds = [total(each, "tokens") / total(each, "seconds") for each in (own, plain)]
    same = sum(own[q]["ids"] == plain[q]["ids"] for q in asked)
    print(
        f"{title}: {per_round:.2f} tokens per round, {speeds[0] / speeds[1]:.2f} times "
        f"plain ({speeds[0]:.1f} against {speeds[1]:.1f} tokens/s), the same ids for "
        f"{same} of {len(asked)} questions"
    )


if __name__ == "__main__":
    file, results, *names = sys.argv[1:]
    if names:
        measure(file, results, names)
    table(results)
