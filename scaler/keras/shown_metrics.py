"""What `fit` shows when steps are rolled back: metrics without those steps, and a step's own numbers unchanged.

A number that a step returns is a metric's if a metric returned it, maybe one of another name, else the step's own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import CALLS, is_eager, reached, sources_of
from scaler.backend.layers import direction_of
from scaler.backend.variables import outside_the_graph
from scaler.errors import ScaleWarning
from scaler.gate.rollback import all_finite

_RESULT = "_halfstep_result_of"
"""Of a tensor: the name under which a metric's result is among the logs."""


class Shown:
    """Tracks what happened since a model's metrics were reset.

    It knows whether any step was kept, which metrics were not finite in how many of those, and which of the returned
    numbers are a step's own.

    Args:
        model: The Keras model with these metrics.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._results = model.get_metrics_result
        self._numbers: dict[str, Any] = {}
        self._metric_of: dict[str, str] = {}
        """The logs that are results of metrics, each with the name of its metric."""
        self._traced: dict[str, str] = {}
        self._own: frozenset[str] = frozenset()
        self._in_step = False
        self._left_out: dict[str, tf.Variable] = {}
        self._told: set[str] = set()
        with replicas.in_scope(model.distribute_strategy):
            self._kept = replicas.local_variable(0.0, "steps_kept")
            self._put_back = replicas.local_variable(0.0, "steps_put_back")

    def begin(self) -> None:
        """Begins a step, which counts as kept while it runs."""
        self._kept.assign_add(1.0)
        self._in_step = tf.executing_eagerly()

    def listen(self) -> None:
        """Has the model's metrics tell their results to `note`, as `get_metrics_result` does."""
        for metric in _metrics_of(self._model):
            if not hasattr(metric.result, _RESULT):
                vars(metric)["result"] = self._telling(metric.name, metric.result)

    def _telling(self, name: str, result: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(result)
        def told() -> Any:
            return self.note({name: result()})[name]

        setattr(told, _RESULT, name)
        return told

    def note(self, results: dict[str, Any]) -> dict[str, Any]:
        """Remembers of each value that it is the result of a metric, and returns them."""
        for name, value in results.items():
            if tf.is_tensor(value):
                setattr(value, _RESULT, name)
            else:  # Keras 3.8 returns Python numbers where a step runs eagerly.
                self._numbers[name] = value
        return results

    def look(self, logs: Any) -> Any:
        """Finds the logs that are results of metrics, where the step has made them, and returns all logs."""
        self._in_step = False
        if isinstance(logs, dict):
            asked = {name: self._returned_by(name, value) for name, value in logs.items()}
            found = {name: metric for name, metric in asked.items() if metric is not None}
            if tf.executing_eagerly():
                # The value of a function does not tell what it is. A step that runs eagerly is traced once before.
                found = {name: self._traced[name] for name in self._traced if name in logs} | found
            else:
                self._traced = found
            self._metric_of = found
            self._own = frozenset(name for name in logs if found.get(name) != name)
        return logs

    def _returned_by(self, name: str, value: Any) -> str | None:
        """The name of the metric that returned it, maybe in a function that the step calls; None if none did."""

        def sources(node: tuple) -> list[tuple]:
            here, calls = node[0].deref(), node[1]
            passed_on = not is_eager(here) and here.op.type in ("Identity", "Placeholder", *CALLS)
            return sources_of(here, calls) if passed_on else []

        if not tf.is_tensor(value):
            return name if name in self._numbers and self._numbers[name] is value else None
        nodes = reached([(value.ref(), ())], sources)
        known = [getattr(node[0].deref(), _RESULT) for node in nodes if hasattr(node[0].deref(), _RESULT)]
        return name if name in known else next(iter(known), None)

    def among(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs that are results of metrics."""
        return {name: logs[name] for name in self._metric_of}

    def counted(self, logs: Any) -> dict[str, Any]:
        """The results of all metrics after a step and before anything is put back; none if no log is one of them.

        Args:
            logs: What the step returned.
        """
        if not isinstance(logs, dict) or not self._metric_of:
            return {}
        if not self._own:
            return dict(logs)
        return self.results() | {metric: logs[name] for name, metric in self._metric_of.items()}

    def results(self) -> dict[str, Any]:
        """The model's current metrics, inside a step."""
        results = self._used_results().items()
        return {name: tf.constant(value) if isinstance(value, float) else value for name, value in results}

    def spoilt(self, before: Iterable[tuple[Any, tf.Tensor]]) -> dict[int, tf.Tensor]:
        """Whether a step made a metric non-finite, scalar bool, by the ids of all variables of that metric.

        A total that went back without its count would leave a mean that is too small.

        Args:
            before: Variables of the model with their values before the step.
        """
        # An element that was infinite before, such as the first of a running minimum, says nothing.
        fell = {
            id(variable): tf.where(tf.math.is_finite(value), replicas.own_component(variable), tf.zeros_like(value))
            for variable, value in before
            if value.dtype.is_floating
        }
        found: dict[int, tf.Tensor] = {}
        for metric in _metrics_of(self._model):
            own = [fell[id(variable)] for variable in metric.variables if id(variable) in fell]
            found |= dict.fromkeys(map(id, metric.variables), ~all_finite(own)) if own else {}
        return found

    def after(self, counted: dict[str, Any], bad: tf.Tensor, spoilt: tf.Tensor) -> dict[str, Any]:
        """The logs to show in place of a step's, after state was put back.

        Args:
            counted: The results before, from `counted`.
            bad: Scalar bool, whether the step was rolled back. If not, what was not finite was.
            spoilt: Scalar bool, whether any metric was rolled back for that.

        Returns:
            For each result of a metric that metric's new result. If no step was kept since the last reset, it is what
            this step counted if all of that is finite, else the worst value. If the metric was finite in none of those
            that were kept, it is NaN.
        """
        self._kept.assign_sub(tf.cast(bad, tf.float32))
        self._put_back.assign_add(tf.cast(bad, tf.float32))
        if not counted:
            return {}
        nothing = tf.logical_and(self._put_back > 0.0, self._kept <= 0.0)
        believable, results = _all_finite(counted), self.results()
        # Keras has its own names for the metrics of several outputs.
        renewed = {name: results.get(name, counted[name]) for name in self._metric_of.values()}
        for name, value in renewed.items():
            if _is_float(value):
                before, left_out = counted[name], self._count_of(name)
                left_out.assign_add(tf.cast(spoilt & ~bad & ~_all_finite({name: before}), tf.float32))
                never = (left_out > 0.0) & (left_out >= self._kept)
                instead = tf.where(believable, before, _filled(value, _worst_of(self._model, name)))
                renewed[name] = tf.where(never, _filled(value, float("nan")), tf.where(nothing, instead, value))
        return {name: renewed[metric] for name, metric in self._metric_of.items()}

    def reset(self) -> None:
        """Forgets all steps, because the model's metrics were reset."""
        self._in_step = False
        if tf.executing_eagerly():
            self._never()
        for variable in (self._kept, self._put_back, *self._left_out.values()):
            variable.assign(0.0)

    def at_rest(self) -> dict[str, Any]:
        """The model's metrics between steps, at the end of an epoch.

        It leaves out metrics for which steps returned their own numbers. Keras then shows those of the last. If all
        steps since the reset were rolled back, a metric has the worst value. That is not 0.0, which may be the best. It
        is not NaN either: Keras's callbacks take a NaN that comes first for the best. A metric that was finite in none
        of the steps that were kept is NaN.

        It warns of metrics that were not finite in steps that were kept, of each once.
        """
        if self._in_step:  # Which runs eagerly, and is free to make numbers of its own from these.
            return self._used_results()
        never, kept = self._never(), _first(self._kept)
        own = self._own if kept or self.put_back else ()  # Those of an evaluation are no step's.
        shown = {name: value for name, value in self._used_results().items() if name not in own}
        if self.put_back and not kept:
            return {name: _filled(value, _worst_of(self._model, name)) for name, value in shown.items()}
        return {name: _filled(value, float("nan")) if name in never else value for name, value in shown.items()}

    @property
    def put_back(self) -> float:
        """How many steps were rolled back since the metrics were reset; read between steps."""
        return _first(self._put_back)

    def _never(self) -> set[str]:
        """The metrics that were finite in no step that was kept. Warns of those that were not in some, of each once."""
        lost = {name: [*map(float, replicas.replica_values(one))] for name, one in self._left_out.items()}
        new = {name for name, counts in lost.items() if any(counts)} - self._told
        if new:
            self._told |= new
            warnings.warn(
                f"protect: metrics of model {self._model.name!r} were not finite in steps that were applied: "
                f"{sorted(new)}. They are shown without those batches, and as NaN where none is left. Compute them in "
                "float32, and keep zeros out of what they divide by or take the logarithm of.",
                ScaleWarning,
                stacklevel=3,
            )
        return {name for name, counts in lost.items() if 0.0 < _first(self._kept) <= min(counts)}

    def _used_results(self) -> dict[str, Any]:
        used = [metric for metric in self._model.metrics if getattr(metric, "built", True)]
        if len(used) == len(self._model.metrics):
            return self._results()
        # Keras refuses to give any result as long as one metric was never used.
        results = {metric.name: metric.result() for metric in used}
        return {name: value for name, value in results.items() if not isinstance(value, dict)}

    def _count_of(self, name: str) -> tf.Variable:
        """In how many of the steps that were kept a metric was not finite."""
        if name not in self._left_out:
            with outside_the_graph():
                self._left_out[name] = replicas.local_variable(0.0, "of_a_metric")
        return self._left_out[name]


def _worst_of(model: keras.Model, name: str) -> float:
    """Infinity for a metric to minimise, minus infinity for one to maximise, NaN if Keras does not know."""
    for metric in _metrics_of(model):
        direction = direction_of(metric)
        if direction in ("up", "down") and (name == metric.name or name.endswith(f"_{metric.name}")):
            return float("-inf" if direction == "up" else "inf")
    return float("inf" if name.endswith("loss") else "nan")


def _metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, those that were passed to `compile` one by one."""
    return [inner for metric in model.metrics for inner in getattr(metric, "metrics", None) or [metric]]


def _filled(value: Any, number: float) -> Any:
    """The number in the place of each of a float's or of a tensor's; other values as they are."""
    if isinstance(value, float):
        return number
    return tf.fill(tf.shape(value), tf.constant(number, tf.as_dtype(value.dtype))) if _is_float(value) else value


def _first(counter: tf.Variable) -> float:
    """A count of steps, which is the same on all replicas."""
    return float(replicas.replica_values(counter)[0])


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _all_finite(values: dict[str, Any]) -> tf.Tensor:
    floats = [value for value in values.values() if isinstance(value, float) or _is_float(value)]
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(value)) for value in floats)])
