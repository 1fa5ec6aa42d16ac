"""Under `fit` a skipped step moves nothing with `protect`, and BatchNorm without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import compiled, data, finite, make_model, overflowing, started
from rigs import raw

import scaler


def one_bad_batch_among_good():
    good, bad = data(24), overflowing()
    return [np.concatenate([g[:16], b, g[16:]]) for g, b in zip(good, bad, strict=True)]


def test_a_skipped_batch_never_happened():
    """Weights, slots, BatchNorm, the dropout's generator, metrics and the scale are those of the data without it."""
    ends = []
    for batches, skipped in ((one_bad_batch_among_good(), 1), (data(24), 0)):
        model = started(policy="mixed_float16")
        logs = model.fit(*batches, batch_size=8, shuffle=False, verbose=0).history
        assert model.optimizer.loss_scaler.counters.skipped == skipped
        assert finite(model)
        moved = raw([*model.variables, *model.optimizer.inner_optimizer.variables])
        ends.append((logs, moved, float(model.optimizer.loss_scale)))
    assert ends[0] == ends[1]


@pytest.mark.slow_with("graph")
@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "graph"])
def test_without_it_weights_are_safe_and_state_of_layers_in_eager_mode_and_metrics_are_not(run_eagerly):
    model = compiled(protect=False, run_eagerly=run_eagerly)
    model.train_on_batch(*data(8))
    before, everything = raw(model.trainable_variables), raw(model.variables)
    model.train_on_batch(*overflowing())
    assert raw(model.trainable_variables) == before
    assert (raw(model.variables) == everything) is not run_eagerly
    assert not all(np.isfinite(np.asarray(variable)).all() for variable in model.metrics_variables)


class Mine(keras.Sequential):
    """Returns a number of its own beside Keras's."""

    def train_step(self, batch):
        return {**super().train_step(batch), "one": tf.constant(1.0)}


@pytest.mark.slow
def test_what_a_step_returns_is_computed_anew_and_the_rest_is_left_whenever_it_is_asked_for():
    model = Mine(make_model().layers)
    assert scaler.protect(model) is model
    step = model.train_step
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse", jit_compile=False)
    assert scaler.protect(model).train_step is step
    assert model.train_on_batch(*overflowing(), return_dict=True) == {"loss": np.inf, "one": 1.0}
    assert finite(model)


def test_a_window_puts_back_the_micro_batch_that_overflowed():
    model = protected(
        keras.Input([4]),
        keras.layers.BatchNormalization(center=False, scale=False, dtype="mixed_float16"),
        keras.layers.Dense(1, dtype="mixed_float16"),
        optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2),
    )
    for _ in range(2):
        model.train_on_batch(*data(8))
    before = raw(model.non_trainable_variables)
    model.train_on_batch(*overflowing())
    assert raw(model.non_trainable_variables) == before
    model.train_on_batch(*data(8))
    assert raw(model.non_trainable_variables) != before
    assert finite(model)


class Beside(keras.layers.Layer):
    """Assigns an infinity to its state."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(2,), initializer="ones", trainable=False)

    def call(self, x):
        self.largest.assign(tf.stack([tf.reduce_max(x) * 1e30 * 1e30, 2.0]))
        return x


def protected(*layers, optimizer=None, **arguments):
    """A model that `train_on_batch` builds and trains."""
    model = keras.Sequential(layers)
    optimizer = scaler.LossScaleOptimizer(optimizer or keras.optimizers.SGD(0.1), scaler.Static(4.0))
    model.compile(optimizer, loss="mse", **{"jit_compile": False, **arguments})
    return scaler.protect(model)


@pytest.mark.slow_with("{'jit_compile': True}")
@pytest.mark.parametrize("mode", [{"jit_compile": False}, {"jit_compile": True}], ids=str)
def test_statistics_that_overflow_on_an_applied_step_keep_their_last_finite_value(mode):
    """The variance of an absurd row is infinite, and the loss and the gradients are finite in float32."""
    x, y = data(32)
    x[3, 0] = 1e30
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    model = protected(keras.Input([4]), Beside(), norm, keras.layers.Dense(1), **mode)
    model.train_on_batch(*data(32))
    mean, variance = (one.numpy() for one in model.layers[1].non_trainable_variables)
    model.train_on_batch(x, y)
    assert model.optimizer.loss_scaler.counters.applied == 2
    np.testing.assert_array_equal(model.layers[0].largest, [1.0, 2.0])
    after = [one.numpy() for one in model.layers[1].non_trainable_variables]
    assert (after[0][0], after[1][0]) == (mean[0], variance[0])
    assert (after[0][1:] != mean[1:]).all()
    assert (after[1][1:] != variance[1:]).all()


def test_it_says_what_it_needs():
    with pytest.raises(scaler.InvalidArgument, match=r"protect\(3\)"):
        scaler.protect(3)
    model = make_model()
    model.compile("adam", loss="mse")
    with pytest.raises(scaler.InvalidArgument, match=r"has no hs.LossScaleOptimizer"):
        scaler.protect(model).train_on_batch(*data(8))


def test_a_step_that_runs_eagerly_may_be_compiled_again_with_other_metrics():
    model = compiled(stateful=False, run_eagerly=True)
    model.train_on_batch(*data(8))
    model.compile(model.optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
    assert "mae" in model.train_on_batch(*data(8), return_dict=True)
    assert model.optimizer.loss_scaler.counters.applied == 2


class Adds(keras.layers.Layer):
    """Adds the mean of its input to the loss, in the dtype that it computes in."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x


def test_penalties_in_float16_are_added_to_the_loss():
    """Of a layer's output, of a layer's own kind, and of a kernel."""
    model = protected(
        keras.Input([4]),
        keras.layers.Dense(3, activity_regularizer="l2", dtype="mixed_float16"),
        Adds(dtype="mixed_float16"),
        keras.layers.Dense(3, kernel_regularizer="l2", dtype="float16"),
        keras.layers.Dense(1, kernel_initializer="zeros"),
        run_eagerly=True,
    )
    first, second = (np.asarray(model.layers[at].kernel, np.float32) for at in (0, 2))
    hidden = np.ones([8, 4]) @ first
    expected = 0.01 * (hidden**2).sum() / 8, hidden.mean(), 0.01 * (second**2).sum()
    assert min(map(abs, expected)) > 5e-3
    loss = model.train_on_batch(np.ones([8, 4]), np.zeros([8, 1]))
    assert model.optimizer.loss_scaler.counters.applied == 1
    np.testing.assert_allclose(loss, sum(expected), rtol=1e-3, atol=1e-3)
