"""Log-probabilities of emitted tokens, against a table's own logits in float64."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, oracles, quick
from tests.executions import counting

VOCAB, NODES, NEW, CAPACITY, IMPOSSIBLE, EOS = 12, 3, 40, 64, 3, 0
INF = float("inf")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["windows", "stacked"],
)
@dataclasses.dataclass(frozen=True)
class Table(fakes.TableModel):
    """A table model that a generator takes."""

    config = SimpleNamespace(max_positions=CAPACITY)

    def logits(self, text):
        """After a text, straight from the table."""
        before = text[-2] + 1 if len(text) > 1 else 0
        return np.asarray(self.table)[(len(text) - 1) % 3, before, text[-1]]


def table(seed):
    model = Table.random(VOCAB, seed, scale=2.0, windows=(None,))
    table = model.table.at[..., IMPOSSIBLE].set(-INF).at[..., EOS].add(-4.0)
    return dataclasses.replace(model, table=table)


TARGET = table(0)
DRAFT = TARGET.near(1, 1.0)
DRAFTERS = {
    "none": None,
    "draft_model": DraftModel(DRAFT, NODES),
    "prompt_lookup": PromptLookup(NODES, min_ngram=1),
}
# Of each row; all of them are there for every row, most with a value that changes
# nothing. Rows 0 and 1 are greedy, row 2 is sampled as it is.
IDLE = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "banned_sequences": [],
    "min_new_tokens": 0,
}
ROWS = [
    {"temperature": 0.0},
    {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 1.5, 2: -INF},
        "banned_sequences": [[7], [1, 4]],
        "min_new_tokens": 9,
        "top_k": 2,
        "top_p": 0.3,
    },
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.8, "presence_penalty": 0.5},
    {"min_p": 0.1, "frequency_penalty": -0.1, "repetition_penalty": 0.8},
]
PROMPTS = [[1], [4, 5, 4, 5], [2, 0], [6, 6, 6], [8, 9, 10, 8, 9], [11, 2, 4]]
OPTIONS = {name: [row.get(name, idle) for row in ROWS] for name, idle in IDLE.items()}
ALTERNATIVES = VOCAB


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    with quick.generators():
        yield


@pytest.fixture(scope="module", params=DRAFTERS)
def case(request):
    target = jaxspec.LanguageModel("table", TARGET)
    generator = jaxspec.Generator(target, DRAFTERS[request.param], capacity=CAPACITY)
    call = functools.partial(
        generator.generate, PROMPTS, max_new_tokens=NEW, eos_ids=[EOS], **OPTIONS
    )
    results = call(log_probs=ALTERNATIVES)
    return SimpleNamespace(
        name=request.param, generator=generator, call=call, results=results
    )


def expected(row, output):
    """The raw and the warped log-probabilities of the token after `output`."""
    logits = np.float64(TARGET.logits([*PROMPTS[row], *output]))
    options = {**IDLE, **ROWS[row], "ends": [EOS]}
    options["banned"] = options.pop("banned_sequences")
    order = [*oracles.ADJUSTMENTS, *oracles.FILTERS]
    if options["temperature"] == 0:
        order = [*oracles.ADJUSTMENTS]
    warped = oracles.adjusted(logits, PROMPTS[row], output, order, **options)
    with np.errstate(divide="ignore"):
        return np.log(oracles.softmax(logits)), np.log(oracles.softmax(warped))


def test_every_token_has_the_targets_own_log_probabilities(case):
    for row, result in enumerate(case.results):
        ids, found = result.token_ids, result.log_probs
        assert len(ids) == len(found.raw) == len(found.warped) > 0
        raw, warped = zip(
            *(expected(row, ids[:place]) for place in range(len(ids))), strict=True
        )
        own = np.arange(len(ids)), ids
        np.testing.assert_allclose(found.raw, np.array(raw)[own], atol=2e-5)
        np.testing.assert_allclose(found.warped, np.array(warped)[own], atol=2e-5)
        for place, likeliest in enumerate(found.alternatives):
            # All ids but the impossible one, best first.
            order = np.argsort(-raw[place], kind="stable")[:-1]
            assert [each.id for each in likeliest] == order.tolist()
            np.testing.assert_allclose(
                [each.raw for each in likeliest], raw[place][order], atol=2e-5
            )


def test_accepted_corrected_and_bonus_tokens_were_all_met(case):
    accepted = corrected = bonus = 0
    for result in case.results:
        run = 0
        for drafted in result.from_draft[1:]:
            accepted += drafted
            bonus += not drafted and run == NODES
            corrected += not drafted and run < NODES
            run = run + 1 if drafted and run < NODES else int(drafted)
    print(case.name, accepted, corrected, bonus)
    assert corrected >= 20
    assert case.name == "none" or min(accepted, bonus) >= 5


def test_none_is_zero_by_accident(case):
    for row, result in enumerate(case.results):
        assert max(result.log_probs.raw) < -1e-4
        # Only a filter may leave one id alone; greedy rows have none.
        assert row > 2 or max(result.log_probs.warped) < -1e-4
        assert min(result.log_probs.warped) > -30


def test_greedy_rows_take_the_best_of_what_they_report(case):
    for row in (0, 1):
        result = case.results[row]
        for place, token in enumerate(result.token_ids):
            _, warped = expected(row, result.token_ids[:place])
            assert warped.argmax() == token
            assert result.log_probs.warped[place] == pytest.approx(
                warped.max(), abs=2e-5
            )


def test_json_holds_them_as_plain_numbers(case):
    result = case.results[1]
    fields = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert fields["log_probs"]["raw"] == result.log_probs.raw
    assert fields["log_probs"]["warped"] == result.log_probs.warped
    first = result.log_probs.alternatives[0][0]
    assert fields["log_probs"]["alternatives"][0][0] == {
        "id": first.id,
        "raw": first.raw,
    }


@pytest.mark.parametrize("case", ["draft_model"], indirect=True)
def test_asking_changes_no_id_and_compiles_one_program(case):
    """BL-56: with and without, one program each, and the second call compiles none."""
    before = [program.compilations for program in case.generator.programs]
    assert before == [1, 0, 1]
    without = case.call()
    assert [each.log_probs for each in without] == [None] * len(PROMPTS)
    assert [each.token_ids for each in without] == [
        each.token_ids for each in case.results
    ]
    assert "log_probs" not in without[0].to_json()
    with counting() as counts:
        case.call()
        again = case.call(log_probs=ALTERNATIVES)
    assert counts.compilations == 0
    assert [program.compilations for program in case.generator.programs] == [2, 0, 2]
    assert [each.log_probs for each in again] == [
        each.log_probs for each in case.results
    ]
