import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.eagle import load_eagle
from jaxspec.errors import UserError
from jaxspec.train.corpus import Corpus, Texts
from jaxspec.train.heads import new_pupil
from jaxspec.train.new_heads import commonest_ids
from jaxspec.train.recipe import HeadRecipe
from jaxspec.train.trainer import TrainState
from tests.train import made


@pytest.fixture(scope="module")
def unbroken(model, corpus, tmp_path_factory):
    """A training that nobody interrupted: its folder and the progress of each step."""
    folder = tmp_path_factory.mktemp("head")
    return folder, list(made.training(model, corpus, folder))


def final_leaves(folder):
    """The arrays of the last checkpoint, by name."""
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(folder / "checkpoints")
    leaves = manager.restore(made.SETTINGS.steps, args=ocp.args.StandardRestore())
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_bit_equal(one, other):
    one, other = final_leaves(one), final_leaves(other)
    assert one.keys() == other.keys() and len(one) > 30
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_head_learns(unbroken):
    folder, steps = unbroken
    assert [each.step for each in steps] == list(range(1, 11))
    assert np.mean([s.loss for s in steps[-3:]]) < steps[0].loss - 0.05
    checked = [each.step for each in steps if each.held_out is not None]
    assert checked == [3, 6, 9, 10]
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[-1]["held_out"]["sampled_tokens_per_round"] >= 1


def test_the_head_is_one_that_the_loader_takes(model, unbroken):
    folder, _ = unbroken
    head, places = load_eagle(folder, model.decoder.config)
    assert head.taps == made.TAPS
    known = np.flatnonzero(np.asarray(places) < 16)
    assert known.size == 16
    trained = final_leaves(folder)
    name = next(name for name in trained if "lm_head" in name and "optim" not in name)
    np.testing.assert_allclose(head.lm_head.weight[...], trained[name], rtol=5e-3)


