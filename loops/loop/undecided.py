"""Runs that train nothing: no step of them is decided, or none is applied."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import tensorflow as tf

import scaler
from loops.loop.counters import Counters
from loops.step.scalers_in_graph import Found

MANY, FEW = 1000, 100
"""So many undecided steps are worth a word, in a run and at its end, where fewer may be an incomplete window."""

SKIPPED = 20
"""So many steps without an applied one are worth a word at the end of a run."""


def warn_if_all_were_skipped(before: Counters, now: Counters, scalers: Iterable[scaler.LossScaler]) -> None:
    """Warns at the end of a run that attempted steps and applied none: too few for a `StuckPolicy` to stop it.

    Args:
        before: Where the run began.
        now: Where it ended.
        scalers: The loss scalers of its steps.
    """
    steps = now.attempted - before.attempted
    if steps >= SKIPPED and now.known and now.applied == before.applied:
        why = " ".join(one.explain() for one in scalers)
        warnings.warn(
            f"The run ends, and none of its {steps:,} attempted steps was applied: nothing was trained. {why}".rstrip(),
            scaler.StuckWarning,
            stacklevel=4,
        )


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
