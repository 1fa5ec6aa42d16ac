"""Loss scalers that scale the losses of a run while no step of it is decided."""

from __future__ import annotations

import tensorflow as tf

import scaler
from loops.step.scalers_in_graph import Found

MANY = 1000
"""So many steps without a decision are worth a word, wherever the run is."""
FEW = 100
"""So many are at the end of a run, for a step that can decide: fewer may be a window that is not complete."""


class Undecided:
    """Compares the attempts that each loss scaler counts with the steps of the run."""

    def __init__(self) -> None:
        self._since: dict[scaler.LossScaler, tuple[int, int]] = {}
        self._fewest: dict[scaler.LossScaler, int] = {}

    def watch(self, found: Found, data: tf.Variable) -> None:
        """Begins to count for the loss scalers of a step, when it is traced: after a restore, before the first step.

        Args:
            found: What its graph has.
            data: How many steps were taken.
        """
        for one in found.trained_by:
            if one not in self._since:
                with tf.init_scope():
                    self._since[one] = int(one.counters.attempted), int(data)
                self._fewest[one] = FEW if one in found.scalers else 1

    def look(self, steps: int, readings: list[tuple[scaler.LossScaler, list[float]]], ended: bool) -> None:
        """Lets each of them warn that decided nothing for long, or in the whole run; at a visit of the host.

        Args:
            steps: How many were taken.
            readings: What the host read of those that the step moves.
            ended: Whether the run ends here.
        """
        attempted = {one: int(reading[0]) for one, reading in readings}
        for one, (before, since) in self._since.items():
            now, due = attempted.get(one, before), steps - since >= (self._fewest[one] if ended else MANY)
            if due:
                now = int(one.counters.attempted)
                if now == before:
                    one.warn_of_no_decision(steps - since)
            if due or now != before:
                self._since[one] = now, steps
