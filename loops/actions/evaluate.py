"""Evaluates a model on held-out data while it trains, and ends a run that no longer improves."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.variables import cast_with_mask
from loops.loop.visit import Cadence, Seconds, Visit
from loops.support.batches import explaining, parts, why_not
from loops.support.errors import LoopError, check, check_count
from loops.support.text import one_line

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Evaluate:
    """Runs a model over a dataset for evaluation, and keeps the results of Keras metrics.

        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        evaluate = loops.Evaluate(model, test_data, [accuracy], every=500)
        loop = loops.Loop(step, dataset, actions=[evaluate, loops.EarlyStop(loops.Best(evaluate, "accuracy"))])

    The model is called with `training=False`, so the state of the training run does not change. Metrics get its
    predictions in float32, with the mask that Keras stores on them. They are reset before each pass, stay on the device
    during it, and are read once after it. A metric may be NaN: it is kept and shown as NaN, and is never the best of a
    `Best`.

    A `JsonLines` or `Csv` among the loop's actions keeps the results in a file beside its own, which `halfstep report`
    draws: for `run/steps.jsonl` in `run/steps.evaluations.jsonl`, with lines such as
    `{"step": 500, "validation/accuracy": 0.93}`. `TensorBoard` and `Progress` show them, too.

    Args:
        model: A Keras model, or any function `(x, training=False) -> prediction`.
        dataset: A finite `tf.data.Dataset` of `(x, y)` or `(x, y, sample_weight)`. Each pass reads it from the start.
        metrics: `keras.metrics.Metric` objects with different names, made outside of a `tf.distribute` scope; or their
            names as for Keras's `compile`, such as "accuracy", which depends on the shapes of y and the prediction.
        every: Steps or `Seconds` between passes. With seconds, a resumed run evaluates at other steps.
        name: A prefix of the metrics' names where they are shown.

    Attributes:
        metrics: Those that it measures, metrics of Keras.
        step: The step after which the newest results were measured; 0 before the first.
        results: The newest result of each metric, floats by name.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(
        self,
        model: Any,
        dataset: tf.data.Dataset,
        metrics: Iterable[keras.metrics.Metric | str],
        *,
        every: int | Seconds,
        name: str = "validation",
    ):
        several = isinstance(metrics, Iterable) and not isinstance(metrics, str)
        found = [_from_name(one) for one in (metrics if several else [metrics])]
        _check(model, dataset, found)
        self._cadence = Cadence("Evaluate", every)
        self._model, self._dataset, self.metrics = model, dataset, found
        self.name = name
        self.step = 0
        self.results: dict[str, float] = {}
        self._update = tf.function(self._update_metrics)
        self._read = tf.function(lambda: tf.stack([tf.cast(one.result(), tf.float32) for one in found]))

    @property
    def metric_names(self) -> list[str]:
        """The keys of `results`."""
        return [metric.name for metric in self.metrics]

    @property
    def state_keys(self) -> list[str]:
        """What its results are known by in a checkpoint."""
        return [f"{self.name}: {', '.join(self.metric_names)}", self.name]

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Evaluates, if it is due.

        Raises:
            LoopError: If the dataset is empty.
        """
        if self._cadence.due(visit):
            self.measure(visit.counters.data)

    def measure(self, step: int = 0) -> dict[str, float]:
        """Evaluates now.

        Args:
            step: The new value of the attribute `step`.

        Returns:
            The new `results`.

        Raises:
            LoopError: If the dataset is empty.
        """
        for metric in self.metrics:
            metric.reset_state()
        empty = True
        for batch in self._dataset:
            self._update(batch)
            empty = False
        if empty:
            raise LoopError(
                f"Evaluate({self.name!r}): the dataset is empty: it gave no batch. Is the batch larger than the data, "
                "with drop_remainder? Give a dataset that can be read more than once."
            )
        values = self._read().numpy().tolist()
        self.step, self.results = step, {one.name: value for one, value in zip(self.metrics, values, strict=True)}
        return self.results

    def save_state(self) -> dict:
        """The newest results, for a `Checkpoint`."""
        results = {name: value if math.isfinite(value) else str(value) for name, value in self.results.items()}
        return {"step": self.step, "results": results}

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self.step = value["step"]
        # A metric that it no longer has is not measured again.
        saved = value["results"]
        self.results = {name: float(saved[name]) for name in self.metric_names if name in saved}

    def _update_metrics(self, batch: Any) -> None:
        x, y, sample_weight = parts(batch, "Evaluate")
        with explaining(f"Evaluate({self.name!r})", self._model, x, y):
            self._measure(x, y, sample_weight)

    def _measure(self, x: Any, y: Any, sample_weight: Any) -> None:
        prediction = self._model(x, training=False)
        prediction = tf.nest.map_structure(lambda one: cast_with_mask(one, tf.float32), prediction)
        for metric in self.metrics:
            with self._told(metric, x, y, prediction):
                metric.update_state(y, prediction, sample_weight=sample_weight)

    @contextlib.contextmanager
    def _told(self, metric: keras.metrics.Metric, x: Any, y: Any, prediction: Any) -> Iterator[None]:
        """Replaces an error of a metric that takes something else by one sentence, unless the batch is at fault."""
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            if why_not(self._model, x, y):
                raise
            count = len(tf.nest.flatten(prediction))
            several = (
                f"The model has {count} outputs. Give a function that returns one, such as "
                "`lambda x, training: model(x, training=training)[0]`, and data whose y is its target: an Evaluate for "
                "each output."
                if count > 1
                else "Give a metric of predictions, such as keras.metrics.MeanSquaredError()."
            )
            raise scaler.InvalidArgument(
                f"Evaluate({self.name!r}): the metric {metric.name!r}, a {type(metric).__name__}, does not take "
                f"(y, prediction, sample_weight=...): {one_line(error)} {several}"
            ) from error


def _from_name(metric: Any) -> Any:
    """Keras's metric of a name, under this name."""
    if isinstance(metric, str) and metric.lower() in ("accuracy", "acc"):
        return keras.metrics.MeanMetricWrapper(_accuracy, name=metric)
    found = scaler.authoring.from_keras(keras.metrics, metric)
    if isinstance(metric, str) and isinstance(found, keras.metrics.Metric):
        return type(found).from_config({**found.get_config(), "name": metric})
    return found


