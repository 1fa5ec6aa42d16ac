"""The highest static scale at which recorded runs, taken again, skip almost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import scaler
from loops.replay.one_run import one_run
from loops.replay.recording import Recording
from loops.replay.stepping import Scales
from loops.replay.tallies import Lost

MOST_SKIPPED = 0.01
"""The largest share of steps that a scale may skip and still be recommended."""
_LOWEST, _HIGHEST = -126, 126


def static_scale(recordings: Sequence[Recording]) -> float | None:
    """The largest power of two at which none of these runs can skip more than a hundredth of its steps.

    It lies an octave below each limit. Where a skip differs from the recorded run's, all later steps may be skipped: a
    step that a static scale skips moves no weight, so that nothing helps the next one.

    Args:
        recordings: Whole runs of one problem.

    Returns:
        The scale; None if there is none.
    """
    limits = [limit for one in recordings for limit in one.limits.decided[one.applied]]
    if not limits or min(limits) <= 0:
        return None
    first = min(math.floor(math.log2(min(limits))), _HIGHEST)
    scales = (2.0**exponent for exponent in range(first, _LOWEST - 1, -1))
    return next((scale for scale in scales if all(_holds(scale, one) for one in recordings)), None)


def _holds(scale: float, recording: Recording) -> bool:
    used = np.full(len(recording.step), scale, np.float32)
    run = Scales(used, scale)
    found = one_run("", scaler.Static(scale), recording, run, lambda *_: Lost(0.0, 0.0), lambda: used)
    return found.replayed.highest_skip_rate <= MOST_SKIPPED
