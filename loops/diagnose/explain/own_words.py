"""Why a step whose gradients are finite was skipped, in the words of the loss scaler that skipped it."""

from __future__ import annotations

import scaler
from loops.diagnose.explain.attempts import Attempts

_BEGINNING = "The step was skipped because "


def said_by_scaler(attempts: Attempts, cause: scaler.Cause) -> str | None:
    """Repeats the step with its update, and returns what its scaler says of it as a clause.

    Args:
        attempts: At the step.
        cause: Why it was skipped.

    Returns:
        Such as "in part 'critic', the learning rate of SGD is NaN ..."; None if no scaler tells.
    """
    if attempts.moment.alone:
        return None  # Other workers would have to take part.
    with attempts.as_it_was():
        attempts.moment.loop.calls.one(attempts.moment.batch)
        for one in attempts.scalers:
            skipped = int(one.counters.consecutive_skips) and int(one.last_skip.cause) == cause
            said = one.explain() if skipped else ""
            if said.startswith(_BEGINNING):
                return _part(attempts, one) + said.removeprefix(_BEGINNING)
    return None


def _part(attempts: Attempts, one: scaler.LossScaler) -> str:
    """Which part of the step the scaler is of, if it is of one alone."""
    scalers = getattr(attempts.moment.train_step, "scalers", {})
    own = [name for name, each in scalers.items() if each is one] if len(scalers) > 1 else []
    return f"in part {own[0]!r}, " if len(own) == 1 else ""
