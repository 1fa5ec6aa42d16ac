"""Guards that a step is repeated only where all that it moves can be put back, also what other threads use."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.backend import captured
from loops.diagnose.explain.at_hand import Recent, at_hand

RECENT = Recent(1, tf.constant([1.0]))


def step(batch):
    return {"loss": tf.reduce_sum(batch)}


def from_python():
    return tf.data.Dataset.from_generator(lambda: iter([[1.0]]), output_signature=tf.TensorSpec([1]))


PLAIN = tf.data.Dataset.from_tensors([1.0])
DATA = {
    "plain": PLAIN,
    "generator": from_python(),
    "numpy_function": PLAIN.map(lambda x: tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), [1])),
}


@pytest.mark.parametrize("kind", DATA)
def test_numbers_that_threads_of_the_data_drew_are_not_drawn_again(kind):
    np.random.seed(0)
    first = np.random.random()
    np.random.seed(0)
    with at_hand(loops.Loop(step, DATA[kind]), RECENT) as point:
        assert point.loop.calls.one(point.batch)["loss"] == 1.0
        assert np.random.random() == first
        point.reset()
    assert (np.random.random() == first) == (kind == "plain")


def calls_python(batch):
    return {"loss": tf.ensure_shape(tf.numpy_function(np.sum, [batch], batch.dtype), [])}


ITERATOR = iter(tf.data.Dataset.random().map(lambda x: tf.cast(x, tf.float32)))


def calls_an_iterator(batch):
    return {"loss": tf.reduce_sum(batch) + next(ITERATOR)}


@pytest.mark.parametrize(("taken", "named"), [(calls_python, "PyFunc"), (calls_an_iterator, "a table or an iterator")])
def test_a_step_whose_state_cannot_be_put_back_is_not_repeated(taken, named, monkeypatch):
    # An iterator is put back where it is found.
    monkeypatch.setattr(captured, "owners", lambda handles: {})
    loop = loops.Loop(taken, PLAIN)
    with pytest.raises(loops.LoopError, match=f"uses .*{named}.* cannot be put back"), at_hand(loop, RECENT):
        pass


def test_no_variable_is_named_by_its_place_in_a_list_that_is_not_the_models():
    """A step of one's own gives its variables in another order than its model's; the last gradient is huge."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="only")], name="model")
    loss_scaler, optimizer, variables = scaler.LossScaler(scaler.Static(8.0)), keras.optimizers.SGD(0.1), model.weights

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
            scaled = loss_scaler.scale(loss)
        bias, kernel = tape.gradient(scaled, variables[::-1])
        outcome = loss_scaler.apply(optimizer, [bias, 0.0 * kernel + 1e30], variables[::-1])
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause, "variable": outcome.variable}

    x = tf.ones([2, 4])
    outputs = step(x)
    assert (bool(outputs["applied"]), int(outputs["variable"])) == (False, 1)
    assert "'model/only/kernel'" in loss_scaler.explain()
    found = loops.observe.explain_batch(step, x, seconds=0)
    assert (found.verdict, found.tensor, found.layer) == ("too_large", None, None)
