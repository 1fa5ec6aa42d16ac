"""The probes of a step: what is measured at each place in the order of its calls, for each part in its own pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.probe_rows import PARTS, Look, NoiseScale, rms_by_layer, weights_of

if TYPE_CHECKING:
    from loops.step.passes import Role

ATTENTION, UPDATE_RMS, NOISE_SCALE = scaler.observe.GAUGES
LOGIT, ENTROPY = scaler.observe.GAUGES[ATTENTION]
RMS, RATIO = scaler.observe.GAUGES[UPDATE_RMS]
OUTPUTS = ("counts", "amax", "swallowed_updates", LOGIT, ENTROPY, RMS, RATIO, NOISE_SCALE)
"""The additional outputs of a step with probes."""
_ZEROS = {"counts": 0, "amax": 0}
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
    """The measurements of a `TrainStep` or of a part, in the order of a step's calls; without a watch no operations.

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
        self._last: dict[str, tf.TensorSpec] = {}
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

    def check_examples(self, name: str, batch: Any) -> None:
        """Refuses a batch whose first tensor does not tell the number of examples, where that is needed."""
        needed = self.watch is not None and NOISE_SCALE in self.watch.kinds
        if needed and getattr(tf.nest.flatten(batch)[0], "shape", tf.TensorShape(None)).rank == 0:
            raise scaler.InvalidArgument(
                f"ComposedStep(probes=...): the gradient noise scale of part {name!r} needs the number of examples, "
                "which is the first dimension of the first tensor of a batch, and here that is a scalar: expected a "
                "batch that begins with a tensor of examples."
            )

    def look(self, role: Role, loss_scale: tf.Tensor, turn: tf.Tensor | bool = True) -> Look | None:
        """Looks at the variables of a role before they move; None without a watch.

        Args:
            role: What the step moves.
            loss_scale: Its scale now.
            turn: Whether it is the part's turn; at other calls nothing is measured.
        """
        if self.watch is None:
            return None
        due = at_its_turn = None
        if self.watch.every > 1:
            due = at_its_turn = tf.equal((role.loss_scaler.counters.attempted + 1) % self.watch.every, 0)
        if turn is not True:
            now = tf.convert_to_tensor(turn)
            due = now if due is None else tf.logical_and(due, now)
        read = not {"weights", "updates", UPDATE_RMS}.isdisjoint(self.watch.kinds)
        return Look(role.variables, role.masters, read, due, at_its_turn, loss_scale)

    def measured(self, collection: scaler.observe.Collection | None, due: tf.Tensor | None) -> Seen | None:
        """The measurements of the forward and the backward pass, after both and before the pass of another part."""
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

    def outputs(
        self,
        look: Look | None,
        seen: Seen | None,
        grads: list,
        optimizer: Any,
        attempted: tf.Tensor,
        outcome: scaler.Outcome,
        inputs: Any,
    ) -> dict[str, tf.Tensor]:
        """The outputs `OUTPUTS` of the step, after its decision.

        Args:
            look: What `look` returned.
            seen: What `measured` returned.
            grads: Scaled gradients of the variables that `look` saw.
            optimizer: The optimizer with the slots to measure.
            attempted: Whether there was a decision, scalar bool.
            outcome: What was decided.
            inputs: The examples of the batch, or tensors that begin with them.
        """
        if self.watch is None or seen is None or look is None:
            return {}
        kinds, applied = self.watch.kinds, outcome.finite
        weights = weights_of(self.watch, look, grads, optimizer)
        gradients = {name: grads[place] for name, (kind, place) in weights.rows.items() if kind == "weight_gradients"}
        self.sparse = frozenset(name for name, grad in gradients.items() if isinstance(grad, tf.IndexedSlices))

        def measure() -> dict[str, tf.Tensor]:
            updates = look.updates(applied) if {"updates", UPDATE_RMS} & {*kinds} else []
            slots = list(map(tf.convert_to_tensor, weights.slots))
            values = look.values if "weights" in kinds else []
            of_kind = {"weight_gradients": grads, "weights": values, "updates": updates, "slots": slots}
            rows = {name: [of_kind[kind][place]] for name, (kind, place) in weights.rows.items()}
            counts, amax = scaler.observe.measured(rows)
            found = {"counts": counts, "amax": _of_sums(amax, rows)}
            if "updates" in kinds:
                shares, counted = look.swallowed(updates, applied), weights.counted
                found["swallowed_updates"] = shares if len(counted) == len(updates) else tf.gather(shares, counted)
            if UPDATE_RMS in kinds:
                places = weights.places
                of = ([values[place] for place in places] for values in (updates, look.start))
                of_layers = tf.where(applied, rms_by_layer(weights.layers, *of), _NAN)
                found[RMS], found[RATIO] = tf.unstack(of_layers, axis=1)
            if self._noise is not None:
                derivatives = scaler.gradients.derivatives(grads, look.variables)
                found[NOISE_SCALE] = self._noise.measured(
                    derivatives, look.loss_scale, inputs, attempted, outcome.grad_norm
                )
            return found

        found = scaler.observe.if_due(look.due, measure, _ZEROS)
        if seen.attention is not None:
            found[LOGIT], found[ENTROPY] = tf.unstack(seen.attention, axis=1)
        layers = list(dict.fromkeys(weights.layers))
        names = {LOGIT: self._attend, ENTROPY: self._attend, RMS: layers, RATIO: layers, NOISE_SCALE: list(PARTS)}
        self.watch.found([*self._in_the_pass, *weights.rows], {name: of for name, of in names.items() if name in found})
        found |= {
            "counts": tf.concat([seen.rows.counts, found["counts"]], axis=0),
            "amax": tf.concat([seen.rows.amax, found["amax"]], axis=0),
        }
        self._last = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in found.items()}
        return found

    def left_out(self) -> dict[str, tf.Tensor]:
        """The outputs of an eager call without the part's turn. Before its first turn nothing is known of the rows."""
        return {
            name: tf.fill(like.shape, tf.constant(_ZEROS.get(name, _NAN), like.dtype))
            for name, like in self._last.items()
        }


