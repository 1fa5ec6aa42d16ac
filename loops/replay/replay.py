"""Replays strategies over recorded steps: of each run, its intervals, and the sum over the runs of several seeds."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import scaler
from loops.replay.intervals import LEAST, SEEDS, Intervals, Range, around, as_far_behind, half_widths, of_pairs, wider
from loops.replay.one_run import OneRun, one_run
from loops.replay.recording import Recording, largest_gradient, recording_of
from loops.replay.results import PathLike, Replay, Replayed, differences_in
from loops.replay.sources import Source, named_strategies, tables_of
from loops.replay.stepping import Facts, Scales, stepper
from loops.replay.tails import Tail
from loops.replay.tallies import Counted, Lost, Tallies, counted_in, lost, tallies_of
from loops.support.errors import LoopError

Progress = Callable[[int, int], object]
_THREADS = 2
"""The number of strategies that are replayed in parallel."""
_SEEDS_ALONE = (
    "These 90% intervals are from seeds alone, which share what is wrong with the record: on held-out problems they "
    "held 81% of the mean scales. --validated mends that."
)
"""benchmarks/results has the figures."""


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
    facts = _facts(recordings, strategies)
    counted = [counted_in(recording) for recording in recordings]

    def one(named: tuple[str, scaler.Strategy]) -> Replayed:
        return _replayed(*named, recordings, facts, counted, differences)

    found: list[Replayed] = []
    # XLA's compiled code runs without the GIL.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for replayed in pool.map(one, strategies):
            found.append(replayed)
            if progress:
                progress(len(found), len(strategies))
    numbers = np.concatenate([recording.step for recording in recordings])
    return Replay(len(numbers), tuple(found), _lacking(found, recordings, differences), numbers)


def _replayed(
    name: str,
    strategy: scaler.Strategy,
    recordings: Sequence[Recording],
    facts: Sequence[Callable[[scaler.Strategy], Facts]],
    counted: Sequence[Counted],
    differences: Sequence[Tail],
) -> Replayed:
    runs, step_through = [], stepper(strategy)
    for recording, known, counts in zip(recordings, facts, counted, strict=True):
        run = step_through(known(strategy))
        _check_moved(name, strategy, run.used)
        lost_of = functools.partial(_lost, counts, recording, run.used)
        overflowing = functools.partial(_overflowing, step_through, known(strategy))
        runs.append(one_run(name, strategy, recording, run, lost_of, overflowing))
    return _summed([_with_intervals(one, runs, differences) for one in runs], [run.values for run in runs])


def _overflowing(step_through: Callable[[Facts], Scales], facts: Facts) -> np.ndarray:
    none = facts._replace(limit=np.zeros_like(facts.limit), of_loss=np.zeros_like(facts.of_loss))
    return step_through(none).used


def _lost(counts: Counted, recording: Recording, used: np.ndarray, skipped: np.ndarray, since: int) -> Lost:
    return lost(counts, recording, used, skipped, since)


def _facts(
    recordings: Sequence[Recording], strategies: Sequence[tuple[str, scaler.Strategy]]
) -> list[Callable[[scaler.Strategy], Facts]]:
    """For each recording a function from a strategy to the facts that it needs. Raises now if a trace lacks some."""
    return [functools.partial(_needed, recording, *_statistics(recording, strategies)) for recording in recordings]


def _statistics(
    recording: Recording, strategies: Sequence[tuple[str, scaler.Strategy]]
) -> tuple[np.ndarray | None, dict[tuple[float, ...], Tallies]]:
    amax: np.ndarray | None = None
    tallies: dict[tuple[float, ...], Tallies] = {}
    for name, strategy in strategies:
        needs = scaler.strategies.needs_of(strategy)
        try:
            if needs.amax and amax is None:
                amax = largest_gradient(recording)
            if needs.edges and needs.edges not in tallies:
                tallies[needs.edges] = tallies_of(recording, needs.edges)
        except LoopError as error:
            raise LoopError(f"strategy {name!r} cannot be replayed on {error}") from None
    return amax, tallies


def _needed(
    recording: Recording,
    amax: np.ndarray | None,
    tallies: Mapping[tuple[float, ...], Tallies],
    strategy: scaler.Strategy,
) -> Facts:
    needs = scaler.strategies.needs_of(strategy)
    return Facts(recording.limits.decided, recording.of_loss, amax if needs.amax else None, tallies.get(needs.edges))


def _check_moved(name: str, strategy: scaler.Strategy, scales: np.ndarray) -> None:
    if scaler.strategies.needs_of(strategy).edges and (np.frexp(scales)[0] != 0.5).any():
        odd = scales[np.frexp(scales)[0] != 0.5][0]
        raise scaler.InvalidArgument(
            f"strategy {name!r}: its scale becomes {odd:g}, but the recorded histograms, which it needs, can only be "
            "moved by powers of two. Give it an initial_scale, a floor and a ceiling that are powers of two."
        )


def _with_intervals(one: OneRun, runs: Sequence[OneRun], differences: Sequence[Tail]) -> Replayed:
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
