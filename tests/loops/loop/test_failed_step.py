"""Guards that an error out of a step of one's own says at which step it came, with what batches, in its own words."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.loop.failed_step import described

X, LABELS = np.ones([64, 3], np.float32), np.zeros([64], np.int32)


def notes(caught):
    return [one for one in getattr(caught.value, "__notes__", []) if one.startswith("halfstep: this came")]


@pytest.mark.parametrize("wrapped", [lambda step: step, tf.function], ids=["plain", "function"])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_labels_of_another_shape_are_told_beside_the_words_of_keras(tmp_path, wrapped, with_checkpoint):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def my_step(x, y):
        return {"loss": loss_fn(y, model(x, training=True))}

    actions = [loops.Checkpoint(tmp_path, every=2)] if with_checkpoint else []
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(8)
    with pytest.raises(ValueError, match="must have the same rank") as caught:
        loops.Loop(wrapped(my_step), data, actions=actions).run(4)
    assert notes(caught) == [
        "halfstep: this came at step 1 of the run, in my_step, with batches of (float32 [None, 3], int32 [None])."
    ]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_step_that_fails_later_is_the_one_that_is_named(steps_per_call):
    def my_step(number):
        tf.debugging.assert_none_equal(number, tf.constant(5, tf.int64), message="the fifth")
        return {"loss": number}

    loop = loops.Loop(my_step, tf.data.Dataset.range(1, 9), steps_per_call=steps_per_call)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the fifth") as caught:
        loop.run(8)
    assert notes(caught) == ["halfstep: this came at step 5 of the run, in my_step, with batches of int64 []."]


def test_our_own_sentences_need_no_note():
    with pytest.raises(scaler.ScalerError) as caught:
        loops.Loop(lambda number: 5, tf.data.Dataset.range(3)).run(2)
    assert notes(caught) == []


def test_any_batch_can_be_described():
    spec = {"x": tf.RaggedTensorSpec([None, None], tf.int32), "y": [tf.TensorSpec(None, tf.float16), None]}
    assert described(spec) == "{'x': int32 [None, None], 'y': [float16 of any shape, NoneType]}"
    assert described(tf.data.DatasetSpec(tf.TensorSpec([]))) == "DatasetSpec"
