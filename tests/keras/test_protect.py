"""Under `fit` a skipped step moves nothing with `protect`, and BatchNorm without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import compiled, data, finite, fit, make_model, overflowing
from rigs import raw

import scaler


def state(model):
    return raw([*model.non_trainable_variables, *model.metrics_variables])


def one_bad_batch_among_good():
    good, bad = data(24), overflowing()
    return [np.concatenate([g[:16], b, g[16:]]) for g, b in zip(good, bad, strict=True)]


@pytest.mark.exhaustive_with("{'jit_compile': True}", "{'run_eagerly': True}", "{'steps_per_execution': 3}")
@pytest.mark.parametrize(
    "mode", [{}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 3}], ids=str
)
def test_a_skipped_batch_never_happened(mode):
    """BatchNorm, the dropout's generator and metrics are those of the data without it."""
    x, y = one_bad_batch_among_good()
    skipped = compiled(strategy=scaler.Static(64.0), **mode)
    logs = skipped.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert skipped.optimizer.loss_scaler.counters.skipped == 1
    clean = compiled(strategy=scaler.Static(64.0), **mode)
    assert clean.fit(*data(24), batch_size=8, shuffle=False, verbose=0).history == logs
    assert state(skipped) == state(clean)
    assert raw(skipped.weights) == raw(clean.weights)


def test_without_it_weights_are_safe_and_statistics_in_eager_mode_are_not():
    model = compiled(protect=False, run_eagerly=True)
    fit(model)
    before = raw(model.trainable_variables)
    model.train_on_batch(*overflowing())
    assert raw(model.trainable_variables) == before
    assert not finite(model)


@pytest.mark.slow
def test_without_it_state_of_layers_in_a_graph_is_safe_and_metrics_are_not():
    model = compiled(protect=False)
    fit(model)
    before = raw(model.variables)
    model.train_on_batch(*overflowing())
    assert raw(model.variables) == before
    assert not all(np.isfinite(np.asarray(variable)).all() for variable in model.metrics_variables)


@pytest.mark.slow
def test_what_a_step_returns_is_computed_anew_and_the_rest_is_left():
    class Mine(keras.Sequential):
        def train_step(self, batch):
            logs = super().train_step(batch)
            return {**logs, "one": tf.constant(1.0)}

    model = Mine(make_model().layers)
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse", jit_compile=False)
    scaler.protect(model)
    logs = model.train_on_batch(*overflowing(), return_dict=True)
    assert logs == {"loss": np.inf, "one": 1.0}


@pytest.mark.slow
def test_before_or_after_compile_and_again_is_the_same():
    model = make_model()
    assert scaler.protect(model) is model
    step = model.train_step
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse", jit_compile=False)
    assert scaler.protect(model).train_step is step
    model.train_on_batch(*overflowing())
    assert finite(model)


def test_a_window_puts_back_the_micro_batch_that_overflowed():
    model = compiled(inner=keras.optimizers.Adam(gradient_accumulation_steps=3))
    for _ in range(6):  # Two windows, without the trace of its own that `fit` has.
        model.train_on_batch(*data(8))
    before = raw(model.non_trainable_variables)
    model.train_on_batch(*overflowing())
    assert raw(model.non_trainable_variables) == before
    model.train_on_batch(*data(8))
    assert raw(model.non_trainable_variables) != before
    assert finite(model)


def test_statistics_that_overflow_on_an_applied_step_keep_their_last_finite_value():
    class Beside(keras.layers.Layer):
        def build(self, shape):
            self.largest = self.add_weight(shape=(2,), initializer="ones", trainable=False)

        def call(self, x):
            self.largest.assign(tf.stack([tf.reduce_max(x) * 1e30 * 1e30, 2.0]))
            return x

    model = keras.Sequential([keras.Input([4]), Beside(), keras.layers.Dense(1)])
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    scaler.protect(model)
    model.train_on_batch(*data(8))
    assert model.optimizer.loss_scaler.counters.applied == 1
    np.testing.assert_array_equal(model.layers[0].largest, [1.0, 2.0])


@pytest.mark.exhaustive_with("{'jit_compile': False}", "{'run_eagerly': True}")
@pytest.mark.parametrize("mode", [{"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_a_model_is_built_on_the_first_batch_even_if_that_overflows(mode):
    model = keras.Sequential(
        [
            keras.layers.Dense(4, dtype="float16"),
            keras.layers.BatchNormalization(dtype="float16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse", metrics=["mae"], **mode)
    scaler.protect(model)
    logs = model.train_on_batch(*overflowing(), return_dict=True)
    assert logs == {"loss": np.inf, "mae": np.inf}
    assert finite(model)


def test_it_says_what_it_needs():
    with pytest.raises(scaler.InvalidArgument, match=r"protect\(3\): expected a keras.Model"):
        scaler.protect(3)
    model = make_model()
    model.compile("adam", loss="mse")
    scaler.protect(model)
    with pytest.raises(scaler.InvalidArgument, match=r"has no scaler.LossScaleOptimizer"):
        model.train_on_batch(*data(8))


class Adds(keras.layers.Layer):
    """Adds the mean of its input to the loss, in the dtype that it computes in."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x


PENALTIES = {
    "activity": lambda: keras.layers.Dense(3, activity_regularizer="l2", dtype="mixed_float16"),
    "add_loss": lambda: Adds(dtype="mixed_float16"),
    "kernel": lambda: keras.layers.Dense(3, kernel_regularizer="l2", dtype="float16"),
}


@pytest.mark.slow_with("activity", "kernel")
@pytest.mark.parametrize("kind", PENALTIES)
def test_a_penalty_in_float16_is_added_to_the_loss(kind):
    model = keras.Sequential([keras.Input([4]), PENALTIES[kind](), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler.Static(4.0))
    scaler.protect(model).compile(optimizer, loss="mse", jit_compile=False)
    loss = model.train_on_batch(np.ones([8, 4]), np.zeros([8, 1]))
    assert optimizer.loss_scaler.counters.applied == 1
    assert 0.0 < loss < 5.0
