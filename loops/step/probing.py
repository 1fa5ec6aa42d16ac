"""What a `TrainStep` with probes measures, at each place in the order of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import scaler

OUTPUTS = ("counts", "amax", "swallowed_updates")
"""The additional outputs of a `TrainStep` with probes."""
_KEEP_NOTHING = (scaler.weights.KahanWeights, scaler.weights.StochasticRounding)
_FLOATS = (tf.float16, tf.bfloat16, tf.float32)
Rows = dict[str, list]


class Probing:
    """The measurements of a `TrainStep`, in the order of its calls. Without a watch they add no operations.

    Args:
        watch: The tensors to measure, or None.

    Attributes:
        sparse: The names of gradients that are `tf.IndexedSlices`, known after the first trace.
    """

    def __init__(self, watch: scaler.observe.Watch | None):
        self.watch = watch
        # The rows of the most recently traced pass. All replicas trace the same.
        self._in_the_pass: list[str] = []
        self.sparse: frozenset[str] = frozenset()

    def due(self, loss_scaler: scaler.LossScaler) -> tf.Tensor | None:
        """Whether this call counts histograms, scalar bool; None for always or never."""
        if self.watch is None or self.watch.every == 1:
            return None
        return tf.equal((loss_scaler.counters.attempted + 1) % self.watch.every, 0)

    @contextlib.contextmanager
    def forward(self) -> Iterator[scaler.observe.Collection | None]:
        """Surrounds the forward pass, and keeps its watched tensors for `measured`."""
        if self.watch is None:
            yield None
            return
        with self.watch.collect() as collection:
            yield collection

    def measured(
        self, collection: scaler.observe.Collection | None, due: tf.Tensor | None
    ) -> scaler.observe.Measured | None:
        """The measurements of the forward and the backward pass, after both."""
        if collection is None:
            return None
        rows = collection.rows()
        self._in_the_pass = list(rows)
        return scaler.observe.measured(rows, due)

    def before(self, variables: list, masters: scaler.MasterWeights | None) -> Before | None:
        """Keeps the weights as they are before the update."""
        if self.watch is None:
            return None
        return Before(variables, masters, {"weights", "updates"} & {*self.watch.kinds} != set())

    def outputs(
        self,
        seen: scaler.observe.Measured | None,
        due: tf.Tensor | None,
        grads: list,
        before: Before | None,
        applied: tf.Tensor,
        optimizer: Any,
    ) -> dict[str, tf.Tensor]:
        """The outputs `OUTPUTS` of the step.

        Args:
            seen: What `measured` returned.
            due: What `due` returned.
            grads: Scaled gradients of the variables in `before`.
            before: What `before` returned.
            applied: Whether the weights moved, scalar bool.
            optimizer: The optimizer with the slots to measure.
        """
        if self.watch is None or seen is None or before is None:
            return {}
        kinds = self.watch.kinds
        rows: Rows = {}
        names = _names(self.watch.model, before.variables)
        holds = self.watch.holds()
        held = [number for number, variable in enumerate(before.variables) if holds(variable)]
        uncounted = [n for n in held if tf.as_dtype(before.variables[n].dtype) not in _FLOATS]
        if {"weight_gradients", "weights", "updates"} & {*kinds}:
            self.watch.leave_out([names[n] for n in uncounted], "float64 has exponents outside of the bins.")
        held = [n for n in held if n not in uncounted]
        if "weight_gradients" in kinds:
            rows |= {f"weight_gradients/{names[n]}": [grads[n]] for n in held if grads[n] is not None}
        if "weights" in kinds:
            rows |= {f"weights/{names[n]}": [before.values[n]] for n in held}
        swallowed = {}
        if "updates" in kinds:
            updates = before.updates(applied)
            rows |= {f"updates/{names[n]}": [updates[n]] for n in held}
            shares = before.swallowed(updates, applied)
            swallowed = {"swallowed_updates": shares if len(held) == len(names) else tf.gather(shares, held)}
        if "slots" in kinds:
            rows |= _slots(optimizer, dict(zip(names, before.variables, strict=True)), holds)
        self.sparse = frozenset(name for name, (one, *_) in rows.items() if isinstance(one, tf.IndexedSlices))
        rest = scaler.observe.measured(rows, due)
        self.watch.found([*self._in_the_pass, *rows])
        return {
            "counts": tf.concat([seen.counts, rest.counts], axis=0),
            "amax": tf.concat([seen.amax, _of_sums(rest.amax, rows)], axis=0),
            **swallowed,
        }


def _of_sums(amax: tf.Tensor, rows: Rows) -> tf.Tensor:
    """The largest magnitudes; for a sparse gradient after summing values of equal index, as strategies see it."""
    largest = tf.unstack(amax, num=len(rows))
    for place, (one, *_) in enumerate(rows.values()):
        if isinstance(one, tf.IndexedSlices):
            summed = scaler.gradients.amax(scaler.gradients.unscale([one], 1.0))
            largest[place] = tf.where(tf.math.is_finite(largest[place]), summed, largest[place])
    return tf.stack(largest) if largest else amax


class Before:
    """Trainable variables as they were before a step.

    Args:
        variables: The model's.
        masters: Their master weights, or None.
        read: Whether to keep their values.
    """

    def __init__(self, variables: list, masters: scaler.MasterWeights | None, read: bool):
        self.variables = variables
        if not read:
            return
        self.values = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
        self._updated = masters.weights if masters else variables
        self._own = [updated is variable for updated, variable in zip(self._updated, variables, strict=True)]
        kept = self.values if isinstance(masters, _KEEP_NOTHING) else self._updated
        self._start = [_start(tf.convert_to_tensor(one), value) for one, value in zip(kept, self.values, strict=True)]

    def updates(self, applied: tf.Tensor) -> list[tf.Tensor]:
        """The step's change of each variable, float32; zeros if it was not applied."""
        after = [tf.cast(tf.convert_to_tensor(variable), tf.float32) for variable in self._updated]
        pairs = zip(after, self._start, strict=True)
        return [tf.where(applied, now - then, tf.zeros_like(then)) for now, then in pairs]

    def swallowed(self, updates: list[tf.Tensor], applied: tf.Tensor) -> tf.Tensor:
        """The share of each update that its variable's dtype rounds away, float32 [variables]; NaN if unknown."""
        shares = [
            tf.constant(float("nan")) if own else scaler.observe.swallowed_share(value, update)
            for own, value, update in zip(self._own, self.values, updates, strict=True)
        ]
        return tf.where(applied, tf.stack(shares), float("nan"))


