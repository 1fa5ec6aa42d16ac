"""What a `TrainStep` with probes measures, at each place in the order of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.before import Before, rms_by_layer
from loops.step.noise_scale import PARTS, NoiseScale
from loops.step.weight_rows import weights_of

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

    def build(self, micro_batches: int) -> None:
        """Creates the state of the probes, before the first trace of the step's parts.

        Raises:
            scaler.InvalidArgument: If the step cannot measure what the watch asks for.
        """
        if self.watch is None or NOISE_SCALE not in self.watch.kinds or self._noise is not None:
            return

        def create(strategy: tf.distribute.Strategy) -> None:
            with scaler.authoring.outside_the_graph():
                self._noise = NoiseScale(micro_batches, strategy.num_replicas_in_sync)

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
