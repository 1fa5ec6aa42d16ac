"""The gate between scaled gradients and updated weights: one decision for all replicas, then apply or skip."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.graphs import apart
from scaler.gate.choose import Attempt, choose_attempt, choose_update, selects
from scaler.gate.events import event_of, no_event
from scaler.gate.joined import Joined
from scaler.gate.norms import measured
from scaler.gate.optimizers import build_optimizer
from scaler.gate.rollback import Snapshot, put_back_non_finite
from scaler.gate.selecting import move_where, restore_where
from scaler.gate.skip_reasons import reason_of, where
from scaler.gate.spikes import Spikes
from scaler.gate.targets import Targets
from scaler.gate.unscale_and_clip import finish_all, unscaled, worth_unscaling_first
from scaler.gradients.clipping import Clipping
from scaler.outcome.outcome import Cause, Outcome, Skip, not_skipped, unless_limited, whole
from scaler.strategies import Event
from scaler.strategies.base import Needs


class Decision(NamedTuple):
    """What the gate saw and did, scalar tensors.

    Attributes:
        attempted: Bool, whether it was asked to decide.
        finite: Bool, whether the step was applied.
        norm: Float32, the global norm of the unscaled gradients.
        clipped_norm: Float32, the global norm of what the optimizer was given; NaN if the step was not applied.
        skip: Why it was not.
        replica: Int64, the first replica whose own gradients or loss are to blame, or -1; None on one replica alone.
        spike: The three numbers of a SPIKE as in `Outcome`, float32; none if nothing looks for spikes.
        clipped: Int64, `Outcome.clipped_tensors`; None if nothing clips by the last steps.
        event: What the strategy is to be told, for a step that is counted later; None if it is counted now.
    """

    attempted: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    clipped_norm: tf.Tensor
    skip: Skip
    replica: tf.Tensor | None
    spike: tuple[tf.Tensor, ...]
    clipped: tf.Tensor | None
    event: Event | None = None

    @property
    def of_loss(self) -> tf.Tensor:
        """Whether the step was skipped because its loss was not finite, scalar bool: that says nothing of the scale."""
        return tf.equal(self.skip.cause, int(Cause.LOSS))

    def outcome(self, skip: Skip, loss_scale: tf.Tensor, names_from: int) -> Outcome:
        """The outcome of the step.

        Args:
            skip: Why it was skipped, which a diagnosis may know better than the gate.
            loss_scale: What its gradients were scaled by.
            names_from: Where the names of its variables begin.
        """
        return Outcome(
            finite=self.finite,
            loss_scale=loss_scale,
            grad_norm=self.norm,
            clipped_norm=self.clipped_norm,
            **skip._asdict(),
            replica=whole(-1) if self.replica is None else self.replica,
            names_from=whole(names_from),
            **dict(zip(("value", "usual", "limit"), self.spike or (tf.constant(0.0),) * 3, strict=True)),
            clipped_tensors=whole(0) if self.clipped is None else self.clipped,
        )


@dataclasses.dataclass(frozen=True)
class Gate:
    """Applies or skips steps of one set of variables.

    Attributes:
        targets: The variables, their optimizer and their masters.
        clip: How unscaled gradients are limited, or None.
        needs: Statistics that the strategy wants.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates, or each by itself.
        select: Whether new values are selected and nothing branches; None for where that is faster.
        spikes: What a guard says of the step, or None without one.
        returns_event: Whether decisions have their event.
    """

    targets: Targets
    clip: Clipping | None
    needs: Needs
    sum_duplicates: bool = True
    select: bool | None = None
    spikes: Spikes | None = None
    returns_event: bool = False

    @property
    def selects(self) -> bool:
        """Whether a step that is traced here selects its new values, see `selecting`."""
        return selects(self.select, self.targets, self.sum_duplicates)

    def decide(
        self,
        grads: list,
        loss_scale: tf.Tensor,
        loss_finite: tf.Tensor,
        rollback: Snapshot | None,
        when: tf.Tensor,
        on_skip: Callable[[Skip, tf.Tensor | None, tf.Tensor | None], Skip],
        after: Callable[[Event, tf.Tensor, tf.Tensor, tf.Tensor], None],
        losses: tuple[tf.Tensor, ...] = (),
    ) -> Decision:
        """Decides once for all replicas; every replica calls it.

        Args:
            grads: Scaled gradients of this replica, of any floating dtype.
            loss_scale: Scalar float32, what they are scaled by.
            loss_finite: Scalar bool, of this replica.
            rollback: Of this replica, or None.
            when: Scalar bool, whether to decide at all: it does where all replicas say so.
            on_skip: Called once for all replicas with why the step is skipped, `Decision.replica`, and whether it is
                skipped, or None in the branch of a skip. It returns why, which it may know better.
            after: Called once for all replicas with what was seen, `Decision.of_loss`, a tensor that is there when the
                weights have moved or not, and whether there was a step, scalar bool.
            losses: The loss of this replica, scalar float32; empty if the strategy does not need it.
        """
        if replicas.replica_count() > 1:
            grads = self._to_be_summed(grads)
        variables, before = (rollback.variables, rollback.values) if rollback else ((), ())

        def decide(
            strategy: Any, grads: list, before: tuple, loss_finite: tf.Tensor, when: tf.Tensor, losses: tuple
        ) -> Decision:
            build_optimizer(self.targets.optimizer, self.targets.known)
            if self.spikes:
                self.spikes.know(self.targets.known)

            when = replicas.agreed(strategy, when)

            state = list(zip(variables, before, strict=True))

            def now(when: tf.Tensor) -> Decision:
                decision, event = self._decide(strategy, grads, loss_scale, loss_finite, state, when, on_skip, losses)
                after(event, decision.of_loss, decision.clipped_norm, when)
                return decision._replace(event=event) if self.returns_event else decision

            if self.selects or tf.get_static_value(when):
                return now(when)
            true = tf.constant(True)
            return tf.cond(_after_side_effects(when), lambda: now(true), lambda: self._not_now(strategy, state))

        return replicas.merge(decide, grads, before, loss_finite, when, losses)

    def _to_be_summed(self, grads: list) -> list:
        """In float32 or float64. Of a new value the sum over the replicas holds that of each, [replicas, ...]."""
        pairs = zip(gradients.widened(grads), self.targets.updated, self.targets.takes_derivative, strict=True)
        return [
            grad if derivative else replicas.placed(tf.reshape(tf.convert_to_tensor(grad), variable.shape))
            for grad, variable, derivative in pairs
        ]

    def _sums(self, strategy: Any, grads: list) -> list:
        """What all replicas have together: the sums of derivatives, and the largest new values."""
        totals = replicas.total(strategy, grads)
        if strategy.num_replicas_in_sync == 1:
            return totals
        return [
            total if derivative else replicas.each(strategy, gradients.largest, total)
            for total, derivative in zip(totals, self.targets.takes_derivative, strict=True)
        ]

    def _decide(
        self,
        strategy: Any,
        grads: list,
        loss_scale: tf.Tensor,
        loss_finite: tf.Tensor,
        state: list[tuple],
        when: tf.Tensor,
        on_skip: Callable[[Skip, tf.Tensor | None, tf.Tensor | None], Skip],
        losses: tuple,
    ) -> tuple[Decision, Event]:
        """One step, in its order: reduce, measure, decide, apply or skip, put back, and the event."""
        totals = self._sums(strategy, grads)
        summed = replicas.each(strategy, gradients.sum_duplicates, totals)
        # What follows divides by 1, which takes no operation.
        divisor, ready = loss_scale, summed
        selects, together = self.selects, Joined(strategy, summed)
        if self.sum_duplicates and worth_unscaling_first(self.targets, together, loss_scale):
            divisor, ready = tf.constant(1.0), replicas.each(strategy, unscaled, summed, loss_scale)
            together = Joined(strategy, ready)
        given = ready if self.sum_duplicates else totals

        by_tensor = self.spikes is not None and self.spikes.by_tensor is not None
        squared_norms, each = measured(strategy, self.targets, self.clip, ready, together, divisor, selects, by_tensor)
        squared_norm = replicas.each(strategy, tf.reduce_sum, squared_norms)
        squares = replicas.of_each(strategy, squared_norms)[0]
        norm = tf.cast(tf.sqrt(replicas.of_each(strategy, squared_norm)[0]), tf.float32)

        loss = replicas.sum_of(strategy, losses[0]) if losses else None
        judged = self.spikes.judge(self.targets, squares, norm, loss, self.clip) if self.spikes else None
        clip = judged.clip if judged else self.clip

        update = choose_update(self.targets, given, clip, together)
        attempt = choose_attempt(strategy, self.targets, self.sum_duplicates)
        finite = self._finite(strategy, attempt, squared_norm, given, loss_scale)
        limited = tf.constant(True) if clip is None else clip.valid()
        finite = finite if tf.get_static_value(limited) else tf.logical_and(finite, limited)
        spike = None if judged is None else tf.logical_and(finite, judged.verdict.spike)
        finite = finite if spike is None else tf.logical_and(finite, tf.logical_not(spike))

        def because(reason: Skip, squares: tf.Tensor | None) -> Skip:
            """The reason, corrected where the limit of the clipping or the guard is it."""
            reason = reason if tf.get_static_value(limited) else unless_limited(reason, limited)
            spiked = spike if spike is None else tf.logical_and(spike, when)
            return judged.because(self.targets, reason, spiked, squares) if judged else reason

        def move() -> None:
            update.move(given, divisor, None if clip is None else clip.limiter(squares))

        def clipped() -> tf.Tensor:
            return norm if clip is None else self._clipped_norm(strategy, given, divisor, squares, clip)

        def selected() -> tuple[tf.Tensor, tf.Tensor, Skip, tf.Tensor | None]:
            applied = tf.logical_and(finite, when)
            move_where(applied, self.targets, move)
            restore_where(strategy, state, applied, when)
            skipped = tf.logical_and(when, tf.logical_not(applied))
            assert each is not None
            reason = where(skipped, because(explained(each), each))
            replica = self._to_blame(strategy, grads, loss_finite)
            replica = None if replica is None else tf.where(skipped, replica, -1)
            return applied, tf.where(applied, clipped(), float("nan")), on_skip(reason, replica, skipped), replica

        def apply() -> tuple[tf.Tensor, Skip, tf.Tensor | None]:
            attempt.complete(move)
            put_back_non_finite(strategy, state)
            return clipped(), not_skipped(), _no_replica(strategy)

        def put_back(state: list[tuple]) -> None:
            for variable, value in state:
                replicas.assign_each(strategy, variable, lambda own, value: value, value)

        def explained(squares: tf.Tensor, broken: tf.Tensor | None = None) -> Skip:
            reason = reason_of(self.targets, squares, replicas.all_of(strategy, loss_finite), broken)
            failed = attempt.failed(finite, norm)
            failed = failed if spike is None else tf.logical_and(failed, tf.logical_not(spike))
            return attempt.reason(failed, reason)

        def skip() -> tuple[tf.Tensor, Skip, tf.Tensor | None]:
            put_back(state)
            first, scaled = ([replicas.of_each(strategy, grad)[0] for grad in grads] for grads in (ready, summed))
            squares = self.targets.squared_norms(first, divisor, may_branch=False) if each is None else each
            broken = gradients.not_finite(list(map(gradients.values_of, scaled)))
            reason = because(explained(squares, broken), squares)
            # An update that was taken back began with weights that the forward pass may have assigned.
            put_back([pair for pair in state if getattr(pair[0], "trainable", False)])
            replica = self._to_blame(strategy, grads, loss_finite)
            return tf.constant(float("nan")), on_skip(reason, replica, None), replica

        def branched() -> tuple[tf.Tensor, tf.Tensor, Skip, tf.Tensor | None]:
            applied = attempt.holds(finite, move)
            # Several workers meet in operations that a function of its own cannot hold.
            skip_apart = skip if tf.distribute.has_strategy() else functools.partial(apart, skip)
            return applied, *tf.cond(applied, apply, skip_apart)

        applied, clipped_norm, reason, replica = selected() if selects else branched()
        told: tuple[tf.Tensor, ...] = ()
        unlimited = applied
        counted = None
        if judged is not None and spike is not None:
            spike = tf.logical_and(spike, when)
            told = judged.told(spike)
            counted = None if judged.clipped is None else tf.where(applied, judged.clipped, 0)
            # The guard sees for itself that it was a spike.
            unlimited = tf.logical_or(applied, spike)
        decision = Decision(when, applied, _where(when, norm), clipped_norm, reason, replica, told, counted)
        own, summed = self.targets.derivatives(grads), self.targets.derivatives(summed)
        seen = (judged.norm, loss, judged.norms) if judged else (norm, loss)
        return decision, event_of(strategy, self.needs, unlimited, own, summed, loss_scale, *seen)

    def _not_now(self, strategy: tf.distribute.Strategy, state: list[tuple]) -> Decision:
        put_back_non_finite(strategy, state)
        false, nan = tf.constant(False), tf.constant(float("nan"))
        told = (tf.constant(0.0),) * 3 if self.spikes else ()
        clipped = whole(0) if self.spikes and self.spikes.by_tensor == "clip" else None
        event = no_event(self.needs) if self.returns_event else None
        return Decision(false, false, nan, nan, not_skipped(), _no_replica(strategy), told, clipped, event)

    def _finite(
        self, strategy: Any, attempt: Attempt, squared_norm: Any, given: list, loss_scale: tf.Tensor
    ) -> tf.Tensor:
        """Whether the gradients may be applied, as all replicas see it."""
        sound = replicas.each(strategy, attempt.sound, squared_norm)
        finite = _after_side_effects(replicas.all_of(strategy, sound))
        if self.sum_duplicates:
            return finite
        one_by_one = replicas.each(strategy, _finite_one_by_one, given, loss_scale)
        return tf.logical_and(finite, replicas.all_of(strategy, one_by_one))

    def _to_blame(self, strategy: Any, grads: list, loss_finite: Any) -> tf.Tensor | None:
        """As `Decision.replica`: what was not finite before the sum over the replicas."""
        if strategy.num_replicas_in_sync == 1:
            return None

        def spoiled(grads: list, loss_finite: tf.Tensor) -> tf.Tensor:
            # They are scaled, so that their norm says nothing.
            sound = [tf.reduce_all(tf.math.is_finite(gradients.values_of(grad))) for grad in grads]
            return tf.logical_not(tf.reduce_all([loss_finite, *sound]))

        look = functools.partial(apart, spoiled)
        return replicas.first_of(strategy, replicas.each(strategy, look, grads, loss_finite))

    def _clipped_norm(
        self, strategy: Any, grads: list, loss_scale: tf.Tensor, squares: tf.Tensor, clip: Clipping
    ) -> tf.Tensor:
        after = clip.squares_after(squares)
        if after is not None:
            return tf.cast(tf.sqrt(tf.reduce_sum(after)), tf.float32)

        def measure(own: list) -> tf.Tensor:
            finished = finish_all(own, self.targets.updated, loss_scale, clip.limiter(squares))
            summed = finished if self.sum_duplicates else gradients.sum_duplicates(finished)
            return tf.cast(tf.sqrt(gradients.squared_norm(self.targets.derivatives(summed))), tf.float32)

        return apart(measure, [replicas.of_each(strategy, grad)[0] for grad in grads])


def _where(when: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    return norm if tf.get_static_value(when) else tf.where(when, norm, float("nan"))


def _no_replica(strategy: tf.distribute.Strategy) -> tf.Tensor | None:
    return None if strategy.num_replicas_in_sync == 1 else whole(-1)


def _after_side_effects(flag: tf.Tensor) -> tf.Tensor:
    """`flag`, once all that was traced before it has run.

    Otherwise a graph runs an assertion of the loss beside the update, which may be half done when it fails.
    """
    if tf.executing_eagerly():
        return flag
    operations = tf.compat.v1.get_default_graph().get_operations()
    with tf.control_dependencies([tf.group(*(op for op in operations if op.op_def.is_stateful))]):
        return tf.identity(flag)


def _finite_one_by_one(grads: Sequence, loss_scale: tf.Tensor) -> tf.Tensor:
    """Whether duplicates can be squared each by itself: large ones may cancel each other in their sum."""
    slices = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
    return tf.math.is_finite(gradients.squared_norm(gradients.divide(slices, loss_scale)))
