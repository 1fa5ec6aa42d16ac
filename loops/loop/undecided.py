"""Runs that train nothing: no step of them is decided, or none is applied."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import tensorflow as tf

import scaler
from loops.loop.counters import Counters
from loops.step.user_steps import Found

MANY, FEW = 1000, 100
"""So many undecided steps are worth a word, in a run and at its end, where fewer may be an incomplete window."""

SKIPPED, SHORT, SHARE = 20, 50, 0.7
"""A run of 20 attempted steps without an applied one is reported, and one of 50 that skipped more than this share."""


def warn_if_most_were_skipped(before: Counters, now: Counters, scalers: Iterable[scaler.LossScaler]) -> None:
    """Warns at the end of a run that applied few of its steps or none, and was too short to be stopped as stuck.

    Args:
        before: Where the run began.
        now: Where it ended.
        scalers: The loss scalers of its steps.
    """
    steps, applied = now.attempted - before.attempted, now.applied - before.applied
    few = (steps >= SKIPPED and not applied) or (steps >= SHORT and steps - applied > SHARE * steps)
    if few and now.known:
        said = f"only {applied:,} of its {steps:,}" if applied else f"none of its {steps:,}"
        why = " ".join(one.explain() for one in scalers)
        warnings.warn(
            f"The run ends, and {said} attempted steps {'were' if applied > 1 else 'was'} applied. {why}".rstrip(),
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
