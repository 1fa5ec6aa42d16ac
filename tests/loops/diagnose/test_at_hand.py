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


@pytest.mark.parametrize(
    ("data", "restored"),
    [
        (tf.data.Dataset.from_tensors([1.0]), True),
        (from_python(), False),
        (
            tf.data.Dataset.from_tensors([1.0]).map(
                lambda x: tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), [1])
            ),
            False,
        ),
    ],
    ids=["plain", "generator", "numpy_function"],
)
def test_numbers_that_threads_of_the_data_drew_are_not_drawn_again(data, restored):
    np.random.seed(0)
    first = np.random.random()
    np.random.seed(0)
    with at_hand(loops.Loop(step, data), RECENT) as point:
        assert point.loop.calls.one(point.batch)["loss"] == 1.0
        assert np.random.random() == first
        point.reset()
    assert (np.random.random() == first) == restored


def calls_python(batch):
    return {"loss": tf.ensure_shape(tf.numpy_function(np.sum, [batch], batch.dtype), [])}


ITERATOR = iter(tf.data.Dataset.random().map(lambda x: tf.cast(x, tf.float32)))


def calls_an_iterator(batch):
    return {"loss": tf.reduce_sum(batch) + next(ITERATOR)}


@pytest.mark.parametrize(("taken", "named"), [(calls_python, "PyFunc"), (calls_an_iterator, "a table or an iterator")])
def test_a_step_whose_state_cannot_be_put_back_is_not_repeated(taken, named, monkeypatch):
    # An iterator is put back where it is found.
    monkeypatch.setattr(captured, "owners", lambda handles: {})
    loop = loops.Loop(taken, tf.data.Dataset.from_tensors([1.0]))
    with pytest.raises(loops.LoopError, match=f"uses .*{named}.* cannot be put back"), at_hand(loop, RECENT):
        pass


class Reversed:
    """A step of one's own, which gives its variables in another order than its model's; the last gradient is huge."""

    def __init__(self):
        layers = [keras.layers.Dense(2, name=name) for name in ("first", "second")]
        self.model = keras.Sequential([keras.Input([4]), *layers], name="model")
        self.loss_scaler, self.optimizer = scaler.LossScaler(scaler.Static(8.0)), keras.optimizers.SGD(0.1)

    def __call__(self, x):
        variables = self.model.trainable_variables[::-1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(x))
            scaled = self.loss_scaler.scale(loss)
        *grads, last = tape.gradient(scaled, variables)
        outcome = self.loss_scaler.apply(self.optimizer, [*grads, 0.0 * last + 1e30], variables)
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause, "variable": outcome.variable}


def test_no_variable_is_named_by_its_place_in_a_list_that_is_not_the_models():
    step, x = Reversed(), tf.ones([2, 4])
    assert not step(x)["applied"]
    assert "the gradient of 'model/first/kernel' is the largest" in step.loss_scaler.explain()
    found = loops.observe.explain_batch(step, x, seconds=0)
    assert (found.verdict, found.tensor, found.layer) == ("too_large", None, None)
