"""`compile` and `fit` with ours train as with Keras's class on clean data, and never corrupt on other data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import SCALE, compiled, data, finite, fit, make_model, overflowing, returner
from rigs import raw
from versions import needs_keras

import scaler


def test_keras_does_not_wrap_it_once_more():
    model = compiled()
    assert type(model.optimizer) is scaler.LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.SGD


def test_another_strategy_goes_on_with_the_slots():
    model, inner = make_model("mixed_float16", stateful=False), keras.optimizers.SGD(1e-2, momentum=0.9)
    for steps, strategy in enumerate((scaler.Static(8.0), scaler.Dynamic(4.0)), 1):
        slots = raw(inner.variables)
        model.compile(scaler.LossScaleOptimizer(inner, strategy), loss="mse", run_eagerly=True)
        assert raw(inner.variables) == slots
        model.train_on_batch(*data(8))
        assert int(inner.iterations) == steps
    assert model.optimizer.loss_scaler.strategy == scaler.Dynamic(4.0)


@pytest.mark.slow
def test_another_wrapper_does_not_take_the_slots_of_masters():
    model = compiled("float16", stateful=False)
    model.optimizer.build(model.trainable_variables)
    model.compile(scaler.LossScaleOptimizer(model.optimizer.inner_optimizer), loss="mse", jit_compile=False)
    with pytest.raises(scaler.InvalidArgument, match="One optimizer goes with one MasterWeights"):
        fit(model)


@pytest.mark.slow
def test_clean_steps_are_those_of_keras_bit_for_bit():
    weights = []
    for make in (
        lambda inner: scaler.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=3),
        lambda inner: keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=3),
        lambda inner: inner,
    ):
        model = make_model("float32")
        inner = keras.optimizers.Adam(1e-2, clipnorm=0.1, weight_decay=0.1, use_ema=True)
        model.compile(make(inner), loss="mse", jit_compile=False)
        fit(model)
        weights.append(raw(model.weights))
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.slow
def test_weights_of_classes_and_examples_reach_the_gradients():
    x, y = data(16)
    labels = (y > 0).astype(np.int32)
    moved = []
    for scaled in (True, False):
        model = make_model("float32", stateful=False)
        inner = keras.optimizers.SGD(0.1)
        optimizer = scaler.LossScaleOptimizer(inner, initial_scale=SCALE) if scaled else inner
        model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
        model.fit(x, labels, class_weight={0: 0.1, 1: 3.0}, batch_size=8, shuffle=False, verbose=0)
        model.fit(x, labels, sample_weight=np.arange(16.0), batch_size=8, shuffle=False, verbose=0)
        moved.append(raw(model.weights))
    assert moved[0] == moved[1]


@pytest.mark.slow
def test_callbacks_read_and_set_the_learning_rate():
    model = compiled(inner=keras.optimizers.Adam(0.5), stateful=False, protect=False)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    history = fit(model, epochs=3, callbacks=[plateau, keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 5)])
    assert history["learning_rate"] == pytest.approx([0.1, 0.01, 0.001])  # A fifth, then half of it.
    assert float(model.optimizer.learning_rate) == pytest.approx(0.001)
    assert int(model.optimizer.iterations) == 18


def stopped_early(model):
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["watched"] = float(epoch)
            if epoch == 0:
                self.best = raw(self.model.weights)

    worse, stop = Worse(), keras.callbacks.EarlyStopping("watched", patience=1, restore_best_weights=True, mode="min")
    fit(model, epochs=3, callbacks=[worse, stop])
    return worse.best


@pytest.mark.slow
def test_masters_follow_weights_that_were_assigned():
    model = compiled("float16", stateful=False, inner=keras.optimizers.Adam(1e-2))
    fit(model)
    wanted = stopped_early(model)
    assert raw(model.weights) == wanted
    model.optimizer.learning_rate = 0.0
    fit(model)
    assert raw(model.weights) == wanted  # Stale masters would have written the later weights back.


@pytest.mark.slow_with("float32")
@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_averages_are_taken_over_at_the_end_and_only_if_there_are_any(policy):
    model = compiled(policy, keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), stateful=False)
    start = raw(model.weights)
    model.fit(*overflowing(), batch_size=8, verbose=0)
    if policy == "float16":
        assert model.optimizer.loss_scaler.counters.applied == 0
        assert raw(model.weights) == start  # Averages before the first step are zeros.
    fit(model)
    averages = model.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(model.weights, averages, strict=True):
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(average).astype(np.asarray(weight).dtype))


@pytest.mark.slow
def test_accumulated_steps_are_those_of_keras_bit_for_bit():
    x, y = data(48)
    weights = []
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)
    for make in (lambda inner: scaler.LossScaleOptimizer(inner, initial_scale=SCALE), lambda inner: inner):
        model = make_model("float32", stateful=False)
        inner = keras.optimizers.Adam(schedule, gradient_accumulation_steps=3, clipnorm=0.1)
        model.compile(make(inner), loss="mse", jit_compile=False)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights.append((raw(model.weights), int(model.optimizer.iterations)))
    assert weights[0] == weights[1]
    assert weights[0][1] == 2


def test_a_window_that_overflows_ends_where_it_would_have_ended():
    good = data(8)
    inner = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3)
    model = compiled(inner=inner, stateful=False, protect=False)
    set_back, start = returner(model), raw(model.weights)
    for batch in (good, overflowing(), good):
        model.train_on_batch(*batch)
        assert finite(model)  # Sums too.
    counters = model.optimizer.loss_scaler.counters
    assert (counters.attempted, counters.skipped) == (1, 1)
    assert raw(model.weights) == start
    ends = []
    for _ in range(2):
        for _ in range(3):
            model.train_on_batch(*good)
        ends.append(raw(model.weights))
        set_back()
    assert ends[0] == ends[1] != start


@pytest.mark.slow
def test_gradients_may_be_missing_or_sparse():
    keras.utils.set_random_seed(7)
    tokens = keras.Input([3], dtype="int32")
    embedded = keras.layers.Embedding(10, 4, dtype="mixed_float16")(tokens)
    side = keras.layers.Dense(2, dtype="mixed_float16", name="unused")
    output = keras.layers.Dense(1, dtype="float32")(keras.layers.Flatten(dtype="float32")(embedded))
    model = keras.Model(tokens, [output, side(embedded)])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=SCALE)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x)[0] - y)))
        grads = tape.gradient(scaled, model.trainable_variables)
        assert isinstance(grads[0], tf.IndexedSlices)
        assert grads.count(None) == 2
        return optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    before = raw(model.trainable_variables)
    with pytest.warns(scaler.ScaleWarning, match="no gradient for 'unused/kernel', 'unused/bias'"):
        applied = step(tf.constant([[1, 1, 2]]), tf.constant([[1.0]]))
    assert applied == 1
    moved = [a != b for a, b in zip(before, raw(model.trainable_variables), strict=True)]
    assert sum(moved) == 3
    embedding = np.asarray(model.trainable_variables[0])
    assert (embedding != np.frombuffer(before[0], np.float32).reshape(10, 4)).any(axis=1).tolist() == [
        index in (1, 2) for index in range(10)
    ]


def test_a_variable_that_takes_its_gradient_is_left_alone_by_scale_norm_and_clipping():
    weight, own = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0])
    own.overwrite_with_gradient = True
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=100.0), scaler.Static(3.0))
    scaled = optimizer.scale_loss(tf.constant(1.0))
    outcome = optimizer.apply([tf.constant([3.0, 4.0]) * scaled, tf.constant([1e4, 0.7])], [weight, own])
    np.testing.assert_array_equal(own, np.float32([1e4, 0.7]))
    np.testing.assert_allclose(weight, [-2.0, -2.0])
    assert float(outcome.grad_norm) == pytest.approx(5.0)
    outcome = optimizer.apply([tf.constant([3.0, 4.0]), tf.constant([float("inf"), 0.7])], [weight, own])
    assert not outcome.finite
    np.testing.assert_array_equal(own, np.float32([1e4, 0.7]))


@needs_keras("MultiOptimizer")
def test_keras_distributes_variables_over_optimizers_inside():
    size = 600  # Large enough that an optimizer of another kind would be compiled in clusters.
    keras.utils.set_random_seed(7)
    models = []
    for make in (lambda inner: scaler.LossScaleOptimizer(inner, initial_scale=SCALE), lambda inner: inner):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input([size]), keras.layers.Dense(size, name="a"), keras.layers.Dense(1)])
        inner = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"a/.*": keras.optimizers.Adam(1e-3)})
        )
        model.compile(make(inner), loss="mse", jit_compile=False, run_eagerly=bool(models))
        model.train_on_batch(np.ones([2, size], np.float32), np.ones([2, 1], np.float32))
        models.append([np.asarray(weight) for weight in model.weights])
    for ours, theirs in zip(*models, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_weight_decay_leaves_out_what_is_excluded_masters_too():
    weights = [keras.Variable(np.ones(2), dtype="float16") for _ in range(2)]
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.9), initial_scale=SCALE)
    optimizer.exclude_from_weight_decay(var_list=weights[:1])
    optimizer.build(weights)
    optimizer.apply([tf.zeros(2) * optimizer.loss_scale] * 2)
    np.testing.assert_array_equal(weights[0], [1.0, 1.0])
    assert (np.asarray(weights[1]) < 1.0).all()
