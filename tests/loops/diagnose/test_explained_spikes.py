"""A spike is explained by its number and the limit of its guard, as the log and the replay say."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import one_layer, squared_error

import loops
import scaler
from loops.diagnose.explain.explain import explain
from loops.views.report import write_report

SPIKE = 11


def program(folder, accumulate=1, resume=False, **guarding):
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(12, 8, 4)).astype(np.float32)
    y = np.tanh(x.sum(axis=-1, keepdims=True)).astype(np.float32)
    y[SPIKE - 1] *= 1e3
    guard = scaler.SpikeGuard(scaler.NoScaling(), window=3, **guarding)
    step = loops.TrainStep(
        one_layer(),
        squared_error,
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(guard),
        accumulate=accumulate,
    )
    actions = [loops.JsonLines(folder / "steps.jsonl"), loops.Checkpoint(folder / "ckpt", every=10, resume=resume)]
    return loops.Loop(step, tf.data.Dataset.from_tensor_slices((x, y)), steps_per_call=1, actions=actions)


@pytest.mark.slow
def test_a_spike_is_told_with_its_limit(tmp_path):
    program(tmp_path).run(SPIKE)
    found = explain(program(tmp_path))
    assert (found.step, found.verdict, found.applied) == (SPIKE, "spike", False)
    name, value, limit = found.spike
    assert (name, value > limit > 0) == ("norm", True)
    assert found.to_dict()["spike"] == ["norm", value, limit]
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "the norm, the loss or the norm of one gradient was far beyond that of the steps before" in page


@pytest.mark.slow
@pytest.mark.exhaustive_with("clip")
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_a_spike_with_a_guard_of_each_gradient_is_told_in_the_words_of_the_scaler(tmp_path, by_tensor):
    """The log has no limit of each gradient, and its norm is that before they are clipped."""
    guarding = {"loss": by_tensor == "clip", "by_tensor": by_tensor}
    run = program(tmp_path, **guarding)
    run.run(SPIKE)
    words = run.train_step.loss_scaler.explain().removeprefix("The step was skipped because ")
    found = explain(program(tmp_path, **guarding))
    assert (found.step, found.verdict, found.applied, found.spike) == (SPIKE, "spike", False, None)
    assert found.said == words
    assert found.observed_alike
