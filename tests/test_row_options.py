"""What may be asked of a row, in which forms, and what is refused in which words."""

import math

import numpy as np
import pytest

import jaxspec
from jaxspec.batching import pack, pack_eos, pack_sampling, pack_sequences
from jaxspec.loading import LanguageModel
from jaxspec.requests import make_requests
from jaxspec.row_options import OPTIONS, check_options, columns_of
from tests import fakes

INF, NAN = math.inf, math.nan
HUGE = 10**400  # no float holds it
PROMPTS = [[5, 6, 7], [1, 2], [3]]
NOT_NUMBERS = ("hot", True, [], {}, (1, "x", 3), HUGE, -HUGE, NAN, INF, -INF)
NOT_COUNTS = (*NOT_NUMBERS, -1, 1.5, 2**31)
BAD = {
    "max_new_tokens": (*NOT_COUNTS, None),
    "min_new_tokens": NOT_COUNTS,
    "temperature": (*NOT_NUMBERS, -1, -1e-9, 1e31, None),
    "top_k": NOT_COUNTS,
    "top_p": (*NOT_NUMBERS, 0, -0.1, 1.0001),
    "min_p": (*NOT_NUMBERS, -0.1, 1.1),
    "repetition_penalty": (*NOT_NUMBERS, 0, -1.0, 1e-31, 1e31),
    "presence_penalty": (*NOT_NUMBERS, 1e31, -1e31),
    "frequency_penalty": (*NOT_NUMBERS, 1e31, -1e31),
    "logit_bias": (
        *("x", 3, [3, 4, 5], [(1, 2.0)] * 3, {"a": 1.0}, {1.5: 1.0}, {-1: 1.0}),
        *({True: 1.0}, {1: "x"}, {1: None}, {1: NAN}, {1: INF}, {1: 1e31}, {1: HUGE}),
    ),
    "banned_sequences": (
        *("x", 3, [[]], [[1], []], [-1], [1.5], [True], ["a"], [[1, -2]], {1: 2}),
        *([[1, [2.0]], [3], [4]], [[[1]], [[]], [[2]]], [None, "a", None]),
    ),
    "stop_sequences": ("x", 3, [[]], [-1], [[1.5]], [None, [[]], None]),
    "stop": (3, "", [""], ["a", ""], [1], [["a"], [""], ["b"]], {"a": 1}, b"a", [b"a"]),
    "seed": (*NOT_NUMBERS, -1, 1.5, 2**64, None),
}


@pytest.fixture(scope="module")
def model():
    return LanguageModel("tiny", fakes.tiny(1))


@pytest.fixture(scope="module")
def generator(model):
    return jaxspec.Generator(model)


def test_every_option_has_bad_values():
    assert BAD.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_each_bad_value_is_named_before_any_compute(generator, name):
    for value in BAD[name]:
        # A list of numbers is one value a row, and says itself what is wrong.
        words = rf"{name} (is .*, expected|has \d+ values|must be given)"
        with pytest.raises(jaxspec.UserError, match=words) as error:
            generator.generate(PROMPTS, **{name: value})
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
        with pytest.raises(jaxspec.UserError, match=words):
            check_options(3, **{name: value})
    assert [program.dispatches for program in generator.programs] == [0, 0, 0]


@pytest.mark.parametrize("name", OPTIONS)
def test_one_bad_value_among_good_ones_is_named(name):
    good = GOOD[name]
    for value in BAD[name]:
        if not OPTIONS[name].is_column(value) and value is not None:
            with pytest.raises(jaxspec.UserError, match=f"{name} is .*expected"):
                check_options(3, **{name: [good, value, good]})