def _accuracy(y: Any, prediction: Any) -> Any:
    """The accuracy that `compile` chooses for these shapes."""
    if prediction.shape[-1] == 1:
        return keras.metrics.binary_accuracy(y, prediction)
    if len(y.shape) < len(prediction.shape) or y.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(y, prediction)
    return keras.metrics.categorical_accuracy(y, prediction)


def _check(model: object, dataset: object, metrics: list) -> None:
    check(f"Evaluate(model={model!r})", callable(model), "a keras.Model")
    if not isinstance(dataset, tf.data.Dataset):
        raise scaler.InvalidArgument(f"Evaluate(dataset={type(dataset).__name__}): expected a tf.data.Dataset.")
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise scaler.InvalidArgument("Evaluate(dataset=...): it never ends. Leave out .repeat(), or .take(n) of it.")
    if not metrics or not all(isinstance(one, keras.metrics.Metric) for one in metrics):
        raise scaler.InvalidArgument(
            f"Evaluate(metrics={metrics!r}): expected a list of keras.metrics.Metric objects or their names such as "
            "'accuracy', at least one."
            + "".join(scaler.authoring.did_you_mean(one, [*dir(keras.metrics), "accuracy"]) for one in metrics)
        )
    names, counts = np.unique([one.name for one in metrics], return_counts=True)
    if counts.max() > 1:
        raise scaler.InvalidArgument(
            f"Evaluate(metrics=...): two are named {str(names[counts.argmax()])!r}. Give them names: "
            "keras.metrics.Mean(name=...)."
        )


_BETTER = {
    "min": ("loss", "error", "mse", "mae", "rmse", "perplexity"),
    "max": ("accuracy", "acc", "auc", "precision", "recall", "f1", "f1_score", "iou"),
}
"""Which way the metrics of these names, or with such an ending, are better."""


def _better(metric: Any) -> str | None:
    """The mode in which a metric is better, by what Keras says of it or else by its name; None if unknown."""
    known = {"down": "min", "up": "max"}.get(scaler.authoring.direction_of(metric) or "")
    words = ((mode, word) for mode, several in _BETTER.items() for word in several)
    return known or next((mode for mode, word in words if f"_{metric.name.lower()}".endswith(f"_{word}")), None)


