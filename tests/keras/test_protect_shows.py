"""What `fit` shows under `protect`: a step's own numbers, metrics without skipped batches, and never a false best."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import data, overflowing
from rigs import Batches

import scaler

MODES = [{}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}]


class Own(keras.Sequential):
    """Returns its loss, and does not touch Keras's tracker of it."""

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def linear(kind=Own, **arguments):
    """A model whose weights do not move."""
    keras.utils.set_random_seed(7)
    model = kind([keras.Input([4]), keras.layers.Dense(1, use_bias=False, dtype="mixed_float16")])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.0), scaler.Static(64.0))
    model.compile(optimizer, **{"loss": "mse", "jit_compile": False, **arguments})
    return scaler.protect(model)


def steep():
    """A batch whose loss is finite, and whose gradient is not: a label of 1e18."""
    x, y = data(8)
    y[0] = 1e18
    return x, y


def true_loss(model, batch):
    x, y = batch
    return float(np.mean((np.float32(model.predict_on_batch(x)) - y) ** 2))


def test_a_loss_that_no_tracker_saw_is_what_is_shown_also_of_a_skipped_step():
    model, batches = linear(), Batches()
    x, y = data(32)
    arguments = {"shuffle": False, "verbose": 0, "epochs": 2, "callbacks": [batches]}
    history = model.fit(x, y, batch_size=8, validation_data=(x, y), **arguments).history
    losses = [true_loss(model, (x[i : i + 8], y[i : i + 8])) for i in range(0, 32, 8)]
    np.testing.assert_allclose([logs["loss"] for logs in batches.seen], losses * 2, rtol=2e-3)
    np.testing.assert_allclose(history["loss"], [losses[-1]] * 2, rtol=2e-3)
    np.testing.assert_allclose(history["val_loss"], [np.mean(losses)] * 2, rtol=2e-3)
    model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(model.get_metrics_result()["loss"], np.mean(losses), rtol=2e-3)
    logs = model.train_on_batch(x[:8], y[:8], return_dict=True)
    np.testing.assert_allclose(logs["loss"], losses[0], rtol=2e-3)
    assert not np.isfinite(model.train_on_batch(*overflowing(), return_dict=True)["loss"])
    logs = model.train_on_batch(*steep(), return_dict=True)
    assert model.optimizer.loss_scaler.counters.skipped == 2
    np.testing.assert_allclose(logs["loss"], 1e36 / 8, rtol=1e-3)


class OwnUnderAMetricsName(Own):
    """Returns each batch's loss as "m". The metric m is the mean of it."""

    def __init__(self, layers):
        super().__init__(layers)
        self.m = keras.metrics.Mean(name="m")

    def train_step(self, batch):
        loss = super().train_step(batch)["loss"]
        self.m.update_state(loss)
        return {"m": loss}


@pytest.mark.slow_with("{'run_eagerly': True}")
@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
def test_a_number_under_a_metrics_name_is_the_steps_own_where_both_are_not_finite(mode):
    model, batches = linear(OwnUnderAMetricsName, **mode), Batches()
    x, y = data(32)
    y[24:] = np.nan
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[batches]).history
    assert model.optimizer.loss_scaler.counters.skipped == 1
    np.testing.assert_equal(batches.seen[-1]["m"], np.nan)
    np.testing.assert_equal(history["m"], [np.nan])
    np.testing.assert_allclose(float(model.m.result()), np.mean([true_loss(model, (x[:24], y[:24]))]), rtol=2e-3)


class Computed(OwnUnderAMetricsName):
    """Returns under the names of metrics what it computes from them: of m, and of n in another dtype."""

    def __init__(self, layers):
        super().__init__(layers)
        self.n = keras.metrics.Mean(name="n")

    def train_step(self, batch):
        self.n.update_state(super().train_step(batch)["m"])
        logs = {"m": 2.0 * self.m.result(), "n": tf.cast(self.n.result() / 1e32, tf.float16)}
        return {**logs, "mae": tf.constant(3), "list": [1.0], "half": tf.constant(0.5, tf.float16), "one": 1.0}


