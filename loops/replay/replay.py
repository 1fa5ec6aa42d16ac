"""Replays strategies over recorded steps: of each run, its intervals, and the sum over the runs of several seeds.

Where a strategy leaves the record, and the highest static scale at which recorded runs, taken again, skip almost
nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.replay.intervals import (
    LEAST,
    SEEDS,
    Intervals,
    PathLike,
    Range,
    Tail,
    around,
    as_far_behind,
    differences_in,
    half_widths,
    of_pairs,
    tail_of,
    wider,
)
from loops.replay.recording import Lost, Recording, Source, recording_of, tables_of
from loops.replay.results import Replay, Replayed, figures_of
from loops.replay.stepping import Facts, Scales, named_strategies, stepper, tallies_of
from loops.support.errors import LoopError

Progress = Callable[[int, int], object]
_THREADS = 2
"""The number of strategies that are replayed in parallel."""
_SEEDS_ALONE = (
    "These 90% intervals are from seeds alone, which share what is wrong with the record: on held-out problems they "
    "held 81% of the mean scales. --validated mends that."
)
"""benchmarks/results has the figures."""
_PATIENT = 10
"""A strategy that lets so many overflows pass lowers its scale soon: one with hysteresis does."""
MOST_SKIPPED = 0.01
"""The largest share of steps that a scale may skip and still be recommended."""
_LOWEST, _HIGHEST = -126, 126


def replay(
    traces: Source | Sequence[Source],
    strategies: str | scaler.Strategy | Sequence[str | scaler.Strategy],
    *,
    validated: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
) -> Replay:
    """The scale and the skips of each strategy at each step of a run: up to its first that may differ.

    After that it is an estimate: training would have other gradients. A step is skipped if the replayed scale is above
    the step's limit, which follows from the recorded critical scale and from the step's own decision. docs/replay.md
    says what counts if the trace is not certain.

    Args:
        traces: A trace, the folder of a run with a trace, or what `read` returned; or a list of these. Every strategy
            starts from its initial state in each trace. Traces of six and more seeds give intervals.
        strategies: One or several, as text for `halfstep train --strategy`, or as objects.
        validated: Files of what `halfstep lab replay --validate --json` printed of this problem, for the intervals.
        progress: Called with the number of finished strategies, and their total.

    Raises:
        LoopError: If a file cannot be read, or a trace lacks what a strategy needs: the message says how to record it.
        scaler.InvalidArgument: If an argument is not a trace or not a strategy.
    """
    named = named_strategies(strategies)
    recordings = [recording_of(tables, name) for name, tables in tables_of(traces)]
    return replay_recordings(recordings, named, progress, differences_in(validated))


def replay_recordings(
    recordings: Sequence[Recording],
    strategies: Sequence[tuple[str, scaler.Strategy]],
    progress: Progress | None = None,
    differences: Sequence[Tail] = (),
) -> Replay:
    """`replay` for traces that are already read, with the differences of runs that are already validated."""
    # Raises now if a trace lacks what a strategy needs.
    facts = [[_facts(*named, recording) for recording in recordings] for named in strategies]

    def one(named: tuple[str, scaler.Strategy], known: Sequence[Facts]) -> Replayed:
        return _replayed(*named, recordings, known, differences)

    found: list[Replayed] = []
    # XLA's compiled code runs without the GIL.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for replayed in pool.map(one, strategies, facts):
            found.append(replayed)
            if progress:
                progress(len(found), len(strategies))
    numbers = np.concatenate([recording.step for recording in recordings])
    return Replay(len(numbers), tuple(found), _lacking(found, recordings, differences), numbers)


def _replayed(
    name: str,
    strategy: scaler.Strategy,
    recordings: Sequence[Recording],
    facts: Sequence[Facts],
    differences: Sequence[Tail],
) -> Replayed:
    runs, step_through = [], stepper(strategy)
    for recording, known in zip(recordings, facts, strict=True):
        run = step_through(known)
        _check_moved(name, strategy, run.used)
        none = known._replace(limit=np.zeros_like(known.limit), of_loss=np.zeros_like(known.of_loss))
        runs.append(_one_run(name, strategy, recording, run, functools.partial(step_through, none)))
    return _summed([_with_intervals(one, runs, differences) for one in runs], [run.values for run in runs])


def _facts(name: str, strategy: scaler.Strategy, recording: Recording) -> Facts:
    needs = scaler.strategies.needs_of(strategy)
    try:
        amax = recording.largest_gradient if needs.amax else None
        tallies = tallies_of(recording, needs.edges) if needs.edges else None
    except LoopError as error:
        raise LoopError(f"strategy {name!r} cannot be replayed on {error}") from None
    return Facts(recording.limits.decided, recording.of_loss, amax, tallies)


def _check_moved(name: str, strategy: scaler.Strategy, scales: np.ndarray) -> None:
    if scaler.strategies.needs_of(strategy).edges and (np.frexp(scales)[0] != 0.5).any():
        odd = scales[np.frexp(scales)[0] != 0.5][0]
        raise scaler.InvalidArgument(
            f"strategy {name!r}: its scale becomes {odd:g}, but the recorded histograms, which it needs, can only be "
            "moved by powers of two. Give it an initial_scale, a floor and a ceiling that are powers of two."
        )


class _OneRun(NamedTuple):
    """A strategy on a recording.

    Attributes:
        recording: The recorded run.
        replayed: The figures, without intervals.
        since: The index of the first step that may differ from a real run; the number of steps if there is none.
        bounds: The lowest and the highest scale that the strategy may choose.
        values: The number of recorded gradients of all steps that are not skipped.
    """

    recording: Recording
    replayed: Replayed
    since: int
    bounds: Range
    values: float

    def lost(self, since: int) -> Lost:
        """What the steps from an index on flush to zero."""
        return self.recording.lost(self.replayed.scales, self.replayed.skipped, since)

    def tail(self, since: int) -> Tail:
        """The figures from a step on."""
        one = self.replayed
        return tail_of(one.scales, one.skipped, one.final_scale, self.bounds, since, self.lost(since))


def _one_run(
    name: str,
    strategy: scaler.Strategy,
    recording: Recording,
    run: Scales,
    overflowing: Callable[[], Scales],
) -> _OneRun:
    """The figures of a strategy on a recording.

    Args:
        name: The strategy's name.
        strategy: The strategy.
        recording: The recorded run.
        run: The replayed scales.
        overflowing: Returns the scales of the strategy if each of as many steps overflows.
    """
    low, high = (float(bound) for bound in scaler.strategies.float_bounds_of(strategy))
    used, limits = run.used, recording.limits
    skipped = used > limits.decided
    unsure = (used > limits.finite_to) & (used <= limits.skips_from)
    # At another scale gradients round differently, and soon the weights are no longer quite the recorded ones.
    close = (used * 2 > limits.decided) & (used != recording.scale)
    steps, since, at = _parting(skipped != ~recording.applied, unsure | (close & ~skipped))
    everything = recording.lost(used, skipped)
    whole = tail_of(used, skipped, run.final, (low, high), 0, everything)
    replayed = Replayed(
        strategy=name,
        **figures_of(used, skipped, run.final),
        flushed=None if math.isnan(whole.flushed) else whole.flushed,
        at_floor=whole.floor if low < high else None,
        at_ceiling=whole.ceiling if low < high else None,
        uncertain=int(unsure.sum()),
        may_differ_at=None if since == steps else int(recording.step[at]),
        intervals=None,
        # Without an interval each step there may be skipped.
        highest_skip_rate=(int(skipped[:since].sum()) + steps - since) / steps,
        may_stall=since < steps and _may_stall((skipped | unsure | close)[at:], used[at:], low, overflowing),
        scales=used,
        skipped=skipped,
    )
    return _OneRun(recording, replayed, since, (low, high), everything.values)


def _may_stall(skips: np.ndarray, used: np.ndarray, low: float, overflowing: Callable[[], Scales]) -> bool:
    if not skips.any() or (skips & (used == low)).any():
        return bool(skips.any())
    scales = overflowing().used
    falls = np.flatnonzero((np.diff(scales) < 0) | (scales[1:] == low))
    return int(np.diff(falls, prepend=-1, append=len(scales) - 1).max()) > _PATIENT


def _parting(differs: np.ndarray, unsure: np.ndarray) -> tuple[int, int, int]:
    """The number of steps, the index of the first that may differ from a real run, and that of the cause."""
    steps = len(differs)
    first, doubt = (int(one.argmax()) if one.any() else steps for one in (differs, unsure))
    # The step that differs is itself as replayed: its weights are still the recorded ones.
    return steps, min(first + 1, doubt, steps), min(first, doubt)


def _with_intervals(one: _OneRun, runs: Sequence[_OneRun], differences: Sequence[Tail]) -> Replayed:
    """The results of one of a strategy's runs, with intervals where enough is known."""
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


