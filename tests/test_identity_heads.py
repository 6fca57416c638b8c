"""SmolLM2 with every drafter that is made of it or for it, alone and under the oracle.

Heads of random weights accept nothing and would prove nothing by themselves.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core.dynamic_tree import DynamicTree
from tests import fakes, models_on_disk
from tests.drafters import eagle_files
from tests.drafters.test_medusa import medusa_layout, tensors, written
from tests.test_identity import PROMPTS, assert_identical

NEW = 40
WIDTH, VOCAB = 576, 49152
SIZES = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_attention_heads": 9}
SIZES |= {"num_key_value_heads": 3, "intermediate_size": 256}

pytestmark = [
    pytest.mark.full,
    # Random heads are what a file loaded wrongly looks like.
    pytest.mark.filterwarnings("ignore:the drafter's first tokens"),
]


@pytest.fixture(scope="module")
def smollm2():
    models_on_disk.path("smollm2-135m-instruct")
    return jaxspec.load("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def plain(smollm2):
    return jaxspec.Generator(smollm2).generate(PROMPTS, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def text(smollm2, plain):
    """The plain run's tokens, prompts included, as the oracle wants them."""
    rows = [smollm2.tokenizer.encode(r.prompt) + r.token_ids for r in plain]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens)


def medusa_file(folder):
    made = tensors(own=False, width=WIDTH)
    folder.mkdir()
    return f"medusa:{written(folder, medusa_layout(made))}"


def eagle_folder(folder):
    made = eagle_files.eagle(embedding=False, **SIZES)
    return f"eagle:{eagle_files.write(folder, *made)}"


def eagle3_folder(folder):
    # Low ids are the common ones; the oracle cannot dictate what the head never says.
    ids = [token for token in range(30_000) if token % 97]
    made = eagle_files.eagle3((1, 14, 26), draft_ids=ids, target_size=WIDTH, **SIZES)
    return f"eagle:{eagle_files.write(folder, *made)}"


CASES = {
    "early exit after 8": (lambda folder: "early-exit:8", {}),
    "early exit after 15, tree": (lambda folder: "early-exit:15", {"tree": (2, 2, 1)}),
    "early exit after 29": (lambda folder: "early-exit:29", {"draft_tokens": 2}),
    "Medusa": (medusa_file, {"tree": (3, 2, 1)}),
    "EAGLE-1": (eagle_folder, {"tree": (2, 2, 1)}),
    "EAGLE-3, dynamic tree": (eagle3_folder, {"tree": DynamicTree(4, 2, 8)}),
}


@pytest.mark.parametrize("name", CASES)
def test_smollm2_stays_exact(smollm2, plain, text, tmp_path, name):
    make, options = CASES[name]
    generator = jaxspec.Generator(smollm2, make(tmp_path / "head"), **options)
    inner = generator.drafter
    by_warp = isinstance(options.get("tree"), DynamicTree)
    alone = fakes.Oracle(inner, text, jnp.array(False), jnp.int32(0), by_warp)
    forced = dataclasses.replace(alone, forced=jnp.array(True))
    results = {}
    for how, drafter in (("alone", alone), ("under the oracle", forced)):
        generator.drafter = drafter
        results[how] = generator.generate(PROMPTS, max_new_tokens=NEW)
    assert_identical(smollm2, plain, results, blocks=(1 + inner.nodes,))
    accepted = sum(result.stats.accepted for result in results["under the oracle"])
    print(f"{name}: {accepted} accepted under the oracle")
    assert accepted >= 40
