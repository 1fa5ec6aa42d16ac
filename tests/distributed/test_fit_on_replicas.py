"""`fit` on replicas with ours: one decision for all, clipping after the sum, accumulation; the rest is refused."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, stateful_model
from replica_cases import agree, finite, mirrored, raw, spoil
from rigs import Batches

import scaler

SCALE = 2.0**8


def make_model(policy):
    return stateful_model(policy, ends=[keras.layers.Activation("linear", dtype="float32")])


def stateless(policy):
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, activation="tanh", dtype=policy)])


def compiled(strategy, policy, arguments, model=stateless, optimizer=keras.optimizers.SGD, **options):
    with strategy.scope():
        model = model(policy)
        inner = optimizer(1e-2, **arguments)
        model.compile(scaler.LossScaleOptimizer(inner, initial_scale=SCALE), loss="mse", **options)
    return scaler.protect(model)


def moved_by_a_step(model):
    return [*model.weights, *model.metrics_variables, *model.optimizer.inner_optimizer.variables]


@pytest.mark.slow
def test_an_overflow_on_any_replica_skips_on_all():
    model = compiled(mirrored(2), "mixed_float16", {}, make_model, keras.optimizers.Adam, metrics=["mae"])
    model.fit(*batch(size=16), batch_size=8, verbose=0)
    model.reset_metrics()
    before = raw(moved_by_a_step(model))
    for replica in (0, 1):
        logs = model.fit(*spoil(batch(), "forward", replica, 2), batch_size=8, verbose=0).history
        assert logs == {"loss": [np.inf], "mae": [np.inf]}
        assert raw(moved_by_a_step(model)) == before
        assert model.optimizer.loss_scaler.counters.skipped == replica + 1
    model.fit(*batch(size=16), batch_size=8, verbose=0)
    assert raw(model.trainable_variables) != before[: len(model.trainable_variables)]
    assert agree([*model.trainable_variables, *model.optimizer.inner_optimizer.variables])
    assert finite([*model.variables, *model.optimizer.variables])


@pytest.mark.slow
def test_keras_writes_nan_where_ours_skips():
    """What this is all about; when it fails, Keras has mended its class."""
    with mirrored(2).scope():
        model = stateless("mixed_float16")
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=SCALE), loss="mse")
    model.fit(*spoil(batch(), "data", 1, 2), batch_size=8, verbose=0)
    assert not finite(model.trainable_variables)


class BuildsInItsStep(keras.Model):
    """A model with an optimizer of its own, which nothing builds before the first step is traced."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(center=False, scale=False)
        self.dense = keras.layers.Dense(1)
        self.own = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, inputs, training=False):
        return self.dense(self.norm(inputs, training=training))

    def train_step(self, data):
        features, labels, *_ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(features, training=True) - labels) ** 2) / 2
            scaled = self.own.scale_loss(loss)
        self.own.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_window_that_the_step_builds_puts_back_the_spoiled_batch_and_no_other():
    with mirrored(2).scope():
        model = BuildsInItsStep()
        model.build((None, 3))
        model.compile()
    scaler.protect(model)
    good, bad = np.ones([4, 3], np.float32), np.full([4, 3], np.inf, np.float32)
    for features in (good, bad, good):
        model.train_on_batch(features, np.ones([4, 1], np.float32))
    means = model.norm.moving_mean.numpy()
    np.testing.assert_allclose(means, np.full(3, 1 - 0.99**2), rtol=1e-5)


@pytest.mark.slow
def test_a_window_with_an_overflow_is_skipped_as_a_whole():
    model = compiled(mirrored(2), "float16", {"gradient_accumulation_steps": 2})
    model.train_on_batch(*batch())
    model.train_on_batch(*batch())
    before = raw([*model.trainable_variables, *model.optimizer.masters.weights])
    for replica in (0, 1):
        model.train_on_batch(*spoil(batch(), "forward", replica, 2))
        model.train_on_batch(*batch())
        assert raw([*model.trainable_variables, *model.optimizer.masters.weights]) == before
        assert model.optimizer.loss_scaler.counters.attempted == 2 + replica
        assert finite(model.variables)


@pytest.mark.slow_with("jit")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_execution": 2}, "steps_per_execution > 1 on several replicas"),
        ({"jit_compile": True}, "jit_compile=True on several replicas"),
    ],
    ids=["steps", "jit"],
)
def test_what_keras_cannot_do_there_is_refused(options, message):
    model = compiled(mirrored(2), "mixed_float16", {}, **options)
    with pytest.raises(scaler.InvalidArgument, match=message):
        model.fit(*batch(size=16), batch_size=8, verbose=0)


