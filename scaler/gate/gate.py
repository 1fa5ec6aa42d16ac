"""One step between scaled gradients and updated weights: measure, judge, propose, commit, once for all replicas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.graphs import call_noninlined
from scaler.backend.variables import choose
from scaler.gate.commit import Committed, Proposal, Trial, after_side_effects, no_replica
from scaler.gate.joined import Joined
from scaler.gate.judge import Spikes, Verdict, judge
from scaler.gate.measure import Measured, event_of, measure, to_be_summed
from scaler.gate.optimizers import build_optimizer
from scaler.gate.proofs import moves_by_selecting, needs_trial, selects
from scaler.gate.propose import finish_all, move, propose
from scaler.gate.rollback import Snapshot, put_back_non_finite
from scaler.gate.targets import Part, Targets
from scaler.outcome.outcome import Outcome, Skip, int64, not_skipped
from scaler.strategies import Event
from scaler.strategies.base import Needs


class Decision(NamedTuple):
    """What the gate saw and did, scalar tensors.

    Attributes:
        attempted: Bool, whether it was asked to decide.
        finite: Bool, whether the step was applied.
        norms: Float32, the global norm of the unscaled gradients of each part.
        clipped_norms: Float32, that of what each optimizer was given; NaN if the step was not applied.
        norm: Float32, the global norm of all.
        clipped_norm: Float32, that of what all optimizers were given; NaN if the step was not applied.
        skip: Why it was not.
        replica: Int64, the first replica whose own gradients or loss are to blame, or -1; None on one replica alone.
        spike: The three numbers of a SPIKE as in `Outcome`, float32; none if nothing looks for spikes.
        clipped: Int64, `Outcome.clipped_tensors`; None if nothing clips by the last steps.
    """

    attempted: tf.Tensor
    finite: tf.Tensor
    norms: tuple[tf.Tensor, ...]
    clipped_norms: tuple[tf.Tensor, ...]
    norm: tf.Tensor
    clipped_norm: tf.Tensor
    skip: Skip
    replica: tf.Tensor | None
    spike: tuple[tf.Tensor, ...]
    clipped: tf.Tensor | None

    def outcome(self, skip: Skip, loss_scale: tf.Tensor, name_offset: int) -> Outcome:
        """The outcome of the step.

        Args:
            skip: Why it was skipped, which a diagnosis may know better than the gate.
            loss_scale: What its gradients were scaled by.
            name_offset: Where the names of its variables begin.
        """
        return Outcome(
            finite=self.finite,
            loss_scale=loss_scale,
            grad_norm=self.norm,
            clipped_norm=self.clipped_norm,
            **skip._asdict(),
            replica=int64(-1) if self.replica is None else self.replica,
            name_offset=int64(name_offset),
            **dict(zip(("value", "usual", "limit"), self.spike or (tf.constant(0.0),) * 3, strict=True)),
            clipped_tensors=int64(0) if self.clipped is None else self.clipped,
        )


@dataclasses.dataclass(frozen=True)
class Gate:
    """Applies or skips steps of one set of variables.

    Attributes:
        targets: The variables, their optimizers and their masters.
        needs: Statistics that the strategy wants.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates, or each by itself.
        select: Whether new values are selected and nothing branches; None for where that is faster.
        spikes: The scaler's guard, which is false without one.
        loss_scale: Scalar float32, what the gradients are scaled by.
        on_skip: As of `Proposal`, called once for all replicas.
    """

    targets: Targets
    needs: Needs
    sum_duplicates: bool
    select: bool | None
    spikes: Spikes
    loss_scale: tf.Tensor
    on_skip: Callable[[tf.Tensor, tf.Tensor | None, tf.Tensor | None], tf.Tensor]

    @functools.cached_property
    def selects(self) -> bool:
        """Whether a step that is traced here selects its new values."""
        return selects(self.select, self.targets)

    def decide(
        self,
        grads: list,
        loss_finite: tf.Tensor,
        rollback: Snapshot | None,
        when: tf.Tensor,
        count: Callable[[Event, tf.Tensor, tf.Tensor], Any],
        losses: tuple[tf.Tensor, ...],
    ) -> Decision:
        """Decides once for all replicas; every replica calls it.

        Args:
            grads: Scaled gradients of this replica, of any floating dtype.
            loss_finite: Scalar bool, of this replica.
            rollback: Of this replica, or None.
            when: Scalar bool, whether to decide at all: it does where all replicas say so.
            count: Called once for all replicas with what was seen, whether the step was skipped because of its loss,
                which says nothing of the scale, and whether there was a step, scalar bools.
            losses: The loss of this replica, scalar float32; empty if the strategy does not need it.
        """
        if replicas.replica_count() > 1:
            grads = to_be_summed(self.targets, grads)
        variables, before = (rollback.variables, rollback.values) if rollback else ((), ())

        def decide(
            strategy: Any, grads: list, before: tuple, loss_finite: tf.Tensor, when: tf.Tensor, losses: tuple
        ) -> Decision:
            for part in self.targets.parts:
                build_optimizer(part.optimizer, part.built_for)
            self.spikes.bind(self.targets.built_for)
            when = replicas.all_agree(strategy, when)
            state = list(zip(variables, before, strict=True))

            def now(when: tf.Tensor) -> Decision:
                return self._decide(strategy, grads, loss_finite, state, when, losses, count)

            if self.selects or tf.get_static_value(when):
                return now(when)
            with after_side_effects():
                when = tf.identity(when)
            return tf.cond(when, lambda: now(tf.constant(True)), lambda: self._no_decision(strategy, state))

        return replicas.merge(decide, grads, before, loss_finite, when, losses)

    def _decide(
        self,
        strategy: Any,
        grads: list,
        loss_finite: tf.Tensor,
        state: list[tuple],
        when: tf.Tensor,
        losses: tuple,
        count: Callable[[Event, tf.Tensor, tf.Tensor], Any],
    ) -> Decision:
        """One step, in its order: measure, judge, propose, commit."""
        measured = measure(
            strategy,
            self.targets,
            grads,
            self.loss_scale,
            sum_duplicates=self.sum_duplicates,
            selects=self.selects,
            by_tensor=self.spikes.by_tensor is not None,
        )
        loss = replicas.sum_of(strategy, losses[0]) if losses else None
        verdict = judge(strategy, self.targets, measured, self.spikes, loss, duplicates=not self.sum_duplicates)
        guard, spike = verdict.guard, verdict.spike
        own, summed = self.targets.derivatives(grads), self.targets.derivatives(measured.summed)
        seen = (guard.norm, loss, guard.norms) if guard else (measured.norm, loss)
        event = event_of(strategy, self.needs, verdict.sound, own, summed, self.loss_scale, *seen)

        def tell(applied: tf.Tensor, of_loss: tf.Tensor) -> None:
            # The guard sees for itself that it was a spike.
            finite = applied if spike is None else choose(applied, True, spike)
            count(event._replace(finite=finite), of_loss, when)

        proposal = self._propose(strategy, measured, verdict, loss_finite, state, when, tell)
        with after_side_effects():
            sound = tf.identity(verdict.sound)
        done = proposal.select(strategy, sound, when) if self.selects else proposal.branch(strategy, sound)

        told, counted = (), None
        if guard is not None and spike is not None:
            of_guard, here = guard.verdict, tf.logical_and(spike, when)
            told = tuple(choose(here, one, 0.0) for one in (of_guard.value, of_guard.usual, of_guard.limit))
            counted = None if guard.clipped is None else choose(done.applied, guard.clipped, 0)
        return Decision(
            attempted=when,
            finite=done.applied,
            norms=tuple(_where(when, norm) for norm in self._norms(measured)),
            clipped_norms=done.clipped_norms,
            norm=_where(when, measured.norm),
            clipped_norm=self._clipped_norm(measured.norm, done),
            skip=Skip.of(done.reason),
            replica=done.replica,
            spike=told,
            clipped=counted,
        )

    def _propose(
        self,
        strategy: Any,
        measured: Measured,
        verdict: Verdict,
        loss_finite: Any,
        state: list[tuple],
        when: tf.Tensor,
        count: Callable[[tf.Tensor, tf.Tensor], None],
    ) -> Proposal:
        """What the step would do. Nothing has moved yet."""
        targets, guard = self.targets, verdict.guard
        parts = list(targets.parts)
        if guard is not None and guard.clipped is not None:
            parts = [dataclasses.replace(parts[0], clip=guard.clip)]
        given, of_parts = targets.split(measured.given), targets.split(measured.squares)
        joined = [measured.joined] if len(parts) == 1 else [Joined(strategy, own) for own in given]
        layouts = list(map(propose, parts, given, joined))

        def move_all() -> None:
            for part, layout, own, squares in zip(parts, layouts, given, of_parts, strict=True):
                limit = None if part.clip is None else part.clip.limiter(squares)
                move(part, layout, own, measured.divisor, limit)

        def clipped_norms() -> tuple[tf.Tensor, ...]:
            norms = self._norms(measured)
            return tuple(map(functools.partial(self._norm_after, strategy, measured), parts, given, of_parts, norms))

        def explain(looks: bool) -> tf.Tensor:
            each, broken = measured.of_each(strategy, targets), None
            if looks:
                scaled = [gradients.values_of(replicas.local_values(strategy, grad)[0]) for grad in measured.summed]
                broken = gradients.not_finite(scaled)
            finite = replicas.all_of(strategy, loss_finite)
            return verdict.reason(targets, each, measured.norm, finite, when, broken)

        trial = Trial(strategy, targets) if needs_trial(targets) else None
        blame = functools.partial(_first_bad_replica, strategy, measured.own, loss_finite)
        light = moves_by_selecting(self.select, targets)
        return Proposal(targets, move_all, trial, state, clipped_norms, explain, blame, self.on_skip, count, light)

    def _norms(self, measured: Measured) -> tuple[tf.Tensor, ...]:
        """The global norm of each part's gradients, float32."""
        if len(self.targets.parts) == 1:
            return (measured.norm,)
        return tuple(_root(tf.reduce_sum(squares)) for squares in self.targets.split(measured.squares))

    def _norm_after(
        self, strategy: Any, measured: Measured, part: Part, given: list, squares: tf.Tensor, norm: tf.Tensor
    ) -> tf.Tensor:
        """The global norm of what a part's optimizer is given, float32."""
        clip = part.clip
        if clip is None:
            return norm
        after = clip.squares_after(squares)
        if after is not None:
            return _root(tf.reduce_sum(after))

        def measure_again(own: list) -> tf.Tensor:
            finished = finish_all(own, part.updated, measured.divisor, clip.limiter(squares))
            summed = finished if self.sum_duplicates else gradients.sum_duplicates(finished)
            return _root(gradients.squared_norm(Targets([part]).derivatives(summed)))

        return call_noninlined(measure_again, [replicas.local_values(strategy, grad)[0] for grad in given])

    def _clipped_norm(self, norm: tf.Tensor, done: Committed) -> tf.Tensor:
        """The global norm of what all optimizers were given, float32."""
        if len(done.clipped_norms) == 1:
            return done.clipped_norms[0]
        if all(part.clip is None for part in self.targets.parts):
            return choose(done.applied, norm, float("nan"))
        # In float64, since the square of a norm of float64 gradients may be beyond float32.
        squares = [tf.square(tf.cast(one, tf.float64)) for one in done.clipped_norms]
        return tf.cast(tf.sqrt(tf.add_n(squares)), tf.float32)

    def _no_decision(self, strategy: tf.distribute.Strategy, state: list[tuple]) -> Decision:
        put_back_non_finite(strategy, state)
        false, nan = tf.constant(False), tf.constant(float("nan"))
        told = (tf.constant(0.0),) * 3 if self.spikes else ()
        clipped = int64(0) if self.spikes.by_tensor == "clip" else None
        nans = (nan,) * len(self.targets.parts)
        return Decision(false, false, nans, nans, nan, nan, Skip.of(not_skipped()), no_replica(strategy), told, clipped)


def _root(squared: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.sqrt(squared), tf.float32)


def _where(when: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    return norm if tf.get_static_value(when) else choose(when, norm, float("nan"))


def _first_bad_replica(strategy: Any, grads: list, loss_finite: Any) -> tf.Tensor | None:
    """As `Decision.replica`: what was not finite before the sum over the replicas."""
    if strategy.num_replicas_in_sync == 1:
        return None

    def spoiled(grads: list, loss_finite: tf.Tensor) -> tf.Tensor:
        # They are scaled, so that their norm says nothing.
        sound = [tf.reduce_all(tf.math.is_finite(gradients.values_of(grad))) for grad in grads]
        return tf.logical_not(tf.reduce_all([loss_finite, *sound]))

    look = functools.partial(call_noninlined, spoiled)
    return replicas.first_of(strategy, replicas.map_replicas(strategy, look, grads, loss_finite))
