"""The generator on tiny random models: what a caller sees."""

import numpy as np
import pytest

import jaxspec
from jaxspec.batching import chunks, pack, power_of_two
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.loading import LanguageModel
from jaxspec.requests import make_requests
from tests import fakes, runs
from tests.checkpoints.writers import tiny_config, write_hf_folder
from tests.executions import counting
from tests.tokenizers_made import write_folder

IDS = [[5, 6, 7, 8, 9, 5, 6], [1, 2, 3], list(range(1, 14))]


THREE_BUT_PLAIN = ("lookup", "drafting")
THREE = ["plain", pytest.param("lookup", marks=pytest.mark.full), "drafting"]
# One of the drafters here is random.
pytestmark = pytest.mark.filterwarnings("ignore:the drafter's first tokens")


@pytest.fixture(scope="module")
def target():
    return LanguageModel("tiny", fakes.tiny(1))


@pytest.fixture(scope="module")
def draft():
    return LanguageModel("tiny-draft", fakes.tiny(2, layers=1))


@pytest.fixture(scope="module")
def plain(target):
    return jaxspec.Generator(target)


@pytest.fixture(scope="module")
def lookup(target):
    return jaxspec.Generator(target, "prompt-lookup", draft_tokens=3)


@pytest.fixture(scope="module")
def drafting(target, draft):
    return jaxspec.Generator(target, draft, draft_tokens=3)


def ids_of(results):
    return [result.token_ids for result in results]


def test_every_drafter_writes_what_the_target_writes(plain, lookup, drafting):
    expected = ids_of(plain.generate(IDS, max_new_tokens=40))
    assert len({token for ids in expected for token in ids}) >= 8
    for generator in (lookup, drafting):
        assert ids_of(generator.generate(IDS, max_new_tokens=40)) == expected


@pytest.mark.full
def test_a_tree_writes_what_the_target_writes_in_fewer_rounds(plain, target):
    """The draft is the target with noise: its second guess is often the right one."""
    near = jaxspec.LanguageModel("near", fakes.near(target.decoder, 0.3))
    chain = jaxspec.Generator(target, near, draft_tokens=3)
    tree = jaxspec.Generator(target, near, tree=(3, 2, 1))
    expected = ids_of(plain.generate(IDS, max_new_tokens=40))
    grown = jaxspec.Generator(target, near, tree=DynamicTree(4, 3, 9))
    made = (chain, tree, grown)
    found = {each: each.generate(IDS, max_new_tokens=40) for each in made}
    for results in found.values():
        assert ids_of(results) == expected
    rounds = [sum(r.stats.rounds for r in results) for results in found.values()]
    print(f"rounds of a chain, a tree and a dynamic tree: {rounds}")
    assert max(rounds[1:]) < 0.9 * rounds[0]
    for result in found[tree] + found[grown]:
        assert 0 <= result.stats.acceptance_rate <= 1
        assert result.stats.drafted > result.stats.rounds


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tree": (2, 1), "draft_tokens": 3}, "draft_tokens and tree are both given"),
        ({"tree": (2, 1), "rule": "block"}, "rule block takes chains, but a tree of 4"),
        ({"tree": (2, 0)}, "tree is (2, 0), expected whole numbers over 0"),
        ({"tree": ()}, "tree is ()"),
        ({"tree": 5}, "tree is 5, expected children by level"),
        (
            {"draft_tokens": 257},
            "draft_tokens is 257, expected a whole number from 1 to",
        ),
        ({"draft_tokens": True}, "draft_tokens is True"),
        ({"tree": (20, 20)}, "tree has 420 nodes, expected 1 to 256"),
        ({"tree": Topology.chain(300)}, "tree has 300 nodes"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(target, draft, options, part):
    with pytest.raises(jaxspec.UserError) as error:
        jaxspec.Generator(target, draft, **options)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("drafter", "part"),
    [
        (None, "tree has no effect with the drafter None"),
        ("prompt-lookup", "a tree needs a draft model or early-exit, medusa, eagle"),
    ],
)
def test_a_tree_needs_a_drafter_that_draws_it(target, drafter, part):
    with pytest.raises(jaxspec.UserError, match=part):
        jaxspec.Generator(target, drafter, tree=(2, 1))