@contextlib.contextmanager
def collect_all(probings: Mapping[str, Probing]) -> Iterator[dict[str, scaler.observe.Collection]]:
    """Surrounds a forward pass, and keeps the watched tensors of each part that shares it.

    Args:
        probings: By the names of parts; "" is that of a whole step.
    """
    found: dict[str, scaler.observe.Collection] = {}
    with contextlib.ExitStack() as opened:
        for name, one in probings.items():
            if one.watch is not None:
                beside = list(found.values()) if name else None
                found[name] = opened.enter_context(one.watch.collect(beside))
        yield found


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


class Watched(NamedTuple):
    """A watch of a step, and the names of what it measures.

    Attributes:
        part: The name of the part; "" for that of a whole step.
        watch: The watch, known after the step's first trace.
        sparse: Its rows that are gradients of the type `tf.IndexedSlices`.
    """

    part: str
    watch: Any
    sparse: frozenset[str] = frozenset()

    def output(self, name: str) -> str:
        """An output of the step: "amax", or "critic/amax" of a part."""
        return f"{self.part}/{name}" if self.part else name

    def row(self, name: str) -> str:
        """A row among those of all parts: "activations/dense", or "activations/critic/dense" of a part."""
        kind, _, path = name.partition("/")
        return f"{kind}/{self.part}/{path}" if self.part else name


def watched_by(train_step: Any) -> list[Watched]:
    """The watches of a train step, in the order of its outputs; none without probes.

    Args:
        train_step: Any.
    """
    probes = getattr(train_step, "probes", None)
    if probes is None:
        return []
    sparse: Any = getattr(train_step, "sparse_gradients", frozenset())
    if isinstance(probes, Mapping):
        return [Watched(part, watch, sparse.get(part, frozenset())) for part, watch in probes.items()]
    return [Watched("", probes, frozenset(sparse))]