class Best:
    """Follows one metric of an `Evaluate`. An `EarlyStop` and a `Checkpoint` may share one.

    A NaN is never better: it counts as an evaluation without improvement.

    Args:
        evaluate: One of the same loop's actions, before those that use this.
        metric: The name of one of its metrics.
        mode: "min" or "max", whichever is better. Default: as Keras says of the metric, or as its name does, such as
            "loss", "error", "accuracy" or "auc", also at its end: "top_k_accuracy".
        min_delta: The smallest change that counts as an improvement, in the metric's units.

    Attributes:
        value: The best result, or None before there is one.
        step: The step of the best result, 0 before there is one.
        since: The number of evaluations since then.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, evaluate: Evaluate, metric: str, mode: str | None = None, *, min_delta: float = 0.0):
        check(f"Best({evaluate!r})", isinstance(evaluate, Evaluate), "an hs.Evaluate")
        check(f"Best(metric={metric!r})", metric in evaluate.metric_names, f"one of {', '.join(evaluate.metric_names)}")
        if mode is None:
            mode = _better(next(one for one in evaluate.metrics if one.name == metric))
            check(f"Best(metric={metric!r})", mode, "mode='min' or mode='max' as well: its name does not say which")
        check(f"Best(mode={mode!r})", mode in ("min", "max"), "'min' or 'max', whichever is better")
        number = isinstance(min_delta, numbers.Real) and min_delta >= 0
        check(f"Best(min_delta={min_delta!r})", number, "a number of at least 0")
        self._evaluate, self._metric, self._mode, self._min_delta = evaluate, metric, mode, float(min_delta)
        self.value: float | None = None
        self.step = self.since = self._seen = 0
        # Another min_delta goes on with the best result: it was one.
        known = f"{mode} {metric} of {evaluate.name}"
        self.state_keys = [f"{known}, by {self._min_delta!r}", known]

    def check(self, loop: Loop, user: str, action: EarlyStop | None = None) -> None:
        """Makes sure that the evaluation belongs to the loop, and acts before an action that looks at it in its turn.

        Raises:
            LoopError: If it does not.
        """
        before = loop.actions if action is None else loop.actions[: loop.actions.index(action)]
        if self._evaluate not in before:
            raise LoopError(
                f"{user}: the hs.Evaluate that it follows is not among the loop's actions before it. Put it there."
            )

    def look(self) -> None:
        """Reads a new result, if there is one."""
        if self._evaluate.step == self._seen or self._metric not in self._evaluate.results:
            return
        self._seen = self._evaluate.step
        result, sign = self._evaluate.results[self._metric], 1 if self._mode == "min" else -1
        better = result == result if self.value is None else sign * result < sign * self.value - self._min_delta
        if better:
            self.value, self.step, self.since = result, self._seen, 0
        else:
            self.since += 1

    def describe(self) -> str:
        """The best result in words."""
        if self.value is None:
            return f"{self._metric} was never a number"
        return f"the best {self._metric}, {self.value:g}, is that of step {self.step}"

    def save_state(self) -> dict:
        """The state, for the actions that use this."""
        # As text: a result may be infinite, and JSON has no infinities.
        return {
            "value": None if self.value is None else str(self.value),
            "step": self.step,
            "since": self.since,
            "seen": self._seen,
        }

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self.value = None if value["value"] is None else float(value["value"])
        self.step, self.since, self._seen = value["step"], value["since"], value["seen"]


class EarlyStop:
    """Ends the run, as if its goal were reached, after `patience` evaluations without an improvement.

    A metric that is NaN is not an improvement. A run that resumes from a checkpoint of a stopped one stops at once.

    Args:
        best: The metric to follow.
        patience: The number of consecutive evaluations without improvement that ends the run.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, best: Best, *, patience: int = 3):
        check(f"EarlyStop({best!r})", isinstance(best, Best), "an hs.Best, such as hs.Best(evaluate, 'loss')")
        check_count(f"EarlyStop(patience={patience!r})", patience)
        self._best, self._patience = best, patience
        self.state_keys, self.state_of = best.state_keys, best

    @property
    def stopped(self) -> str | None:
        """Why the run should end, or None."""
        if self._best.since < self._patience:
            return None
        return f"no improvement in {self._best.since} evaluations: {self._best.describe()}"

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes sure that the evaluation is one of the loop's actions.

        Raises:
            LoopError: If it is not.
        """
        self._best.check(loop, "EarlyStop", self)

    def __call__(self, visit: Visit) -> None:
        """Reads the newest results."""
        self._best.look()

    def save_state(self) -> dict:
        """The best result and the evaluations since, for a `Checkpoint`."""
        return self._best.save_state()

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self._best.load_state(value)