@pytest.mark.parametrize(
    "name",
    ["plain", *(pytest.param(n, marks=pytest.mark.full) for n in THREE_BUT_PLAIN)],
)
def test_a_batch_is_its_rows_one_by_one(request, name):
    """With the compiler's own options, under which plain batches once went wrong."""
    generator = request.getfixturevalue(name)
    together = ids_of(generator.generate(IDS, max_new_tokens=20))
    alone = [generator.generate(ids, max_new_tokens=20).token_ids for ids in IDS]
    assert together == alone
    assert ids_of(generator.generate(IDS, max_new_tokens=20, batch_size=2)) == alone


@pytest.mark.parametrize("name", THREE)
def test_a_generator_writes_what_the_loop_writes_when_called_by_hand(
    request, target, name
):
    generator = request.getfixturevalue(name)
    for prompts in (IDS, IDS[:1]):
        batch = runs.Batch(prompts, new=20)
        expected = runs.generate(target.decoder, Autoregressive(), batch).ids
        assert ids_of(generator.generate(prompts, max_new_tokens=20)) == expected


@pytest.mark.parametrize("count", range(1, 6))
def test_bl24_never_more_than_max_new_tokens(plain, lookup, count):
    expected = plain.generate(IDS[0], max_new_tokens=count)
    result = lookup.generate(IDS[0], max_new_tokens=count)
    assert len(result.token_ids) == count
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == "length"


def test_bl26_nothing_asked_calls_no_model(target):
    generator = jaxspec.Generator(target, "prompt-lookup")
    [result, other] = generator.generate(IDS[:2], max_new_tokens=0)
    assert result.token_ids == other.token_ids == []
    assert result.text == "" and result.finish_reason == "length"
    assert result.stats.acceptance_rate is None and result.stats.rounds == 0
    assert [program.dispatches for program in generator.programs] == [0, 0, 0]


def test_bl26_a_row_may_ask_for_nothing_beside_one_that_does(plain):
    none, some = plain.generate(IDS[:2], max_new_tokens=[0, 4])
    assert none.token_ids == [] and len(some.token_ids) == 4
    assert some.token_ids == plain.generate(IDS[1], max_new_tokens=4).token_ids


def test_bl26_unequal_lists_name_both_lengths(plain):
    with pytest.raises(jaxspec.UserError, match="seed has 2 values for 3 prompts"):
        plain.generate(IDS, seed=[1, 2])


def test_bl26_a_prompt_shorter_than_the_ngram(plain, lookup):
    expected = plain.generate([3], max_new_tokens=9)
    assert lookup.generate([3], max_new_tokens=9).token_ids == expected.token_ids


def test_no_prompts_give_no_results(plain):
    assert plain.generate([]) == []


def test_bl18_a_seed_gives_the_same_ids_alone_and_in_a_batch(drafting):
    options = {"max_new_tokens": 30, "temperature": 1.0}
    alone = drafting.generate(IDS[0], seed=7, **options).token_ids
    batch = drafting.generate([IDS[1], IDS[2], IDS[0]], seed=[1, 2, 7], **options)
    assert batch[2].token_ids == alone
    assert drafting.generate(IDS[0], seed=7, **options).token_ids == alone
    assert drafting.generate(IDS[0], seed=8, **options).token_ids != alone


def test_a_seed_of_64_bits_is_not_cut(plain):
    options = {"max_new_tokens": 30, "temperature": 1.0}
    high = plain.generate(IDS[0], seed=2**40 + 7, **options).token_ids
    assert high != plain.generate(IDS[0], seed=7, **options).token_ids


def test_eos_ends_a_row_and_stays_in_the_ids(plain, lookup, drafting):
    free = plain.generate(IDS[0], max_new_tokens=30).token_ids
    end = free[11]
    expected = free[: free.index(end) + 1]
    for generator in (plain, lookup, drafting):
        result = generator.generate(IDS[0], max_new_tokens=30, eos_ids=[60, end])
        assert result.token_ids == expected and result.finish_reason == "eos"


