"""Guards the certificate of neutrality: a probe that changes a run is found and named, and no other is."""

import json

import numpy as np
import pytest
import tensorflow as tf
import verify_cases

import loops
import scaler
from halfstep import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return loops.observe.verify(verify_cases.build, steps=2)


@pytest.mark.exhaustive
def test_the_probe_that_causes_an_overflow_is_named(found):
    """Without it the product is regrouped in a graph, and finite; XLA overflows in any case."""
    assert not found.neutral
    (change,) = found.changes
    assert (change.mode, change.probes, change.step) == ("graph", ("square",), 1)
    loss, with_probe = change.outputs["loss"]
    assert np.isfinite(loss)
    assert np.isinf(with_probe)
    assert change.outputs["applied"] == (True, False)
    assert "in a graph, probing 'square' changes step 1" in str(found)
    assert found.probes == ("dense", "relu", "square", "regrouped", "weight_gradients")
    assert found.digests["graph"][0] != found.digests["graph"][1]
    assert found.digests["jit_compile"][0] == found.digests["jit_compile"][1]


def test_the_command_prints_it_and_says_so_with_its_status(capsys, monkeypatch):
    change = loops.observe.Change("graph", ("square",), 1, {"loss": (1.0, np.inf)})
    found = loops.observe.Verification(2, ("square",), (), {"graph": ("a", "b")}, "an operation", (change,))
    monkeypatch.setattr("loops.diagnose.verify.verify", lambda build, steps: build() and found)
    arguments = ["lab", "observe", "--verify", "--build", "verify_cases:plain"]
    assert main(arguments) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "2 steps in a graph, 1 probe",
        "not compiled by XLA: an operation",
        "in a graph, probing 'square' changes step 1: loss is 1.0 without and inf with it",
    ]
    assert main([*arguments, "--steps", "2", "--json"]) == 4
    printed = json.loads(capsys.readouterr().out)
    assert printed["neutral"] is False
    assert printed["changes"][0]["probes"] == ["square"]
    assert printed["changes"][0]["outputs"] == {"loss": [1.0, None]}


def test_a_program_that_is_not_there(capsys):
    assert main(["lab", "observe", "--verify", "--build", "verify_cases:nothing"]) == 2
    assert "has no function 'nothing'" in capsys.readouterr().err


def written(steps=1):
    return loops.Loop(lambda x: {"loss": tf.reduce_sum(x)}, tf.data.Dataset.from_tensors([1.0]).repeat())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((written,), "a Loop of .*: expected an hs.Loop of a TrainStep"),
        ((lambda: None,), "returned None: expected"),
        ((written(),), "expected a function without arguments"),
        ((verify_cases.build, 0), "steps=0"),
        ((verify_cases.build, 1, 3), "probes=3"),
        ((verify_cases.plain, 1, lambda model: None), "the function returned None: expected hs.observe.watch"),
    ],
)
def test_what_cannot_be_verified(arguments, sentence):
    with pytest.raises(scaler.InvalidArgument, match=sentence):
        loops.observe.verify(*arguments)


def test_a_run_that_is_never_the_same_cannot_be_verified():
    count = iter(range(10))

    def build():
        loop = verify_cases.plain()
        weights = loop.train_step.model.trainable_variables[0]
        weights.assign(weights + float(next(count)))
        return loop

    with pytest.raises(scaler.InvalidArgument, match="gave different weights or losses"):
        loops.observe.verify(build, steps=1)
