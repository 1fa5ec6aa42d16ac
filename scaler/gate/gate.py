"""The gate between scaled gradients and updated weights: one decision for all replicas, then apply or skip."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.graphs import apart
from scaler.gate import compiled
from scaler.gate.proofs import largest_learning_rate
from scaler.gate.transaction import Proven, Transaction
from scaler.gate.updates import Optimizer, build_optimizer, gradients_are_reduced, update_variables, variables_of
from scaler.gradients import measurement, statistics
from scaler.gradients.clipping import Clipping, Limiter
from scaler.outcome import Skip, not_skipped, presumed_cause, unless_limited
from scaler.rollback import Snapshot, keep_finite
from scaler.strategies import Event
from scaler.strategies.base import Needs
from scaler.weights.masters import MasterWeights


class Decision(NamedTuple):
    """What the gate saw and did, scalar tensors.

    Attributes:
        attempted: Bool, whether it was asked to decide.
        finite: Bool, whether the step was applied.
        norm: Float32, the global norm of the unscaled gradients.
        clipped_norm: Float32, the global norm of what the optimizer was given; NaN if the step was not applied.
        skip: Why it was not.
    """

    attempted: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    clipped_norm: tf.Tensor
    skip: Skip


@dataclasses.dataclass(frozen=True)
class Gate:
    """Applies or skips steps of one set of variables.

    Attributes:
        optimizer: A Keras optimizer or a function `(grads, variables) -> None`.
        all_targets: The float32 variables, also those that have no gradient.
        positions: Of those to update among them, one for each gradient.
        masters: Rounded into the model after an update, or None.
        clip: How unscaled gradients are limited, or None.
        needs: Statistics that the strategy wants.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates, or each by itself.
    """

    optimizer: Optimizer
    all_targets: Sequence
    positions: Sequence[int]
    masters: MasterWeights | None
    clip: Clipping | None
    needs: Needs
    sum_duplicates: bool = True

    @property
    def targets(self) -> list:
        """The variables to update."""
        return [self.all_targets[position] for position in self.positions]

    def decide(
        self,
        grads: list,
        loss_scale: tf.Tensor,
        loss_finite: tf.Tensor,
        rollback: Snapshot | None,
        when: tf.Tensor,
        on_skip: Callable[[Skip], None],
        after: Callable[[Event, tf.Tensor], None],
    ) -> Decision:
        """Decides once for all replicas; every replica calls it.

        Args:
            grads: Scaled gradients of this replica, of any floating dtype.
            loss_scale: Scalar float32, what they are scaled by.
            loss_finite: Scalar bool, of this replica.
            rollback: Of this replica, or None.
            when: Scalar bool, the same on all replicas: whether to decide at all.
            on_skip: Called once for all replicas in the branch of a skip.
            after: Called once for all replicas with what was seen, and a tensor that is there when the weights have
                moved or not.
        """
        if replicas.replica_count() > 1:
            grads = gradients.to_float32(grads)
            # New values are averaged over the replicas, derivatives summed.
            shares = [1.0 if plain else float(replicas.replica_count()) for plain in self._plain]
            grads = [grad if share == 1.0 else grad / share for grad, share in zip(grads, shares, strict=True)]
        variables, before = (rollback.variables, rollback.values) if rollback else ((), ())

        def decide(strategy, grads: list, before: tuple, loss_finite, when) -> Decision:
            build_optimizer(self.optimizer, self.all_targets)

            def now() -> Decision:
                state = list(zip(variables, before, strict=True))
                decision, event = self._decide(strategy, grads, loss_scale, loss_finite, state, on_skip)
                after(event, decision.clipped_norm)
                return decision

            when = replicas.of_each(strategy, when)[0]
            constant = tf.get_static_value(when)
            return now() if constant else tf.cond(_after_side_effects(when), now, _not_now)

        return replicas.merge(decide, grads, before, loss_finite, when)

    def _decide(
        self, strategy, grads: list, loss_scale, loss_finite, state: list, on_skip: Callable[[Skip], None]
    ) -> tuple[Decision, Event]:
        summed = replicas.each(strategy, gradients.sum_duplicates, replicas.total(strategy, grads))
        squared_norms = replicas.each(strategy, self._squared_norms, summed, loss_scale)
        totals = replicas.each(strategy, tf.reduce_sum, squared_norms)
        attempt = self._attempt(strategy)
        sound = replicas.each(strategy, attempt.sound, totals)
        finite = _after_side_effects(replicas.all_of(strategy, sound))
        loss_finite = replicas.all_of(strategy, loss_finite)
        squares = replicas.of_each(strategy, squared_norms)[0]
        norm = tf.sqrt(replicas.of_each(strategy, totals)[0])
        given = summed
        if not self.sum_duplicates:
            given = replicas.total(strategy, grads)
            one_by_one = replicas.each(strategy, _finite_one_by_one, given, loss_scale)
            finite = tf.logical_and(finite, replicas.all_of(strategy, one_by_one))

        limited = tf.constant(True) if self.clip is None else self.clip.valid()
        finite = finite if tf.get_static_value(limited) else tf.logical_and(finite, limited)

        def update() -> None:
            self._update(strategy, given, loss_scale, self._limit(squares))

        applied = attempt.holds(finite, update)

        def apply() -> tuple[tf.Tensor, Skip]:
            attempt.complete(update)
            for variable, value in state:
                replicas.assign_each(strategy, variable, keep_finite, value)
            clipped_norm = norm if self.clip is None else self._clipped_norm(strategy, given, loss_scale, squares)
            return clipped_norm, not_skipped()

        def skip() -> tuple[tf.Tensor, Skip]:
            for variable, value in state:
                replicas.assign_each(strategy, variable, lambda own, value: value, value)
            pieces = [replicas.of_each(strategy, grad)[0] for grad in summed]
            look = functools.partial(apart, self._reason(loss_scale, loss_finite), pieces)
            reason = tf.cond(attempt.failed(finite, norm), attempt.undo, lambda: Skip(*look()))
            reason = reason if tf.get_static_value(limited) else unless_limited(reason, limited)
            on_skip(reason)
            return tf.constant(float("nan")), reason

        clipped_norm, reason = tf.cond(applied, apply, skip)
        decision = Decision(tf.constant(True), applied, norm, clipped_norm, reason)
        return decision, Event(applied, *self._statistics(strategy, grads, summed, loss_scale))

    def _statistics(self, strategy, own: list, summed: list, loss_scale: tf.Tensor) -> statistics.Statistics:
        amax = counts = None
        own, summed = self._derivatives(own), self._derivatives(summed)
        if self.needs.amax:
            # Rounding keeps the order: the largest divided is the largest of those divided.
            amax = replicas.of_each(strategy, replicas.each(strategy, statistics.amax, summed))[0] / loss_scale
        if self.needs.edges:
            counted = replicas.each(strategy, lambda grads: statistics.histogram(grads, self.needs.edges), own)
            counts = replicas.of_each(strategy, replicas.total(strategy, [counted])[0])[0]
        return statistics.Statistics(amax, counts)

    def _attempt(self, strategy) -> Proven | Transaction:
        """How an update that makes values which are not finite is kept from counting."""
        # An optimizer that works in 16 bits was asked for by name, with all it does.
        unsafe = any(replicas.native(target).dtype.size < 4 for target in self.targets)
        rate = float("inf") if unsafe else largest_learning_rate(self.optimizer, self.targets)
        # Of the same index several times the proofs say nothing.
        if rate is not None and (self.sum_duplicates or unsafe):
            return Proven(self.optimizer, rate)
        masters = (*self.masters.model_variables, *self.masters.variables) if self.masters else ()
        kept = [*self.all_targets, *variables_of(self.optimizer), *masters]
        indices = [*self.positions, *range(len(self.all_targets), len(self.all_targets) + len(self.own_values))]
        return Transaction(strategy, self.optimizer, kept, [*self.targets, *self.own_values], indices)

    @property
    def own_values(self) -> list:
        """The optimizer's own variables that have to stay finite."""
        own = variables_of(self.optimizer)
        return [variable for variable in own if replicas.native(variable).dtype.is_floating]

    def _limit(self, squares: tf.Tensor) -> Limiter | None:
        return None if self.clip is None else self.clip.limiter(squares)

    def _clipped_norm(self, strategy, grads: list, loss_scale: tf.Tensor, squares: tf.Tensor) -> tf.Tensor:
        assert self.clip is not None
        after = self.clip.squares_after(squares)
        if after is not None:
            return tf.sqrt(tf.reduce_sum(after))

        def measure(own: list) -> tf.Tensor:
            finished = self._finished(own, loss_scale, self._limit(squares))
            summed = finished if self.sum_duplicates else gradients.sum_duplicates(finished)
            return tf.sqrt(gradients.squared_norm(self._derivatives(summed)))

        return apart(measure, [replicas.of_each(strategy, grad)[0] for grad in grads])

    def _reason(self, loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> Callable[[list], Skip]:
        """A function of the scaled gradients."""
        weights = self._model_weights()

        def look(scaled: list) -> Skip:
            squares = self._squared_norms(scaled, loss_scale)
            broken = _not_finite(list(map(gradients.values_of, scaled)))
            # Where every value is finite, a squared norm need not be.
            bad = tf.where(tf.reduce_any(broken), broken, tf.logical_not(tf.math.is_finite(squares)))
            some, positions = tf.reduce_any(bad), tf.constant(self.positions)
            first = tf.where(some, _first(bad), tf.argmax(squares, output_type=tf.int32))
            last = tf.shape(bad)[0] - 1 - _first(tf.reverse(bad, [0]))
            spoiled = _not_finite(weights)
            return Skip(
                cause=presumed_cause(loss_finite, tf.logical_not(tf.reduce_any(broken))),
                has_nan=tf.reduce_any(tf.math.is_nan(squares)),
                index=tf.gather(positions, first),
                count=tf.math.count_nonzero(bad, dtype=tf.int32),
                nearest=tf.where(some, tf.gather(positions, last), -1),
                weight=tf.where(tf.reduce_any(spoiled), _first(spoiled), -1),
                lower_helps=tf.constant(False),
            )

        return look

    def _model_weights(self) -> list:
        """What the forward pass read, on the first replica: not the masters of it."""
        variables = self.masters.model_variables if self.masters else self.all_targets
        strategy = tf.distribute.get_strategy()
        return [replicas.of_each(strategy, replicas.native(variable))[0] for variable in variables]

    @property
    def _plain(self) -> list[bool]:
        """For each target whether its gradient is a derivative of the loss, and not its new value."""
        return [not gradients.overwrites(target) for target in self.targets]

    def _derivatives(self, grads: list) -> list:
        return [grad for grad, plain in zip(grads, self._plain, strict=True) if plain]

    def _squared_norms(self, grads: list, loss_scale: tf.Tensor) -> tf.Tensor:
        if all(self._plain):
            return measurement.squared_norms(grads, loss_scale)
        derivatives = self._derivatives(grads)
        measured = iter(tf.unstack(measurement.squared_norms(derivatives, loss_scale)) if derivatives else ())
        pairs = zip(grads, self._plain, strict=True)
        return tf.stack([next(measured) if plain else _zero_if_finite(grad) for grad, plain in pairs])

    def _update(self, strategy, grads: list, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
        masters_do = self.masters is None or self.masters.compiles
        if masters_do and compiled.worth_compiling(self.optimizer, grads, self.targets):
            compiled.update(self.optimizer, grads, self.targets, self.masters, loss_scale, limit)
            return

        def update(own: list) -> None:
            update_variables(self.optimizer, self._finished(own, loss_scale, limit), self.targets)

        if self.masters:
            self.masters.refresh()
        with gradients_are_reduced(self.optimizer):
            replicas.each(strategy, update, grads)
        if self.masters:
            self.masters.write()

    def _finished(self, grads: list, loss_scale: tf.Tensor, limit: Limiter | None) -> list:
        """The gradients unscaled and clipped, and new values as they are."""
        new = gradients.divide(grads, loss_scale)
        if limit is not None:
            new = [gradients.limit(grad, limit, position) for position, grad in enumerate(new)]
        new = gradients.opaque(new)
        return [after if plain else grad for grad, after, plain in zip(grads, new, self._plain, strict=True)]


def _not_now() -> Decision:
    false, nan = tf.constant(False), tf.constant(float("nan"))
    return Decision(false, false, nan, nan, not_skipped())


def _after_side_effects(flag: tf.Tensor) -> tf.Tensor:
    """`flag`, once all that was traced before it has run.

    Otherwise a graph runs an assertion of the loss beside the update, which may be half done when it fails.
    """
    if tf.executing_eagerly():
        return flag
    operations = tf.compat.v1.get_default_graph().get_operations()
    with tf.control_dependencies([tf.group(*(op for op in operations if op.op_def.is_stateful))]):
        return tf.identity(flag)


def _zero_if_finite(grad) -> tf.Tensor:
    return tf.where(tf.reduce_all(tf.math.is_finite(gradients.values_of(grad))), 0.0, float("inf"))


def _not_finite(tensors: list) -> tf.Tensor:
    return tf.stack([tf.logical_not(tf.reduce_all(tf.math.is_finite(values))) for values in tensors])


def _first(flags: tf.Tensor) -> tf.Tensor:
    return tf.argmax(tf.cast(flags, tf.int32), output_type=tf.int32)


def _finite_one_by_one(grads: list, loss_scale: tf.Tensor) -> tf.Tensor:
    """Whether duplicates can be squared each by itself: large ones may cancel each other in their sum."""
    slices = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
    return tf.math.is_finite(gradients.squared_norm(gradients.divide(slices, loss_scale)))