ALONE = {
    "Mirrored": lambda: mirrored(1),
    "MultiWorkerMirrored": tf.distribute.MultiWorkerMirroredStrategy,
    "CentralStorage": tf.distribute.experimental.CentralStorageStrategy,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_single_device_of_any_strategy_trains(name):
    assert trained_alone(ALONE[name]) == trained_alone(tf.distribute.get_strategy)


@functools.cache
def trained_alone(make_strategy):
    """The bits of the weights after a good batch and a bad one."""
    with make_strategy().scope():
        norm = keras.layers.BatchNormalization(center=False, scale=False, dtype="float16")
        model = keras.Sequential([keras.Input([4]), norm, *stateless("float16").layers])
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1e-2), initial_scale=SCALE)
        model.compile(optimizer, loss="mse", jit_compile=False)
    scaler.protect(model)
    for one in (batch(), spoil(batch(), "forward", 0, 1)):
        logs = model.fit(*one, batch_size=8, verbose=0).history
    assert logs == {"loss": [np.inf]}
    assert model.optimizer.loss_scaler.counters.skipped == 1
    assert finite([*model.weights, *model.optimizer.variables])
    return raw(model.weights)


def test_protect_works_under_central_storage():
    with tf.distribute.experimental.CentralStorageStrategy().scope():
        model = stateless("float32")
        model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(1e-2)), loss="mse", jit_compile=False)
    scaler.protect(model).train_on_batch(*batch())
    assert model.optimizer.loss_scaler.counters.applied == 1


def test_strategies_that_divide_a_step_are_refused(monkeypatch):
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with central.scope(), pytest.raises(scaler.InvalidArgument, match="under a CentralStorageStrategy: its devices"):
        scaler.LossScaleOptimizer(keras.optimizers.SGD())
    workers = object.__new__(tf.distribute.ParameterServerStrategy)  # A real one waits for its processes.
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: workers)
    with pytest.raises(scaler.InvalidArgument, match=r"ParameterServerStrategy\w*: .* Expected a MirroredStrategy"):
        scaler.LossScaleOptimizer(keras.optimizers.SGD())


@pytest.mark.slow
def test_a_metric_that_is_nan_on_one_replica_is_shown_without_its_share():
    def fives(y, _):
        return tf.where(tf.reduce_max(y) >= 5.0, np.nan, 1.0) * tf.ones(tf.shape(y)[0])

    with mirrored(2).scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.0))
        metrics = [fives, keras.metrics.MeanMetricWrapper(lambda y, _: y + np.nan, name="never")]
        model.compile(optimizer, loss="mse", metrics=metrics, jit_compile=False)
    x, y = np.ones([16, 4], np.float32), np.ones([16, 1], np.float32)
    y[5] = 5.0
    with pytest.warns(scaler.ScaleWarning, match="protect: metrics of model"):
        history = scaler.protect(model).fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert model.optimizer.loss_scaler.counters.applied == 2
    assert history["fives"] == [1.0]
    assert np.isnan(history["never"]).all()


def test_the_wrong_place_is_refused():
    with mirrored(2).scope():
        model = make_model("mixed_float16")
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(scaler.InvalidArgument, match="made outside of the scope of the MirroredStrategy"):
        optimizer.build(model.trainable_variables)
    with mirrored(2).scope():
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD())
        with pytest.raises(scaler.InvalidArgument, match=r"outside of strategy.run"):
            optimizer.apply([tf.zeros(weight.shape) for weight in model.trainable_variables], model.trainable_variables)


BATCH, SIZE = 8, 20
"""Of a last batch that is smaller Keras takes the replicas' shares from a branch."""


def made(ours):
    keras.backend.clear_session()
    with mirrored(2).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1, "sigmoid")])
        inner = keras.optimizers.SGD(0.5)
        model.compile(
            scaler.LossScaleOptimizer(inner, scaler.Static(64.0)) if ours else inner,
            loss="binary_crossentropy",
            weighted_metrics=[keras.metrics.Precision(name="precision")],
            **({"jit_compile": False} if ours else {"run_eagerly": True}),
        )
    return scaler.protect(model) if ours else model


def weighted_data():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(SIZE, 5)), random.uniform(size=(SIZE, 1)) < 0.3
    weight = random.uniform(0.1, 4.0, SIZE)
    parts = (x.astype(np.float32), y.astype(np.float32), weight.astype(np.float32))
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def shown(model):
    """What `fit` shows at the end of each epoch and after each batch, and what `evaluate` returns after it."""
    batches = Batches()
    history = model.fit(weighted_data(), epochs=2, shuffle=False, verbose=0, callbacks=[batches]).history
    return history, batches.seen, model.evaluate(weighted_data(), verbose=0, return_dict=True)


@pytest.mark.dear("two models are compiled and fitted on two devices, ours and Keras's")
def test_metrics_are_those_of_keras():
    model = made(True)
    ours, wanted = shown(model), shown(made(False))
    assert model.optimizer.loss_scaler.counters[:2] == (6, 6)
    for mine, theirs in zip(ours, wanted, strict=True):
        keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), mine, theirs)
