"""Guards that a batch without examples is called that, and not non-finite data: a mean over nothing is NaN."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import squared_error

import loops
import scaler
from loops.diagnose.explain.examples import is_empty
from loops.observe import explain_batch


@pytest.mark.parametrize(
    ("batch", "empty"),
    [
        ((tf.zeros([0, 3]), tf.zeros([0])), True),
        ((tf.zeros([2, 3]), tf.zeros([0])), False),
        ({"x": tf.zeros([0, 3]), "temperature": tf.constant(1.0)}, True),
        (tf.constant(1.0), False),
        (tf.RaggedTensor.from_row_lengths(tf.zeros([0]), tf.zeros([0], tf.int64)), True),
        (tf.RaggedTensor.from_row_lengths(tf.zeros([0]), [0, 0]), False),
        (tf.SparseTensor(np.zeros([0, 2], np.int64), [], [0, 3]), True),
        (tf.SparseTensor(np.zeros([0, 2], np.int64), [], [2, 3]), False),
    ],
)
def test_a_batch_is_empty_if_no_part_holds_an_example(batch, empty):
    assert is_empty(batch) == empty


@pytest.mark.slow
def test_an_empty_batch_is_called_that():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler)
    x, y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)
    step((x, y))
    # BatchNorm makes the gradients NaN, too, so that the step is skipped.
    assert not step((x[:0], y[:0]))["applied"]
    found = explain_batch(step, (x[:0], y[:0]), seconds=0)
    assert (found.verdict, found.empty, found.kind) == ("loss", True, "nan")
    assert "an empty batch" in loss_scaler.explain()
