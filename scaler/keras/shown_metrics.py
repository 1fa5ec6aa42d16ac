"""What `fit` shows when steps are rolled back: metrics without those steps, and a step's own numbers unchanged."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.keras_attributes import direction_of


class Shown:
    """Tracks what happened since a model's metrics were reset.

    It knows whether any step was kept, and which of the returned numbers are a step's own.

    Args:
        model: The Keras model with these metrics.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._results = model.get_metrics_result
        self._own: dict[str, tf.Variable] = {}
        with self._scope():
            self._kept = replicas.local_variable(0.0, "steps_kept")
            self._put_back = replicas.local_variable(0.0, "steps_put_back")

    def begin(self) -> None:
        """Begins a step, which counts as kept while it runs."""
        self._kept.assign_add(1.0)
        for flag in self._own.values():
            flag.assign(False)

    def results(self) -> dict[str, Any]:
        """The model's current metrics, inside a step. Empty if a metric was never used and so has no result."""
        # Keras 3.8 returns Python numbers where a step runs eagerly.
        results = self._used_results().items()
        return {name: tf.constant(value) if isinstance(value, float) else value for name, value in results}

    def end(self, logs: Any, counted: dict[str, Any], bad: tf.Tensor) -> Any:
        """Ends a step and returns the logs to show.

        Args:
            logs: What the step returned.
            counted: `results()` before the rollback.
            bad: Scalar bool, whether the step was rolled back.

        Returns:
            `logs`, in which each number that equals the metric of its name is replaced by that metric's new result. If
            no step was kept since the last reset, it is replaced by what this step counted if all of that is finite,
            else by the worst value.
        """
        self._kept.assign_sub(tf.cast(bad, tf.float32))
        self._put_back.assign_add(tf.cast(bad, tf.float32))
        if not isinstance(logs, dict):
            return logs
        nothing, believable = self._nothing(), _all_finite(counted)
        anew = {}
        for name, value in self.results().items():
            instead = tf.where(believable, counted[name], self._worst(name, value)) if _is_float(value) else value
            anew[name] = tf.where(nothing, instead, value)
        return {name: self._told(name, value, counted, anew) for name, value in logs.items()}

    def reset(self) -> None:
        """Forgets all steps, because the model's metrics were reset."""
        for variable in (self._kept, self._put_back):
            variable.assign(0.0)
        for flag in self._own.values():
            flag.assign(False)

    def at_rest(self) -> dict[str, Any]:
        """The model's metrics between steps, at the end of an epoch.

        It leaves out metrics for which the last step returned its own numbers. Keras then shows those numbers. If all
        steps since the reset were rolled back, a metric has the worst value. That is not 0.0, which may be the best. It
        is not NaN either: Keras's callbacks take a NaN that comes first for the best.
        """
        results, nothing = self._used_results(), bool(self._nothing())
        shown = {name: value for name, value in results.items() if name not in self._own or not bool(self._own[name])}
        return {name: self._worst(name, value) if nothing else value for name, value in shown.items()}

    def _used_results(self) -> dict[str, Any]:
        if not all(getattr(metric, "built", True) for metric in self._model.metrics):
            return {}
        return self._results()

    def _told(self, name: str, value: Any, counted: dict[str, Any], anew: dict[str, Any]) -> Any:
        if name not in counted:
            return value
        same = _same(value, counted[name])
        self._flag(name).assign(tf.logical_not(same))
        return value if tf.get_static_value(same) is False else tf.where(same, anew[name], value)

    def _nothing(self) -> tf.Tensor:
        return tf.logical_and(self._put_back > 0.0, self._kept <= 0.0)

    def _flag(self, name: str) -> tf.Variable:
        if name not in self._own:
            with tf.init_scope():
                self._own[name] = replicas.local_variable(False, "own")
        return self._own[name]

    def _worst(self, name: str, value: Any) -> Any:
        worst = _worst_of(self._model, name)
        if isinstance(value, float):
            return worst
        if not _is_float(value):
            return value
        return tf.fill(tf.shape(value), tf.constant(worst, tf.as_dtype(value.dtype)))

    def _scope(self) -> contextlib.AbstractContextManager:
        strategy = self._model.distribute_strategy
        return contextlib.nullcontext() if strategy is tf.distribute.get_strategy() else strategy.scope()


def _worst_of(model: keras.Model, name: str) -> float:
    """Infinity for a metric to minimise, minus infinity for one to maximise, NaN if Keras does not know."""
    metrics = [inner for metric in model.metrics for inner in (metric, *getattr(metric, "metrics", ()))]
    for metric in metrics:
        direction = direction_of(metric)
        if direction in ("up", "down") and (name == metric.name or name.endswith(f"_{metric.name}")):
            return float("-inf" if direction == "up" else "inf")
    return float("inf" if name.endswith("loss") else "nan")


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _all_finite(values: dict[str, Any]) -> tf.Tensor:
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(v)) for v in values.values() if _is_float(v))])


def _same(value: Any, metric: Any) -> tf.Tensor:
    """Whether a value that a step returned equals this result of a metric, bit for bit; scalar bool."""
    if not (tf.is_tensor(metric) and (tf.is_tensor(value) or isinstance(value, float))):
        return tf.constant(value is metric)
    value = tf.convert_to_tensor(value)
    if value.dtype != metric.dtype or not value.shape.is_compatible_with(metric.shape):
        return tf.constant(False)
    equal = tf.equal(value, metric)
    if _is_float(metric):
        equal = tf.logical_or(equal, tf.logical_and(tf.math.is_nan(value), tf.math.is_nan(metric)))
    return tf.reduce_all(equal)
