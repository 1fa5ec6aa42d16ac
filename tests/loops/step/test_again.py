"""A retry takes the gradients again, from the batch: with nothing moved by it, and no activation kept for it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import loops
import scaler
from scaler import Cause

BATCH, WIDTH = 6, 5
X, Y = np.ones([BATCH, 3], np.float32), np.zeros([BATCH, 1], np.float32)
OVERFLOWS, BACKWARD, SOUND = np.float32(3e3), np.float32(np.nan), np.float32(1.0)


@tf.custom_gradient
def with_slope(values, slope):
    return values, lambda upstream: (upstream * tf.cast(slope, values.dtype), None)


def loss(slope, prediction):
    return tf.reduce_mean((with_slope(tf.cast(prediction, tf.float32), slope[0, 0]) - 1.0) ** 2)


def step_of(loss_fn, *states, retry=True):
    """A step of a float16 model with these layers in its middle, and its function of what makes the batch bad."""
    dense = [keras.layers.Dense(size, use_bias=False, dtype="mixed_float16") for size in (WIDTH, 1)]
    model = keras.Sequential([keras.Input([3]), dense[0], *states, dense[1]])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, min_scale=1.0))
    made = loops.TrainStep(model, loss_fn, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler, retry=retry)
    return made, tf.function(lambda slope: made((X, tf.fill([BATCH, 1], slope))))


@pytest.fixture(scope="module")
def usual():
    """The step of `loss`, traced once."""
    return step_of(loss, keras.layers.BatchNormalization(scale=False, center=False), keras.layers.Dropout(0.5))


def test_what_no_scale_cures_is_skipped_and_nothing_has_moved(usual):
    made, step = usual
    assert step(SOUND)["applied"]
    before = raw(made.model.variables)
    outputs = step(BACKWARD)
    assert int(outputs["cause"]) == Cause.OVERFLOW
    assert int(outputs["retries"]) == 0  # None helps.
    assert not outputs["applied"]
    assert raw(made.model.variables) == before  # BatchNorm's statistics and the seed of Dropout among them.
    assert step(SOUND)["applied"]
    assert raw(made.model.variables) != before


def kept_shapes(step):
    """The shapes of the floating tensors that the branches of the step are given."""
    graph = step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    branches = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    return {tuple(given.shape) for op in branches for given in op.inputs if given.dtype.is_floating}


def test_activations_are_not_kept_for_it(usual):
    assert (BATCH, WIDTH) not in kept_shapes(usual[1])


def test_what_the_loss_function_counts_is_put_back_and_nothing_is_counted_twice():
    calls, metric = tf.Variable(0, trainable=False), keras.metrics.Mean()

    def counting(slope, prediction):
        metric.update_state(slope)
        counts = {"mean": metric.result(), "number": 3, "count": metric.count}
        return loss(tf.where(calls.assign_add(1) == 2, BACKWARD, slope), prediction), counts

    _, step = step_of(counting)
    outputs = [step(slope) for slope in (SOUND, SOUND, BACKWARD, OVERFLOWS)]
    assert [bool(one["applied"]) for one in outputs] == [True, False, False, True]
    assert int(calls) == 4
    assert float(metric.count) == float(outputs[-1]["count"]) == 4 * BATCH
    assert int(outputs[-1]["number"]) == 3
    assert (BATCH, WIDTH) not in kept_shapes(step)


def test_what_nobody_can_put_back_is_done_once():
    numbers = iter(tf.data.Dataset.range(9))

    def drawing(slope, prediction):
        number = tf.reshape(next(numbers), [])
        return loss(tf.where(number % 2 == 1, BACKWARD, slope), prediction), {"number": number}

    _, step = step_of(drawing)
    outputs = [step(SOUND) for _ in range(4)]
    assert [int(one["number"]) for one in outputs] == [0, 1, 2, 3]
    assert [int(one["cause"]) for one in outputs] == [Cause.NONE, Cause.OVERFLOW] * 2


@pytest.mark.slow
def test_a_loss_with_python_branches_is_rewritten_as_in_the_users_own_function():
    def branching(slope, prediction):
        if tf.reduce_mean(slope) > 2.0:
            return loss(slope, prediction)
        return 2.0 * loss(slope, prediction)

    _, step = step_of(branching)
    assert [int(step(slope)["retries"]) > 0 for slope in (SOUND, OVERFLOWS)] == [False, True]


def test_the_loss_may_be_differentiated_by_a_tape_around_the_step():
    """Such as for an adversarial example. Not every gradient of a model has a gradient of its own."""

    def cropped(images):
        boxes, numbers = tf.constant([[0.0, 0.0, 1.0, 1.0]]), tf.constant([0])
        return tf.image.crop_and_resize(images, boxes, numbers, [2, 2])

    layers = [keras.Input([4, 4, 1]), keras.layers.Lambda(cropped), keras.layers.Flatten(), keras.layers.Dense(1)]
    step = loops.TrainStep(keras.Sequential(layers), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.01))

    def gradient(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = step((x, y))
        return tape.gradient(outputs["loss"], x)

    x, y = tf.ones([1, 4, 4, 1]), tf.constant([[2.0]])
    state = [variable.numpy() for variable in step.model.variables]
    eagerly = gradient(x, y)
    for variable, value in zip(step.model.variables, state, strict=True):
        variable.assign(value)
    np.testing.assert_allclose(tf.function(gradient)(x, y), eagerly, rtol=1e-5)


def of_python(y, prediction):
    return tf.reduce_mean(tf.py_function(lambda v: v * 1e30, [tf.cast(prediction, tf.float32)], "float32"))


def test_a_loss_that_calls_python_is_differentiated_once():
    """TensorFlow forgets what a `tf.py_function` computed when its gradient was taken."""
    made, step = step_of(of_python, retry=False)
    assert not any(step(SOUND)["applied"] for _ in range(2))
    assert int(made.loss_scaler.last_skip.cause) == Cause.OVERFLOW
