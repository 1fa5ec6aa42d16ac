"""The last part of a step: all of it counts, or nothing does.

A step commits in one of two ways. A branch moves the variables or puts back what the forward pass moved, and waits for
the decision. Selecting waits for nothing: every assignment of the update stores `where(applied, new, old)`. On a GPU a
branch waits until the device is done, and XLA fuses less across it: see `choose.selects`.

An optimizer of which nothing is proven is tried first: its new values are looked at, and put back if one of them is not
finite. That takes a branch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import call_noninlined
from scaler.backend.selected import assigned_where
from scaler.gate.judge import where
from scaler.gate.rollback import chosen_state, put_back, put_back_non_finite
from scaler.gate.targets import Targets
from scaler.gate.trial import Trial
from scaler.outcome.outcome import Skip, int64, not_skipped


class Committed(NamedTuple):
    """What became of a step.

    Attributes:
        applied: Scalar bool.
        clipped_norms: Float32, for each part the norm of what its optimizer was given; NaN if the step was skipped.
        skip: Why it was skipped.
        replica: Int64, the first replica whose own gradients or loss are to blame, or -1; None on one replica alone.
    """

    applied: tf.Tensor
    clipped_norms: tuple[tf.Tensor, ...]
    skip: Skip
    replica: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a step would do.

    Attributes:
        targets: Its variables.
        move: Moves them.
        trial: Tries an optimizer of which nothing is proven; None where new values need no look.
        state: Pairs of another variable that the forward pass moved, and its value before the step, on every replica.
        clipped_norms: As of `Committed`, where the step is applied.
        explain: Why the step is skipped. It looks at the values of gradients if it is told to.
        blame: As `Committed.replica`, where the step is skipped.
        on_skip: Called with the reason, `Committed.replica`, and whether the step is skipped, or None in the branch of
            a skip. It returns why, which it may know better.
    """

    targets: Targets
    move: Callable[[], None]
    trial: Trial | None
    state: Sequence[tuple]
    clipped_norms: Callable[[], tuple[tf.Tensor, ...]]
    explain: Callable[[bool], Skip]
    blame: Callable[[], tf.Tensor | None]
    on_skip: Callable[[Skip, tf.Tensor | None, tf.Tensor | None], Skip]

    def select(self, strategy: Any, sound: tf.Tensor, when: tf.Tensor) -> Committed:
        """Commits where `sound` and `when`, scalar bools, are true, without a branch. What is proven needs no trial."""
        applied = tf.logical_and(sound, when)
        with assigned_where(applied, [variable for part in self.targets.parts for variable in part.movable]):
            self.move()
        restore_where(strategy, self.state, applied, when)
        skipped = tf.logical_and(when, tf.logical_not(applied))
        reason, replica = where(skipped, self.explain(False)), self.blame()
        replica = None if replica is None else tf.where(skipped, replica, -1)
        norms = tuple(tf.where(applied, norm, float("nan")) for norm in self.clipped_norms())
        return Committed(applied, norms, self.on_skip(reason, replica, skipped), replica)

    def branch(self, strategy: Any, sound: tf.Tensor) -> Committed:
        """Commits in a branch of a step that there is."""
        trial = self.trial
        applied = sound if trial is None else trial.try_update(sound, self.move)

        def apply() -> tuple[tuple[tf.Tensor, ...], Skip, tf.Tensor | None]:
            if trial is None:
                self.move()
            put_back_non_finite(strategy, self.state)
            return self.clipped_norms(), not_skipped(), no_replica(strategy)

        def skip() -> tuple[tuple[tf.Tensor, ...], Skip, tf.Tensor | None]:
            put_back(strategy, self.state)
            reason = self.explain(True)
            if trial is not None:
                reason = trial.reason(sound, reason)
                # An update that was taken back began with weights that the forward pass may have assigned.
                put_back(strategy, [pair for pair in self.state if getattr(pair[0], "trainable", False)])
            replica = self.blame()
            norms = (tf.constant(float("nan")),) * len(self.targets.parts)
            return norms, self.on_skip(reason, replica, None), replica

        # Several workers meet in operations that a function of its own cannot hold.
        skip_apart = skip if tf.distribute.has_strategy() else functools.partial(call_noninlined, skip)
        return Committed(applied, *tf.cond(applied, apply, skip_apart))


def restore_where(strategy: Any, state: Sequence[tuple], applied: tf.Tensor, when: tf.Tensor) -> None:
    """Puts variables back to their values before a skipped step, and what became non-finite in any case.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        state: Pairs of a variable and its value before the step, on every replica.
        applied: Scalar bool.
        when: Scalar bool, whether there is a step at all.
    """
    kept = applied if tf.get_static_value(when) else tf.logical_or(applied, tf.logical_not(when))
    for variable, value in state:
        replicas.assign_each(strategy, variable, functools.partial(chosen_state, kept=kept), value)


def no_replica(strategy: tf.distribute.Strategy) -> tf.Tensor | None:
    """What stands for the replica to blame where there is none to blame."""
    return None if strategy.num_replicas_in_sync == 1 else int64(-1)