@pytest.mark.parametrize("at", [4, pytest.param(7, marks=pytest.mark.full)])
def test_a_killed_training_goes_on_to_the_same_parameters(
    unbroken, corpus, tmp_path, at
):
    command = [sys.executable, "-m", "tests.train.made", str(corpus.folder)]
    with subprocess.Popen(
        [*command, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout:
            if int(line) == at:
                os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    again = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, check=True
    )
    first = int(again.stdout.split()[0])
    assert first <= at + 1
    assert_bit_equal(unbroken[0], tmp_path)
    lines = [line["step"] for line in metrics(tmp_path)]
    assert lines == list(range(1, 11))


@pytest.mark.full
def test_devices_share_the_batches_and_a_job_moves_between_them(
    unbroken, corpus, tmp_path
):
    """Begun on four devices and killed, ended on one: sums in another order apart."""
    command = [sys.executable, "-m", "tests.train.made", str(corpus.folder)]
    four = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with subprocess.Popen(
        [*command, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=four
    ) as child:
        for line in child.stdout:
            # The checkpoint of step 6 was not begun before that of 3 was whole.
            if int(line) == 8:
                os.kill(child.pid, signal.SIGKILL)
    again = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(again.stdout.split()[0]) in (4, 7, 10), "it began anew"
    one, other = final_leaves(unbroken[0]), final_leaves(tmp_path)
    for name, leaf in one.items():
        if "parameters" in name:
            # Adam divides by the slope's size: a last bit of a small slope counts.
            np.testing.assert_allclose(leaf, other[name], atol=1e-4, err_msg=name)


def cut_in_half(checkpoint):
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and "metrics" not in path.parts:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def begin_only(checkpoint):
    """Of a save that was cut short before it said what it holds."""
    (checkpoint / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(checkpoint / "default")


@pytest.mark.parametrize("spoil", [cut_in_half, begin_only])
def test_an_incomplete_checkpoint_is_skipped_with_a_warning(
    model, corpus, unbroken, tmp_path, spoil
):
    """BL-64: the step before it is gone on from, and it is saved anew."""
    shutil.copytree(unbroken[0], tmp_path / "head")
    spoil(tmp_path / "head" / "checkpoints" / "10")
    with pytest.warns(UserWarning, match="the checkpoint of step 10 is incomplete"):
        steps = list(made.training(model, corpus, tmp_path / "head"))
    assert [each.step for each in steps] == [10]
    assert_bit_equal(unbroken[0], tmp_path / "head")


def test_a_changed_model_is_refused_by_its_paths(model, corpus, unbroken):
    from jaxspec.train.checkpoints import Checkpoints

    folder, _ = unbroken
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    other = TrainState(
        jax.numpy.int32(0), {"fc": jax.numpy.zeros((3, 4))}, {"fc": jax.numpy.zeros(2)}
    )
    with pytest.raises(
        UserError, match=r"is of another model: optimizer.* more; choose another"
    ):
        checkpoints.restore(other)
    checkpoints.close()


def test_another_training_does_not_get_into_a_folder(model, corpus, unbroken):
    with pytest.raises(UserError, match=r"`learning_rate` is 0.003, but 0.1 is asked"):
        next(made.training(model, corpus, unbroken[0], changes={"learning_rate": 0.1}))


def test_muon_turns_hidden_matrices_and_adamw_the_rest(model, corpus, tmp_path):
    steps = list(made.training(model, corpus, tmp_path, changes={"method": "muon"}))
    assert np.mean([s.loss for s in steps[-3:]]) < steps[0].loss - 0.05
    moments = {name for name in final_leaves(tmp_path) if "optimizer" in name}
    # AdamW keeps a second moment for each of its own, Muon none.
    second = {name for name in moments if ".nu." in name}
    assert any("lm_head" in name for name in second)
    assert any("norm" in name for name in second)
    assert not any("q_proj" in name or "fc" in name for name in second)
    assert any("q_proj" in name for name in moments)


def test_the_best_checkpoint_is_the_one_that_is_written(
    model, corpus, tmp_path, monkeypatch
):
    """Here the second of four: the measure is made to say so."""
    from jaxspec.train.trainer import Trainer

    judge, worth = Trainer.judge, iter([1.1, 1.9, 1.2, 1.3, 1.9])

    def judged(self, parameters):
        value = np.float32(next(worth))
        return judge(self, parameters)._replace(sampled_tokens_per_round=value)

    monkeypatch.setattr(Trainer, "judge", judged)
    list(made.training(model, corpus, tmp_path))
    card = json.loads((tmp_path / "drafter.json").read_text())
    assert card["held_out"]["step"] == 6


def test_a_training_goes_on_from_a_trained_head(model, corpus, unbroken, tmp_path):
    """It begins where the other ended, up to the rounding of the file."""
    begun = list(made.training(model, corpus, tmp_path, start=str(unbroken[0])))
    assert begun[0].loss < unbroken[1][0].loss - 0.05
    card = json.loads((tmp_path / "drafter.json").read_text())
    assert len(card["made_by"]["start_sha256"]) == 64


def test_a_head_that_goes_on_drafts_the_ids_of_its_new_texts(model, unbroken, corpus):
    """Those that it knew keep their rows, the others begin as the target's."""
    start = str(unbroken[0])
    wider = made.TRAINING | {"draft_vocabulary": 24, "start": start}
    pupil = new_pupil(model.decoder, corpus, HeadRecipe("eagle", **wider))
    trained, _ = load_eagle(unbroken[0], model.decoder.config)
    known, ids = (commonest_ids(corpus, 64, count) for count in (16, 24))
    assert set(known) < set(ids)
    rows = np.asarray(pupil.parameters.lm_head.weight[...])
    kept = np.isin(ids, known)
    np.testing.assert_array_equal(rows[kept], trained.lm_head.weight[...])
    target = np.asarray(model.decoder.lm_head.weight[...])
    np.testing.assert_array_equal(rows[~kept], target[ids[~kept]])
    np.testing.assert_array_equal(pupil.objective.known, ids)
    np.testing.assert_array_equal(pupil.parameters.fc.weight, trained.fc.weight)


def test_of_ids_written_equally_often_those_known_before_stay(tmp_path):
    corpus = Corpus.create(tmp_path, {})
    tokens = np.array([1, 5, 5, 7, 9, 2], np.int32)
    corpus.write_texts(0, Texts(tokens, np.array([6]), np.array([1])))
    favoured = np.array([3, 9])
    assert commonest_ids(corpus, 16, 2).tolist() == [2, 5]
    assert commonest_ids(corpus, 16, 2, favoured).tolist() == [5, 9]
    assert commonest_ids(corpus, 16, 5, favoured).tolist() == [2, 3, 5, 7, 9]


def test_a_head_of_another_shape_is_no_start(model, corpus, unbroken, tmp_path):
    start = str(unbroken[0])
    with pytest.raises(
        UserError, match=r"mlp.*\(there \(32, \d+\), asked \(32, 24\)\)"
    ):
        next(made.training(model, corpus, tmp_path, start=start, inner=24))