GOOD = {
    "max_new_tokens": 3,
    "min_new_tokens": 0,
    "temperature": 0.5,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0.0,
    "repetition_penalty": 1e-30,
    "presence_penalty": -1e30,
    "frequency_penalty": 1,
    "logit_bias": {0: -INF, 63: 1e30},
    "banned_sequences": [[1, 2], 3],
    "stop_sequences": [[1, 2], 3],
    "stop": ["a", "bc"],
    "seed": 2**64 - 3,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_for_all_and_one_for_each_are_the_same(model, name):
    if name == "stop":
        check_options(3, stop=GOOD[name])
        return
    for_all = make_requests(model, PROMPTS, **{name: GOOD[name]})
    each = [GOOD[name]] * 3
    if name == "seed":
        each = [GOOD[name] + row for row in range(3)]
    for container in (list, tuple):
        one_each = make_requests(model, PROMPTS, **{name: container(each)})
        assert one_each == for_all
    for count in (2, 4):
        words = f"{name} has {count} values for 3 prompts"
        with pytest.raises(jaxspec.UserError, match=words):
            check_options(3, **{name: [GOOD[name]] * count})


COLUMNS = {
    "banned_sequences": {
        # As given, then as three rows hold it.
        "ids": ([7, 8], [[[7], [8]]] * 3),
        "sequences": ([[7, 8], [9]], [[[7, 8], [9]]] * 3),
        "ids and sequences": ([7, (8, 9)], [[[7], [8, 9]]] * 3),
        "as many as rows": ([[1], [2], [3]], [[[1], [2], [3]]] * 3),
        "none": ([], [[]] * 3),
        "for each": ([[[1, 2]], [[3], [4]], []], [[[1, 2]], [[3], [4]], []]),
        "for each or none": ([None, [[3]], None], [[], [[3]], []]),
        "ids for each or none": ([None, [3, 4], []], [[], [[3], [4]], []]),
        "none for each": ([None] * 3, [[]] * 3),
    },
    "logit_bias": {
        "all": ({1: 2.0}, [{1: 2.0}] * 3),
        "each": ([{1: 2.0}, {}, {3: -INF}], [{1: 2.0}, {}, {3: -INF}]),
        "each or none": ([{1: 2.0}, None, None], [{1: 2.0}, {}, {}]),
        "none": ({}, [{}] * 3),
    },
    "stop": {
        "text": ("ab", [["ab"]] * 3),
        "texts": (["ab", "c"], [["ab", "c"]] * 3),
        "as many as rows": (["a", "b", "c"], [["a", "b", "c"]] * 3),
        "each": ([["a"], ["b", "c"], []], [["a"], ["b", "c"], []]),
        "each or none": (["a", None, ["b"]], [["a"], [], ["b"]]),
        "none": ([], [[]] * 3),
    },
}
COLUMNS["stop_sequences"] = COLUMNS["banned_sequences"]


class Reads:
    """As much of a tokenizer as a check of stop texts asks for."""

    eos_ids = ()


@pytest.mark.parametrize(
    "name, form", [(name, form) for name, forms in COLUMNS.items() for form in forms]
)
def test_collections_for_all_and_for_each(model, name, form):
    given, rows = COLUMNS[name][form]
    reader = LanguageModel("tiny", model.decoder, Reads())
    requests = make_requests(reader, PROMPTS, **{name: given})
    assert [getattr(request, name) for request in requests] == rows
    check_options(3, **{name: given})


def test_an_option_is_there_for_every_row_or_for_none():
    for name in ("min_new_tokens", "top_k", "top_p", "min_p", "presence_penalty"):
        words = f"{name} must be given for every prompt or for none"
        with pytest.raises(jaxspec.UserError, match=words):
            check_options(3, **{name: [GOOD[name], None, GOOD[name]]})
        check_options(3, **{name: [None] * 3})


def test_ids_outside_the_vocabulary_are_refused_by_row(model):
    for name, value in {
        "logit_bias": {3: 1.0, 64: 1.0},
        "banned_sequences": [[1, 2], [3, 64]],
        "stop_sequences": [2, 64],
    }.items():
        words = f"prompt 1: {name} names id 64, outside the 64 known ids"
        with pytest.raises(jaxspec.UserError, match=words) as error:
            make_requests(model, PROMPTS, **{name: [None, value, None]})
        assert "prompt 0" not in str(error.value)
        with pytest.raises(jaxspec.UserError, match=name):
            make_requests(model, PROMPTS, **{name: [None, {2**70: 1.0}, None]})
    make_requests(model, PROMPTS, logit_bias={63: 1.0}, banned_sequences=[63])


def test_min_new_tokens_is_at_most_max_new_tokens():
    words = "prompt 1: min_new_tokens is 5, over max_new_tokens, 4"
    with pytest.raises(jaxspec.UserError, match=words) as error:
        check_options(3, min_new_tokens=5, max_new_tokens=[5, 4, 9])
    assert "prompt 0" not in str(error.value) and "prompt 2" not in str(error.value)
    check_options(1, min_new_tokens=128)
    with pytest.raises(jaxspec.UserError, match="over max_new_tokens, 128"):
        check_options(1, min_new_tokens=129)


def test_stop_texts_need_a_tokenizer(model):
    with pytest.raises(jaxspec.UserError, match="tiny has no tokenizer to find stop"):
        make_requests(model, PROMPTS, stop=[None, "a", None])
    make_requests(model, PROMPTS, stop=[])


def test_all_faults_of_all_options_come_at_once(model):
    given = {name: values[0] for name, values in BAD.items()}
    with pytest.raises(jaxspec.UserError) as error:
        make_requests(model, [*PROMPTS, []], **given)
    message = str(error.value)
    assert all(f"{name} is" in message for name in OPTIONS)
    assert "prompt 3 is empty" in message
    with pytest.raises(jaxspec.UserError) as error:
        make_requests(
            model, PROMPTS, logit_bias={64: 1.0}, stop_sequences=[99], stop="a"
        )
    for part in ("logit_bias names", "stop_sequences names", "no tokenizer"):
        assert part in str(error.value)


def test_an_unknown_option_is_an_error_of_the_program():
    with pytest.raises(TypeError, match="unknown options: temprature, topk"):
        columns_of(2, {"topk": 1, "temprature": 1.0})


def test_a_seed_for_all_counts_up():
    assert columns_of(3, {"seed": 5})[0]["seed"] == [5, 6, 7]
    assert columns_of(3, {})[0]["seed"] == [0, 1, 2]
    with pytest.raises(jaxspec.UserError, match=f"seed is {2**64}, expected"):
        check_options(3, seed=2**64 - 2)


def test_no_prompts_take_any_option():
    columns, faults = columns_of(0, {"temperature": 1.0, "stop": "a", "seed": 3})
    assert not faults and set(map(len, columns.values())) == {0}


def requests_of(model, **options):
    reader = LanguageModel("tiny", model.decoder, Reads())
    return make_requests(reader, PROMPTS, **options)


def test_absent_options_make_no_arrays(model):
    sampling = pack_sampling(requests_of(model), 4, 64)
    assert sampling.temperature.tolist() == [0] * 4
    assert all(each is None for each in sampling[1:])
    empty = {"logit_bias": {}, "banned_sequences": []}
    sampling = pack_sampling(requests_of(model, **empty), 4, 64)
    assert all(each is None for each in sampling[1:])


def test_options_become_arrays_and_idle_rows_ask_for_nothing(model):
    requests = requests_of(
        model,
        temperature=[0.0, 0.5, 1.0],
        top_k=[3, 2, 0],
        top_p=0.5,
        min_p=[0.1, 0.2, 0.3],
        repetition_penalty=1.5,
        presence_penalty=[1, 2, 3],
        frequency_penalty=0.5,
        logit_bias=[{3: 1.5}, None, {0: -INF, 63: -2}],
        banned_sequences=[None, [[1, 2], 3], None],
        min_new_tokens=[1, 2, 3],
    )
    sampling = pack_sampling(requests, 4, 64)
    np.testing.assert_array_equal(sampling.temperature, np.float32([0, 0.5, 1, 0]))
    np.testing.assert_array_equal(sampling.top_k, [3, 2, 0, 0])
    np.testing.assert_array_equal(sampling.top_p, np.float32([0.5, 0.5, 0.5, 1]))
    np.testing.assert_array_equal(sampling.min_p, np.float32([0.1, 0.2, 0.3, 0]))
    np.testing.assert_array_equal(sampling.repetition_penalty, [1.5, 1.5, 1.5, 1])
    np.testing.assert_array_equal(sampling.presence_penalty, [1, 2, 3, 0])
    np.testing.assert_array_equal(sampling.frequency_penalty, [0.5, 0.5, 0.5, 0])
    np.testing.assert_array_equal(sampling.min_new_tokens, [1, 2, 3, 0])
    bias = np.zeros((4, 64), np.float32)
    bias[0, 3], bias[2, 0], bias[2, 63] = 1.5, -INF, -2
    np.testing.assert_array_equal(sampling.logit_bias, bias)
    expected = pack_sequences([[], [[1, 2], [3]], []], 4)
    for one, other in zip(sampling.banned, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    dtypes = [
        np.asarray(each).dtype for each in sampling if not isinstance(each, tuple)
    ]
    assert set(dtypes) == {np.dtype("f4"), np.dtype("i4")}


def test_the_extreme_values_fit_their_arrays(model):
    """Warnings are errors here: nothing overflows on its way to float32 or int32."""
    extreme = {
        "temperature": [1e30, 1e-300, 0],
        "top_k": 2**31 - 1,
        "top_p": 5e-324,
        "repetition_penalty": [1e30, 1e-30, 1],
        "presence_penalty": [1e30, -1e30, 0],
        "max_new_tokens": 2**31 - 1,
        "min_new_tokens": 2**31 - 1,
        "logit_bias": {0: 1e30, 1: -1e30, 2: -INF},
        "seed": [2**64 - 1, 0, 2**32],
    }
    requests = requests_of(model, **extreme)
    sampling = pack_sampling(requests, 4, 64)
    assert np.isfinite(sampling.temperature).all()
    prompts = pack(requests, 4, 512)
    assert prompts.limit.tolist() == [512, 512, 512, 1]
    assert prompts.keys.tolist() == [[2**32 - 1] * 2, [0, 0], [1, 0], [0, 0]]


def test_eos_ids_are_ids():
    assert pack_eos([7, 3], 1).tolist() == [[3, 7, -1, -1, -1, -1, -1, -1]]
    assert pack_eos({np.uint32(5)}, 1)[0].tolist()[:2] == [5, -1]
    assert pack_eos((), 2).tolist() == [[-1] * 8] * 2
    assert pack_eos(range(9), 3).shape == (3, 16)


@pytest.mark.parametrize("value", [5, [-1], [1.5], ["a"], "ab", [2**31], [None], [[1]]])
def test_other_eos_ids_are_refused_before_any_compute(generator, value):
    with pytest.raises(jaxspec.UserError, match=r"eos_ids is .*expected ids"):
        generator.generate(PROMPTS, eos_ids=value)
    assert [program.dispatches for program in generator.programs] == [0, 0, 0]
