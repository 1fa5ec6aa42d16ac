"""What happens to the loss of a network when its gradients grow at once: how far it rises, and how soon."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.effects.adam_copies import Curves

JUMP = 2.0
"""An RMS that is as large is that of the change."""
SPIKE = 1.5
"""A spike is a loss that is so many times that before the change."""
SOON, AFTER = 20, 80
"""The steps after the change in which a spike is looked for, and all in which the loss is."""


class Spike(NamedTuple):
    """What a change did, float64 [seeds] each.

    Attributes:
        before: The mean RMS of g^2 / u in the last tenth of the quiet phase.
        jump: The largest of it in the loud phase.
        times: The largest held-out loss soon after the change over that before it.
        later: The same of the steps behind.
        lag: The steps from the first RMS of `JUMP` or more to a loss halfway up to the largest; NaN without a spike,
            and if there is no such RMS before that.
        end: The held-out loss in the end.
    """

    before: np.ndarray
    jump: np.ndarray
    times: np.ndarray
    later: np.ndarray
    lag: np.ndarray
    end: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """The largest of `times` and `later`."""
        return np.maximum(self.times, self.later)


def spike_of(curves: Curves, setup: int, change: int) -> Spike:
    """What the change before this step did to one of the set-ups."""
    loss, rms = (np.asarray(values[:, setup], np.float64) for values in (curves.loss, curves.rms))
    loss = np.where(np.isfinite(loss), loss, np.inf)
    jumped = rms[change : change + SOON] >= JUMP
    first = np.where(jumped.any(axis=0), jumped.argmax(axis=0), np.nan)
    soon = loss[change : change + SOON]
    halfway = (soon >= (soon[0] + soon.max(axis=0)) / 2).argmax(axis=0)
    times = soon.max(axis=0) / soon[0]
    return Spike(
        before=rms[last_of(change)].mean(axis=0),
        jump=rms[change:].max(axis=0),
        times=times,
        later=loss[change + SOON : change + AFTER].max(axis=0, initial=0) / soon[0],
        lag=np.where((halfway < first) | (times < SPIKE), np.nan, halfway - first),
        end=loss[-1],
    )


def last_of(change: int) -> slice:
    """The last tenth of the steps before the change."""
    return slice(change - max(1, change // 10), change)
