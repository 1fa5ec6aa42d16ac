"""What `fit` shows when steps are rolled back: metrics without those steps, and a step's own numbers unchanged.

A number that a step returns is its own if it was computed from no metric of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import CALLS, is_eager, reached, sources_of
from scaler.backend.layers import direction_of
from scaler.backend.variables import outside_the_graph, parts_of
from scaler.errors import ScaleWarning
from scaler.gate.rollback import all_finite


class Counted(NamedTuple):
    """What the metrics of a model give after a step, before anything is put back.

    Attributes:
        results: Of all metrics, by name.
        shown: The names of those that may be among the logs. A scalar bool, or True, tells of each whether it is.
    """

    results: dict[str, Any]
    shown: dict[str, tf.Tensor | bool]


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
        self._own: dict[str, tf.Variable] = {}
        self._noted: dict[str, Any] = {}
        self._certain: frozenset[str] = frozenset()
        self._certainly_own: frozenset[str] = frozenset()
        self._left_out: dict[str, tf.Variable] = {}
        self._told: set[str] = set()
        with replicas.in_scope(model.distribute_strategy):
            self._kept = replicas.local_variable(0.0, "steps_kept")
            self._put_back = replicas.local_variable(0.0, "steps_put_back")

    def begin(self) -> None:
        """Begins a step, which counts as kept while it runs."""
        self._kept.assign_add(1.0)
        for flag in self._own.values():
            flag.assign(False)

    def forget(self) -> None:
        """Begins another trace, before the step is traced."""
        self._noted, self._certain = {}, frozenset()

    def note(self, results: dict[str, Any]) -> dict[str, Any]:
        """Remembers what the model's metrics give while a step is traced, and returns it."""
        self._noted.update(results)
        return results

    def look(self, logs: Any) -> Any:
        """Finds the logs that are the metrics' results for certain, and those that are not, and returns all logs.

        The first are what `get_metrics_result` returned, as in Keras's own step. The second are computed from no
        metric. Of others only a comparison shows it. It looks while a step is traced: one that runs eagerly is traced
        once, before it runs.
        """
        if isinstance(logs, dict) and not tf.executing_eagerly():
            self._certainly_own = logs_not_from_metrics(logs, self._model)
        # Replicas take turns with their traces.
        if isinstance(logs, dict) and replicas.in_place():
            self._certain = frozenset(name for name, value in logs.items() if self._noted.get(name) is value)
        return logs

    def counted(self, logs: Any) -> Counted:
        """The model's metrics after a step and before anything is put back. Empty if a metric was never used.

        It also records which of the logs are the step's own numbers.

        Args:
            logs: What the step returned.
        """
        if not isinstance(logs, dict):
            return Counted({}, {})
        if self._certain == frozenset(logs):
            return Counted(dict(logs), dict.fromkeys(logs, True))
        # Keras 3.8 returns Python numbers where a step runs eagerly.
        results = self.results() | {name: logs[name] for name in self._certain}
        shown: dict[str, tf.Tensor | bool] = dict.fromkeys(self._certain, True)
        for name in results.keys() & logs.keys() - self._certain:
            is_result = name not in self._certainly_own and _same(logs[name], results[name])
            is_own = not is_result if isinstance(is_result, bool) else tf.logical_not(is_result)
            self._made(self._own, name, False).assign(is_own)
            if is_result is not False:
                shown[name] = is_result
        return Counted(results, shown)

    def results(self) -> dict[str, Any]:
        """The model's current metrics, inside a step. Empty if a metric was never used and so has no result."""
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

    def after(self, logs: Any, counted: Counted, bad: tf.Tensor, spoilt: tf.Tensor) -> dict[str, Any]:
        """The logs to show in place of a step's, after state was put back.

        Args:
            logs: What the step returned.
            counted: The metrics before, from `counted`.
            bad: Scalar bool, whether the step was rolled back. If not, what was not finite was.
            spoilt: Scalar bool, whether any metric was rolled back for that.

        Returns:
            For each number that equals the metric of its name, and may come from a metric, that metric's new result. If
            no step was kept since the last reset, it is what this step counted if all of that is finite, else the worst
            value. If the metric was finite in none of those that were kept, it is NaN.
        """
        self._kept.assign_sub(tf.cast(bad, tf.float32))
        self._put_back.assign_add(tf.cast(bad, tf.float32))
        if not counted.shown:
            return {}
        nothing = tf.logical_and(self._put_back > 0.0, self._kept <= 0.0)
        believable, results = _all_finite(counted.results), self.results()
        anew = {name: results[name] for name in counted.shown}
        for name, value in anew.items():
            if _is_float(value):
                before, left_out = counted.results[name], self._made(self._left_out, name, 0.0)
                left_out.assign_add(tf.cast(spoilt & ~bad & ~_all_finite({name: before}), tf.float32))
                never = (left_out > 0.0) & (left_out >= self._kept)
                instead = tf.where(believable, before, _filled(value, _worst_of(self._model, name)))
                anew[name] = tf.where(never, _filled(value, float("nan")), tf.where(nothing, instead, value))
        return {
            name: anew[name] if is_result is True else tf.where(is_result, anew[name], logs[name])
            for name, is_result in counted.shown.items()
        }

    def reset(self) -> None:
        """Forgets all steps, because the model's metrics were reset."""
        if tf.executing_eagerly():
            self._never()
        for variable in (self._kept, self._put_back, *self._left_out.values()):
            variable.assign(0.0)
        for flag in self._own.values():
            flag.assign(False)

    def at_rest(self) -> dict[str, Any]:
        """The model's metrics between steps, at the end of an epoch.

        It leaves out metrics for which the last step returned its own numbers. Keras then shows those numbers. If all
        steps since the reset were rolled back, a metric has the worst value. That is not 0.0, which may be the best. It
        is not NaN either: Keras's callbacks take a NaN that comes first for the best. A metric that was finite in none
        of the steps that were kept is NaN.

        It warns of metrics that were not finite in steps that were kept, of each once.
        """
        never = self._never()
        # As a truth of Python's a variable of several replicas is always true.
        own = {name for name, flag in self._own.items() if any(map(bool, replicas.replica_values(flag)))}
        shown = {name: value for name, value in self._used_results().items() if name not in own}
        if self.put_back and not _first(self._kept):
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
        if not all(getattr(metric, "built", True) for metric in self._model.metrics):
            return {}
        return self._results()

    @staticmethod
    def _made(known: dict[str, tf.Variable], name: str, first: bool | float) -> tf.Variable:
        if name not in known:
            with outside_the_graph():
                known[name] = replicas.local_variable(first, "of_a_metric")
        return known[name]


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


