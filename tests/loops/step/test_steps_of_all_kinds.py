"""Guards `TrainStep` with what people bring along: losses of several terms, ragged and named batches, gradient
checkpointing, layers that choose their own dtypes. In float16 a batch that overflows is skipped in each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, dataset, static
from models import plain_model, squared_error
from rigs import Rig

import loops


def two_terms(y, prediction):
    fit, size = squared_error(y, prediction), tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32)))
    return fit + 0.5 * size, {"fit": fit, "size": size}


@pytest.mark.slow
def test_terms_of_a_loss_are_outputs():
    ours = Rig(plain_model(), keras.optimizers.SGD(0.1), two_terms, loss_scaler=static(8.0), jit_compile=True)
    alone = loops.TrainStep(plain_model(), lambda y, p: two_terms(y, p)[0], keras.optimizers.SGD(0.1))
    batches = [batch(number) for number in range(4)]
    for one, other in zip(ours.run(batches), map(alone, batches), strict=True):
        assert list(one) == [*other, "fit", "size"]
        np.testing.assert_allclose(one["loss"], one["fit"] + 0.5 * one["size"], rtol=1e-6)
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)
    for one, other in zip(ours.step.model.variables, alone.model.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class Bag(keras.Model):
    """The mean of the rows of some tokens: takes ragged [batch, tokens]."""

    def __init__(self, kind):
        super().__init__(dtype=kind)
        self.table = keras.layers.Embedding(10, 4, dtype=kind, embeddings_initializer="ones")
        self.last = keras.layers.Dense(1, dtype=kind, kernel_initializer="ones")

    def call(self, tokens, training=None):
        rows = self.table(tokens.to_tensor())
        there = tf.cast(tf.sequence_mask(tokens.row_lengths()), rows.dtype)
        return self.last(tf.reduce_sum(rows * there[:, :, None], axis=1))


def ragged_batches(bad=1e6):
    """Rows of 1, 2, ... tokens in batches of 4; the targets of the second batch overflow the gradients."""
    rows = tf.ragged.constant([[number % 10] * (1 + number % 5) for number in range(16)], dtype=tf.int32)
    targets = np.arange(16, dtype=np.float32)[:, None] / 16
    targets[5] = bad
    return tf.data.Dataset.from_tensor_slices((rows, tf.constant(targets))).ragged_batch(4, drop_remainder=True)


@pytest.mark.slow
def test_ragged_batches():
    step = loops.TrainStep(Bag("float16"), squared_error, keras.optimizers.SGD(0.01), loss_scaler=static(64.0))
    assert loops.Loop(step, ragged_batches(), steps_per_call=3, jit_compile=False).run(4) == loops.Counters(4, 4, 3)
    by_hand = Bag("float16")
    other = loops.TrainStep(by_hand, squared_error, keras.optimizers.SGD(0.01), loss_scaler=static(64.0))
    for tokens, targets in ragged_batches():
        other((tokens, targets))
    for ours, theirs in zip(step.model.variables, by_hand.variables, strict=True):
        np.testing.assert_allclose(ours.numpy().astype(float), theirs.numpy().astype(float), rtol=1e-2, atol=1e-6)


@pytest.mark.slow
def test_batches_by_name_in_a_loop():
    """A hand-written step takes the dictionary as it is; a TrainStep takes `(x, y)` with dictionaries in it."""
    model = plain_model()
    data = dataset(4)
    weighted = data.map(lambda x, y: ({"x": x}, {"target": y, "weight": tf.ones([8, 1])}))

    def loss(y, prediction):
        return tf.reduce_mean(y["weight"] * tf.square(prediction - y["target"]))

    inputs = {"x": keras.Input([4], name="x")}
    named = keras.Model(inputs, model(inputs["x"]))
    step = loops.TrainStep(named, loss, keras.optimizers.SGD(0.1))
    loops.Loop(step, weighted, steps_per_call=3).run(4)
    plain = loops.TrainStep(plain_model(), squared_error, keras.optimizers.SGD(0.1))
    for one in data:
        plain(one)
    for ours, theirs in zip(named.variables, plain.model.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


class Norm(keras.layers.Layer):
    """Chooses its own dtypes: squares in float32, whatever comes in, and gives back what it took."""

    def __init__(self, **arguments):
        super().__init__(dtype="float32", autocast=False, **arguments)

    def build(self, shape):
        self.gain = self.add_weight(shape=shape[-1:], initializer="ones", name="gain")

    def call(self, x):
        wide = tf.cast(x, tf.float32)
        return tf.cast(wide * tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, True) + 1e-6) * self.gain, x.dtype)


@pytest.mark.slow
def test_a_layer_that_casts_by_itself():
    """Its inputs of 1000 have squares beyond float16; its float32 weight is its own master."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input([4], dtype="float16"),
        keras.layers.Dense(8, dtype="float16"),
        Norm(),
        keras.layers.Dense(1, dtype="float16"),
    ]
    step = loops.TrainStep(
        keras.Sequential(layers), squared_error, keras.optimizers.SGD(0.01), loss_scaler=static(64.0)
    )
    data = dataset(4, bad=[1]).map(lambda x, y: (1000.0 * x, y))
    before = step.model.layers[1].gain.numpy()
    assert loops.Loop(step, data, jit_compile=False).run(4) == loops.Counters(4, 4, 3)
    gain = step.model.layers[1].gain
    assert gain.dtype == "float32"
    assert any(weight is gain for weight in step.masters.weights)
    assert (gain.numpy() != before).any()
    assert all(np.isfinite(variable.numpy().astype(float)).all() for variable in step.model.variables)
