"""What a strategy costs: the share of the gradients that it loses."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from loops.replay.intervals import Range
from loops.replay.results import Replayed


def cost(runs: Sequence[Replayed]) -> float:
    """All gradients of skipped steps, and those of the others that are flushed to zero, as a share of all."""
    share = flushed(runs)
    if share is None:
        # No step with a histogram was applied; traces without histograms are refused before.
        return 1.0
    return _cost(skip_rate(runs), share)


def skip_rate(runs: Sequence[Replayed]) -> float:
    """The share of skipped steps."""
    return sum(run.skips for run in runs) / sum(len(run.scales) for run in runs)


def flushed(runs: Sequence[Replayed]) -> float | None:
    """The mean share of flushed gradients over the runs of which it is known; None if there is none."""
    known = [(run.flushed, len(run.scales)) for run in runs if run.flushed is not None]
    return sum(share * steps for share, steps in known) / sum(steps for _, steps in known) if known else None


def cost_interval(runs: Sequence[Replayed]) -> Range | None:
    """The lowest and the highest mean cost that the intervals of the runs allow; None if one is unknown."""
    ends: list[Range] = []
    for run in runs:
        if run.may_differ_at is None:
            ends.append((cost([run]), cost([run])))
        elif run.intervals is None or (run.flushed is not None and run.intervals.flushed is None):
            return None
        else:
            rate, share = run.intervals.skip_rate, run.intervals.flushed or (1.0, 1.0)
            ends.append((_cost(rate[0], share[0]), _cost(rate[1], share[1])))
    weights = [len(run.scales) for run in runs]
    low, high = (sum(map(operator.mul, side, weights)) / sum(weights) for side in zip(*ends, strict=True))
    return low, high


def _cost(skipped: float, flushed: float) -> float:
    return skipped + (1 - skipped) * flushed
