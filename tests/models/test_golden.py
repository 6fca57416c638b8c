import json

import numpy as np
import pytest

from jaxspec.checkpoints.load import load_decoder
from tests import models_on_disk
from tests.golden.make_logits import (
    POSITIONS,
    SMOLLM2,
    SMOLLM2_FILE,
    TINY_FILE,
    tiny_folder,
)
from tests.models.forwards import (
    NEWER,
    TEXT_LENGTH,
    TINY,
    chunked,
    largest_difference,
    one_shot,
    random_ids,
    tiny_names,
)

LIMIT = 1e-3


def test_every_tiny_model_has_golden_logits():
    golden = json.loads(TINY_FILE.read_text())
    assert list(golden["models"]) == list(TINY)
    assert golden["positions"] == list(POSITIONS)


@pytest.mark.parametrize("name", tiny_names(*NEWER))
def test_tiny_models_give_the_logits_of_transformers(name, tmp_path):
    golden = json.loads(TINY_FILE.read_text())["models"][name]
    assert tiny_folder(tmp_path, name) == golden["weights"], (
        "the seeded weights are no longer those of the golden logits"
    )
    ids = random_ids(64, TEXT_LENGTH)
    ours = one_shot(load_decoder(tmp_path), ids).logits[0, list(POSITIONS)]
    assert largest_difference(ours, golden["logits"]) < LIMIT


@pytest.mark.full
def test_smollm2_gives_the_largest_logits_of_transformers():
    golden = json.loads(SMOLLM2_FILE.read_text())
    ids = np.array(golden["ids"], np.int32)
    assert len(ids) == 64
    ours = chunked(load_decoder(models_on_disk.path(SMOLLM2)), ids, 64).logits[0]
    best = np.array(golden["best"])
    values = np.take_along_axis(ours, best, axis=1)
    assert largest_difference(values, golden["logits"]) < LIMIT
    assert largest_difference(ours.mean(axis=1), golden["mean"]) < LIMIT
    # Those eight are the largest of ours too: no other exceeds the least of them.
    others = ours.copy()
    np.put_along_axis(others, best, -np.inf, axis=1)
    assert (others.max(axis=1) < values.min(axis=1) + LIMIT).all()