def test_the_capacity_ends_a_row(target, plain):
    generator = jaxspec.Generator(target, "prompt-lookup", capacity=20)
    result = generator.generate(IDS[2], max_new_tokens=50)
    assert len(result.token_ids) == 20 - len(IDS[2])
    assert result.finish_reason == "length"
    assert result.token_ids == plain.generate(IDS[2], max_new_tokens=7).token_ids


def test_streamed_rounds_are_the_same_program(drafting):
    requests = make_requests(drafting.target, [IDS[0]], max_new_tokens=20)
    prompts = pack(requests, 1, 512)
    whole = drafting.generate(IDS[0], max_new_tokens=20)
    before = drafting.programs[2].compilations
    options = drafting.pack_options(requests, 1, (), None)
    watch = lambda state: state  # noqa: E731
    states = list(drafting._states(prompts, options, rounds=1, watch=watch))
    tokens = np.asarray(states[-1].tokens)[0, 7 : int(states[-1].length[0])].tolist()
    assert tokens == whole.token_ids
    assert len(states) == whole.stats.rounds + 1
    assert drafting.programs[2].compilations == before


def test_bl56_lengths_and_values_share_programs(target, draft):
    generator = jaxspec.Generator(target, draft, draft_tokens=3)
    options = {"temperature": 0.0, "top_p": 0.9, "batch_size": 2}
    generator.generate([[1] * 5, [2]], **options)
    with counting() as counts:
        for length in range(5, 17):
            generator.generate(
                [[1] * length, [2, 3]],
                max_new_tokens=length,
                temperature=0.1 * length,
                top_p=0.5,
                seed=length,
                batch_size=2,
            )
        generator.generate([[1] * 6, [2], [3]], **options)
    assert counts.compilations == 0
    # One dispatch for the chunk of prompt and one for all rounds, for 14 batches.
    assert counts.executions == 2 * 14


def test_another_bucket_compiles_one_program(target):
    generator = jaxspec.Generator(target)
    generator.generate([1] * 16, max_new_tokens=4)
    with counting() as counts:
        generator.generate([1] * 17, max_new_tokens=4)
    assert counts.compilations == 1 and counts.executions == 2


def test_a_long_prompt_goes_in_pieces():
    config_capacity = 2048
    requests = [_request(length) for length in (1100, 20)]
    pieces = list(chunks(pack(requests, 2, config_capacity)))
    assert [piece.tokens.shape[1] for piece, _ in pieces] == [512, 512, 128]
    assert [piece.count.tolist() for piece, _ in pieces] == [
        [512, 20],
        [512, 0],
        [76, 0],
    ]
    assert [bool(final) for _, final in pieces] == [False, False, True]
    fed = np.concatenate([piece.tokens[0, : piece.count[0]] for piece, _ in pieces])
    assert fed.tolist() == requests[0].ids


def _request(length):
    model = LanguageModel("tiny", fakes.tiny(1))
    return make_requests(model, [[i % 60 for i in range(length)]])[0]


def test_buckets_are_powers_of_two():
    sizes = [power_of_two(size, 16) for size in (1, 16, 17, 512, 513)]
    assert sizes == [16, 16, 32, 512, 1024]


BAD = {
    "temperature": (-1, float("nan"), float("inf"), "hot", True),
    "top_p": (0, -0.1, 1.5, float("nan")),
    "min_p": (-0.1, 1.1),
    "top_k": (-1, 1.5),
    "max_new_tokens": (-1, 2.5),
    "seed": (-1, 2**64),
    "batch_size": (0, -1, 1.5),
}


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_named_before_any_compute(plain, name, value):
    before = [program.dispatches for program in plain.programs]
    with pytest.raises(jaxspec.UserError, match=f"{name} is .*expected"):
        plain.generate(IDS, **{name: value})
    assert [program.dispatches for program in plain.programs] == before


