"""One strategy over one recorded run, and where it leaves the record.

The highest static scale at which recorded runs, taken again, skip almost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import scaler
from loops.replay.intervals import Range
from loops.replay.recording import Recording
from loops.replay.results import Replayed
from loops.replay.stepping import Scales
from loops.replay.tails import Tail, tail_of
from loops.replay.tallies import Lost

_PATIENT = 10
"""A strategy that lets so many overflows pass lowers its scale soon: one with hysteresis does."""


class OneRun(NamedTuple):
    """A strategy on a recording.

    Attributes:
        replayed: The figures, without intervals.
        since: The index of the first step that may differ from a real run; the number of steps if there is none.
        bounds: The lowest and the highest scale that the strategy may choose.
        lost: A function from an index to what the steps from there on flush to zero.
        values: The number of recorded gradients of all steps that are not skipped.
    """

    replayed: Replayed
    since: int
    bounds: Range
    lost: Callable[[int], Lost]
    values: float

    def tail(self, since: int) -> Tail:
        """The figures from a step on."""
        one = self.replayed
        return tail_of(one.scales, one.skipped, one.final_scale, self.bounds, since, self.lost(since))


def one_run(
    name: str,
    strategy: scaler.Strategy,
    recording: Recording,
    run: Scales,
    lost: Callable[[np.ndarray, int], Lost],
    overflowing: Callable[[], np.ndarray],
) -> OneRun:
    """The figures of a strategy on a recording.

    Args:
        name: The strategy's name.
        strategy: The strategy.
        recording: The recorded run.
        run: The replayed scales.
        lost: A function from the skipped steps, Bool [steps], and an index to what the steps from there on lose.
        overflowing: Returns the scales of the strategy if each of as many steps overflows.
    """
    low, high = (float(bound) for bound in scaler.strategies.float_bounds_of(strategy))
    used, limits = run.used, recording.limits
    skipped = used > limits.decided
    unsure = (used > limits.finite_to) & (used <= limits.skips_from)
    # At another scale gradients round differently, and soon the weights are no longer quite the recorded ones.
    close = (used * 2 > limits.decided) & (used != recording.scale)
    steps, since, at = _parting(skipped != ~recording.applied, unsure | (close & ~skipped))
    all_of_it = lost(skipped, 0)
    replayed = Replayed(
        strategy=name,
        skips=int(skipped.sum()),
        skip_rate=float(skipped.mean()),
        mean_log2_scale=float(np.log2(used.astype(np.float64)).mean()),
        final_scale=run.final,
        flushed=all_of_it.flushed / all_of_it.values if all_of_it.values else None,
        at_floor=float((used == low).mean()) if low < high else None,
        at_ceiling=float((used == high).mean()) if low < high else None,
        uncertain=int(unsure.sum()),
        may_differ_at=None if since == steps else int(recording.step[at]),
        intervals=None,
        # Without an interval each step there may be skipped.
        highest_skip_rate=(int(skipped[:since].sum()) + steps - since) / steps,
        may_stall=since < steps and _may_stall((skipped | unsure | close)[at:], used[at:], low, overflowing),
        scales=used,
        skipped=skipped,
    )
    return OneRun(replayed, since, (low, high), lambda start: lost(skipped, start), all_of_it.values)


def _may_stall(skips: np.ndarray, used: np.ndarray, low: float, overflowing: Callable[[], np.ndarray]) -> bool:
    if not skips.any() or (skips & (used == low)).any():
        return bool(skips.any())
    scales = overflowing()
    falls = np.flatnonzero((np.diff(scales) < 0) | (scales[1:] == low))
    return int(np.diff(falls, prepend=-1, append=len(scales) - 1).max()) > _PATIENT


def _parting(differs: np.ndarray, unsure: np.ndarray) -> tuple[int, int, int]:
    """The number of steps, the index of the first that may differ from a real run, and that of the cause."""
    steps = len(differs)
    first, doubt = (int(one.argmax()) if one.any() else steps for one in (differs, unsure))
    # The step that differs is itself as replayed: its weights are still the recorded ones.
    return steps, min(first + 1, doubt, steps), min(first, doubt)


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
