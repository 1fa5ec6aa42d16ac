"""Guards `halfstep lint`: what it takes, prints and returns."""

import json

import pytest
from command_cases import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("program")]

PROGRAM = """
import keras, numpy as np, tensorflow as tf, loops, scaler

def model(*layers):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(8, dtype="float32", name="last")])

def dataset(count=8):
    return tf.data.Dataset.from_tensor_slices((np.ones([8, 8], "f"), np.ones([8, 8], "f"))).take(count).batch(4)

def make_loop(run):
    assert run.is_dir() and not list(run.iterdir())
    odd = keras.layers.Dense(10, dtype="mixed_float16", name="odd")
    step = loops.TrainStep(model(odd), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))
    return loops.Loop(step, dataset(), actions=[loops.JsonLines(run / "steps.jsonl")])

def parts(run):
    unit = keras.layers.UnitNormalization(dtype="mixed_float16", name="unit")
    return model(unit), keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(), dataset()

def by_name(run):
    return dict(zip(["model", "optimizer", "loss", "sample"], parts(run))) | {"model": model()}

def own_step(run):
    return loops.Loop(lambda x, y: {"loss": tf.reduce_mean(x)}, dataset())

def failing(run):
    def loss(y, prediction):
        raise ValueError("no such label")
    return (*parts(run)[:2], loss, dataset())

def empty(run):
    return (*parts(run)[:3], dataset(0))

def nothing(run):
    return None
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program_of_lint.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_what_hurts_has_a_status_of_its_own(capsys):
    status, printed, _ = run(capsys, "lint", "--build", "program_of_lint:parts", "--json")
    assert status == 4
    assert {one["layer"] for one in json.loads(printed)} == {None, "unit"}
    status, printed, _ = run(capsys, "lint", "--build", "program_of_lint:parts")
    assert status == 4
    assert "UnitNormalization" in printed
    assert "instead: Give this layer" in printed


def test_nothing_found_is_said(capsys):
    assert run(capsys, "lint", "--build", "program_of_lint:by_name", "--json")[:2] == (0, "[]\n")
    status, printed, _ = run(capsys, "lint", "--build", "program_of_lint:by_name")
    assert (status, printed) == (0, "No known problems with float16 were found.\n")


@pytest.mark.parametrize(
    ("build", "status", "said"),
    [
        ("program_of_lint:none", 2, "has no function 'none'"),
        ("program_of_lint:own_step", 2, "return (model, optimizer, loss, sample)"),
        ("program_of_lint:nothing", 2, "it returned NoneType: expected an hs.Loop"),
        ("program_of_lint:empty", 1, "the dataset is empty"),
        ("program_of_lint:failing", 1, "the model or the loss failed on the sample: ValueError: no such label."),
    ],
)
def test_what_cannot_be_built_is_one_line(capsys, build, status, said):
    found, printed, errors = run(capsys, "lint", "--build", build)
    assert (found, printed) == (status, "")
    assert said in errors
    assert errors.startswith("halfstep: ")
    assert errors.count("\n") == 1