def test_all_faults_come_at_once(plain):
    with pytest.raises(jaxspec.UserError) as error:
        plain.generate([[1], [], [99]], temperature=-1, top_p=2)
    message = str(error.value)
    for fault in (
        "temperature is -1",
        "top_p is 2",
        "prompt 1 is empty",
        "prompt 2: id",
    ):
        assert fault in message
    assert "\n" not in message


def test_a_prompt_must_fit(target):
    generator = jaxspec.Generator(target, capacity=16)
    with pytest.raises(
        jaxspec.UserError, match="prompt 1 has 16 tokens, but a capacity"
    ):
        generator.generate([[1], [2] * 16])
    with pytest.raises(jaxspec.UserError, match="capacity is 513, expected 2 to 512"):
        jaxspec.Generator(target, capacity=513)


@pytest.mark.parametrize("count", [0, -1, 1.5, "4"])
def test_draft_tokens_is_a_whole_number_over_0(target, count):
    with pytest.raises(jaxspec.UserError, match="draft_tokens is"):
        jaxspec.Generator(target, "prompt-lookup", draft_tokens=count)


def test_a_generator_from_a_reference_is_one_of_the_loaded_model(tmp_path):
    folder = str(write_hf_folder(tmp_path, tiny_config("llama", vocab_size=512)))
    write_folder(tmp_path, jinja=None)
    short = jaxspec.Generator.from_pretrained(
        folder, "prompt-lookup", draft_tokens=3, dtype="bfloat16"
    )
    by_hand = jaxspec.Generator(jaxspec.load(folder, "bfloat16"), PromptLookup(3))
    ids = [5, 6, 7] * 4
    one, other = (g.generate(ids, max_new_tokens=9) for g in (short, by_hand))
    assert one.token_ids == other.token_ids
    assert short.target.decoder.dtype == "bfloat16" and short.drafter.nodes == 3


@pytest.mark.parametrize("drafter", [None, PromptLookup(3)])
def test_k_is_not_ignored(target, drafter):
    with pytest.raises(jaxspec.UserError, match="draft_tokens has no effect"):
        jaxspec.Generator(target, drafter, draft_tokens=2)


def test_an_unknown_drafter_is_refused(target):
    with pytest.raises(jaxspec.UserError, match="drafter is 5, expected"):
        jaxspec.Generator(target, 5)
    with pytest.raises(jaxspec.UserError, match="'magic', expected auto, "):
        jaxspec.Generator(target, "magic")


def test_an_unknown_option_is_refused(plain):
    with pytest.raises(TypeError, match="unexpected keyword"):
        plain.generate(IDS, temprature=1.0)
    with pytest.raises(TypeError, match="unknown options: temprature"):
        plain.iterate(IDS, temprature=1.0)


def test_a_model_without_a_tokenizer_takes_ids_only(plain):
    with pytest.raises(jaxspec.UserError, match="prompt 0: tiny has no tokenizer"):
        plain.generate("text")


@pytest.mark.full
def test_bl31_vocabularies_that_differ_in_padding(plain, target):
    expected = ids_of(plain.generate(IDS, max_new_tokens=24))
    for vocab in (48, 80):
        padded = LanguageModel("other", fakes.tiny(3, layers=1, vocab=vocab))
        generator = jaxspec.Generator(target, padded, draft_tokens=2)
        assert ids_of(generator.generate(IDS, max_new_tokens=24)) == expected
        for result in generator.generate(IDS, max_new_tokens=24, temperature=1.5):
            assert max(result.token_ids) < 64


def test_bl66_figures_hold_together(lookup):
    for result in lookup.generate(IDS, max_new_tokens=50):
        stats = result.stats
        assert 0 <= stats.accepted <= stats.drafted
        assert stats.acceptance_rate is None or 0 <= stats.acceptance_rate <= 1
        # The first token is prefill's; the rest are accepted ones and one a round.
        assert len(result.token_ids) - 1 <= stats.accepted + stats.rounds
        emitted = stats.tokens_per_round * stats.rounds
        assert emitted == pytest.approx(len(result.token_ids) - 1)
        assert sum(result.from_draft) == stats.accepted