def _summed(runs: Sequence[Replayed], values: Sequence[float]) -> Replayed:
    """The results of several runs as one. The ends of an interval are those of the runs, taken together like figures.

    The interval is wider than that of the sum of independent runs, but runs of one problem may err alike.

    Args:
        runs: The results of each run.
        values: The number of recorded gradients of each run, by which the flushed shares are weighted.
    """
    if len(runs) == 1:
        return runs[0]
    steps = [len(run.scales) for run in runs]
    parted = [run.may_differ_at for run in runs if run.may_differ_at is not None]
    intervals = None
    if parted and all(run.intervals is not None or run.may_differ_at is None for run in runs):
        low, high = (_together([_end(run, at) for run in runs], steps, values, whole=True) for at in (0, 1))
        ranges: dict[str, Any] = {name: None if low[name] is None else (low[name], high[name]) for name in _FIGURES}
        intervals = Intervals(**ranges)
    return Replayed(
        strategy=runs[0].strategy,
        **_together([_end(run) for run in runs], steps, values),
        uncertain=sum(run.uncertain for run in runs),
        may_differ_at=min(parted) if parted else None,
        intervals=intervals,
        highest_skip_rate=float(np.average([run.highest_skip_rate for run in runs], weights=steps)),
        may_stall=any(run.may_stall for run in runs),
        scales=np.concatenate([run.scales for run in runs]),
        skipped=np.concatenate([run.skipped for run in runs]),
        runs=tuple(runs),
    )


