"""One strategy over the recorded runs of several seeds: their intervals, and their sum."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from loops.replay.intervals import LEAST, SEEDS, Intervals, Range, around, as_far_behind, half_widths, of_pairs, wider
from loops.replay.one_run import OneRun
from loops.replay.recording import Recording
from loops.replay.results import Replayed
from loops.replay.tails import Tail

_SEEDS_ALONE = (
    "These 90% intervals are from seeds alone, which share what is wrong with the record: on held-out problems they "
    "held 81% of the mean scales. --validated mends that."
)
"""benchmarks/results has the figures."""


def with_intervals(runs: Sequence[OneRun], differences: Sequence[Tail]) -> list[Replayed]:
    """The results of each run, with intervals where enough is known.

    Args:
        runs: The strategy on each recording.
        differences: Those of validated runs.
    """
    return [_with_intervals(one, runs, differences) for one in runs]


def _with_intervals(one: OneRun, runs: Sequence[OneRun], differences: Sequence[Tail]) -> Replayed:
    replayed, steps = one.replayed, len(one.replayed.scales)
    if replayed.may_differ_at is None:
        return replayed
    alike = [run for run in runs if len(run.replayed.scales) == steps]
    spread = half_widths(of_pairs([run.tail(one.since) for run in alike]) if len(alike) >= SEEDS else [])
    half = wider(spread, half_widths(as_far_behind(differences, steps - one.since)))
    if half is None:
        return replayed
    moved = one.lost(one.since).values / one.values if one.values else 0.0
    found = around(replayed, one.tail(one.since), half, steps, one.bounds, moved)
    return dataclasses.replace(replayed, intervals=found, highest_skip_rate=found.skip_rate[1])


def summed(runs: Sequence[Replayed], values: Sequence[float]) -> Replayed:
    """Counts are added, and shares are means over all steps; the final scale is that of the last run.

    The ends of an interval are those of the runs, added in the same way. The interval is wider than that of the sum of
    independent runs, but runs of one problem may err alike.

    Args:
        runs: The results of each run.
        values: The number of recorded gradients of each run, by which the flushed shares are weighted.
    """
    if len(runs) == 1:
        return runs[0]
    steps = [len(run.scales) for run in runs]

    def mean(shares: Sequence[float | None], weights: Sequence[float] = steps) -> float | None:
        known = [(share, weight) for share, weight in zip(shares, weights, strict=True) if share is not None]
        whole = sum(weight for _, weight in known)
        return sum(share * weight for share, weight in known) / whole if whole else None

    first, parted = runs[0], [run.may_differ_at for run in runs if run.may_differ_at is not None]
    skips = sum(run.skips for run in runs)
    known = all(run.intervals is not None or run.may_differ_at is None for run in runs)
    return Replayed(
        strategy=first.strategy,
        skips=skips,
        skip_rate=skips / sum(steps),
        mean_log2_scale=float(np.average([run.mean_log2_scale for run in runs], weights=steps)),
        final_scale=runs[-1].final_scale,
        flushed=mean([run.flushed for run in runs], values),
        at_floor=mean([run.at_floor for run in runs]),
        at_ceiling=mean([run.at_ceiling for run in runs]),
        uncertain=sum(run.uncertain for run in runs),
        may_differ_at=min(parted) if parted else None,
        intervals=_added(runs, steps, values) if parted and known else None,
        highest_skip_rate=float(np.average([run.highest_skip_rate for run in runs], weights=steps)),
        may_stall=any(run.may_stall for run in runs),
        scales=np.concatenate([run.scales for run in runs]),
        skipped=np.concatenate([run.skipped for run in runs]),
        runs=tuple(runs),
    )


def _added(runs: Sequence[Replayed], steps: Sequence[int], values: Sequence[float]) -> Intervals:
    def ends(name: str) -> list[Range | None]:
        return [_ends(run, name) for run in runs]

    def mean(name: str, weights: Sequence[float] = steps) -> Range | None:
        known = [(one, weight) for one, weight in zip(ends(name), weights, strict=True) if one is not None]
        if len(known) < len(runs) or not sum(weights):
            return None
        low, high = np.average([one for one, _ in known], axis=0, weights=[weight for _, weight in known])
        return float(low), float(high)

    low, high = np.sum([one for one in ends("skips") if one is not None], axis=0)
    octaves, final = mean("mean_log2_scale"), _ends(runs[-1], "final_scale")
    assert octaves is not None
    assert final is not None
    return Intervals(
        skips=(int(low), int(high)),
        skip_rate=(low / sum(steps), high / sum(steps)),
        mean_log2_scale=octaves,
        final_scale=final,
        flushed=mean("flushed", values),
        at_floor=mean("at_floor"),
        at_ceiling=mean("at_ceiling"),
    )


def _ends(run: Replayed, name: str) -> Range | None:
    """The interval of a figure; the figure itself where it has none."""
    if run.intervals is not None:
        found: Range | None = getattr(run.intervals, name)
        return found
    value = getattr(run, name)
    return None if value is None else (value, value)


def lacking(found: Sequence[Replayed], recordings: Sequence[Recording], differences: Sequence[Tail]) -> str | None:
    """What the intervals lack, as a sentence; None if they lack nothing."""
    runs = [run for one in found for run in (one.runs or (one,))]
    if all(run.may_differ_at is None for run in runs):
        return None
    if all(run.intervals is not None or run.may_differ_at is None for run in runs):
        return None if len(differences) >= LEAST else _SEEDS_ALONE
    ((_, seeds),) = Counter(len(one.step) for one in recordings).most_common(1)
    return (
        f"Too few runs for an interval: it takes the traces of {SEEDS} seeds with as many steps, or {LEAST} runs of "
        f"--validate that differ as early; here are {seeds} and {len(differences)}."
    )