def _start(master: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value before the update, float32: the master, or a value assigned to the model since the last update."""
    kept = tf.equal(tf.saturate_cast(master, value.dtype), value)
    return tf.where(kept, tf.cast(master, tf.float32), tf.cast(value, tf.float32))


def check_probes(probes: object, model: Any, layerwise: object) -> None:
    """Refuses anything but a watch of the step's model, and a watch together with `layerwise`.

    Raises:
        scaler.InvalidArgument: If `probes` cannot be used.
    """
    if probes is None:
        return
    if not isinstance(probes, scaler.observe.Watch):
        raise scaler.InvalidArgument(f"TrainStep(probes={probes!r}): expected scaler.observe.watch(model).")
    if probes.model is not model:
        raise scaler.InvalidArgument(
            f"TrainStep(probes=...): it watches model {probes.model.name!r}, but the step trains {model.name!r}: "
            "expected a watch of the same model."
        )
    if layerwise is not None:
        raise scaler.InvalidArgument(
            "TrainStep(probes=..., layerwise=...): gradients carry another scale in each group of layers, so their "
            "rows cannot be compared. Leave one of the two out."
        )


def _names(model: Any, variables: list) -> list[str]:
    """A unique path for each variable: that of its innermost layer, and the variable's name."""
    holders: dict[int, str] = {}
    for path, layer in scaler.observe.layers_by_path(model).items():
        holders |= {id(variable): path for variable in layer.variables}
    names: list[str] = []
    for variable in variables:
        name = free = f"{holders.get(id(variable), model.name)}/{variable.name}"
        number = 1
        while free in names:
            number += 1
            free = f"{name}:{number}"
        names.append(free)
    return names


def _slots(optimizer: Any, variables: dict[str, Any], holds: Callable[[Any], bool]) -> Rows:
    """The optimizer's float variables, except those of weights that are not watched; named after their weight."""
    out = tuple(f"{name}/" for name, variable in variables.items() if not holds(variable))
    found: Rows = {}
    for slot in getattr(optimizer, "variables", []):
        if tf.as_dtype(slot.dtype) in _FLOATS and not slot.path.endswith("learning_rate"):
            # Drops the optimizer's name: Keras numbers optimizers per process.
            own = slot.path.partition("/")[2] or slot.path
            for name, variable in variables.items():
                own = own.replace(f"{variable.path.replace('/', '_')}_", f"{name}/", 1)
            if not own.startswith(out):
                found[f"slots/{own}"] = [tf.convert_to_tensor(slot)]
    return found
