"""What a `TrainStep` with probes measures, at each place in the order of a step.

The rows of probes that are made of weights, of their gradients and updates, and of an optimizer's slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.before import Before, rms_by_layer
from loops.step.noise_scale import PARTS, NoiseScale

ATTENTION, UPDATE_RMS, NOISE_SCALE = scaler.observe.GAUGES
LOGIT, ENTROPY = scaler.observe.GAUGES[ATTENTION]
RMS, RATIO = scaler.observe.GAUGES[UPDATE_RMS]
OUTPUTS = ("counts", "amax", "swallowed_updates", LOGIT, ENTROPY, RMS, RATIO, NOISE_SCALE)
"""The additional outputs of a `TrainStep` with probes."""
_NAN = float("nan")


class Seen(NamedTuple):
    """What was measured of a forward and a backward pass.

    Attributes:
        rows: Counts and largest magnitudes.
        attention: Float32 [layers, 2], what each attention layer did; None if it was not asked for.
    """

    rows: scaler.observe.Measured
    attention: tf.Tensor | None


def unseen(seen: Seen | None) -> Seen | None:
    """What there is in the place of these measurements at a call that takes no pass."""
    if seen is None:
        return None
    nothing = scaler.observe.Measured(tf.zeros_like(seen.rows.counts), tf.zeros_like(seen.rows.amax))
    return Seen(nothing, None if seen.attention is None else tf.fill(seen.attention.shape, _NAN))


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
        self._attend: list[str] = []
        self._noise: NoiseScale | None = None
        self.sparse: frozenset[str] = frozenset()

    def build(self, windows: Mapping[int, int]) -> None:
        """Creates the state of the probes, before the first trace of the step's parts.

        Args:
            windows: Micro-batches per step, by the number of applied steps from which they hold.

        Raises:
            scaler.InvalidArgument: If the step cannot measure what the watch asks for.
        """
        if self.watch is None or NOISE_SCALE not in self.watch.kinds or self._noise is not None:
            return
        if len(windows) > 1:
            raise scaler.InvalidArgument(
                f"TrainStep(accumulate={dict(windows)!r}, probes=...): the gradient noise scale compares two "
                "batch sizes, which must stay as they are. Leave out the kind 'noise_scale', or accumulate a fixed "
                "number of micro-batches."
            )

        def create(strategy: tf.distribute.Strategy) -> None:
            with scaler.authoring.outside_the_graph():
                self._noise = NoiseScale(windows[0], strategy.num_replicas_in_sync)

        tf.distribute.get_replica_context().merge_call(create)

    def due(self, loss_scaler: scaler.LossScaler) -> tf.Tensor | None:
        """Whether this call is measured, scalar bool; None for always or never."""
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

    def measured(self, collection: scaler.observe.Collection | None, due: tf.Tensor | None) -> Seen | None:
        """The measurements of the forward and the backward pass, after both."""
        if collection is None or self.watch is None:
            return None
        rows, scores = collection.rows(), collection.scores
        self._in_the_pass, self._attend = list(rows), list(scores)
        found = scaler.observe.measured(rows, due)
        if ATTENTION not in self.watch.kinds:
            return Seen(found, None)

        def attention() -> tf.Tensor:
            return tf.reshape([scaler.observe.attention_of(calls) for calls in scores.values()], [len(scores), 2])

        return Seen(found, scaler.observe.if_due(due, attention, _NAN))

    def before(
        self, variables: list, masters: scaler.MasterWeights | None, due: tf.Tensor | None = None
    ) -> Before | None:
        """Keeps the weights as they are before the update."""
        if self.watch is None:
            return None
        return Before(variables, masters, {"weights", "updates", UPDATE_RMS} & {*self.watch.kinds} != set(), due)

    def outputs(
        self,
        seen: Seen | None,
        due: tf.Tensor | None,
        grads: list,
        before: Before | None,
        applied: tf.Tensor,
        optimizer: Any,
        noise: Callable[[NoiseScale, list], tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """The outputs `OUTPUTS` of the step.

        Args:
            seen: What `measured` returned.
            due: What `due` returned.
            grads: Scaled gradients of the variables in `before`.
            before: What `before` returned.
            applied: Whether the weights moved, scalar bool.
            optimizer: The optimizer with the slots to measure.
            noise: Has the noise scale measured of scaled gradients.
        """
        if self.watch is None or seen is None or before is None:
            return {}
        kinds, weights = self.watch.kinds, weights_of(self.watch, before, grads, optimizer)
        self.sparse = frozenset(name for name, row in weights.rows.items() if row.sparse)

        def look() -> dict[str, tf.Tensor]:
            updates = before.updates(applied) if {"updates", UPDATE_RMS} & {*kinds} else []
            rows = {name: [row.values(updates)] for name, row in weights.rows.items()}
            counts, amax = scaler.observe.measured(rows)
            found = {"counts": counts, "amax": _of_sums(amax, rows)}
            if "updates" in kinds:
                shares, counted = before.swallowed(updates, applied), weights.counted
                found["swallowed_updates"] = shares if len(counted) == len(updates) else tf.gather(shares, counted)
            if UPDATE_RMS in kinds:
                places = weights.places
                of = ([values[place] for place in places] for values in (updates, before.start))
                of_layers = tf.where(applied, rms_by_layer(weights.layers, *of), _NAN)
                found[RMS], found[RATIO] = tf.unstack(of_layers, axis=1)
            if self._noise is not None:
                found[NOISE_SCALE] = noise(self._noise, scaler.gradients.derivatives(grads, before.variables))
            return found

        found = scaler.observe.if_due(due, look, {"counts": 0, "amax": 0})
        if seen.attention is not None:
            found[LOGIT], found[ENTROPY] = tf.unstack(seen.attention, axis=1)
        layers = list(dict.fromkeys(weights.layers))
        names = {LOGIT: self._attend, ENTROPY: self._attend, RMS: layers, RATIO: layers, NOISE_SCALE: list(PARTS)}
        self.watch.found([*self._in_the_pass, *weights.rows], {name: of for name, of in names.items() if name in found})
        return {
            **found,
            "counts": tf.concat([seen.rows.counts, found["counts"]], axis=0),
            "amax": tf.concat([seen.rows.amax, found["amax"]], axis=0),
        }


def _of_sums(amax: tf.Tensor, rows: dict[str, list]) -> tf.Tensor:
    """The largest magnitudes; for a sparse gradient after summing values of equal index, as strategies see it."""
    largest = tf.unstack(amax, num=len(rows))
    for place, (one, *_) in enumerate(rows.values()):
        if isinstance(one, tf.IndexedSlices):
            summed = scaler.gradients.amax(scaler.gradients.unscale([one], 1.0))
            largest[place] = tf.where(tf.math.is_finite(largest[place]), summed, largest[place])
    return tf.stack(largest) if largest else amax


def check_probes(probes: object, model: Any, layerwise: object) -> None:
    """Refuses anything but a watch of the step's model, and a watch together with `layerwise`.

    Raises:
        scaler.InvalidArgument: If `probes` cannot be used.
    """
    if probes is None:
        return
    if not isinstance(probes, scaler.observe.Watch):
        raise scaler.InvalidArgument(f"TrainStep(probes={probes!r}): expected hs.observe.watch(model).")
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


_FLOATS = (tf.float16, tf.bfloat16, tf.float32)


class Row(NamedTuple):
    """A row of the probes.

    Attributes:
        values: Returns its tensor from the updates of all variables: read where it is called, and at no other step.
        sparse: Whether it is a gradient of the type `tf.IndexedSlices`.
    """

    values: Callable[[Sequence[tf.Tensor]], Any]
    sparse: bool = False


class Weights(NamedTuple):
    """The trainable variables that are watched.

    Attributes:
        rows: The rows by name.
        layers: For each variable that is watched the path of its innermost layer.
        places: Their positions in the step's trainable variables.
        counted: The positions of those whose values are counted: all but float64.
    """

    rows: dict[str, Row]
    layers: list[str]
    places: list[int]
    counted: list[int]


def weights_of(watch: scaler.observe.Watch, before: Before, grads: Sequence, optimizer: Any) -> Weights:
    """What a watch asks for of the trainable variables.

    Args:
        watch: The watch.
        before: The variables.
        grads: The scaled gradient of each of them, or None.
        optimizer: The optimizer with the slots.
    """
    kinds, variables = watch.kinds, before.variables
    holders, names = _names(watch.model, variables)
    watched, own = watch.holds(), {id(variable) for variable in watch.model.variables}

    def holds(variable: Any) -> bool:
        # A part of a step may move more than the model that is watched. What takes its gradient as its value is no
        # weight: the scales and histories of float8 layers.
        return id(variable) in own and watched(variable) and not scaler.gradients.overwrites(variable)

    held = [place for place, variable in enumerate(variables) if holds(variable)]
    uncounted = [place for place in held if tf.as_dtype(variables[place].dtype) not in _FLOATS]
    if {"weight_gradients", "weights", "updates"} & {*kinds}:
        watch.leave_out([names[place] for place in uncounted], "float64 has exponents outside of the bins.")
    counted = [place for place in held if place not in uncounted]
    rows: dict[str, Row] = {}
    if "weight_gradients" in kinds:
        rows |= {
            f"weight_gradients/{names[place]}": _gradient(grads[place]) for place in counted if grads[place] is not None
        }
    if "weights" in kinds:
        rows |= {f"weights/{names[place]}": _weight(before, place) for place in counted}
    if "updates" in kinds:
        rows |= {f"updates/{names[place]}": _update(place) for place in counted}
    if "slots" in kinds:
        rows |= _slots(optimizer, dict(zip(names, variables, strict=True)), holds)
    return Weights(rows, [holders[place] for place in held], held, counted)


def _gradient(grad: Any) -> Row:
    return Row(lambda updates: grad, isinstance(grad, tf.IndexedSlices))


def _weight(before: Before, place: int) -> Row:
    return Row(lambda updates: before.values[place])


def _update(place: int) -> Row:
    return Row(lambda updates: updates[place])


def _slot(slot: Any) -> Row:
    return Row(lambda updates: tf.convert_to_tensor(slot))


def _names(model: Any, variables: list) -> tuple[list[str], list[str]]:
    """The path of each variable's innermost layer, and a unique name: that path and the variable's name."""
    holders: dict[int, str] = {}
    for path, layer in scaler.observe.layers_by_path(model).items():
        holders |= {id(variable): path for variable in layer.variables}
    paths = [holders.get(id(variable), model.name) for variable in variables]
    names: list[str] = []
    for path, variable in zip(paths, variables, strict=True):
        name = free = f"{path}/{variable.name}"
        number = 1
        while free in names:
            number += 1
            free = f"{name}:{number}"
        names.append(free)
    return paths, names


def _slots(optimizer: Any, variables: dict[str, Any], holds: Callable[[Any], bool]) -> dict[str, Row]:
    """The optimizer's float variables, except those of weights that are not watched; named after their weight."""
    out = tuple(f"{name}/" for name, variable in variables.items() if not holds(variable))
    found: dict[str, Row] = {}
    for slot in getattr(optimizer, "variables", []):
        if tf.as_dtype(slot.dtype) in _FLOATS and not slot.path.endswith("learning_rate"):
            # Drops the optimizer's name: Keras numbers optimizers per process.
            own = slot.path.partition("/")[2] or slot.path
            for name, variable in variables.items():
                own = own.replace(f"{variable.path.replace('/', '_')}_", f"{name}/", 1)
            if not own.startswith(out):
                found[f"slots/{own}"] = _slot(slot)
    return found