def _same(value: Any, metric: Any) -> tf.Tensor | bool:
    """Whether a value that a step returned equals this result of a metric, bit for bit."""
    if not (tf.is_tensor(metric) and (tf.is_tensor(value) or isinstance(value, float))):
        return value is metric
    value = tf.convert_to_tensor(value)
    if value.dtype != metric.dtype or not value.shape.is_compatible_with(metric.shape):
        return False
    equal = tf.equal(value, metric)
    if _is_float(metric):
        equal = tf.logical_or(equal, tf.logical_and(tf.math.is_nan(value), tf.math.is_nan(metric)))
    return tf.reduce_all(equal)


_UNSEEN = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Python functions may read any variable."""


def logs_not_from_metrics(logs: dict[str, Any], model: keras.Model) -> frozenset[str]:
    """The names of the numbers that no variable of the model's metrics is in, for certain.

    Values alone cannot tell: a loss of NaN equals the mean of an epoch that this loss has made NaN.

    Args:
        logs: What a step returned, while it is traced.
        model: The Keras model with the metrics. A metric without variables leaves everything uncertain.
    """
    metrics = [metric.variables for metric in model.metrics]
    if not all(metrics):
        return frozenset()
    handles = {id(part.handle) for variables in metrics for variable in variables for part in parts_of(variable)}
    tensors = {name: value for name, value in logs.items() if tf.is_tensor(value) and not is_eager(value)}
    return frozenset(name for name, tensor in tensors.items() if not _may_come_from(handles, tensor))


def _may_come_from(handles: set[int], tensor: tf.Tensor) -> bool:
    def sources(node: tuple) -> list[tuple]:
        here, calls = node[0].deref(), node[1]
        return [] if is_eager(here) else sources_of(here, calls)

    for node in reached([(tensor.ref(), ())], sources):
        here = node[0].deref()
        if is_eager(here):
            found = id(here) in handles
        else:
            has_source = here.op.type in CALLS or (here.op.type == "Placeholder" and here.dtype == tf.resource)
            found = here.op.type in _UNSEEN or (has_source and not sources(node))
        if found:
            return True
    return False