_FIGURES = tuple(field.name for field in dataclasses.fields(Intervals))


def _end(run: Replayed, at: int | None = None) -> dict[str, Any]:
    """The figures of a run, or one end of the interval of each, where it has intervals."""
    if at is None or run.intervals is None:
        return {name: getattr(run, name) for name in _FIGURES}
    ranges = ((name, getattr(run.intervals, name)) for name in _FIGURES)
    return {name: None if found is None else found[at] for name, found in ranges}


def _together(
    runs: Sequence[Mapping[str, Any]], steps: Sequence[int], values: Sequence[float], *, whole: bool = False
) -> dict[str, Any]:
    """The figures of some runs as those of one: skips are added, shares are means, and the final scale is the last.

    Args:
        runs: The figures of each run.
        steps: How many steps each has, by which shares are weighted.
        values: How many recorded gradients each has, by which the flushed shares are weighted.
        whole: Whether a share is None if that of one run is.
    """

    def mean(name: str, weights: Sequence[float] = steps) -> float | None:
        known = [(one[name], weight) for one, weight in zip(runs, weights, strict=True) if one[name] is not None]
        if not sum(weight for _, weight in known) or (whole and len(known) < len(runs)):
            return None
        shares, kept = zip(*known, strict=True)
        return float(np.average(shares, weights=kept))

    skips = int(sum(one["skips"] for one in runs))
    shares = {name: mean(name) for name in ("mean_log2_scale", "at_floor", "at_ceiling")}
    rest = {"skip_rate": skips / sum(steps), "final_scale": runs[-1]["final_scale"], "flushed": mean("flushed", values)}
    return {"skips": skips, **shares, **rest}


def _lacking(found: Sequence[Replayed], recordings: Sequence[Recording], differences: Sequence[Tail]) -> str | None:
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
    found = _one_run("", scaler.Static(scale), recording, run, lambda: run)
    return found.replayed.highest_skip_rate <= MOST_SKIPPED
