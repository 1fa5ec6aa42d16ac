"""What a `SpikeGuard` says of the steps of a loss scaler, where the scaler has one."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.gate.state import StoredState
from scaler.outcome.outcome import Cause, Outcome
from scaler.strategies.base import Strategy
from scaler.strategies.spike_guard import Verdict, guard_of


class Spikes:
    """The guard of a scaler, with the variables that hold its state. Without a guard it says nothing.

    Args:
        strategy: The scaler's.
        stored: Its state.
    """

    def __init__(self, strategy: Strategy, stored: StoredState) -> None:
        self._guard, self._stored = guard_of(strategy), stored

    @property
    def verdict(self) -> Callable[[tf.Tensor, tf.Tensor | None], Verdict | None] | None:
        """What is asked about a step's norm and loss; None without a guard."""
        return self._stored.verdict if self._guard else None

    def check_whole_step(self, update: bool) -> None:
        """Refuses an `apply` that is only a part of a step."""
        if self._guard and not update:
            raise InvalidArgument(
                "apply(update=False) with a SpikeGuard: the guard judges a whole step by its norm and its loss, and "
                "here several calls are one step. Expected one apply for all variables, or a strategy without the "
                "guard."
            )

    def limits(self) -> dict[str, tf.Tensor]:
        """What the next step's norm and loss may be, scalar float32, by the names "norm_limit" and "loss_limit"."""
        names = [f"{name}_limit" for name in self._guard.watched] if self._guard else []
        return {name: tf.identity(self._stored.fields[name]) for name in names}

    def told(self, last_skip: Outcome) -> Outcome:
        """The outcome of the last skip, with the numbers of a spike."""
        if not self._guard:
            return last_skip
        spike = tf.equal(last_skip.cause, int(Cause.SPIKE))
        value, usual, limit = tf.unstack(tf.where(spike, self._stored.fields["last_spike"], 0.0))
        return last_skip._replace(value=value, usual=usual, limit=limit)

    def too_many(self, consecutive_skips: int) -> str | None:
        """What is wrong if more steps in a row were spikes than may be, as the beginning of a sentence."""
        if not self._guard or not consecutive_skips:
            return None
        # As a number a variable of several replicas is none.
        spikes = int(tf.convert_to_tensor(self._stored.fields["spikes_in_a_row"]))
        most = self._guard.most_in_a_row
        if spikes <= most:
            return None
        return (
            f"{spikes} steps in a row were skipped as spikes, and {most} are allowed. This is another level and no "
            "spike: go back to an earlier checkpoint if the run has diverged, else use a larger factor"
        )
