"""Loss scalers that scale the losses of a run while no step of it is decided."""

from __future__ import annotations

import tensorflow as tf

import scaler
from loops.step.scalers_in_graph import Found

MANY, FEW = 1000, 100
"""So many undecided steps are worth a word, in a run and at its end, where fewer may be an incomplete window."""


class Undecided:
    """Compares the attempts that each loss scaler counts with the steps of the run."""

    def __init__(self) -> None:
        self._since: dict[scaler.LossScaler, tuple[int, int, int]] = {}

    def watch(self, found: Found, data: tf.Variable) -> None:
        """Begins to count for the loss scalers of a step, when it is traced: after a restore, before the first step.

        Args:
            found: What its graph has.
            data: How many steps were taken.
        """
        for one in set(found.concerned).difference(self._since):
            with tf.init_scope():
                self._since[one] = int(one.counters.attempted), int(data), FEW if one in found.scalers else 1

    def look(self, steps: int, ended: bool) -> None:
        """Lets each of them warn that decided nothing for long, or in the whole run; at a visit of the host.

        Args:
            steps: How many were taken.
            ended: Whether the run ends here.
        """
        for one, (attempted, since, few) in self._since.items():
            if steps - since >= (few if ended else MANY):
                now = int(one.counters.attempted)
                if now == attempted:
                    scaler.authoring.warn_of_no_decision(one, steps - since)
                self._since[one] = now, steps, few