def test_what_is_computed_from_a_metric_and_is_not_its_result_is_shown_as_it_was():
    """And so are numbers of other types."""
    model = linear(Computed, metrics=["mae"])
    for batch in (data(8), steep()):
        model.reset_metrics()
        logs = model.train_on_batch(*batch, return_dict=True)
        assert (logs["mae"], logs["half"], logs["one"]) == (3, 0.5, 1.0)
    assert model.optimizer.loss_scaler.counters.skipped == 1
    np.testing.assert_allclose([logs["m"], logs["n"]], [2e36 / 8, 1250.0], rtol=1e-3)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
def test_results_of_metrics_are_computed_anew_however_they_are_returned(mode):
    class Tracking(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.tracker = keras.metrics.Mean(name="tracked")
            self.chosen = keras.metrics.Mean(name="chosen")

        @tf.function
        def train_step(self, batch):
            loss = Own.train_step(self, batch)["loss"]
            for metric in (self.tracker, self.chosen):
                metric.update_state(loss)
            tracked, given = self.tracker.result(), self.chosen.result()
            chosen = tf.cond(loss > 0.0, self.chosen.result, lambda: given)
            return {"tracked": tracked, "chosen": chosen, "loss": tracked, "twice": 2.0 * tracked}

    model = linear(Tracking, metrics=["mae"], **mode)  # Which the step never uses.
    x, y = data(8)
    first = model.train_on_batch(x, y, return_dict=True)
    bad = overflowing()
    joined = np.concatenate([x, bad[0]]), np.concatenate([y, bad[1]])
    batches = Batches()
    history = model.fit(*joined, batch_size=8, shuffle=False, verbose=0, callbacks=[batches]).history
    assert model.optimizer.loss_scaler.counters.skipped == 1
    np.testing.assert_allclose(first["tracked"], true_loss(model, (x, y)), rtol=2e-3)
    for name in ("tracked", "chosen", "loss"):  # Of which the last is the name of no metric that the step updates.
        assert [logs[name] for logs in batches.seen] == [first["tracked"]] * 2
    assert history["loss"] == [first["tracked"]]
    assert np.isnan(batches.seen[1]["twice"])  # A number of its own.


class Doubled(keras.Sequential):
    """Computes from the results of the metrics."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        return {**logs, "loss": 2.0 * logs["loss"]}


def test_a_step_that_runs_eagerly_is_given_the_results_of_all_metrics():
    model, batches = linear(Doubled, run_eagerly=True), Batches()
    x, y = data(16)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[batches])
    losses = [true_loss(model, (x[i : i + 8], y[i : i + 8])) for i in (0, 8)]
    np.testing.assert_allclose([logs["loss"] for logs in batches.seen], [2 * losses[0], sum(losses)], rtol=2e-3)


class Score(keras.metrics.Mean):
    """Of which Keras does not know which way is better."""

    def update_state(self, y, prediction, sample_weight=None):
        return super().update_state(y)


def fit_all_skipped_then_good(callbacks, epochs, metrics=("accuracy",)):
    """Epochs of which the first is skipped whole; labels that a NaN prediction would pass for right."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile(
        scaler.LossScaleOptimizer(keras.optimizers.SGD(0.05), scaler.Static(64.0)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=list(metrics),
        jit_compile=False,
    )
    scaler.protect(model)
    x = data(16)[0]
    bad = np.full([16, 4], np.nan, np.float32)
    good = tf.data.Dataset.from_tensor_slices((x, np.r_[np.zeros(12), np.ones(4)].astype(np.int32))).batch(8)
    broken = tf.data.Dataset.from_tensor_slices((bad, np.zeros(16, np.int32))).batch(8)
    stream = broken.concatenate(good.repeat(epochs - 1))
    history = model.fit(stream, steps_per_epoch=2, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model, history.history


@pytest.mark.slow
def test_an_epoch_of_skipped_steps_is_the_worst_there_is():
    batches = Batches()
    model, history = fit_all_skipped_then_good([batches], 2, ("accuracy", Score(name="score")))
    assert model.optimizer.loss_scaler.counters.skipped == 2
    assert history["loss"][0] == np.inf
    assert history["accuracy"][0] == -np.inf
    assert np.isnan(history["score"][0])
    assert all(np.isfinite(history[name][1:]).all() for name in history)
    np.testing.assert_equal(batches.seen[0], {"loss": np.inf, "accuracy": -np.inf, "score": np.nan})
    results = model.evaluate(data(16)[0], np.zeros(16, np.int32), verbose=0, return_dict=True)
    assert all(np.isfinite(value) for value in results.values())


@pytest.mark.slow
def test_keras_keeps_a_later_epoch_as_the_best(tmp_path):
    monitored = {"monitor": "loss", "mode": "min"}
    path = tmp_path / "best.weights.h5"
    best = keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True, **monitored)
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True, **monitored)
    reduce = keras.callbacks.ReduceLROnPlateau(patience=9, **monitored)
    _, history = fit_all_skipped_then_good([best, stop, reduce], epochs=5)
    value = min(history["loss"])
    assert np.isfinite(value)
    assert best.best == stop.best == reduce.best == value
    assert stop.best_epoch >= 1


