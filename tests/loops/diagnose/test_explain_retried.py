"""Guards what `explain` says of a step that was retried: the scale at which it was applied, and how it came there."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler

pytestmark = pytest.mark.slow


def loop(folder):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16")])
    step = loops.TrainStep(
        model,
        keras.losses.MeanSquaredError(),
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**30)),
        retry=True,
    )
    data = tf.data.Dataset.from_tensors((np.ones([4, 2], np.float32), np.ones([4, 1], np.float32))).repeat()
    actions = [loops.JsonLines(folder / "steps.jsonl"), loops.Checkpoint(folder / "checkpoints", every=5, resume=True)]
    return loops.Loop(step, data, actions=actions)


@pytest.mark.exhaustive
def test_a_retried_step_is_explained_with_both_of_its_scales(tmp_path):
    loop(tmp_path).run(10)
    scale = float(loop_scale(tmp_path))
    found = loops.observe.explain(loop(tmp_path), step=1)
    assert found.verdict == "healthy"
    assert found.retried == (int(30 - np.log2(scale)), scale)
    assert f"applied at loss scale {scale:g}: its backward pass overflowed at loss scale 1.07374e+09" in found.sentence
    assert loops.observe.explain(loop(tmp_path), step=3).retried is None


def loop_scale(folder):
    return json.loads((folder / "steps.jsonl").read_text().splitlines()[0])["loss_scale"]
