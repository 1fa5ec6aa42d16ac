"""A step that is judged now and counted later, once it is known whether all of its optimizers could move."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend import replicas
from scaler.gate.gate import Decision
from scaler.gate.state import StoredState
from scaler.outcome.last_skip import LastSkip
from scaler.strategies import Event


class Later:
    """What `apply(update=Later())` keeps of its step, for the same trace.

    Attributes:
        decision: What was decided, with its event.
    """

    decision: Decision | None = None

    def count(self, stored: StoredState, kept: LastSkip, failed: tf.Tensor, kept_now: tf.Tensor) -> None:
        """Has the strategy see the step, and counts it, where there was one. Each replica calls it.

        Args:
            stored: What is moved.
            kept: The last skip.
            failed: Scalar bool, whether it was not applied though its gradients were finite.
            kept_now: From `LastSkip.kept_now`.
        """
        decision = self.decision
        if decision is None:
            # `explain` repeats a step with an `apply` in its place that decides nothing.
            return
        seen = decision.event
        assert seen is not None

        def count(strategy: tf.distribute.Strategy, failed: tf.Tensor) -> None:
            sound = tf.logical_not(replicas.any_of(strategy, failed))
            event = Event(*seen)._replace(finite=tf.logical_and(seen.finite, sound))
            stored.move(event, decision.of_loss, when=decision.attempted)
            kept.count(tf.logical_or(event.finite, tf.logical_not(decision.attempted)), kept_now)

        replicas.merge(count, failed)


def keep(later: Later | None, decision: Decision) -> None:
    """Keeps what was decided, if there is something to keep it in."""
    if later is not None:
        later.decision = decision
