"""Guards that a batch without rows is named as that, with its step, and that a dataset's is a step with a loss of 0."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler

PASSED = r"a batch of \(float32 \[0, 6\], float32 \[0, 2\]\)"
"""What failed, and not the batches around it."""
X, Y = np.ones([8, 6], np.float32), np.ones([8, 2], np.float32)


def a_model():
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(2, use_bias=False)])


def one_loss():
    return loops.TrainStep(a_model(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))


def parts():
    model, loss_fn = a_model(), keras.losses.MeanSquaredError()
    part = loops.Part("only", model, lambda batch: loss_fn(batch[1], model(batch[0])), keras.optimizers.SGD(0.1))
    return loops.ComposedStep([part])


def by_hand():
    model, loss_fn, optimizer = a_model(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
    loss_scaler = scaler.LossScaler(scaler.Static(8.0))

    def my_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    return my_step


@pytest.mark.parametrize(("make", "steps_per_call"), [(one_loss, 1), (parts, 3), (by_hand, 1)])
def test_an_iterator_that_gives_no_rows_is_told(make, steps_per_call):
    batches = ((X[:rows], Y[:rows]) for rows in (8, 0, 8))
    loop = loops.Loop(make(), batches, steps_per_call=steps_per_call)
    kind, words = (scaler.InvalidArgument, "was the batch empty") if make is by_hand else (loops.BadBatch, "no rows")
    with pytest.raises(kind, match=words) as caught:
        loop.run(3)
    assert any(re.search(rf"step 2 of the run.* with {PASSED}\.$", note) for note in caught.value.__notes__)
    assert loop.counters.data == 1


def test_the_first_batch_may_be_it():
    with pytest.raises(loops.BadBatch, match="no rows") as caught:
        loops.Loop(one_loss(), iter([(X[:0], Y[:0]), (X, Y)])).run(2)
    assert any(re.search(rf"step 1 of the run.* with {PASSED}\.$", note) for note in caught.value.__notes__)


def test_a_dataset_may_give_one():
    data = tf.data.Dataset.from_tensor_slices([8, 0, 8]).map(
        lambda rows: (tf.constant(X)[:rows], tf.constant(Y)[:rows])
    )
    seen = []
    counters = loops.Loop(one_loss(), data, actions=[lambda visit: seen.extend(visit.outputs["loss"])]).run(3)
    assert (counters.applied, seen[1]) == (3, 0.0)