def reaches_five(y, _):
    """1.0 for each row, and NaN for all of a batch in which a label is 5."""
    return tf.where(tf.reduce_max(y) >= 5.0, np.nan, 1.0) * tf.ones(tf.shape(y)[0])


def nothing_but_nan(y, _):
    return tf.fill([tf.shape(y)[0]], np.nan)


class Lowest(keras.metrics.Metric):
    """The least label of each of two kinds, of which the second never comes."""

    def __init__(self):
        super().__init__(name="lowest")
        self.least = self.add_weight(shape=(2,), initializer=keras.initializers.Constant(np.inf), name="least")

    def reset_state(self):
        self.least.assign([np.inf, np.inf])

    def update_state(self, y, prediction, sample_weight=None):
        self.least.assign(tf.minimum(self.least, [tf.reduce_min(y), np.inf]))

    def result(self):
        return self.least[0]


def infinite_at_five(y, prediction):
    return tf.where(y >= 5.0, np.inf, 2.0) + 0.0 * tf.cast(prediction, tf.float32)


class Part(keras.Sequential):
    """Shows its loss, and all of its metrics but one."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        del logs["mae"]
        return logs


@pytest.mark.slow_with(*map(str, MODES[1:]))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_is_not_finite_on_an_applied_step_is_shown_without_that_batch(mode):
    """Metrics, the loss, and nothing of a metric that is not shown."""
    metrics = [reaches_five, nothing_but_nan, Lowest(), "mae"]
    model, batches = linear(Part, loss=infinite_at_five, metrics=metrics, **mode), Batches()
    epochs = 1 if mode else 2
    y = np.ones([32, 1], np.float32)
    y[9] = 5.0  # In the second of four batches.
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with pytest.warns(scaler.ScaleWarning) as caught:
        history = model.fit(data(32)[0], y, epochs=epochs, callbacks=[batches], **arguments).history
    said = " ".join(str(one.message) for one in caught)
    assert model.optimizer.loss_scaler.counters.applied == 4 * epochs
    assert history["loss"] == [2.0] * epochs
    assert "mae" not in history
    assert history["reaches_five"] == [1.0] * epochs
    assert np.isnan(history["nothing_but_nan"]).all()
    assert history["lowest"] == [1.0] * epochs  # What is infinite from the start holds nothing back.
    assert {logs["reaches_five"] for logs in batches.seen} == {1.0}
    assert np.isnan([logs["nothing_but_nan"] for logs in batches.seen]).all()
    metrics = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    assert [24.0, 24.0] in [
        [float(one) for one in metric.variables] for metric in metrics if len(metric.variables) == 2
    ]
    names = ("'reaches_five'", "'nothing_but_nan'", "'loss'", "'lowest'", "'mae'")
    assert [said.count(name) for name in names] == [1, 1, 1, 0, 0]


@pytest.mark.slow
def test_of_metrics_of_one_name_only_that_of_the_right_output_is_nan():
    given = keras.Input([4])
    model = keras.Model(given, {name: keras.layers.Dense(1, name=name)(given) for name in ("a", "b")})
    wrapped = {"a": reaches_five, "b": nothing_but_nan}
    metrics = {name: [keras.metrics.MeanMetricWrapper(one, name="m")] for name, one in wrapped.items()}
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.0)), loss="mse", metrics=metrics, jit_compile=False)
    x, y = data(8)
    with pytest.warns(scaler.ScaleWarning, match=r"\['b_m'\]"):
        history = scaler.protect(model).fit(x, {"a": y, "b": y}, batch_size=8, verbose=0).history
    assert history["a_m"] == [1.0]
    assert np.isnan(history["b_m"]).all()
